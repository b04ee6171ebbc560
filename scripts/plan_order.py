"""Compares the order of forecast times with the order of measured ones, for choices of one process on a CPU.

    python scripts/plan_order.py            # prints every choice, and pairs in the wrong order (exit code 1)
    python scripts/plan_order.py --write    # also into docs/plan.md

Each choice trains the same rows by Megatron-Core's layers in a process of its own, on one thread: micro-batches of
several sizes, kinds of recomputation, rows that are padded or packed. The choices take turns, one step each, so that a
slow minute of the machine meets all of them; of a choice the fastest step counts, in seconds of the processor. The
forecast has this machine's rates of products, attention and memory and its time for a launch, each measured alone. Two
choices count where their measured times differ by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.page_blocks import replaced  # noqa: E402

PAGE = ROOT / "docs/plan.md"

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
ROWS = 16
"""Rows of a step."""
LENGTH = 256
"""Tokens of a row."""
ROUNDS = 3
"""Steps of each choice."""
READY = "ready "
"""Begins the lines of a choice's process."""
APART = 0.1


@dataclass(frozen=True)
class Choice:
    """A way of training a step's rows."""

    rows: int
    """Rows of a micro-batch."""
    recompute: str = ""
    """`full`, a module, or nothing."""
    documents: str = "whole"
    """`whole` rows; or twice as many of half the length, `padded` to whole ones or `packed` in pairs."""

    @property
    def name(self) -> str:
        """The choice in few words."""
        again = f", {self.recompute} again" if self.recompute else ""
        of = {"whole": "", "padded": ", half rows padded", "packed": ", half rows packed"}[self.documents]
        return f"{self.rows} a micro-batch{again}{of}"

    @property
    def passes(self) -> int:
        """Micro-batches of a step."""
        return ROWS * (2 if self.documents == "padded" else 1) // self.rows

    @property
    def options(self) -> dict[str, Any]:
        """Options of the run."""
        if not self.recompute:
            return {}
        if self.recompute == "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return {"recompute_granularity": "selective", "recompute_modules": (self.recompute,)}


CHOICES = (
    *(Choice(rows) for rows in (1, 2, 4, 16)),
    *(Choice(4, again) for again in ("core_attn", "mlp", "full")),
    *(Choice(rows, "full") for rows in (1, 16)),
    *(Choice(4, documents=documents) for documents in ("padded", "packed")),
    *(Choice(4, "full", documents) for documents in ("padded", "packed")),
    *(Choice(1, documents=documents) for documents in ("padded", "packed")),
)


def microbatches(choice: Choice) -> list[Any]:
    """The micro-batches of a step."""
    from megaswift.losses.contract import Batch

    tokens = torch.randint(3, SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    found = []
    for part in range(choice.passes):
        if choice.documents == "padded":
            halves = tokens.reshape(2 * ROWS, LENGTH // 2)[part * choice.rows : (part + 1) * choice.rows]
            ids = torch.cat([halves, torch.zeros_like(halves)], dim=1)
            lengths = [LENGTH // 2] * choice.rows
        else:
            ids = tokens[part * choice.rows : (part + 1) * choice.rows]
            lengths = [LENGTH] * choice.rows
        valid = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
        weights = valid.float()
        weights[torch.arange(choice.rows), torch.tensor(lengths) - 1] = 0
        positions = torch.arange(LENGTH).repeat(choice.rows, 1)
        starts = None
        if choice.documents == "packed":
            half = LENGTH // 2
            weights[:, half - 1] = 0
            positions = torch.arange(half).repeat(choice.rows, 2)
            ids, valid, weights, positions = (t.reshape(1, -1) for t in (ids, valid, weights, positions))
            starts = torch.arange(0, choice.rows * LENGTH + 1, half, dtype=torch.int32)
        found.append(Batch(ids, ids.roll(-1, 1), weights, positions, valid, starts))
    return found


def configuration(folder: Path, choice: Choice) -> Any:
    """The run of a choice."""
    from megaswift.config import SwiftConfig

    return SwiftConfig(
        task="sft", model=str(folder), torch_dtype="float32", engine="megatron", max_length=LENGTH, **choice.options
    )


def take_turns(folder: Path, choice: Choice) -> None:
    """Take a step for each line of the standard input, and print the seconds of the processor that it took. Prints a
    line once it is ready."""
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.losses.sft import CrossEntropy
    from megaswift.models.family import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import native_engine

    config = json.loads((folder / "config.json").read_text())
    context = ParallelContext(Layout(1), timeout_s=600, seed=1)
    engine = native_engine(configuration(folder, choice), family_of(config).spec(config), context)
    engine.load_hf(folder)
    batches = microbatches(choice)
    engine.train_batch(batches, CrossEntropy(), 1e-4)
    print(READY, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        engine.train_batch(batches, CrossEntropy(), 1e-4)
        print(READY, time.process_time() - began, flush=True)


def measured_seconds(folder: Path) -> list[float]:
    """Return the seconds of the fastest step of each choice."""
    with ExitStack() as running:
        workers = []
        for number in range(len(CHOICES)):
            words = [sys.executable, __file__, "--measure", str(folder), str(number)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            pipe = subprocess.PIPE
            worker = subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, env=environment)
            workers.append(running.enter_context(worker))
            _answer(worker)
        found = []
        for _ in range(ROUNDS):
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("step\n")
                worker.stdin.flush()
                found.append(float(_answer(worker)))
        return [min(found[number :: len(CHOICES)]) for number in range(len(CHOICES))]


def _answer(worker: subprocess.Popen[str]) -> str:
    """Return the text of a worker after READY; libraries print lines of their own."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY)
    raise RuntimeError(f"a choice ended with exit code {worker.wait()}")


def seconds(work: Callable[[], object], times: int = 7) -> float:
    """Median seconds of the processor of a call."""
    work()
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def machine() -> Any:
    """This processor as a planned GPU: its rates alone, so every share is 1."""
    from megaswift.engine.megatron.layers.attention.document import AttentionRule, attend_documents
    from megaswift.parallel.hardware import Gpu, Shares
    from megaswift.planner.machine import Machine

    t = 4 * LENGTH
    h = SIZES["hidden_size"]
    f = SIZES["intermediate_size"]
    left = torch.randn(t, h)
    right = torch.randn(h, 2 * f)
    products = 2 * t * h * 2 * f / seconds(lambda: left @ right)
    heads = SIZES["num_attention_heads"]
    width = SIZES["head_dim"]
    q = torch.randn(4, heads, LENGTH, width)
    rule = AttentionRule(width**-0.5, None, None, None, 0.0)
    from megaswift.engine.megatron.microbatch import RowDocuments

    attention = (
        4 * t * LENGTH / 2 * heads * width / seconds(lambda: attend_documents(q, q, q, RowDocuments(LENGTH), rule))
    )
    large = torch.randn(1 << 22)
    memory = 2 * large.nbytes / seconds(lambda: large * 2.0)
    small = torch.randn(8)
    launch = seconds(lambda: [small * 2.0 for _ in range(1000)]) / 1000
    peak = 2 * max(products, attention)  # a table's figure is bfloat16's, of which float32 has half
    shares = Shares(products * 2 / peak, attention * 2 / peak, 1.0, launch * 1e6)
    gpu = Gpu("cpu", "cpu", peak / 1e12, 1.0, memory_gib=16, hbm_gbs=memory / 1e9, network_gbs=1.0, hbm_share=1.0)
    return Machine(replace(gpu, bf16=shares), 1)


def forecasts(folder: Path, choices: tuple[Choice, ...]) -> list[float]:
    """Seconds by the time model."""
    from megaswift.memory.estimate import TrainedModel
    from megaswift.models.family import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.parallel.pipeline_split import PipelineSplit
    from megaswift.planner.step_time import TimeModel
    from megaswift.run.checks.fit import micro_batch_options
    from megaswift.run.engines import native_kernels

    config = json.loads((folder / "config.json").read_text())
    spec = family_of(config).spec(config)
    here = machine()
    found = []
    for choice in choices:
        cfg = configuration(folder, choice)
        run = TrainedModel.of(cfg.model, cfg.lora, spec, native_kernels(cfg, spec, Layout(1))).on(
            Layout(1), PipelineSplit()
        )
        found.append(TimeModel(here).on(run).step(micro_batch_options(cfg, choice.rows, choice.passes)).total)
    return found


def write_model(folder: Path) -> None:
    """A random model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)


def main() -> int:
    """Measure, and print; return the exit code: 1 where a pair is in the wrong order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/plan.md")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "CHOICE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.measure:
        take_turns(Path(given.measure[0]), CHOICES[int(given.measure[1])])
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        expected = forecasts(folder, CHOICES)
        measured = measured_seconds(folder)
    lines, wrong = report(measured, expected)
    print("\n".join(lines))
    if given.write:
        block = "\n".join(["```text", *lines, "```"])
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "order", block, "plan_order.py"), encoding="utf-8")
    return int(wrong > 0)


def report(measured: list[float], expected: list[float]) -> tuple[list[str], int]:
    """Return the choices in the order of their measured times, and how many pairs are in the wrong order."""
    lines = [f"{'choice':46} {'measured':>9} {'forecast':>9}  ms of the processor"]
    for choice, real, said in sorted(zip(CHOICES, measured, expected, strict=True), key=lambda row: row[1]):
        lines.append(f"{choice.name:46} {real * 1e3:9.0f} {said * 1e3:9.0f}")
    counted = 0
    wrong = []
    for pair in combinations(range(len(CHOICES)), 2):
        fast, slow = sorted(pair, key=lambda i: measured[i])
        if measured[slow] > (1 + APART) * measured[fast]:
            counted += 1
            if expected[slow] <= expected[fast]:
                wrong.append(f"wrong: {CHOICES[fast].name} is faster than {CHOICES[slow].name}")
    right = counted - len(wrong)
    lines += wrong
    lines.append(
        f"{len(CHOICES)} choices, {counted} pairs more than {APART:.0%} apart, {right} in the order of the forecast"
    )
    return lines, len(wrong)


if __name__ == "__main__":
    sys.exit(main())
