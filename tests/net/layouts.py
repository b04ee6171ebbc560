"""Losses, gradient norms and trained weights of short runs in many layouts, as hashes.

A case is a task, a model, a number of ranks and options: a whole command of three steps. `layouts.txt` has its hashes,
and the machine that they belong to: other processors and releases round differently. `python -m tests.net.layouts
--write` rewrites the record; `python -m tests.net.layouts WORD...` prints the hashes of the cases that contain a word.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.net.record import FOLDER, write_record
from tests.parity import models
from tests.parity.pool import close_shared, shared
from tests.te.sources import RELEASES
from tests.trainers.inputs import preference_inputs, write_conversations, write_model, write_preferences

RECORD = "layouts.txt"
MACHINE = "machine"
"""The line of the record that is no case."""
PACKAGES = ("torch", "megatron-core", "transformers", "deepspeed", "peft", "numpy")
"""Whose releases can change bits."""
INSTRUCTIONS = ("amx", "avx", "f16c", "fma")
"""Beginnings of the processor's flags that choose kernels."""
STEPS = 3
USUAL = f"--lr 1e-2 --max_steps {STEPS} --logging_steps 1 --seed 1 --report_to none"
PREFERENCES = "--per_device_train_batch_size 2 --max_length 32"
POLICY = "--max_length 32 --max_completion_length 6 --beta 0.1 --per_device_train_batch_size 4 --global_batch_size 8"
TASKS = {
    "sft": "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 32",
    "dpo": PREFERENCES,
    "grpo": f"{POLICY} --num_generations 4",
    "ppo": POLICY,
}
TE = "--transformer_impl transformer_engine"
"""Option of the cases whose ranks have Transformer Engine's stand-in."""
CASES = (
    "sft qwen3 1",
    "sft qwen3 1 --packing true",
    "sft qwen3 1 --train_type lora",
    "sft qwen3 1 --optimizer muon",
    "sft qwen3 2",
    "sft qwen3 2 --distributed_optimizer false --recompute_granularity full",
    "sft qwen3 2 --torch_dtype bfloat16",
    "sft qwen3 2 --tp 2",
    "sft qwen3 2 --tp 2 --sequence_parallel true --packing true",
    "sft qwen3 2 --pp 2",
    "sft qwen3 2 --pp 2 --vpp 2",
    "sft qwen3 2 --cp 2",
    "sft qwen3 2 --engine ddp",
    "sft qwen3 2 --engine zero2",
    "sft qwen3 2 --engine zero3",
    "sft qwen3 2 --engine fsdp2",
    "sft qwen3 4 --tp 2 --pp 2",
    "sft qwen3 4 --tp 2 --cp 2 --train_type lora",
    "sft moe 2 --ep 2",
    "sft moe 4 --tp 2 --sequence_parallel true --ep 2 --etp 2",
    "sft moe 4 --tp 2 --sequence_parallel true --ep 2 --etp 1 --pp 2",
    "sft deepseek_v3 1",
    "sft deepseek_v3 4 --tp 2 --sequence_parallel true --ep 2 --etp 1",
    f"sft qwen3 2 --tp 2 --sequence_parallel true {TE}",
    f"sft qwen3 2 --cp 2 --packing true {TE}",
    f"sft moe 2 --ep 2 --packing true {TE}",
    "dpo qwen3 1",
    "dpo qwen3 2 --tp 2",
    "dpo qwen3 2 --engine zero3",
    "grpo qwen3 1",
    "grpo qwen3 2 --tp 2",
    "grpo qwen3 2 --engine fsdp2",
    "ppo qwen3 1",
    "ppo qwen3 2",
)
RNG = "rng-"
"""Beginning of a checkpoint's files with generator states, which are left out: the native engine does not seed
Python's generator."""
REWARD = '''def digits(completions, **_):
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
'''


def machine() -> str:
    """Return what the bits of a run depend on besides the code."""
    flags: list[str] = []
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            flags = sorted(flag for flag in value.split() if flag.startswith(INSTRUCTIONS))
            break
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([platform.machine(), *packages, f"kernels {torch.backends.cpu.get_cpu_capability()}", *flags])


class Inputs:
    """Models and data of the cases, made when a case first asks for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def words(self, task: str, model: str) -> list[str]:
        """The command line of a case without its own options."""
        folder = self.folder / f"{task}-{model}"
        if not folder.exists():
            self._write(folder, task, model)
        data = preference_inputs(folder, task, model=False) if task == "dpo" else self._rows(folder)
        words = ["--model", str(folder / "model"), *data, *USUAL.split(), *TASKS[task].split()]
        return [*words, "--reward_funcs", f"{folder / 'rewards.py'}:digits"] if task in ("grpo", "ppo") else words

    def _rows(self, folder: Path) -> list[str]:
        return ["--dataset", str(folder / "rows.jsonl"), "--dataset_cache_dir", str(folder / "cache")]

    def _write(self, folder: Path, task: str, model: str) -> None:
        folder.mkdir()
        write_model(folder / "model", layers=4)
        if task == "dpo":
            write_preferences(folder, 24)
        elif task == "sft":
            write_conversations(folder / "rows.jsonl")
        else:
            prompts = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3)} for i in range(24)]
            text = "".join(json.dumps(row) + "\n" for row in prompts)
            (folder / "rows.jsonl").write_text(text, encoding="utf-8")
            (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
        if model != "qwen3":
            for file in ("config.json", "model.safetensors"):
                (folder / "model" / file).unlink()
            models.build(model, folder / "model")


def run(case: str, inputs: Inputs, out: Path) -> str:
    """Return the hashes of a run that writes to `out`."""
    task, model, ranks, *options = case.split()
    if "--torch_dtype" not in options:
        options += ["--torch_dtype", "float32"]
    words = [*inputs.words(task, model), "--output_dir", str(out), *options]
    pool = shared(RELEASES[0] if TE in case else "")
    pool.logged("tests.trainers.runs:work", (task, words), int(ranks))
    losses = _metric(out, "loss")
    norms = _metric(out, "grad_norm")
    assert all(norms), f"{case} has no gradient to compare"
    return f"loss {_hash(map(_bits, losses))} grad_norm {_hash(map(_bits, norms))} weights {_hash(_weights(out))}"


def _metric(out: Path, name: str) -> list[float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [float(json.loads(line)[name]) for line in lines]
    assert len(values) == STEPS, lines
    return values


def _bits(value: float) -> bytes:
    return struct.pack("d", value)


def _weights(out: Path) -> Iterator[bytes]:
    files = [file for file in sorted(out.rglob("*.safetensors")) if not file.name.startswith(RNG)]
    assert files, f"no weights in {out}"
    for file in files:
        for name, tensor in sorted(load_file(file).items()):
            yield f"{file.parent.relative_to(out)} {name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            yield tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def outcomes(cases: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the hashes of runs, by case. `folder` is empty."""
    inputs = Inputs(folder)
    found = {}
    for number, case in enumerate(cases):
        found[case] = run(case, inputs, folder / f"out-{number}")
        print(case, found[case], sep="\t", flush=True)
    return found


def main() -> int:
    """Rewrite the record, or print hashes of some cases."""
    if not sys.argv[1:]:
        print(__doc__)
        return 2
    write = sys.argv[1:] == ["--write"]
    cases = [case for case in CASES if write or any(word in case for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = outcomes(cases, Path(folder))
        finally:
            close_shared()
    if write:
        write_record(RECORD, found | {MACHINE: machine()})
        print(f"wrote {FOLDER / RECORD}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
