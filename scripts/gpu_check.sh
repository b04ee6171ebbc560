#!/usr/bin/env bash
# What to run on a machine with a CUDA device. First what decides most, in a quarter of an hour: the machine, Transformer
# Engine's modules and our Triton kernels, training 8B and an expert model, whole runs, FP8, the engine's tests. Then
# the rest of the tests and the benchmarks that compare.
#
#   bash scripts/gpu_check.sh [--python PYTHON] [--first] [--budget SECONDS] [--cpu] [--redo] [FOLDER for the logs]
#
# --first ends after the first part, for which it has a budget of 780 seconds unless another is given. Each step has a limit
# of its own, and FOLDER/steps.jsonl a line of JSON for each: name, state, exit code, seconds. FOLDER is $OUT, or gpu-check.
#
# Uses the Python given (python3 unless said) as it is and installs nothing, so that it also works offline. A step that
# has passed is not repeated (FOLDER/NAME.passed), and of a benchmark's cases only those without a good result in
# FOLDER/bench are run. --redo forgets both and begins again; for one case: bench_gpu.py --out FOLDER/bench --redo --only
# CASE. Each step ends within ten minutes: where a command may only run for some minutes, type it again (without --redo)
# until it says that all have passed. With --budget everything has ended after that many seconds. A
# benchmark or a test that cannot be run here is neither passed nor failed, and is tried again by the next call. With --cpu the
# tests, which need a device, are left out, and the benchmarks run on shapes for a CPU: that shows that they work, and
# measures nothing.
set -uo pipefail

python=python3 budget=0 cpu= redo= first=
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python=${2:?"gpu_check.sh: --python needs a command or a path"}; shift 2 ;;
    --budget) budget=${2:?"gpu_check.sh: --budget needs a number of seconds"}; shift 2 ;;
    --cpu) cpu=1; shift ;;
    --first) first=1; shift ;;
    --redo) redo=1; shift ;;
    -*) echo "gpu_check.sh: unknown option $1" >&2; exit 2 ;;
    *) break ;;
  esac
done
out=${1:-${OUT:-gpu-check}}
if [ -n "$first" ] && [ "$budget" = 0 ]; then budget=780; fi
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
told() {  # name, state, code, seconds
  printf '{"step": "%s", "state": "%s", "code": %s, "seconds": %s}\n' "$@" >> "$out/steps.jsonl"
}
step() {  # seconds, name, command
  local most=$1 name=$2 code began cut=; shift 2
  if [ -e "$out/$name.passed" ]; then echo "== $name: passed before"; return; fi
  if [ "$budget" -gt 0 ]; then
    local rest=$((budget - SECONDS))
    if [ "$rest" -lt 5 ]; then left+=("$name"); told "$name" left null 0; return; fi
    if [ "$rest" -lt "$most" ]; then most=$rest cut=1; fi
  fi
  echo "== $name (up to $most s): $*"
  began=$SECONDS
  timeout "$most" "$@" > >(trap '' INT; exec tee "$out/$name.log") 2>&1 &
  running=$!
  wait "$running"; code=$?
  running=
  if [ $code -eq 0 ]; then
    echo "== $name: passed"; touch "$out/$name.passed"; told "$name" passed 0 $((SECONDS - began))
  elif [ $code -eq 124 ] && [ -n "$cut" ]; then
    echo "== $name: not ended within the budget"; left+=("$name"); told "$name" left 124 $((SECONDS - began))
  elif [ $code -eq 77 ]; then
    echo "== $name: not run, or not all of it, for the reason above"; without+=("$name")
    told "$name" "not run" 77 $((SECONDS - began))
  else
    echo "== $name: FAILED (code $code)"; failed+=("$name"); told "$name" failed $code $((SECONDS - began))
  fi
}
tests() {  # seconds, name, what to collect
  local most=$1 name=$2; shift 2
  if [ -n "$cpu" ]; then
    echo "== $name: not run: needs a CUDA device"; without+=("$name"); told "$name" "not run" null 0
    return
  fi
  step "$most" "$name" "$python" -m pytest -q -rs -p no:cacheprovider -p tests.gpu.not_run --durations=5 -m gpu "$@"
}
bench() {  # seconds of a case, how many cases, name, options
  local limit=$1 most=$(($1 * $2 + 15)) name=$3; shift 3
  step "$most" "$name" "$python" scripts/bench_gpu.py --out "$out/bench" --limit "$limit" --redo_failed "$@" \
    ${cpu:+--small}
}
report() {
  echo
  if [ ${#failed[@]} -gt 0 ]; then echo "gpu_check.sh: failed: ${failed[*]}; logs in $out"; exit 1; fi
  if [ ${#left[@]} -gt 0 ]; then echo "gpu_check.sh: not yet run: ${left[*]}; type the command again"; exit 3; fi
  if [ ${#without[@]} -gt 0 ]; then echo "gpu_check.sh: not run: ${without[*]}"; fi
  echo "gpu_check.sh: all ${without:+others }passed; logs in $out, figures in $out/bench/results.md"
  exit 0
}

step 60 doctor "$python" -m megaswift doctor --offline
tests 60 te_modules tests/gpu/test_transformer_engine_modules.py
tests 60 kernels tests/gpu/test_triton_kernels.py
step 40 head_kernels "$python" scripts/gpu_benchmark/head.py ${cpu:+--small}
bench 85 1 packed_8b --steps 5 --warmup 2 --synchronizations --only 'qwen3-8b/full/packed/te'
bench 65 1 bf16_moment_8b --steps 5 --warmup 2 --only 'qwen3-8b/full/packed/bf16_moment'
bench 75 1 moe_30b --steps 3 --warmup 2 --profile --only 'qwen3-30b-a3b/lora/4096/te'
tests 75 runs tests/gpu/test_runs.py -k 'float16 or resumes'
bench 70 1 fp8_8b --steps 5 --warmup 2 --only 'qwen3-8b/fp8/4096/te'
tests 130 engine tests/gpu/test_native.py
tests 60 export tests/gpu/test_runs.py -k export
bench 50 1 small_model --steps 5 --warmup 2 --only 'qwen3-0.6b/full/4096/te'
bench 60 1 torch_layers_8b --steps 5 --warmup 2 --only 'qwen3-8b/full/4096/torch'
if [ -n "$first" ]; then report; fi

tests 60 weight_transfer tests/gpu/test_weight_transfer.py -k bits
tests 590 vllm_weights tests/gpu/test_weight_transfer.py -k vllm
tests 590 vllm_sleep tests/gpu/test_vllm_sleep.py
tests 590 fp8 tests/gpu/test_runs.py -k fp8
bench 280 1 full_8b --only 'qwen3-8b/full/4096/te'
bench 280 1 medium_small_model --only 'qwen3-1.7b/full/4096/te'
bench 280 1 medium_model --only 'qwen3-4b/full/4096/te'
bench 280 2 adapters_8b --only 'qwen3-8b/lora/4096/te' 'qwen3-8b/qlora/4096/te'
bench 280 2 peers_8b --only 'qwen3-8b/full/4096/hf' 'qwen3-8b/full/4096/hf_compile'
bench 280 1 moe_peer_30b --only 'qwen3-30b-a3b/lora/4096/hf'
bench 280 1 moe_30b_te_grouped --only 'qwen3-30b-a3b/lora/4096/te_grouped'
bench 280 2 adapter_peers_8b --only 'qwen3-8b/lora/4096/hf' 'qwen3-8b/qlora/4096/hf'
bench 280 2 long_rows_8b --only 'qwen3-8b/full/8192/te' 'qwen3-8b/lora/8192/te'
bench 280 2 long_row_peers_8b --only 'qwen3-8b/full/8192/hf' 'qwen3-8b/lora/8192/hf'
bench 280 1 packed_peer_8b --only 'qwen3-8b/full/packed/hf'
# One case a step: tracing 36 layers with adapters takes a minute, generating their code more.
bench 560 1 compiled_packed_8b --only 'qwen3-8b/full/packed/hf_compile'
bench 560 1 compiled_lora_8b --only 'qwen3-8b/lora/4096/hf_compile'
bench 560 1 compiled_qlora_8b --only 'qwen3-8b/qlora/4096/hf_compile'
bench 560 1 compiled_moe_30b --only 'qwen3-30b-a3b/lora/4096/hf_compile'
report
