"""Time per step of DPO: megaswift's engine on one process beside TRL's DPOTrainer.

    python scripts/bench_dpo.py                       # about 20 M parameters, float32, CPU
    python scripts/bench_dpo.py --memory              # peak memory, one process a contender
    python scripts/bench_dpo.py --unpacked            # padded rows on our side too: what packing is worth

The same weights, reference, pairs and order, one process; each side makes its batches in its own way, none groups them
by length. Lengths of answers are log-normal: the median document is a quarter of `--length` or less. The contenders
take turns, a step each (the first one of a round moves on), and the median counts.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_harness import Benchmark, Turn, by_contender, options  # noqa: E402
from bench_model import LR, load_engine, load_hf, trl_options, vocabulary  # noqa: E402

NAMES = ("megaswift", "trl")
BETA = 0.1
STOP = 1
"""Id of the token that ends an answer."""


class Pair(NamedTuple):
    """Token ids; answers end with STOP."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def steps(args: argparse.Namespace) -> list[list[Pair]]:
    """The pairs of each step, and of one more than are taken, so that no contender ends by itself."""
    draw, most = np.random.default_rng(5), vocabulary(args)

    def ids(count: int) -> list[int]:
        return [int(i) for i in draw.integers(3, most, count)]

    def pair() -> Pair:
        prompt = ids(int(draw.integers(args.length // 32, args.length // 8)))
        longest = args.length - len(prompt) - 1
        lengths = [min(max(2, int(args.length / 10 * math.exp(draw.normal()))), longest) for _ in range(2)]
        return Pair(prompt, *([*ids(n), STOP] for n in lengths))

    return [[pair() for _ in range(args.pairs)] for _ in range(args.warmup + args.steps + 1)]


def lengths_of(args: argparse.Namespace) -> dict[str, float]:
    """What the documents are like: their median and longest, and the real tokens' share of rows padded to a step's
    longest."""
    documents = [
        [len(p.prompt) + len(answer) for p in step for answer in (p.chosen, p.rejected)]
        for step in steps(args)[args.warmup : -1]
    ]
    every = [n for step in documents for n in step]
    padded = sum(max(step) * len(step) for step in documents)
    return {"median": statistics.median(every), "longest": max(every), "fill_of_padded_rows": sum(every) / padded}


def megaswift(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """The engine, batches as the loader makes them, the reference as the trainer asks it."""
    from megaswift.data.batches.collate import Document, PaddingShape
    from megaswift.data.preference.collate import PreferenceCollator, PreferenceUnit
    from megaswift.losses.dpo import DPO
    from megaswift.losses.dpo_loss_types import DpoSettings
    from megaswift.trainers.batch_fields import ReferenceLogprobs

    def document(prompt: list[int], answer: list[int]) -> Document:
        mask = np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8)
        return np.array(prompt + answer, dtype=np.int32), mask, 0

    def work(turn: Turn) -> None:
        engine = load_engine(args, folder, "dpo")
        engine.keep_reference()
        loss, reference = DPO(settings=DpoSettings(beta=BETA)), ReferenceLogprobs()
        packs = not args.unpacked
        collator = PreferenceCollator(2, packs, False, shares_prefixes=packs)
        for step in steps(args):
            turn.pause()
            units = [PreferenceUnit([document(p.prompt, a) for a in (p.chosen, p.rejected)], 0.0) for p in step]
            batches = collator.batches([units], PaddingShape(), False)
            turn.losses.append(engine.train_batch(reference.prepare(engine, batches, True), loss, LR).loss)

    return work


def trl(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """TRL's DPOTrainer, its own loop, loader and metrics; two models, as without adapters it needs."""
    from datasets import Dataset
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class DpoPacer(TrainerCallback):  # type: ignore[misc]
        def __init__(self, turn: Turn) -> None:
            self.turn = turn

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.turn.pause()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.turn.pause()

    class Told(DPOTrainer):  # type: ignore[misc]
        turn: Turn

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            self.turn.losses.append(float(loss.detach()))
            return loss

    def work(turn: Turn) -> None:
        data = steps(args)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        text = lambda ids: "".join(f" <{i}>" for i in ids)  # noqa: E731
        rows = [
            {"prompt": text(p.prompt), "chosen": text(p.chosen), "rejected": text(p.rejected)}
            for step in data
            for p in step
        ]
        with tempfile.TemporaryDirectory() as scratch:
            config = DPOConfig(
                scratch,
                per_device_train_batch_size=args.pairs,
                max_steps=len(data),
                beta=BETA,
                max_length=args.length,
                logging_strategy="no",
                train_sampling_strategy="sequential",
                **trl_options(args),
            )
            trainer = Told(
                load_hf(args, folder),
                load_hf(args, folder),
                config,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                callbacks=[DpoPacer(turn)],
            )
            trainer.turn = turn
            trainer.train()

    return work


def compared(args: argparse.Namespace, turns: Mapping[str, Turn], times: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, best steps, losses and what the documents were; megaswift's time as a multiple of TRL's."""
    median = by_contender(times, statistics.median)
    found = {
        "median_s": median,
        "best_s": by_contender(times, min),
        "lengths": lengths_of(args),
        "losses": {name: turn.losses for name, turn in turns.items()},
    }
    if len(turns) == len(NAMES):
        sums = by_contender(times, sum)
        found["ratio"] = median["megaswift"] / median["trl"]
        found["ratio_of_sums"] = sums["megaswift"] / sums["trl"]
        found["ratio_by_round"] = statistics.median(t["megaswift"] / t["trl"] for t in times)
    return found


def tell(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The medians and their ratio."""
    lengths = result["lengths"]
    print(
        f"{args.size}, {args.dtype}, {args.pairs} pairs a step, documents of {lengths['median']:.0f} tokens in the "
        f"median and {lengths['longest']} at most, {lengths['fill_of_padded_rows']:.0%} of padded rows filled; "
        f"{args.device}, {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}; "
        f"{args.steps} alternating steps"
    )
    for name, seconds in result["median_s"].items():
        print(
            f"  {name:10} {seconds * 1e3:9.1f} ms   (best {result['best_s'][name] * 1e3:.1f} ms)   "
            f"losses {[round(loss, 6) for loss in result['losses'][name][:3]]}"
        )
    if "ratio" in result:
        print(
            f"  megaswift / trl: {result['ratio']:.3f} of the medians, {result['ratio_of_sums']:.3f} of the sums, "
            f"{result['ratio_by_round']:.3f} median of the rounds' ratios"
        )


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = options(__doc__, NAMES, steps=15)
    parser.add_argument("--pairs", type=int, default=4, help="pairs a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest documents")
    parser.add_argument("--unpacked", action="store_true", help="megaswift lays documents in padded rows, too")
    return parser


if __name__ == "__main__":
    Benchmark({"megaswift": megaswift, "trl": trl}, compared, tell).main(command_line())
