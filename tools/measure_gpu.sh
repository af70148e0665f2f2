#!/usr/bin/env bash
# Measures all that the docs say of a GPU, part by part, into bench/results:
#   tools/measure_gpu.sh --list                     the parts, with minutes on an H200
#   tools/measure_gpu.sh [--dry-run] PART... [-- OPTIONS of scope ablate]
# "timings" and "videos" stand for all parts of their kind. A part whose result is finished at this commit of the code is skipped; one that was
# stopped goes on, but for those marked * in the list, which begin again. The environment:
#   SCOPE      the command (build/cuda/bin/scope); libscope.so lies beside its folder
#   COMMIT     what it was built from, where there is no git; otherwise the last commit that changed code
#   RESULTS    a folder in the place of bench/results; what was begun in bench/results is copied there, and goes on
#   CLIPS_WAN  the folder of clips-wan, a model that is not in this repository
#   SEEDS      videos of each variant: 6 first, then 12 (clips-wan; 6 with fp8) or 8 (tiny-wan), which are the defaults
#   PYTHON     an interpreter with PyTorch, diffusers, numpy and safetensors (python3); PYTHONPATH may lead to them
#   LINEAR     what makes fp8 linear layers in diffusers: torchao; fp8 takes bench/fp8_linear.py, which needs PyTorch alone
#   BACKEND    cuda; cpu only shows that a part runs
set -euo pipefail
cd "$(dirname "$0")/.."
scope=${SCOPE:-build/cuda/bin/scope} python=${PYTHON:-python3} backend=${BACKEND:-cuda}
library=$(dirname "$scope")/../libscope.so
results=${RESULTS:-bench/results}
dry=
extra=()

parts='
timings h200 4                  attention calls against cuDNN and FlashAttention-2
timings h200_methods 2          methods at matched density
timings h200_means 1            means of parts against the damped mean
timings h200_steps_wan 2*       Wan2.1 14B, native, medians of 3
timings h200_steps_wan_fp8 1*   the same with fp8 linear layers
timings h200_steps_hunyuan 3*   HunyuanVideo 13B, native, medians of 3
timings h200_diffusers_wan 6    Wan2.1 14B in diffusers, with bf16 and fp8 linear layers
timings h200_diffusers_hunyuan 9 HunyuanVideo 13B in diffusers, the same
timings h200_ltx2_14080 1       LTX-2 in diffusers, 8 of 48 layers, by length
timings h200_ltx2_32640 1
timings h200_ltx2_130560 2
timings h200_h3_38000 1         MiniMax-H3 in diffusers, 8 of 50 layers, by length
timings h200_h3_96000 2
timings h200_python 1*          what a call from Python adds
videos call_tiny_wan 1          all methods, the density solved in each call
videos run_tiny_wan 2           all methods, one threshold for a run
videos own_tiny_wan 1           all methods at their authors'"'"' settings
videos rho_tiny_wan 1           rho 0.9
videos partitions_tiny_wan 1    partitions and rules
videos products_tiny_wan 1      8-bit products
videos means_tiny_wan 1         means of parts against the damped mean, and the presets
videos video_gpu 3              the suite "paper"
videos video_gpu_720p 4         the suite "paper" at 21x45x80
videos call_clips_wan 13        as above; SEEDS=6 takes 7
videos run_clips_wan 12         SEEDS=4 takes 8, thresholds included
videos own_clips_wan 6
videos rho_clips_wan 3
videos partitions_clips_wan 5
videos products_clips_wan 2
videos means_clips_wan 2
videos presets_held_clips_wan_8 1 presets in 8 steps
videos presets_held_clips_wan_4 1 presets in 4 steps
videos presets_held_tiny_wan_8 1 presets in 8 steps
videos presets_held_tiny_wan_4 1 presets in 4 steps
videos fp8_tiny_wan 1           fp8 linear layers, in PyTorch
videos fp8_clips_wan 2          SEEDS=3 takes 1'

say() { if [ -n "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }
code_commit() { git log -1 --format=%H -- :/CMakeLists.txt :/include :/src :/cli :/models "$@"; }

# RESULT PROGRAM SEEDS COMMAND...: unless it is finished. The command finds the file to resume from in $resume.
measure() {
  local result=$results/$1.json program=$2 seeds=$3
  [ "$results" -ef bench/results ] || find bench/results -name "$1.json*" -exec cp -n -t "$results" {} +
  resume=$(python3 bench/provenance.py state "$result" "$commit" "$seeds")
  if [ "$resume" = finished ]; then
    echo "$result is finished"
    return
  fi
  [ -n "$dry" ] || python3 bench/provenance.py begin "$result" "$commit"
  "${@:4}"
  [ -n "$dry" ] || python3 bench/provenance.py end "$result" "$commit" "$program"
}

in_python() { say env SCOPE_LIBRARY="$library" PYTHONPATH="python${PYTHONPATH:+:$PYTHONPATH}" "$python" "$@"; }
steps() {  # RESULT MODEL LINEAR VARIANTS
  measure "$1" "$scope" 0 say "$scope" steps --model "$2" --backend "$backend" --repeat 3 --commit "$commit" --json "$results/$1.json" \
    --variants "${4:-dense,scope:target_density=0.2,fast}" --linear "${3:-plain}"
}
diffusers() {  # RESULT MODEL
  local commit=$package_commit
  measure "$1" "$library" 0 in_python bench/diffusers_steps.py --model "$2" --modes compiled --linear "bf16,${LINEAR:-torchao}" --repeat 3 \
    --variants fast,fast:products=qk8,quality,scope:target_density=0.2 --fp8-variants fast,fast:products=qk8 --commit "$commit" \
    --json "$results/$1.json"
}
length() {  # RESULT MODEL GRID
  local commit=$package_commit
  measure "$1" "$library" 0 in_python bench/diffusers_steps.py --model "$2" --grid "$3" --modes compiled --layers 8 --repeat 3 \
    --variants scope-mean:target_density=0.1+dense_steps=0,fast --commit "$commit" --json "$results/$1.json"
}
calls() {  # RESULT OPTIONS
  measure "$1" "$library" 0 in_python bench/benchmarks_gpu.py --libscope "$library" --command "$scope" --repeat 5 --densities 0.2,0.1,0.05 \
    --commit "$commit" --json "$results/$1.json" "${@:2}"
}
overhead() {  # RESULT
  local commit=$package_commit
  measure "$1" "$library" 0 in_python bench/python_overhead.py --device "$backend" --json "$results/$1.json"
}
fp8() {  # RESULT SEEDS OPTIONS
  local commit=$package_commit seeds=${SEEDS:-$2}
  measure "$1" "$library" "$seeds" in_python bench/fp8_gate.py --device "$backend" --seeds "$seeds" --commit "$commit" \
    --json "$results/$1.json" "${@:3}" "${extra[@]}"
}

profile() {  # NAME OPTIONS: how dense the attention of another video is, for svoo
  densities=bench/results/profile_$1.csv
  [ -e "$densities" ] || say "$scope" generate --method dense --backend "$backend" --profile-samples 64 --profile-out "$densities" -o build/profile_run "${@:2}"
}
ablate() {  # RESULT SEEDS OPTIONS
  local result=$results/$1.json seeds=${SEEDS:-$2}
  make_videos() {
    if [ "$resume" = "$result" ] && [ -z "$dry" ]; then  # one with fewer seeds, which ablate does not both read and write
      resume=$result.earlier.unfinished
      cp "$result" "$resume"
    fi
    say "$scope" ablate --backend "$backend" --commit "$commit" --seeds "$seeds" -o "$result" ${resume:+--resume "$resume"} "$@" "${extra[@]}"
    [ -n "$dry" ] || rm -f "$result".*.unfinished
  }
  measure "$1" "$scope" "$seeds" make_videos "${@:3}"
}

damped=scope-mean:tail=mean+tail_weight=0.75+select_stride=1+warm_sample=1  # scope-mean before 0.3
methods=scope,scope-paper,scope-mean,svg2,svoo,sparge,svg2-ear,sol
paper=scope-paper
ablations=$paper,$paper:partition=even:1,$paper:partition=even:2,$paper:partition=random:3,$paper:partition=even:4,$paper:partition=even:8,$paper:rule=hybrid,$paper:rule=top_p

# KIND RESULT SEEDS DENSITIES-OF-RUN OPTIONS: the parts that both models have.
both() {
  local result=$2 seeds=$3 options=("${@:5}")
  case $1 in
    call) ablate "$result" "$seeds" "${options[@]}" --match call --density 0.05,0.1,0.2 --profile "$densities" \
      --variants "$methods,scope-mean:dense_steps=0+dense_layers=0,fast,quality${more:+,$more}" ;;
    run) ablate "$result" "$seeds" "${options[@]}" "${choose[@]}" --match run --density "$4" --profile "$densities" --variants "$methods" ;;
    own) ablate "$result" "$seeds" "${options[@]}" --match own --profile "$densities" --variants "$methods,fast,quality" ;;
    rho) ablate "$result" "$seeds" "${options[@]}" --rho 0.9 --variants scope,scope-paper,scope-mean,svg2 ;;
    partitions) ablate "$result" "$seeds" "${options[@]}" --match call --density 0.2 --variants "$ablations" ;;
    products) ablate "$result" "$seeds" "${options[@]}" --match call --density 0.1 \
      --variants scope-mean,scope-mean:products=qk8,scope-mean:products=qkv8 ;;
    means) ablate "$result" "$seeds" "${options[@]}" --match call --density 0.05,0.1 --variants "$damped,scope-mean,fast,quality" ;;
  esac
}

few_steps() {  # RESULT SEEDS OPTIONS; the result's name ends in how many
  ablate "$1" "$2" "${@:3}" --steps "${1##*_}" --no-control --density 0.2 \
    --variants scope,scope-paper,svg2,scope-mean:dense_steps=0+dense_layers=0,fast,quality
}

clips_wan() {  # sets the model's folder and frames; frames 000, 040 and 100 to 103 are for choosing alone
  if [ -z "${CLIPS_WAN:-}" ]; then
    echo "CLIPS_WAN is not set: $1 is left out" >&2
    return 1
  fi
  clips=(--model "$CLIPS_WAN" --image "$CLIPS_WAN/clips/020.png")
  local frame
  for frame in 060 104 105 106 107; do clips[3]+=,$CLIPS_WAN/clips/$frame.png; done
  choose=(--choose "$CLIPS_WAN/clips/000.png,$CLIPS_WAN/clips/040.png")
}

part() {
  local kind=${1%%_*}
  case $1 in
    h200) calls "$1" ;;
    h200_methods) calls "$1" --parts methods ;;
    h200_means) calls "$1" --parts means ;;
    h200_steps_wan) steps "$1" wan2.1-t2v-14b ;;
    h200_steps_wan_fp8) steps "$1" wan2.1-t2v-14b fp8 dense,fast ;;
    h200_steps_hunyuan) steps "$1" hunyuanvideo ;;
    h200_diffusers_wan) diffusers "$1" wan2.1-t2v-14b ;;
    h200_diffusers_hunyuan) diffusers "$1" hunyuanvideo ;;
    h200_ltx2_14080) length "$1" ltx-2 16x22x40 ;;
    h200_ltx2_32640) length "$1" ltx-2 16x34x60 ;;
    h200_ltx2_130560) length "$1" ltx-2 16x68x120 ;;
    h200_h3_38000) length "$1" minimax-h3 37x24x42 ;;
    h200_h3_96000) length "$1" minimax-h3 37x36x72 ;;
    h200_python) overhead "$1" ;;
    video_gpu)
      profile tiny_wan --example 0
      ablate "$1" 8 --suite paper --profile "$densities" ;;
    video_gpu_720p)
      local long=(--grid 21x45x80 --condition models/tiny-wan/held_out_720p.safetensors)
      profile tiny_wan_720p "${long[@]}" --seed 100
      ablate "$1" 3 --suite paper "${long[@]}" --profile "$densities" ;;
    fp8_tiny_wan) fp8 "$1" 8 ;;
    fp8_clips_wan)
      clips_wan "$1" || return 0
      fp8 "$1" 6 --model "$CLIPS_WAN" --frames "${clips[3]}" --steps 25 ;;
    *_tiny_wan)
      choose=() more=scope-mean:groups=300  # as many as at 21x45x80
      profile tiny_wan --example 0
      both "$kind" "$1" 8 0.05,0.1,0.2 ;;
    presets_held_clips_wan_*)
      clips_wan "$1" || return 0
      few_steps "$1" 12 "${clips[@]}" ;;
    presets_held_tiny_wan_*) few_steps "$1" 8 ;;
    *_clips_wan)
      clips_wan "$1" || return 0
      more=
      profile clips_wan --model "$CLIPS_WAN" --steps 25 --example 0
      # The control takes as long as five variants: in one of the parts.
      local control=(--no-control)
      [ "$kind" = call ] && control=()
      both "$kind" "$1" 12 0.1,0.2 "${clips[@]}" --steps 25 "${control[@]}" ;;
  esac
}

wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --list) sed 1d <<<"$parts"; exit ;;
    --dry-run) dry=yes ;;
    --) extra=("${@:2}"); break ;;
    timings | videos) mapfile -t -O ${#wanted[@]} wanted < <(awk -v kind="$1" '$1 == kind {print $2}' <<<"$parts") ;;
    *)
      awk -v name="$1" '$2 == name {found = 1} END {exit !found}' <<<"$parts" || { echo "PART: got \"$1\", expected one of --list" >&2; exit 2; }
      wanted+=("$1") ;;
  esac
  shift
done
[ ${#wanted[@]} -gt 0 ] || { sed -n '2,15s/^# \?//p' "$0" >&2; exit 2; }
[ -n "$dry" ] || [ -x "$scope" ] || { echo "SCOPE: \"$scope\" is no program" >&2; exit 2; }
commit=${COMMIT:-$(code_commit)}
package_commit=${COMMIT:-$(code_commit :/python)}  # of what measures the Python package too
for name in "${wanted[@]}"; do part "$name"; done
[ -n "$dry" ] || echo "bench/report.py puts them into the docs"
