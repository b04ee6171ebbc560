#!/usr/bin/env bash
# Reinforcement learning on two processes: a tiny model's mean reward rises from under 0.3 to over 0.8, in minutes on 2 cores.
#
#   bash scripts/quickstart_rl.sh [--algorithm grpo|ppo] [--python PYTHON] [--output FOLDER] [--env FOLDER]
#
# --env: a virtual environment that has megaswift's dependencies, used as it is.
#
# Makes the quickstart's model, fine-tunes it for 56 steps on the bundled questions, which is too short, and goes on with GRPO or PPO: the model
# samples 256 answers, takes two steps on them, and samples again. An answer is worth 1 if it is the expected one to the letter.
# Data parallel 2; one process where there is one GPU.
set -euo pipefail

algorithm=grpo out=quickstart-output/rl parts=4
. "$(dirname "${BASH_SOURCE[0]}")/quickstart/prepare.sh"
case "$gpus" in 1) ranks=1 ;; *) ranks=2 ;; esac
run() {
  task=$1 per_rank=$(($2 / ranks)); shift 2
  "$env/bin/python" -m torch.distributed.run --standalone --local_addr 127.0.0.1 --nproc_per_node $ranks "megaswift/$task.py" --dataset "$quick/data/train.jsonl" \
    --max_length 128 --torch_dtype float32 --per_device_train_batch_size $per_rank --global_batch_size $((per_rank * ranks)) \
    --overwrite_output_dir true "$@"
}

echo "== 2/4  a short fine-tuning on $ranks process(es)"
run sft 24 --model "$out/model" --max_steps 56 --learning_rate 1.5e-3 --warmup_steps 4 --output_dir "$out/sft"

echo "== 3/4  $algorithm"
case "$algorithm" in
  grpo) settings=(--num_generations 8 --learning_rate 5e-4 --lr_scheduler_type cosine --entropy_coef 0.03 --max_steps 280) ;;
  ppo) settings=(--learning_rate 4e-4 --lr_scheduler_type constant --critic_learning_rate 1e-3 --lam 1.0 --beta 0 --entropy_coef 0.06 --max_steps 200) ;;
esac
run "$algorithm" 128 --model "$out/sft/hf" --reward_funcs "$quick/exact_match_reward.py:exact" --max_completion_length 8 "${settings[@]}" \
  --generation_batch_size 256 --rollout_batch_size 256 --warmup_steps 5 --output_dir "$out/$algorithm"

echo "== 4/4  rewards, and the export, reloaded with transformers"
"$env/bin/python" "$quick/mean_reward_of_first_and_last_steps.py" "$out/$algorithm/completions.jsonl"
"$env/bin/python" "$quick/ask.py" "$out/$algorithm/hf" "$quick/data/heldout.jsonl" --show 3 --before "$out/sft/hf"

cat <<END

curves       $out/$algorithm/loss.png
report       $out/$algorithm/report.html
completions  $out/$algorithm/completions.jsonl
model        $out/$algorithm/hf   (a Hugging Face folder)
took         $((SECONDS - began)) s
END
