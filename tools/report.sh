#!/usr/bin/env bash
# The long report: whole videos of every variant against dense ones, into bench/results, and from there into docs:
# report.sh SCOPE-COMMAND cpu|cuda [OPTIONS of scope ablate, for the first of its runs]
# With cuda there are a second model, clips-wan, where CLIPS_WAN names its folder, and profiles for svoo. What is finished at this commit of
# the code (COMMIT, where there is no git) stays as it is, and a run that was stopped goes on after its last seed: start the script again
# until it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
scope=$1 backend=$2
commit=${COMMIT:-$(git log -1 --format=%H -- :/CMakeLists.txt :/include :/src :/cli :/models)}

# "finished", or the unfinished result of this commit with the most seeds, or nothing.
state_of() {
  python3 - "$1" "$commit" <<'STATE'
import glob, json, sys

def load(path):
    try:
        data = json.load(open(path))
    except (OSError, ValueError):  # stopped while it was written
        return {}
    return data if data["commit"] == sys.argv[2] else {}

begun = [(data["seeds"], path) for path in glob.glob(sys.argv[1] + ".*.unfinished") if (data := load(path))]
print("finished" if load(sys.argv[1]).get("finished") else max(begun)[1] if begun else "")
STATE
}

ablate() {  # NAME OPTIONS...
  local result=bench/results/$1.json state
  state=$(state_of "$result")
  [ "$state" = finished ] && echo "$result is finished" && return
  "$scope" ablate --backend "$backend" --commit "$commit" -o "$result" ${state:+--resume "$state"} "${@:2}"
  rm -f "$result".*.unfinished
}

profile() {  # NAME OPTIONS...: how dense the attention of another video is, for svoo
  profile=bench/results/profile_$1.csv
  [ -e "$profile" ] && return
  "$scope" generate --method dense --backend "$backend" --profile-samples 64 --profile-out "$profile" -o build/profile_run "${@:2}"
}

case $backend in
  cpu) ablate video_cpu --suite paper --compute bf16 "${@:3}" ;;
  cuda)
    held=scope,scope-paper,scope-mean,svg2,svoo,sparge,svg2-ear,sol,scope-mean:dense_steps=0+dense_layers=0,fast,quality
    profile tiny_wan --example 0
    ablate video_gpu --suite paper --profile "$profile" "${@:3}"
    ablate held_tiny_wan --variants "$held,scope-mean:groups=300" --density 0.05,0.1,0.2 --profile "$profile"
    if [ -n "${CLIPS_WAN:-}" ]; then
      profile clips_wan --model "$CLIPS_WAN" --steps 25 --example 0
      clips=(--model "$CLIPS_WAN" --clips 1,3 --steps 25 --profile "$profile")
      ablate held_clips_wan "${clips[@]}" --variants "$held" --density 0.05,0.1,0.2 --seeds 4 --no-control
    else
      echo "CLIPS_WAN is not set: clips-wan is left out"
    fi
    long=(--grid 21x45x80 --condition models/tiny-wan/held_out_720p.safetensors)
    profile tiny_wan_720p "${long[@]}" --seed 100
    ablate video_gpu_720p --suite paper "${long[@]}" --seeds 3 --profile "$profile"
    ;;
  *) echo "BACKEND: got \"$backend\", expected cpu or cuda" >&2; exit 2 ;;
esac
python3 bench/report.py
echo "docs/video_report.md, docs/fidelity.md"
