"""Reading commands from scripts, and other toolkits' commands typed as they are.

Covers: tests/front_door/commands.py, tests/front_door/tiny_models.py, tests/front_door/count.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.front_door.commands import Command, commands_in_folder
from tests.front_door.count import ROWS, refusal

SCRIPT = """
# a comment with swift sft in it
nproc=2
export NCCL_DEBUG=INFO
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    # a commented option
    --gradient_accumulation_steps $(expr 16 / $nproc) \\
    --output_dir "out put" > log.txt 2>&1 &
python tools/swift/cli/_megatron/pt.py --tp 2
"""


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.sh").write_text(SCRIPT)
    first, second = commands_in_folder(tmp_path)
    assert (first.file, first.program, first.task) == ("a/x.sh", "swift", "sft")
    assert first.environ["NPROC_PER_NODE"] == "2" and first.environ["NCCL_DEBUG"] == "INFO"
    words = "--model Qwen/Qwen2.5-7B-Instruct --gradient_accumulation_steps 8 --output_dir"
    assert first.words == (*words.split(), "out put")
    assert (second.program, second.task, second.words) == ("megatron", "pt", ("--tp", "2"))


def test_a_comment_begins_at_the_start_of_a_word_only(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        "swift rlhf --rlhf_type grpo --dataset AI-MO/NuminaMath-TIR#1000 \\\n"
        "    --system 'Answer # briefly' --reward_funcs accuracy  # a comment --lr 5\n"
        'swift sft --model "a#b" --lr 1e-4 #1000\n'
        "# swift sft --model c\n"
    )
    first, second = commands_in_folder(tmp_path)
    words = "--rlhf_type grpo --dataset AI-MO/NuminaMath-TIR#1000 --system"
    assert first.words == (*words.split(), "Answer # briefly", "--reward_funcs", "accuracy")
    assert second.words == ("--model", "a#b", "--lr", "1e-4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front-door")
    (folder / "rows.jsonl").write_text(ROWS * 64)
    return folder


ACCEPTED = {
    "full parameters under Megatron": (
        "sft",
        "NPROC_PER_NODE=4",
        "--model Qwen/Qwen2.5-14B --save_safetensors true --dataset some/rows --load_from_cache_file true "
        "--split_dataset_ratio 0.01 --tensor_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 16 "
        "--packing true --recompute_granularity selective --num_train_epochs 3 --finetune true "
        "--cross_entropy_loss_fusion true --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 --eval_steps 200 "
        "--save_steps 200 --max_length 8192 --dataloader_num_workers 8 --dataset_num_proc 8 --no_save_optim true "
        "--no_save_rng true --sequence_parallel true --attention_backend flash",
    ),
    "experts": (
        "sft",
        "NPROC_PER_NODE=8",
        "--model Qwen/Qwen3-30B-A3B-Instruct-2507 --dataset some/rows --tuner_type lora --lora_rank 8 --lora_alpha 32 "
        "--target_modules all-linear --expert_model_parallel_size 8 --moe_permute_fusion true --moe_grouped_gemm true "
        "--moe_shared_expert_overlap true --moe_aux_loss_coeff 1e-6 --micro_batch_size 2 --global_batch_size 16 "
        "--sequence_parallel true --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 "
        "--max_length 2048 --save_steps 50 --no_save_optim true --no_save_rng true --padding_free true",
    ),
    "LoRA of a language model on one device": (
        "sft",
        "",
        "--model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset some/rows#500 other/rows#500 --torch_dtype "
        "bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate "
        "1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear --gradient_accumulation_steps 16 "
        "--eval_steps 50 --save_steps 50 --save_total_limit 2 --logging_steps 5 --max_length 2048 --warmup_ratio 0.05 "
        "--dataset_num_proc 4 --dataloader_num_workers 4 --model_author someone --model_name something",
    ),
    "a vision-language model without an engine": (
        "sft",
        "",
        "--model Qwen/Qwen2.5-VL-7B-Instruct --dataset some/rows --tuner_type lora --freeze_vit true "
        "--freeze_llm false --freeze_aligner true --vit_gradient_checkpointing false --lora_rank 8",
    ),
    "ZeRO": (
        "sft",
        "NPROC_PER_NODE=2",
        "--model Qwen/Qwen2.5-7B --dataset some/rows --bf16 true --deepspeed zero2 --eval_strategy no --save_strategy "
        "steps --save_steps 100 --save_only_model true --gradient_checkpointing true --gradient_checkpointing_kwargs "
        "'{\"use_reentrant\": false}' --report_to tensorboard --dataloader_drop_last true",
    ),
    "DPO": (
        "rlhf",
        "NPROC_PER_NODE=2",
        "--rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset some/rows --beta 0.1 --rpo_alpha "
        "0.1 --load_from_cache_file true --deepspeed zero2 --eval_steps 50",
    ),
    "GRPO with a server": (
        "rlhf",
        "NPROC_PER_NODE=2",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset some/rows --reward_funcs format --use_vllm true "
        "--vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000 --rollout_sync_folder sync "
        "--max_completion_length 2048 --num_generations 2 --per_device_train_batch_size 2 --vllm_max_model_len 4096",
    ),
}
"""Commands in the manner of the toolkits' examples: name -> task, environment, options."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_typed_as_they_are(name: str, root: Path) -> None:
    task, environ, words = ACCEPTED[name]
    variables = dict(pair.split("=") for pair in environ.split())
    assert refusal(Command(name, 1, "swift", task, tuple(shlex.split(words)), variables), root) == []


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--safe_serialization false", "weights are saved as safetensors"),
        ("--vllm_pipeline_parallel_size 4", "has no effect in sft, which samples nothing"),
        ("--task_type decision", "is not a supported task"),
    ],
)
def test_what_is_still_refused_says_why(words: str, rule: str, root: Path) -> None:
    base = ("--model", "Qwen/Qwen2.5-7B", "--dataset", "some/rows")
    (problem,) = refusal(Command("", 1, "swift", "sft", (*base, *words.split()), {}), root)
    assert rule in problem.rule and problem.fix
