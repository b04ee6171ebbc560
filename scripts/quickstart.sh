#!/usr/bin/env bash
# From nothing to a fine-tuned model in about a minute (after the first installation).
#
#   bash scripts/quickstart.sh [--python PYTHON] [--output FOLDER] [--env FOLDER]
#
# --env: a virtual environment that has megaswift's dependencies, used as it is.
#
# Makes a tiny Qwen3 model, trains it on the bundled questions on 4 processes (tensor parallel 2 x pipeline parallel 2), exports
# it as a Hugging Face folder, reloads that with transformers and asks it questions whose wording it has never seen.
# With GPUs it takes the largest of TP2xPP2, TP2 and a single process that fits them.
set -euo pipefail

out=quickstart-output parts=3
. "$(dirname "${BASH_SOURCE[0]}")/quickstart/prepare.sh"
case "$gpus" in 0) tp=2 pp=2 ;; 1) tp=1 pp=1 ;; 2|3) tp=2 pp=1 ;; *) tp=2 pp=2 ;; esac

echo "== 2/3  fine-tuning on $((tp * pp)) processes: tensor parallel $tp x pipeline parallel $pp"
"$env/bin/python" -m torch.distributed.run --standalone --local_addr 127.0.0.1 --nproc_per_node $((tp * pp)) megaswift/sft.py \
  --tp $tp --pp $pp --model "$out/model" --dataset "$quick/data/train.jsonl" --max_length 128 \
  --per_device_train_batch_size 48 --global_batch_size 48 --max_steps 50 --learning_rate 2e-3 --warmup_steps 4 \
  --torch_dtype float32 --output_dir "$out/run" --overwrite_output_dir true

echo "== 3/3  the export, reloaded with transformers"
"$env/bin/python" "$quick/ask.py" "$out/run/hf" "$quick/data/heldout.jsonl" --show 3 --before "$out/model"

cat <<END

loss curve   $out/run/loss.png
report       $out/run/report.html
model        $out/run/hf   (a Hugging Face folder)
took         $((SECONDS - began)) s
END
