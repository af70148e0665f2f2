#!/usr/bin/env bash
# Builds the library, installs PyTorch's CPU build in a virtual environment and compares dense attention with its SDPA.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/bootstrap.sh pytorch
cmake --preset release >/dev/null
cmake --build build/release --target scope
tools/tiny_video/smoke_test.sh install
"${TINY_VIDEO_VENV:-tools/tiny_video/.venv}/bin/python" bench/compare_pytorch.py --libscope build/release/libscope.so "$@"
