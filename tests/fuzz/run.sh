#!/usr/bin/env bash
# Replays inputs made by hand (corpus/) and found before (found/), then fuzzes each target for the given seconds, two at a time:
# run.sh BUILD SECONDS [--record] [TARGET...]
# --record adds what ran to executions.json, and to found/ the inputs that reach new code.
set -euo pipefail
build=$1 seconds=$2
shift 2
record=no
if [ "${1:-}" = --record ]; then record=yes; shift; fi
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || set -- npy safetensors png model settings c_api
fuzz() {
  local name=$1 work findings=0
  local program=$build/tests/fuzz/fuzz_$name
  work=$(mktemp -d)
  mkdir -p "$here/corpus/$name" "$here/found/$name" "$work/found"
  local TIMEFORMAT=%0U  # seconds of the processor: a busy machine gives less than the wall clock says
  { time "$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$work/" "$work/found" "$here/corpus/$name" "$here/found/$name" >"$work/log" 2>&1 || findings=1; } 2>"$work/seconds"
  if [ "$record" = yes ]; then
    "$here/totals.py" add "$name" "$(awk '/number_of_executed_units/ {print $2}' "$work/log")" "$(cat "$work/seconds")" "$findings"
    "$program" -set_cover_merge=1 -max_len=4096 -artifact_prefix="$work/" "$here/found/$name" "$work/found" >>"$work/log" 2>&1
  fi
  if [ "$findings" = 1 ]; then
    tail -n 40 "$work/log"
    echo "fuzz_$name: failed; input kept in $work"
    return 1
  fi
  grep -E 'Done|DONE' "$work/log" | head -n 1 | sed "s/^/fuzz_$name: /"
  rm -r "$work"
}
export -f fuzz; export build seconds here record
printf '%s\n' "$@" | xargs -P 2 -I{} bash -c 'fuzz {}'
