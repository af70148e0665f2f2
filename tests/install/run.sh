#!/usr/bin/env bash
# Installs a build into an empty prefix and builds a stranger's project against it: run.sh BUILD COMPILER
set -euo pipefail
build=$1 compiler=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sanitize=$(sed -n 's/^SCOPE_SANITIZE:STRING=//p' "$build/CMakeCache.txt")
cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$here/consumer" -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER="$compiler" \
  ${sanitize:+-DCMAKE_CXX_FLAGS=-fsanitize=$sanitize} >/dev/null
cmake --build "$work/consumer"
"$work/consumer/consumer"
"$work/prefix/bin/scope" --version
# The soname is 0.MINOR.
find "$work/prefix" -name libscope.so.0.2 | grep .
# Nothing but the C ABI may be visible.
if nm -D --defined-only "$work"/prefix/lib*/*/libscope.so "$work"/prefix/lib*/libscope.so 2>/dev/null | awk '{print $3}' | grep -v '^scope_' | grep .; then
  echo "libscope.so exports more than scope_*"
  exit 1
fi
