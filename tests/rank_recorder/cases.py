"""The runs that are recorded: a task, an engine and a layout each, on real input of the smallest kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.parity.pool import shared
from tests.rank_recorder.record import RankRecord
from tests.rank_recorder.run_rank import RecordedRun
from tests.trainers.inputs import preference_inputs, write_conversations, write_inputs, write_model, write_preferences
from tests.trainers.test_padded_experts_run import write_experts

STEPS, LINES, ROWS = 3, 2, 4
"""Steps of a run; lines after the second and third; rows of a replica in a step."""
TRAIN = f"--max_steps {STEPS} --logging_steps 2 --save_steps 3 --dataset_num_proc 1 --report_to none"


def write_sft(folder: Path) -> list[str]:
    """Conversations, 20,000 rows of them."""
    return [word + "#20000" if word.endswith(".jsonl") else word for word in write_inputs(folder)]


def write_moe(folder: Path) -> list[str]:
    """Four experts in each layer, and rows that are all the same, which choose the same experts in every world."""
    words = write_sft(folder)
    write_experts(folder / "model")
    write_conversations(folder / "data.jsonl", rows=1)
    return words


def write_validated(folder: Path) -> list[str]:
    """With a validation set of 40 conversations."""
    return [*write_sft(folder), "--val_dataset", str(write_conversations(folder / "val.jsonl", 40, seed=1))]


def write_pairs(folder: Path) -> list[str]:
    """Chosen and rejected answers."""
    write_preferences(folder, rows=24)
    pairs = preference_inputs(folder, "dpo")
    (folder / "val.jsonl").write_text((folder / "pairs.jsonl").read_text())
    pairs += ["--val_dataset", f"{folder / 'val.jsonl'}"]
    return [word + "#20000" if word.endswith("pairs.jsonl") else word for word in pairs]


def write_prompts(folder: Path) -> list[str]:
    """Prompts and a reward."""
    write_model(folder / "model")
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=", "number": i} for i in range(4096)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    words = (
        f"--model {folder / 'model'} --dataset {folder / 'rows.jsonl'} --reward_funcs {folder / 'rewards.py'}:digits"
    )
    return words.split()


REWARD = '''"""A reward."""


def digits(completions, **_):
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
'''


GRPO = "--num_generations 4 --max_completion_length 1 --max_length 24 --beta 0.1 --torch_dtype float32"
"""Completions of one token each: those of a rank that is not run are as long as this rank's."""


@dataclass(frozen=True)
class Case:
    """A run in a world of any size."""

    options: str
    replica: int = 1
    """Ranks of a data-parallel replica."""
    write: Callable[[Path], list[str]] = write_sft
    task: str = "sft"

    def ranks(self, world: int) -> tuple[int, ...]:
        """Those that are recorded of a large world: the first and the last; of pipelines with experts, the first two,
        which are one expert-parallel group."""
        if "--pp" in self.options:
            return 0, 1, world // 2, world // 2 + 1
        return 0, world - 1

    def record(self, folder: Path, world: int, ranks: Sequence[int], fake: bool = True) -> dict[int, RankRecord]:
        """Rank -> what it did. Inputs and outputs lie in `folder`, which is new; names of folders have equal lengths,
        since paths are sent."""
        folder.mkdir()
        words = [*self.write(folder), *TRAIN.split(), *self.options.split(), "--output_dir", str(folder / "out")]
        words += ["--global_batch_size", str(ROWS * world // self.replica)]
        usual = {"dataset_cache_dir": folder / "cache", "per_device_train_batch_size": ROWS, "export_hf": "false"}
        words += [w for name, value in usual.items() if f"--{name}" not in words for w in (f"--{name}", str(value))]
        job = RecordedRun(self.task, words, world, tuple(ranks), folder, fake)
        found = shared("").run("tests.rank_recorder.run_rank:record_rank", job, len(ranks))
        return dict(zip(ranks, found, strict=True))


CASES = {
    "dp": Case("--engine megatron"),
    "async": Case("--engine megatron --async_save true"),
    "tp cp": Case("--engine megatron --tp 2 --cp 2", 4),
    "pp ep": Case("--engine megatron --pp 2 --ep 2", 2, write_moe),
    "dpo": Case("--engine megatron --eval_steps 2 --export_hf true", 1, write_pairs, "dpo"),
    "grpo": Case("--engine megatron --export_hf true " + GRPO, 1, write_prompts, "grpo"),
    "fsdp2": Case("--engine fsdp2 --eval_steps 2 --export_hf true", 1, write_validated),
    "ddp": Case("--engine ddp --eval_steps 2 --export_hf true", 1, write_validated),
}
"""Between them: each engine, parallelism, kind of task, evaluations, exports."""
