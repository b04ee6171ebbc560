#!/usr/bin/env bash
# Runs the tests, after setting the environment up where needed.
#
#   bash scripts/test.sh [--python PYTHON] [--tier fast|default|slow|gpu] [pytest arguments]
#
# fast: no processes and nothing long, about two minutes. default: also those that start processes. slow: the minutes-long ones only.
# Paths and other arguments go to pytest: bash scripts/test.sh tests/config -k alias
set -euo pipefail

setup=(--dev) tier=default
while [ $# -gt 0 ]; do
  case "$1" in
    --python) [ $# -ge 2 ] || { echo "test.sh: --python needs a command or a path" >&2; exit 2; }; setup+=(--python "$2"); shift 2 ;;
    --tier) [ $# -ge 2 ] || { echo "test.sh: --tier needs fast, default, slow or gpu" >&2; exit 2; }; tier=$2; shift 2 ;;
    *) break ;;
  esac
done
case "$tier" in fast|default|slow|gpu) ;; *) echo "test.sh: unknown tier '$tier' (fast, default, slow, gpu)" >&2; exit 2 ;; esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
env=$(bash scripts/setup_env.sh "${setup[@]}")
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE  # each of many processes would compile the sources anew

# $1: marks; the rest for pytest. Code 5 (nothing matched) is an error only where no tier runs anything.
ran=0
run() {
  local marks=$1 code=0; shift
  echo "== $("$env/bin/python" --version), tests marked: $marks"
  "$env/bin/python" -m pytest -q --durations=15 --durations-min=1 -m "$marks" "$@" || code=$?
  case $code in 0) ran=1 ;; 5) ;; *) exit "$code" ;; esac
}
# In parallel, unless tests were picked by hand: three processes keep two cores busy, because many of the default tests wait.
# A file's tests stay in one process: what they import and share is made once.
two=() three=(); [ $# -gt 0 ] || { two=(-n 2 --dist loadfile); three=(-n 3 --dist loadfile); }
case "$tier" in
  fast) run "not process and not wide and not slow and not gpu" "${two[@]}" "$@" ;;
  default) run "not slow and not gpu" "${three[@]}" "$@" ;;  # in one go: the tests are collected once
  slow) run "slow and not gpu" "$@" ;;
  gpu) run "gpu" "$@" ;;
esac
[ "$ran" = 1 ] || { echo "test.sh: no test matched" >&2; exit 5; }
