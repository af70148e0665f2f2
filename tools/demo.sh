#!/usr/bin/env bash
# Generates one clip from the same first frame and noise with dense attention and each of the methods below, and puts them
# side by side: demo.sh SCOPE-COMMAND FOLDER [OPTIONS of scope generate]
set -euo pipefail
# In the order of the table. scope-mean has half the density of the others, since the mean of dropped keys makes up for more than that.
methods=(scope-mean scope svg2)
declare -A density=([scope-mean]=0.1 [scope]=0.2 [svg2]=0.2)
scope=$1 out=$2
shift 2
options=("$@")
mkdir -p "$out"
# bf16 products are twice as fast where the CPU has them, and move the clips by less than the methods do.
run() { "$scope" generate -o "$out/$1" --method "$1" --compute bf16 "${@:2}" "${options[@]}"; }
run dense --dump-qkv "$out/qkv" --dump-layers 2
clips=("dense=$out/dense")
for method in "${methods[@]}"; do
  run "$method" --target-density "${density[$method]}"
  clips+=("$method=$out/$method")
done
names=$(sed 's/ /, /g' <<<"${methods[*]}")
echo "scope-mean keeps half of what the others keep, on purpose. A clip made short by GRID is too short to judge methods by."
"$scope" report "${clips[@]}" --skip 1 --qkv "$out/qkv/step_010_layer_02.safetensors" \
  --title "The same clip: dense attention, $names" -o "$out/report.html"
echo "Open $out/report.html in a browser; the frames are in its folder, under dense, $names."
