#!/usr/bin/env bash
# Tests against the hosts' real packages on the CPU: run.sh PYTORCH_VENV [FOLDER]. Each host has a process of its own, since their packages
# collide. FOLDER keeps the packages, build/hosts unless it is given; they are installed by install.sh. The library is build/release's,
# unless SCOPE_LIBRARY names one.
set -euo pipefail
pytorch=$(realpath -s "$1")
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${2:-build/hosts}")
tests/hosts/install.sh "$pytorch" "$folder"
export SCOPE_LIBRARY=${SCOPE_LIBRARY:-$PWD/build/release/libscope.so}
export OMP_NUM_THREADS=1  # PyTorch's threads spin while the library's work
for host in sglang vllm_omni comfy_kitchen cache_dit quantised together; do
  PYTHONPATH=$PWD/python:$PWD/tests/python_package:$folder/$host "$pytorch/bin/python" -m pytest -q -p no:cacheprovider -W ignore "tests/hosts/test_${host}_real.py"
done
