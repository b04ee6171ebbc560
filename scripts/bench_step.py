"""Time per optimizer step: megaswift's engine on one process, a plain PyTorch loop over the Hugging Face model, and
TRL's SFTTrainer.

    python scripts/bench_step.py                      # about 20 M parameters, float32, CPU
    python scripts/bench_step.py --size 1b --dtype bfloat16          # on a GPU
    python scripts/bench_step.py --memory             # peak memory, one process a contender
    python scripts/bench_step.py --model_type qwen3_5_text           # gated delta nets

The same weights, the same batches, one process: the contenders take turns, a step each (the first one of a round moves
on), and the median counts. Each runs in its own thread, TRL in its own train loop, which waits for its turn in the
trainer's callbacks. In bfloat16 the engine keeps float32 main weights; the two others run float32 weights under
autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_harness import Benchmark, Turn, by_contender, options  # noqa: E402
from bench_model import BETAS, CLIP, DECAY, EPS, LR, load_engine, load_hf, trl_options, vocabulary  # noqa: E402

from megaswift.losses.contract import Batch  # noqa: E402
from megaswift.losses.sft import CrossEntropy  # noqa: E402

NAMES = ("megaswift", "plain", "trl")


def batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids [rows, length], one tensor a step."""
    generator = torch.Generator().manual_seed(3)
    shape = (args.rows, args.length)
    return [torch.randint(3, vocabulary(args), shape, generator=generator) for _ in range(args.warmup + args.steps + 1)]


def megaswift(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """The engine on one process."""

    def work(turn: Turn) -> None:
        engine = load_engine(args, folder, "sft")
        for ids in batches(args):
            turn.pause()
            weights = torch.ones(ids.shape)
            weights[:, -1] = 0
            positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
            batch = Batch(ids, ids.roll(-1, 1), weights, positions, torch.ones(ids.shape, dtype=torch.bool))
            turn.losses.append(engine.train_batch([batch], CrossEntropy(), LR).loss)

    return work


def plain(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """What one writes by hand: forward, cross-entropy, backward, clip, AdamW."""

    def work(turn: Turn) -> None:
        model = load_hf(args, folder)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True if args.fused_adam else None
        )
        half = torch.autocast(args.device, torch.bfloat16) if args.dtype == "bfloat16" else contextlib.nullcontext()
        for cpu_ids in batches(args):
            turn.pause()
            ids = cpu_ids.to(args.device)
            with half:
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            turn.losses.append(loss.item())

    return work


def trl(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """TRL's SFTTrainer, its own loop; the time includes its data loader and what it logs by itself."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class StepPacer(TrainerCallback):  # type: ignore[misc]
        def __init__(self, turn: Turn) -> None:
            self.turn = turn

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.turn.losses:
                self.turn.pause()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.turn.losses.append(float("nan"))
            self.turn.pause()

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: dict[str, float] | None = None, **__: Any
        ) -> None:
            if logs and "loss" in logs:
                self.turn.losses[-1] = logs["loss"]

    def work(turn: Turn) -> None:
        data = batches(args)
        rows = [{"input_ids": row, "labels": row} for ids in data for row in ids.tolist()]
        with tempfile.TemporaryDirectory() as scratch:
            config = SFTConfig(
                scratch,
                per_device_train_batch_size=args.rows,
                max_steps=len(data),
                max_length=args.length,
                packing=False,
                logging_strategy="steps",
                logging_steps=10**6,
                logging_first_step=True,
                train_sampling_strategy="sequential",
                **trl_options(args),
            )
            trainer = SFTTrainer(
                load_hf(args, folder),
                config,
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(folder),
                callbacks=[StepPacer(turn)],
            )
            trainer.train()

    return work


def compared(args: argparse.Namespace, turns: Mapping[str, Turn], times: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, best steps, first losses; megaswift's time as a multiple of each other's."""
    median = by_contender(times, statistics.median)
    others = [name for name in turns if name != "megaswift"] if "megaswift" in turns else []
    return {
        "median_s": median,
        "best_s": by_contender(times, min),
        "first_losses": {name: turn.losses[:2] for name, turn in turns.items()},
        "ratio": {other: median["megaswift"] / median[other] for other in others},
        "ratio_by_round": {other: statistics.median(t["megaswift"] / t[other] for t in times) for other in others},
    }


def tell(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The medians and their ratios."""
    print(
        f"{args.size}, {args.dtype}, {args.rows} x {args.length} tokens a step, {args.device}, "
        f"{torch.get_num_threads()} threads, {platform.processor() or platform.machine()}, torch {torch.__version__}; "
        f"median of {args.steps} alternating steps"
    )
    for name, seconds in result["median_s"].items():
        print(
            f"  {name:10} {seconds * 1e3:9.1f} ms   (best {result['best_s'][name] * 1e3:.1f} ms)   losses "
            f"{result['first_losses'][name]}"
        )
    for other, ratio in result["ratio"].items():
        print(
            f"  megaswift / {other:6} {ratio:.3f} of the medians, {result['ratio_by_round'][other]:.3f} median of "
            f"the rounds' ratios"
        )


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = options(__doc__, NAMES, steps=9)
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--fused_adam", action="store_true", help="the plain loop takes AdamW(fused=True)")
    return parser


if __name__ == "__main__":
    Benchmark({"megaswift": megaswift, "plain": plain, "trl": trl}, compared, tell).main(command_line())
