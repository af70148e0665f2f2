#!/usr/bin/env bash
# Installs what the given purpose needs from Debian's packages, and nothing that is already there.
set -euo pipefail
purpose=${1:-test}
packages="g++ make cmake ninja-build libfmt-dev nlohmann-json3-dev libcli11-dev libhwy-dev libpng-dev"
case $purpose in
  demo) ;;
  wheel) packages="g++ make cmake ninja-build libfmt-dev nlohmann-json3-dev libhwy-dev python3 python3-venv" ;;
  test) packages+=" libgtest-dev python3 python3-numpy python3-pytest pkg-config" ;;
  docs) packages="python3 mkdocs mkdocs-material" ;;
  lint) packages="git python3 python3-venv" ;;
  pytorch) packages+=" libgtest-dev python3 python3-numpy python3-pytest python3-venv" ;;
  check) packages+=" libgtest-dev python3 python3-numpy python3-pytest python3-venv pkg-config clang-14 clang-tidy-14 clang-format-14 libclang-rt-14-dev ccache chromium ffmpeg locales shellcheck mkdocs mkdocs-material"
    # npm comes with nodejs where that is not Debian's, and Debian's npm would not install beside it.
    { command -v node && command -v npm; } >/dev/null || packages+=" nodejs npm" ;;
  *) echo "usage: tools/bootstrap.sh [demo|wheel|test|docs|lint|pytorch|check]" >&2; exit 2 ;;
esac
missing=()
for package in $packages; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
sudo=""
if [ "$(id -u)" -ne 0 ]; then
  sudo="sudo"
  command -v sudo >/dev/null || {
    echo "missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
    echo "as root: apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  }
fi
echo "installing: ${missing[*]}"
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
