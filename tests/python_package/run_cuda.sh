#!/usr/bin/env bash
# Runs the package's tests on CUDA tensors, then bench/python_overhead.py, with the python3, PyTorch, numpy, Pillow and pytest of this
# machine: run_cuda.sh [LIBSCOPE [PACKAGES [PYTEST-OPTIONS...]]]. LIBSCOPE is build/cuda's unless it is named; PACKAGES is a folder made by
# `pip install --target PACKAGES --no-deps diffusers peft importlib_metadata zipp` where transformers and accelerate are there already:
# without diffusers its tests are skipped. The last line says it all.
set -uo pipefail
cd "$(dirname "$0")/../.."
export SCOPE_LIBRARY=$(realpath "${1:-build/cuda/libscope.so}") PYTHONPATH=$PWD/python${2:+:$(realpath "$2")} SCOPE_TEST_DEVICE=cuda
export OMP_NUM_THREADS=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
python3 -m pytest -q -p no:cacheprovider --show-capture=no --tb=short -W ignore tests/python_package "${@:3}" | tee "$log"
tests=$?
python3 bench/python_overhead.py --device cuda
overhead=$?
said=$(tail -n 1 "$log")
[[ $tests == 0 && $overhead == 0 ]] && verdict=passed || verdict=FAILED
echo "$verdict on $(python3 -c 'import torch; print(torch.cuda.get_device_name(), "with PyTorch", torch.__version__)'): $said; copies and waits: $([[ $overhead == 0 ]] && echo none || echo 'see above')"
[[ $verdict == passed ]]
