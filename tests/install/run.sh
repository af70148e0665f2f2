#!/usr/bin/env bash
# Installs a build into an empty prefix and builds strangers' programs against it: run.sh BUILD C++-COMPILER C-COMPILER
set -euo pipefail
build=$1 compiler=$2 c_compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix="$work/a prefix"
fail() { echo "install: $*" >&2; exit 1; }

sanitize=$(sed -n 's/^SCOPE_SANITIZE:STRING=//p' "$build/CMakeCache.txt")
cmake --install "$build" --prefix "$prefix" >/dev/null
cmake -S "$here/consumer" -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$compiler" \
  ${sanitize:+-DCMAKE_CXX_FLAGS=-fsanitize=$sanitize} >/dev/null
cmake --build "$work/consumer"
"$work/consumer/consumer"
"$prefix/bin/scope" --version
# The soname is 0.MINOR.
find "$prefix" -name libscope.so.0.2 | grep .
# Nothing but the C ABI may be visible.
library=$(find "$prefix" -name libscope.so)
if nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^scope_' | grep .; then fail "libscope.so exports more than scope_*"; fi

if [ -n "$sanitize" ]; then
  echo "A sanitized build has no static library, and its runtime for C++ is not in C programs: those are left out."
  exit
fi

# The static library, from a project in C alone. Weak names of the C++ library and of headers may remain: they clash with none.
static=$(find "$prefix" -name libscope.a)
if nm -g --defined-only "$static" | awk 'NF == 3 && $2 !~ /[VW]/ {print $3}' | grep -v '^scope_'; then
  fail "libscope.a defines more than scope_*"
fi
cmake -S "$here/consumer_static" -B "$work/consumer_static" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_C_COMPILER="$c_compiler" >/dev/null
cmake --build "$work/consumer_static"
"$work/consumer_static/consumer_static"
if ldd "$work/consumer_static/consumer_static" | grep libscope; then fail "scope::scope_static linked the shared library"; fi

if ! command -v pkg-config >/dev/null; then
  echo "No pkg-config: scope.pc is not tried. tools/bootstrap.sh test installs it."
  exit
fi
# The folder may be moved. pkg-config quotes spaces, which only eval takes off again.
mv "$prefix" "$work/moved prefix"
prefix="$work/moved prefix"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name scope.pc)")
export PKG_CONFIG_PATH
folder=$(dirname "$PKG_CONFIG_PATH")
[ "$(pkg-config --modversion scope)" = "$("$prefix/bin/scope" --version | cut -d ' ' -f 1)" ] || fail "scope.pc has another version"
eval "'$c_compiler' -std=c11 '$here/../caller.c' -o '$work/shared' $(pkg-config --cflags --libs scope)"
LD_LIBRARY_PATH="$folder" "$work/shared"
ldd "$work/shared" | grep libscope.so.0.2 >/dev/null || fail "pkg-config --libs did not link the shared library"
if grep -q '^SCOPE_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then
  echo "With CUDA a static program needs its runtime, which loads the driver's library: those lines are left out."
  exit
fi
eval "'$c_compiler' -std=c11 -static '$here/../caller.c' -o '$work/static' $(pkg-config --static --cflags --libs scope)"
"$work/static"

# docs/guide/first_call.md: its program, by its lines. They have no eval, so HOME is a path without spaces: this folder.
page="$here/../../docs/guide/first_call.md"
# The page's first lines of C++ are those of a program that was compiled above.
block_of_consumer=$(sed -n '/^  \/\/ begin$/,/^  \/\/ end$/p' "$here/consumer/main.cpp" | sed '1d; $d; s/^  //')
block() { awk -v fence="\`\`\`$1" '$0 == "```" {on = 0} on {print} $0 == fence {on = 1}' "$page"; }
mkdir "$work/page"
mv "$prefix" "$work/page/scope"
cd "$work/page"
[ "$(block cpp | head -n "$(wc -l <<<"$block_of_consumer")")" = "$block_of_consumer" ] || fail "docs/guide/first_call.md has other C++ than consumer/main.cpp"
block c >first_call.c
block cmake >CMakeLists.txt
block sh | sed -n '/PKG_CONFIG_PATH/,$p' >lines.sh  # after those that build and install the library
[ "$(grep -c '^cc \|^cmake ' lines.sh)" -eq 4 ] || fail "docs/guide/first_call.md has other lines than this test expects"
HOME=. bash -eux lines.sh
