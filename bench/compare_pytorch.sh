#!/usr/bin/env bash
# Builds the library, installs PyTorch's CPU build in a virtual environment and compares dense attention with its SDPA.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/bootstrap.sh demo
cmake --preset demo >/dev/null
cmake --build build/demo --target scope
if [ ! -x build/torch/bin/python ]; then
  python3 -m venv build/torch
  build/torch/bin/pip install -q torch==2.13.0 numpy
fi
build/torch/bin/python bench/compare_pytorch.py --libscope build/demo/libscope.so "$@"
