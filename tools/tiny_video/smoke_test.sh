#!/usr/bin/env bash
# Runs the tests that need PyTorch on a CPU, in a virtual environment of its own (kept in .venv beside this file): the tiny video
# model's, and the native runner's if the scope command was built (build/release/bin/scope, or SCOPE_COMMAND).
# `smoke_test.sh install` only makes the environment.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
venv="${TINY_VIDEO_VENV:-$here/.venv}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
# 2.13.0 exactly: the floating name may bring gigabytes of GPU packages that these tests never use.
"$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/pip" install -q torch==2.13.0
"$venv/bin/pip" install -q -r "$here/requirements.txt"
[ "${1:-}" != install ] || exit 0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
tests=$here/../../tests
export PYTHONPATH=$here  # both import the tool's modules
"$venv/bin/python" -m pytest -q "$tests/tiny_video" "$@"
if [ -z "${SCOPE_COMMAND:-}" ] && [ ! -x "$here/../../build/release/bin/scope" ]; then
  echo "scope is not built: the native runner was not compared with diffusers"
  exit 0
fi
export SCOPE_COMMAND="$(realpath "${SCOPE_COMMAND:-$here/../../build/release/bin/scope}")"
exec "$venv/bin/python" -m pytest -q "$tests/python/torch" "$@"
