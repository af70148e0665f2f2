#!/usr/bin/env bash
# Replays each corpus, then fuzzes each target for the given seconds, two at a time: run.sh BUILD SECONDS
set -euo pipefail
build=$1 seconds=$2
here=$(cd "$(dirname "$0")" && pwd)
fuzz() {
  local name=$1 work
  work=$(mktemp -d)
  mkdir -p "$here/corpus/$name"
  # -close_fd_mask silences the target; a finding still prints its report.
  if ! "$build/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
      -artifact_prefix="$work/" "$work" "$here/corpus/$name" >"$work/log" 2>&1; then
    tail -n 40 "$work/log"
    echo "fuzz_$name: failed; input kept in $work"
    return 1
  fi
  grep -E 'Done|DONE' "$work/log" | tail -n 1 | sed "s/^/fuzz_$name: /"
}
export -f fuzz; export build seconds here
printf '%s\n' npy safetensors png model settings c_api | xargs -P 2 -I{} bash -c 'fuzz {}'
