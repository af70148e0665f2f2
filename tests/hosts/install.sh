#!/usr/bin/env bash
# Installs the hosts of packages.txt, each into a folder of its own: install.sh PYTORCH_VENV FOLDER [HOST ...]. A folder that has what the
# list asks for is left alone. NEWEST=1 takes the newest host instead of the pinned one (the light packages keep their pins).
set -euo pipefail
python=$(realpath -s "$1/bin/python")
mkdir -p "$2"
folder=$(realpath "$2")
list=$(dirname "$(realpath "$0")")/packages.txt
shift 2
hosts=("$@")
[[ ${#hosts[@]} -gt 0 ]] || mapfile -t hosts < <(sed -n 's/^\[\(.*\)\]$/\1/p' "$list")
for host in "${hosts[@]}"; do
  # The lines under [host], without comments.
  wanted=$(awk -v host="[$host]" '/^\[/ { inside = $0 == host; next } inside { sub(/ *#.*/, ""); if ($0) print }' "$list")
  [[ -n $wanted ]] || { echo "there is no host \"$host\" in $list" >&2; exit 1; }
  [[ -z ${NEWEST:-} ]] || wanted=$(sed '1s/==.*//' <<<"$wanted")
  if [[ -z ${NEWEST:-} && $(cat "$folder/$host/.installed" 2>/dev/null) == "$wanted" ]]; then
    echo "$host: there already"
    continue
  fi
  rm -rf "${folder:?}/$host"
  # shellcheck disable=SC2086 # one requirement a word
  "$python" -m pip install -q --no-deps --no-compile --disable-pip-version-check --target "$folder/$host" $wanted
  if [[ -e $folder/$host/torch ]]; then
    echo "$host: another PyTorch came with it" >&2
    exit 1
  fi
  echo "$wanted" >"$folder/$host/.installed"
  echo "$host: $(basename "$folder/$host"/"$(head -1 <<<"$wanted" | sed 's/==.*//; s/-/_/g')"-*.dist-info .dist-info)," \
    "$(du -sm "$folder/$host" | cut -f1) MB"
done
