#!/usr/bin/env bash
# Builds the wheel without CUDA, installs it into an empty virtual environment, and runs the package's tests there with the PyTorch,
# diffusers and pytest of another: run.sh PYTORCH_VENV. Those of diffusers run a second time with the oldest version that we know.
set -euo pipefail
pytorch=$(realpath "$1")
cd "$(dirname "$0")/../.."
work=build/python_package
rm -rf "$work"
python3 -m venv "$work/venv"
# The compiler and flags of `make test`, so that ccache knows the objects; a folder of its own, since CMake remembers options.
export CC=cc CXX=c++
"$work/venv/bin/pip" wheel -q --no-deps -w "$work" --config-settings=build-dir=build/wheel_cpu \
  --config-settings=cmake.define.SCOPE_CUDA=OFF --config-settings=cmake.define.SCOPE_WERROR=ON .
ls -l "$work"/scope_attn-*-py3-none-*.whl
"$work/venv/bin/pip" install -q "$work"/scope_attn-*.whl
unset SCOPE_LIBRARY PYTHONPATH
cd "$work"
python=venv/bin/python
$python -c 'import scope_attn; assert [m.name for m in scope_attn.methods()][0] == "scope"'  # nothing but the package
$python -m scope_attn.doctor
# What libscope.so needs is what every Linux has, from glibc 2.28 on.
library=$($python -c 'from scope_attn import _c_api; print(_c_api.library().path)')
if ldd "$library" | grep -v -e linux-vdso -e 'libm\.so' -e 'libc\.so' -e 'ld-linux' -e libpthread -e 'libdl\.so' -e 'librt\.so' -e libgcc_s; then
  echo "libscope.so needs more than the C library"
  exit 1
fi
if newer=$(objdump -T "$library" | grep -E 'GLIBC_2\.(29|[3-9][0-9])\b'); then
  echo "libscope.so needs a glibc newer than 2.28; src/capi/old_glibc.c leads functions to their older versions"
  echo "$newer"
  exit 1
fi
"$pytorch/bin/python" - "$(echo venv/lib/python3*/site-packages)/pytorch.pth" <<'PATHS'
import sys, sysconfig
open(sys.argv[1], "w").write(sysconfig.get_paths()["purelib"] + "\n")
PATHS
venv/bin/pip install -q transformers peft ftfy imageio imageio-ffmpeg  # diffusers' pipelines, LoRA and .mp4
export OMP_NUM_THREADS=1  # PyTorch's threads spin while the library's work
SCOPE_TABLES=$PWD/tables.md $python -m pytest -q -p no:cacheprovider ../../tests/python_package
# The same packages, but for diffusers and what that cannot work with.
python3 -m venv --without-pip oldest
cat venv/lib/python3*/site-packages/pytorch.pth >"$(echo oldest/lib/python3*/site-packages)/packages.pth"
realpath venv/lib/python3*/site-packages >>"$(echo oldest/lib/python3*/site-packages)/packages.pth"
venv/bin/pip --python oldest/bin/python install -q diffusers==0.36.0
oldest/bin/python -m pytest -q -p no:cacheprovider -W ignore ../../tests/python_package/test_{diffusers,selector,ranks,prompt_to_video}.py \
  ../../tests/python_package/test_reproduce.py::test_six
