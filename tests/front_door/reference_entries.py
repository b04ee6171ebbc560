"""Files that the reference documents start with python, torchrun or another launcher, as data: the file, the words
after it, and the task that it must run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LORA = "--model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset some/rows#500"
RUN = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "some/rows"}


@dataclass(frozen=True)
class Entry:
    """A file of this repository and the words after it; CONFIG is `yaml` in a file."""

    typed: str
    task: str
    world: int = 4
    yaml: dict[str, Any] = field(default_factory=lambda: {**RUN})


PAIRS = {
    "model": "Qwen/Qwen3-70B",
    "parallel": {"tp": 4, "pp": 8, "dp": 2, "cp": 1},
    "train_type": "dpo",
    "dataset": "dpo_data.jsonl",
    "gradient_accumulation_steps": 16,
}
ENTRIES = [
    Entry(f"megaswift/cli/sft.py {LORA} --torch_dtype bfloat16 --gradient_accumulation_steps 8", "sft"),
    Entry(f"megaswift/sft.py {LORA}", "sft"),
    Entry(f"megaswift/cli/_megatron/sft.py {LORA} --tensor_parallel_size 4 --pipeline_parallel_size 8", "sft", 32),
    Entry("megaswift/cli/_megatron/rlhf.py --config CONFIG", "rlhf", 64, PAIRS),
    Entry("main.py --mode train --config CONFIG --algorithm sft", "sft"),
    Entry("main.py --config CONFIG", "sft", 2),
    Entry("main.py --local_rank=0 --mode train --config CONFIG --algorithm sft", "sft"),
    Entry("main.py --config CONFIG --mode train --algorithm dpo", "dpo"),
    Entry("scripts/run_distributed.py --nproc_per_node 4 --config CONFIG --algorithm sft", "sft", 0),
    Entry("scripts/run_distributed.py --use_torchrun --nproc_per_node 4 --config CONFIG", "sft"),
    Entry("scripts/run_distributed.py --nproc_per_node 2 --master_port 29501 --config CONFIG", "sft", 0),
    Entry(
        "scripts/run_distributed.py --nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr 127.0.0.1 --master_port "
        "29500 --config CONFIG",
        "sft",
        0,
    ),
]
"""Each in a worker of a launcher with `world` processes; 0: before any launcher."""
