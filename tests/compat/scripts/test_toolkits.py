"""Which program a command starts, whose it is, and the task that it trains.

Covers: megaswift/compat/scripts/launcher_words.py.
"""

from __future__ import annotations

import pytest

from megaswift.compat.defaults import (
    LLAMA_FACTORY,
    MEGATRON_LM,
    MEGATRON_SWIFT,
    SWIFT,
    TRANSFORMERS,
    TRL,
)
from megaswift.compat.scripts.toolkits import ForeignCommand, command_of_file, foreign_commands
from megaswift.config.sections import TRAINING
from megaswift.options.sources import source_from_mapping


def only(text: str) -> ForeignCommand:
    (command,) = foreign_commands(text, "run.sh")
    return command


@pytest.mark.parametrize(
    ("text", "toolkit", "task"),
    [
        ("swift sft --lr 1", SWIFT, "sft"),
        ("A=1 nohup swift rlhf --rlhf_type dpo", SWIFT, None),
        ("megatron pt --lr 1", MEGATRON_SWIFT, "pt"),
        ("python -u swift/cli/sft.py --lr 1", SWIFT, "sft"),
        ("torchrun --nproc_per_node 4 swift/cli/_megatron/sft.py --lr 1", MEGATRON_SWIFT, "sft"),
        ("python -m swift.cli._megatron.rlhf --lr 1", MEGATRON_SWIFT, None),
        ("torchrun --nproc_per_node=8 pretrain_gpt.py --lr 1", MEGATRON_LM, "pt"),
        ("srun -N 2 --label python3 my.py --micro-batch-size 1 --train-iters 3", MEGATRON_LM, "pt"),
        ("torchrun pretrain_gpt.py --sft --lr 1", MEGATRON_LM, "sft"),
        ("trl dpo --lr 1", TRL, "dpo"),
        ("trl reward --lr 1", TRL, "rm"),
        ("python trl/scripts/sft.py --lr 1", TRL, "sft"),
        ("python trl/experimental/gkd/gkd.py --lr 1", TRL, "gkd"),
        ("python trl/scripts/distillation.py --lr 1", TRL, "gkd"),
        ("accelerate launch --num_processes 2 examples/scripts/kto.py --lr 1", TRL, "kto"),
        ("accelerate launch -m trl.scripts.grpo --lr 1", TRL, "grpo"),
        ("python examples/scripts/ppo/ppo_tldr.py --lr 1", TRL, "ppo"),
        ("python trl/scripts/nash_md.py --model_name_or_path m", TRL, None),
        ("llamafactory-cli train --stage dpo", LLAMA_FACTORY, None),
        ("torchrun src/train.py --stage sft --model_name_or_path m", LLAMA_FACTORY, None),
        ("deepspeed --num_gpus 2 train.py --model_name_or_path m --deepspeed z.json", TRANSFORMERS, "sft"),
        ("python run_clm.py --num_train_epochs 1", TRANSFORMERS, "pt"),
        ("accelerate launch dpo_mine.py --model_name_or_path m", TRANSFORMERS, "dpo"),
        ("torchrun megaswift/kto.py --lr 1", "megaswift", "kto"),
        ("megaswift orpo --lr 1", "megaswift", "orpo"),
        ("srun --gres gpu:8 --label python trl/scripts/sft.py --lr 1", TRL, "sft"),
        ("conda run -n swift swift pt --lr 1", SWIFT, "pt"),
        ("conda run -n env python trl/scripts/dpo.py --lr 1", TRL, "dpo"),
        ("python -W ignore -X dev trl/scripts/kto.py --lr 1", TRL, "kto"),
    ],
)
def test_programs(text: str, toolkit: str, task: str | None) -> None:
    command = only(text)
    assert (command.toolkit, command.task, command.place) == (toolkit, task, "run.sh:1")


@pytest.mark.parametrize(
    "text",
    [
        "pip install ms-swift",
        "python eval.py --model m",
        "swift --help",
        "accelerate config",
        "python",
        "torchrun",
        "ls",
    ]
    + ["python tools/run_text_generation.py --micro-batch-size 1 --seq-length 3", "python -m pytest", "trl env"],
)
def test_other_programs(text: str) -> None:
    assert not list(foreign_commands(text, "run.sh"))


def test_launchers() -> None:
    command = only(
        "export NNODES=9\nNPROC_PER_NODE=3 torchrun --standalone --nnodes 2 --node-rank=$RANK --rdzv_id x "
        "--nproc-per-node 4 swift/cli/sft.py --lr 1"
    )
    assert {name: word.text for name, word in command.launch.items()} == {
        "nproc_per_node": "4",
        "nnodes": "2",
        "node_rank": "$RANK",
    }
    assert command.launch["node_rank"].unresolved == ("$RANK",) and [w.text for w in command.words] == ["--lr", "1"]
    command = only("accelerate launch --multi_gpu --num_processes 8 --config_file a.yaml train.py --num_train_epochs 1")
    assert {n: w.text for n, w in command.launcher_options.items()} == {
        "multi_gpu": "true",
        "num_processes": "8",
        "config_file": "a.yaml",
    }
    command = only("trl sft --num_processes 4 --learning_rate 1 --accelerate_config=zero3 --lr_x 2")
    assert {n: w.text for n, w in command.launcher_options.items()} == {
        "num_processes": "4",
        "accelerate_config": "zero3",
    }
    assert [w.text for w in command.words] == ["--learning_rate", "1", "--lr_x", "2"]


def test_several_commands_and_conditions() -> None:
    first, second = foreign_commands("swift pt --lr 1\nif [ $x ]; then\n  swift sft --lr 2\nfi\n", "run.sh")
    assert (first.place, first.notes) == ("run.sh:1", ()) and second.place == "run.sh:3"
    assert "a condition, a loop or a function" in second.notes[0]


@pytest.mark.parametrize(
    ("values", "name", "toolkit", "task"),
    [
        ({"stage": "dpo", "model_name_or_path": "m"}, "x.yaml", LLAMA_FACTORY, None),
        ({"model": "m", "rlhf_type": "kto"}, "x.yaml", SWIFT, None),
        ({"model": "m", "micro_batch_size": 1}, "pt.yaml", MEGATRON_SWIFT, "pt"),
        ({"model_name_or_path": "m"}, "my_dpo.yaml", TRL, "dpo"),
        ({"model_name_or_path": "m"}, "x.yaml", TRL, "sft"),
    ],
)
def test_files(values: dict[str, object], name: str, toolkit: str, task: str | None) -> None:
    command = command_of_file(source_from_mapping(values, TRAINING), name)
    assert (command.toolkit, command.task) == (toolkit, task)
