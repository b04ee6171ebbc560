#!/usr/bin/env bash
# What to run on a machine with a CUDA device: its description, the tests marked gpu, and the benchmarks.
#
#   bash scripts/gpu_check.sh [--python PYTHON] [FOLDER for the logs]
#
# Uses the Python given (python3 unless said) as it is and installs nothing, so that it also works offline.
set -uo pipefail

python=python3
if [ "${1:-}" = --python ]; then python=${2:?"gpu_check.sh: --python needs a command or a path"}; shift 2; fi
out=${1:-gpu-check}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check.sh: torch of '$python' sees no CUDA device" >&2
  exit 2
fi
failed=()
step() {
  local name=$1; shift
  echo "== $name: $*"
  if "$@" > >(tee "$out/$name.log") 2>&1; then echo "== $name: ok"; else echo "== $name: FAILED (code $?)"; failed+=("$name"); fi
}
step doctor "$python" -m megaswift doctor
step tests "$python" -m pytest -q --durations=10 -m gpu
step bench_1b "$python" scripts/bench_step.py --size 1b --dtype bfloat16 --only megaswift plain
step memory_1b "$python" scripts/bench_step.py --size 1b --dtype bfloat16 --only megaswift plain --memory
echo
if [ ${#failed[@]} -gt 0 ]; then echo "gpu_check.sh: failed: ${failed[*]}; logs in $out"; exit 1; fi
echo "gpu_check.sh: all passed; logs in $out"
