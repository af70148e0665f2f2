#!/usr/bin/env bash
# Generates one clip from the same first frame and noise with dense attention, SCOPE and SVG2, and puts them side by side:
# demo.sh SCOPE-COMMAND FOLDER [OPTIONS of scope generate]
set -euo pipefail
scope=$1 out=$2
shift 2
options=("$@")
mkdir -p "$out"
# bf16 products are twice as fast where the CPU has them, and move the clips by less than the methods do.
run() { "$scope" generate -o "$out/$1" --compute bf16 "${@:2}" "${options[@]}"; }
run dense --method dense --dump-qkv "$out/qkv" --dump-layers 2
run scope --method scope --target-density 0.2
run svg2 --method svg2 --target-density 0.2
"$scope" report "dense=$out/dense" "scope=$out/scope" "svg2=$out/svg2" --skip 1 --qkv "$out/qkv/step_010_layer_02.safetensors" \
  --title "The same clip: dense attention, SCOPE and SVG2" -o "$out/report.html"
echo "Open $out/report.html in a browser; the frames are in $out/dense, $out/scope and $out/svg2."
