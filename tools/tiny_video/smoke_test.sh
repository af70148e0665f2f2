#!/usr/bin/env bash
# Runs the tiny video model's tests on a CPU in a virtual environment of its own (kept in .venv beside this file).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
venv="${TINY_VIDEO_VENV:-$here/.venv}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
# 2.13.0 exactly: the floating name may bring gigabytes of GPU packages that these tests never use.
"$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/pip" install -q torch==2.13.0
"$venv/bin/pip" install -q -r "$here/requirements.txt"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
exec "$venv/bin/python" -m pytest -q "$here/tests" "$@"
