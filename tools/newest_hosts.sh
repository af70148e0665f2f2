#!/usr/bin/env bash
# Tests against the newest release of each host, which our pins may lag behind: newest_hosts.sh PYTORCH_VENV LOG [HOST ...]. It writes a log,
# a line for each host, and fails if a test does. The packages go into $FOLDER, build/newest_hosts unless it is set. It needs
# build/release, or SCOPE_LIBRARY.
# --list: the hosts and their tests, without a download. --check LOG, for a release: every host passed, at a commit of this history
# after which neither the adapters nor their tests changed.
set -euo pipefail
declare -A tests=(
  [diffusers]=tests/python_package/test_diffusers.py
  [sglang]=tests/hosts/test_sglang_real.py
  [vllm_omni]=tests/hosts/test_vllm_omni_real.py
  [comfy_kitchen]=tests/hosts/test_comfy_kitchen_real.py
  [cache_dit]=tests/hosts/test_cache_dit_real.py
)
hosts=(diffusers sglang vllm_omni comfy_kitchen cache_dit)
if [[ ${1:-} == --list ]]; then
  cd "$(dirname "$0")/.."
  for host in "${hosts[@]}"; do
    echo "$host: ${tests[$host]}"
    [[ -f ${tests[$host]} ]]
  done
  exit
fi
if [[ ${1:-} == --check && $# -eq 2 ]]; then
  log=$(realpath "$2")
  cd "$(dirname "$0")/.."
  for host in "${hosts[@]}"; do
    grep -qE "^${host//_/-} [0-9.]+: [0-9]+ passed(, [0-9]+ skipped)?$" "$log" || { echo "$2: ${host//_/-} did not pass" >&2; exit 1; }
  done
  commit=$(sed -n 's/.* at commit \([0-9a-f]*\),.*/\1/p' "$log")
  git merge-base --is-ancestor "$commit" HEAD 2>/dev/null || { echo "$2: commit ${commit:-(none)} is not in this history" >&2; exit 1; }
  changed=$(git diff --name-only "$commit" HEAD -- python/scope_attn/hosts "${tests[@]}")
  [[ -z $changed ]] || { echo "$2: changed since $commit: ${changed//$'\n'/ }" >&2; exit 1; }
  exit
fi
[[ $# -ge 2 ]] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
venv=$(realpath -s "$1")
log=$(realpath -m "$2")
shift 2
[[ $# -eq 0 ]] || hosts=("$@")
cd "$(dirname "$0")/.."
folder=$(realpath -m "${FOLDER:-build/newest_hosts}")
export SCOPE_LIBRARY=${SCOPE_LIBRARY:-$PWD/build/release/libscope.so} OMP_NUM_THREADS=1
mkdir -p "$folder" "$(dirname "$log")"
version() { "$venv/bin/python" -c "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))" "$1"; }
{
  echo "# The newest hosts, tested by tools/newest_hosts.sh on $(date -u +%Y-%m-%d) at commit $(git rev-parse --short HEAD)," \
    "$("$venv/bin/python" -V), PyTorch $(version torch), on the CPU"
} >"$log"
failed=0
for host in "${hosts[@]}"; do
  [[ -n ${tests[$host]:-} ]] || { echo "there is no host \"$host\"; there are ${!tests[*]}" >&2; exit 2; }
  out=$folder/$host.log
  if [[ $host == diffusers ]]; then
    rm -rf "${folder:?}/$host"
    install=("$venv/bin/python" -m pip install -q --no-deps --no-compile --disable-pip-version-check --target "$folder/$host" diffusers)
  else
    install=(env NEWEST=1 tests/hosts/install.sh "$venv" "$folder" "$host")
  fi
  if ! "${install[@]}" >"$out" 2>&1; then
    echo "$host: not installed" | tee -a "$log"
    failed=1
    continue
  fi
  newest=$(PYTHONPATH=$folder/$host version "${host//_/-}")
  status=0
  PYTHONPATH=$PWD/python:$PWD/tests/python_package:$folder/$host "$venv/bin/python" -m pytest -q -p no:cacheprovider -W ignore "${tests[$host]}" >"$out" 2>&1 || status=$?
  # "3 passed, 1 skipped in 5.21s", without the time.
  echo "${host//_/-} $newest: $(tail -n 1 "$out" | sed 's/ in [0-9.]*s.*//; s/^=* *//')" | tee -a "$log"
  grep -oE '^(FAILED|ERROR) [^ ]+' "$out" | sed 's/^/  /' | tee -a "$log" || true
  [[ $status == 0 ]] || failed=1
done
exit "$failed"
