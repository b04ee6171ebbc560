"""Time per step of DPO: megaswift's engine on one process beside TRL's DPOTrainer.

    python scripts/bench_dpo.py                       # about 20 M parameters, float32, CPU
    python scripts/bench_dpo.py --memory              # peak memory, one process a contender
    python scripts/bench_dpo.py --unpacked            # padded rows on our side too: what packing is worth

The same weights, reference, pairs and order, one process; each side makes its batches in its own way, none groups them by length.
Lengths of answers are log-normal: the median document is a quarter of `--length` or less. The contenders take turns, a step each
(the first one of a round moves on), and the median counts; turns, model and tokenizer are those of bench_step.py.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import BETAS, CLIP, DECAY, EPS, LR, SIZES, contest_options, load_hf, make_model  # noqa: E402
from contest import Turn, rounds  # noqa: E402

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
    draw, vocabulary = np.random.default_rng(5), SIZES[args.size][-1]

    def ids(count: int) -> list[int]:
        return [int(i) for i in draw.integers(3, vocabulary, count)]

    def pair() -> Pair:
        prompt = ids(int(draw.integers(args.length // 32, args.length // 8)))
        longest = args.length - len(prompt) - 1
        lengths = [min(max(2, int(args.length / 10 * math.exp(draw.normal()))), longest) for _ in range(2)]
        return Pair(prompt, *([*ids(n), STOP] for n in lengths))

    return [[pair() for _ in range(args.pairs)] for _ in range(args.warmup + args.steps + 1)]


def lengths_of(args: argparse.Namespace) -> dict[str, float]:
    """What the documents are like: their median and longest, and the real tokens' share of rows padded to a step's longest."""
    documents = [[len(p.prompt) + len(answer) for p in step for answer in (p.chosen, p.rejected)] for step in steps(args)[args.warmup:-1]]
    every = [n for step in documents for n in step]
    padded = sum(max(step) * len(step) for step in documents)
    return {"median": statistics.median(every), "longest": max(every), "fill_of_padded_rows": sum(every) / padded}


def megaswift(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """The engine, batches as the loader makes them, the reference as the trainer asks it."""
    from megaswift.config import SwiftConfig
    from megaswift.data.collate import Document, Shape
    from megaswift.data.unit_batches import lay_out
    from megaswift.engine.megatron.context import ParallelContext
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.families import family_of
    from megaswift.losses.dpo import DPO
    from megaswift.losses.dpo_types import Settings
    from megaswift.parallel.layout import Layout
    from megaswift.trainers.reference import Reference, with_field

    def document(prompt: list[int], answer: list[int]) -> Document:
        mask = np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8)
        return np.array(prompt + answer, dtype=np.int32), mask, 0

    def work(turn: Turn) -> None:
        cfg = SwiftConfig(
            task="dpo", model=str(folder), torch_dtype=args.dtype, learning_rate=LR, weight_decay=DECAY, max_grad_norm=CLIP,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, distributed_optimizer=args.device == "cuda")
        hf_config = json.loads((folder / "config.json").read_text())
        engine = MegatronEngine(family_of(hf_config).spec(hf_config), cfg, ParallelContext(Layout(1), timeout_s=600, seed=1))
        engine.load_hf(folder)
        engine.keep_reference()
        loss, reference = DPO(settings=Settings(beta=BETA)), Reference()
        numbers = torch.arange(2 * args.pairs).view(-1, 2)
        for step in steps(args):
            turn.pause()
            documents = [document(p.prompt, answer) for p in step for answer in (p.chosen, p.rejected)]
            batches = with_field(lay_out([documents], not args.unpacked, Shape(), False), "pairs", [numbers])
            turn.losses.append(engine.train_batch(reference.prepare(engine, batches, True), loss, LR).loss)

    return work


def trl(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """TRL's DPOTrainer, its own loop, loader and metrics; two models, as without adapters it needs."""
    from datasets import Dataset
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Pacer(TrainerCallback):  # type: ignore[misc]
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
        rows = [{"prompt": text(p.prompt), "chosen": text(p.chosen), "rejected": text(p.rejected)} for step in data for p in step]
        with tempfile.TemporaryDirectory() as scratch:
            config = DPOConfig(
                scratch, per_device_train_batch_size=args.pairs, gradient_accumulation_steps=1, max_steps=len(data), learning_rate=LR,
                lr_scheduler_type="constant", weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, beta=BETA,
                max_grad_norm=CLIP, max_length=args.length, gradient_checkpointing=False, bf16=args.dtype == "bfloat16", report_to="none",
                save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=args.device == "cpu",
                train_sampling_strategy="sequential", dataloader_pin_memory=False)
            trainer = Told(load_hf(args, folder), load_hf(args, folder), config, train_dataset=Dataset.from_list(rows),
                           processing_class=tokenizer, callbacks=[Pacer(turn)])
            trainer.turn = turn
            trainer.train()

    return work


MAKERS: dict[str, Callable[[argparse.Namespace, Path], Callable[[Turn], None]]] = {"megaswift": megaswift, "trl": trl}


def compete(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs both by turns, a step each a round."""
    turns = {name: Turn(MAKERS[name](args, folder)) for name in args.only}
    times = rounds(turns, args)
    median = {name: statistics.median(t[name] for t in times) for name in turns}
    found = {"median_s": median, "best_s": {name: min(t[name] for t in times) for name in turns}, "lengths": lengths_of(args),
             "losses": {name: turn.losses for name, turn in turns.items()}}
    if len(turns) == len(NAMES):
        found["ratio"] = median["megaswift"] / median["trl"]
        found["ratio_of_sums"] = sum(t["megaswift"] for t in times) / sum(t["trl"] for t in times)
        found["ratio_by_round"] = statistics.median(t["megaswift"] / t["trl"] for t in times)
    return found


def peak_memory(args: argparse.Namespace, folder: Path) -> float:
    """GiB at the peak of the one contender's steps: device memory on a GPU, resident memory on a CPU."""
    (name,) = args.only
    turn = Turn(MAKERS[name](args, folder))
    turn.start()
    for _ in range(args.warmup + args.steps):
        turn.step()
    on_gpu = args.device == "cuda"
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memories(args: argparse.Namespace) -> dict[str, float]:
    """The peak of each contender in a process of its own."""
    found = {}
    same = [f"--{key}={getattr(args, key)}" for key in ("size", "dtype", "device", "pairs", "length", "threads", "steps", "warmup")]
    for name in args.only:
        command = [sys.executable, __file__, "--peak", "--only", name, *same, *(["--unpacked"] if args.unpacked else [])]
        found[name] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_options(__doc__, NAMES, steps=15)
    parser.add_argument("--pairs", type=int, default=4, help="pairs a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest documents")
    parser.add_argument("--unpacked", action="store_true", help="megaswift lays documents in padded rows, too")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Prints the medians and their ratio, or the peaks."""
    args = options().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory:
        return print(json.dumps({"peak_gib": memories(args)}, indent=1))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(args, folder)
        if args.peak:
            return print(peak_memory(args, folder))
        result = compete(args, folder)
    if args.json:
        return print(json.dumps(result, indent=1))
    lengths = result["lengths"]
    print(f"{args.size}, {args.dtype}, {args.pairs} pairs a step, documents of {lengths['median']:.0f} tokens in the median and "
          f"{lengths['longest']} at most, {lengths['fill_of_padded_rows']:.0%} of padded rows filled; {args.device}, "
          f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}; {args.steps} alternating steps")
    for name, seconds in result["median_s"].items():
        print(f"  {name:10} {seconds * 1e3:9.1f} ms   (best {result['best_s'][name] * 1e3:.1f} ms)   "
              f"losses {[round(loss, 6) for loss in result['losses'][name][:3]]}")
    if "ratio" in result:
        print(f"  megaswift / trl: {result['ratio']:.3f} of the medians, {result['ratio_of_sums']:.3f} of the sums, "
              f"{result['ratio_by_round']:.3f} median of the rounds' ratios")


if __name__ == "__main__":
    main()
