#!/usr/bin/env bash
# Runs scope_attn.reproduce from end to end on a GPU, with small random pipelines: every setting, method and the control, stopped once in
# the middle by SIGINT and resumed; prints the tables. reproduce_gpu.sh OUT [SETTING...]: all six settings unless they are named.
#
# It needs no network. $PYTHON (python3) must have PyTorch, transformers, accelerate, numpy and Pillow; what it lacks may lie in a folder
# that PYTHONPATH names, made by `pip install --target FOLDER --no-deps diffusers importlib_metadata zipp ftfy wcwidth`. $SCOPE_LIBRARY
# names the library (build/cuda/libscope.so). DEVICE=cpu runs on the CPU, with build/release/libscope.so. $MORE has more options of the
# command, as MORE=--compile.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda} python=${PYTHON:-python3} out=$1
shift
[ $# -gt 0 ] || set -- wan2.1-t2v wan2.1-i2v wan2.2-t2v wan2.2-i2v hunyuan-t2v hunyuan-i2v
if [ "$device" = cpu ]; then
  library=build/release/libscope.so
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
  library=build/cuda/libscope.so
fi
export SCOPE_LIBRARY=${SCOPE_LIBRARY:-$PWD/$library} PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
mkdir "$out"
out=$(realpath "$out")

needs="torch diffusers transformers accelerate numpy PIL"
[[ $* != *wan* ]] || needs+=" ftfy"  # it cleans Wan's prompts
for package in $needs; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || { echo "$python has no $package"; exit 1; }
done
"$python" -c "
import torch
assert torch.cuda.is_available() == ('$device' == 'cuda'), 'DEVICE is $device, and PyTorch has CUDA: %s' % torch.cuda.is_available()
from PIL import Image
Image.effect_noise((300, 300), 80).convert('RGB').save('$out/noise.png')
Image.radial_gradient('L').resize((400, 200)).convert('RGB').save('$out/gradient.png')"
printf 'a cat walks\na dog runs slowly\n' >"$out/t2v.txt"
printf 'noise.png\ta cat walks\ngradient.png\ta dog runs slowly\n' >"$out/i2v.txt"

reproduce() {  # SETTING
  # It is to be stopped, also where what started this script ignores interrupts, as nohup and a shell's & do.
  # shellcheck disable=SC2086 # MORE is a list of words
  env --default-signal=INT "$python" -m scope_attn.reproduce --setting "$1" --model "$out/models/$1" --prompts "$out/${1: -3}.txt" --out "$out/$1" \
    --first 1 --size 224x128 --frames 9 --steps 5 --min-tokens 0 --methods sparge svg2 svoo scope-paper scope-mean scope ${MORE:-}
}

set -m  # a job in the background takes SIGINT then, and it reaches the job alone
stopped=
for setting in "$@"; do
  echo "== $setting ($SECONDS s)"
  "$python" tests/python_package/tiny_folders.py "$out/models" "$setting" >"$out/log" 2>&1 || { cat "$out/log"; exit 1; }
  if [ -z "$stopped" ]; then
    reproduce "$setting" >"$out/log" 2>&1 &
    until [ -e "$out/$setting/svg2/0000" ]; do
      kill -0 %% 2>/dev/null || { cat "$out/log"; echo "it ended before it was stopped"; exit 1; }
      sleep 0.02
    done
    kill -INT -- "-$!"
    status=0
    wait $! || status=$?
    grep "the same command goes on" "$out/log" || { cat "$out/log"; echo "it does not say how to go on"; exit 1; }
    [ "$status" = 130 ] && [ ! -e "$out/$setting/table.md" ] || { cat "$out/log"; echo "stopped with status $status, expected 130"; exit 1; }
    made=$(cd "$out/$setting" && ls -d --time-style=full-iso -l ./*/0??? | sort)
    stopped=yes
  fi
  reproduce "$setting" >"$out/log" 2>&1 || { cat "$out/log"; exit 1; }
  grep -v -e "experimental feature" -e "it/s" "$out/log"
  if [ -n "${made:-}" ]; then
    still=$(cd "$out/$setting" && ls -d --time-style=full-iso -l ./*/0??? | sort)
    [ -z "$(comm -23 <(echo "$made") <(echo "$still"))" ] || { echo "a video that was whole was made again"; exit 1; }
    echo "resumed: $(wc -l <<<"$made") of $(wc -l <<<"$still") videos were there"
    made=
  fi
done
echo "reproduced $# settings on $device in $SECONDS s"
