#!/usr/bin/env bash
# The long report: whole videos of every variant against dense ones, into bench/results, and from there into docs:
# report.sh SCOPE-COMMAND cpu|cuda [OPTIONS of scope ablate, for the first of its runs]
set -euo pipefail
cd "$(dirname "$0")/.."
scope=$1 backend=$2
case $backend in
  cuda) name=video_gpu ;;
  cpu) name=video_cpu ;;
  *) echo "BACKEND: got \"$backend\", expected cpu or cuda" >&2; exit 2 ;;
esac
commit=$(git rev-parse HEAD)
"$scope" ablate --suite paper --backend "$backend" --compute bf16 --commit "$commit" -o "bench/results/$name.json" "${@:3}"
if [ "$backend" = cuda ]; then
  "$scope" ablate --suite paper --grid 21x45x80 --condition models/tiny-wan/held_out_720p.safetensors --seeds 3 --backend cuda --commit "$commit" \
    -o "bench/results/${name}_720p.json"
fi
python3 bench/report.py
echo "docs/video_report.md"
