#!/usr/bin/env bash
# What to run on a machine with a CUDA device, in this order: Transformer Engine's modules, our Triton
# kernels, the engine's tests, whole runs, and the benchmarks.
#
#   bash scripts/gpu_check.sh [--python PYTHON] [--budget SECONDS] [--cpu] [--redo] [FOLDER for the logs]
#
# Uses the Python given (python3 unless said) as it is and installs nothing, so that it also works offline. A step that
# has passed is not repeated (FOLDER/NAME.passed), and of a benchmark's cases only those without a good result in
# FOLDER/bench are run. --redo forgets both and begins again; for one case: bench_gpu.py --out FOLDER/bench --redo --only
# CASE. Each step ends within ten minutes: where a command may only run for some minutes, type it again (without --redo)
# until it says that all have passed. With --budget no step is started after that many seconds. A
# benchmark or a test that cannot be run here is neither passed nor failed, and is tried again by the next call. With --cpu the
# tests, which need a device, are left out, and the benchmarks run on shapes for a CPU: that shows that they work, and
# measures nothing.
set -uo pipefail

python=python3 budget=0 cpu= redo=
limit=280  # seconds of a benchmark case; a step has two of them at most
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python=${2:?"gpu_check.sh: --python needs a command or a path"}; shift 2 ;;
    --budget) budget=${2:?"gpu_check.sh: --budget needs a number of seconds"}; shift 2 ;;
    --cpu) cpu=1; shift ;;
    --redo) redo=1; shift ;;
    -*) echo "gpu_check.sh: unknown option $1" >&2; exit 2 ;;
    *) break ;;
  esac
done
out=${1:-gpu-check}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

if [ -z "$cpu" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check.sh: torch of '$python' sees no CUDA device" >&2
  exit 2
fi
if [ -n "$redo" ]; then rm -f "$out"/*.passed "$out/bench/results.jsonl"; fi
failed=() left=() without=() running=
stop() {  # timeout puts a step into a process group of its own, which Ctrl-C does not reach
  trap '' INT TERM
  if [ -n "$running" ]; then kill "$running" && wait "$running"; fi 2>/dev/null
  echo "gpu_check.sh: stopped; type the command again to go on" >&2
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
step() {
  local name=$1 code; shift
  if [ -e "$out/$name.passed" ]; then echo "== $name: passed before"; return; fi
  if [ "$budget" -gt 0 ] && [ "$SECONDS" -ge "$budget" ]; then left+=("$name"); return; fi
  echo "== $name: $*"
  timeout 590 "$@" > >(trap '' INT; exec tee "$out/$name.log") 2>&1 &
  running=$!
  wait "$running"; code=$?
  running=
  if [ $code -eq 0 ]; then echo "== $name: passed"; touch "$out/$name.passed"
  elif [ $code -eq 77 ]; then echo "== $name: not run, or not all of it, for the reason above"; without+=("$name")
  else echo "== $name: FAILED (code $code)"; failed+=("$name"); fi
}
tests() {
  local name=$1; shift
  if [ -n "$cpu" ]; then echo "== $name: not run: needs a CUDA device"; without+=("$name"); return; fi
  step "$name" "$python" -m pytest -q -rs -p no:cacheprovider -p tests.gpu.not_run --durations=5 -m gpu "$@"
}
bench() {
  local name=$1; shift
  step "$name" "$python" scripts/bench_gpu.py --out "$out/bench" --limit "$limit" --redo_failed "$@" ${cpu:+--small}
}

step doctor "$python" -m megaswift doctor
tests te_modules tests/gpu/test_transformer_engine_modules.py
tests kernels tests/gpu/test_triton_kernels.py
tests engine tests/gpu/test_native.py
tests float16 tests/gpu/test_runs.py -k float16
tests resume tests/gpu/test_runs.py -k resumes
bench packed_8b --only 'qwen3-8b/full/packed/te' --synchronizations
bench full_8b --only 'qwen3-8b/full/4096/te'
tests vllm_sleep tests/gpu/test_vllm_sleep.py
tests fp8 tests/gpu/test_runs.py -k fp8
tests export tests/gpu/test_runs.py -k export
bench fp8_8b --only 'qwen3-8b/fp8/4096/te'
bench small_models --only 'qwen3-0.6b/full/4096/te' 'qwen3-1.7b/full/4096/te'
bench medium_model --only 'qwen3-4b/full/4096/te'
bench adapters_8b --only 'qwen3-8b/lora/4096/te' 'qwen3-8b/qlora/4096/te'
bench torch_layers_8b --only 'qwen3-8b/full/4096/torch'
bench peers_8b --only 'qwen3-8b/full/4096/hf' 'qwen3-8b/full/4096/hf_compile'
bench moe_30b --only 'qwen3-30b-a3b/lora/4096/te' 'qwen3-30b-a3b/lora/4096/hf'
bench moe_30b_te_grouped --only 'qwen3-30b-a3b/lora/4096/te_grouped'
bench adapter_peers_8b --only 'qwen3-8b/lora/4096/hf' 'qwen3-8b/qlora/4096/hf'
bench long_rows_8b --only 'qwen3-8b/full/8192/te' 'qwen3-8b/lora/8192/te'
bench long_row_peers_8b --only 'qwen3-8b/full/8192/hf' 'qwen3-8b/lora/8192/hf'
bench packed_peer_8b --only 'qwen3-8b/full/packed/hf'
# One case a step: tracing 36 layers with adapters takes a minute, generating their code more.
limit=560 bench compiled_packed_8b --only 'qwen3-8b/full/packed/hf_compile'
limit=560 bench compiled_lora_8b --only 'qwen3-8b/lora/4096/hf_compile'
limit=560 bench compiled_qlora_8b --only 'qwen3-8b/qlora/4096/hf_compile'
limit=560 bench compiled_moe_30b --only 'qwen3-30b-a3b/lora/4096/hf_compile'
echo
if [ ${#failed[@]} -gt 0 ]; then echo "gpu_check.sh: failed: ${failed[*]}; logs in $out"; exit 1; fi
if [ ${#left[@]} -gt 0 ]; then echo "gpu_check.sh: not yet run: ${left[*]}; type the command again"; exit 3; fi
if [ ${#without[@]} -gt 0 ]; then echo "gpu_check.sh: not run: ${without[*]}"; fi
echo "gpu_check.sh: all ${without:+others }passed; logs in $out, figures in $out/bench/results.md"
