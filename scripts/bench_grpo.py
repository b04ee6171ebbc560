"""Time per GRPO step, on one process: megaswift and TRL's GRPOTrainer, the same model and prompts, as many and as long
completions.

    python scripts/bench_grpo.py                      # about 20 M parameters, float32, CPU

The contenders take turns, a step each (the first one of a round moves on), and the median counts. Both generate with
transformers, train on what they have just sampled, and log; neither writes checkpoints. The tokenizer's end of text is
no token of the model, so every completion has the full length and both do the same work. A step is split into
generation, weight sync, scoring (log-probabilities outside of the training pass), rewards, and the rest, which is
training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_harness import Benchmark, Turn, by_contender, options  # noqa: E402
from bench_model import LR, load_hf, make_model, trl_options, vocabulary  # noqa: E402

NAMES = ("megaswift", "trl")
PARTS = ("generation", "weight sync", "scoring", "rewards", "training")
Work = Callable[["Sampling"], None]


def even(completions: list[str], **columns: object) -> list[float]:
    """The reward: the share of even words."""
    return [
        statistics.fmean(int(word[1:-1]) % 2 == 0 for word in text.split()) if text else 0.0 for text in completions
    ]


@dataclass
class Sampling(Turn):
    """A contender's turn that also knows where its steps' time went, and what it sampled."""

    parts: list[dict[str, float]] = field(default_factory=list)
    """Seconds by part, of each step; training is left out."""
    lengths: list[float] = field(default_factory=list)
    """Mean length of each step's completions."""


def prompts(args: argparse.Namespace) -> list[dict[str, str]]:
    """Rows of random words, all of one length."""
    rng = random.Random(3)
    count = args.prompts * (args.warmup + args.steps + 1)
    words = range(3, vocabulary(args))
    return [{"prompt": " ".join(f"<{n}>" for n in rng.choices(words, k=args.prompt_length))} for _ in range(count)]


def megaswift(args: argparse.Namespace, folder: Path) -> Work:
    """A whole run on one process, without checkpoints."""
    from megaswift.config import SwiftConfig
    from megaswift.run import build
    from megaswift.trainers.hook import Hook, Run, StepRecord
    from megaswift.trainers.loop import train

    class HookPacer(Hook):
        def __init__(self, turn: Sampling) -> None:
            self.turn, self.before = turn, dict[str, float]()

        def on_start(self, run: Run) -> None:
            self.pause(run)

        def on_step(self, run: Run, step: StepRecord) -> None:
            self.turn.lengths.append(step.result.metrics["completions/mean_length"])
            self.turn.parts.append(
                {name: run.seconds[name] - self.before.get(name, 0.0) for name in PARTS if name in run.seconds}
            )
            self.pause(run)

        def pause(self, run: Run) -> None:
            self.before = dict(run.seconds)
            self.turn.pause()

    def work(turn: Sampling) -> None:
        completions = args.prompts * args.generations
        cfg = SwiftConfig(
            task="grpo",
            model=str(folder),
            dataset=[str(folder / "prompts.jsonl")],
            reward_funcs=[f"{__file__}:even"],
            num_generations=args.generations,
            max_completion_length=args.length,
            max_length=args.prompt_length + args.length,
            per_device_train_batch_size=completions,
            global_batch_size=completions,
            rollout_batch_size=completions,
            max_steps=args.warmup + args.steps + 1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            torch_dtype="float32",
            report_to="none",
            log_completions=False,
            output_dir=str(folder / "run"),
        )
        settled = build.settle(cfg, build.join_processes(cfg))
        run = build.build_run(settled.plan, {}, nullcontext).run
        run.hooks = [*run.hooks[:-1], HookPacer(turn)]  # the last one saves checkpoints
        train(run)

    return work


def trl(args: argparse.Namespace, folder: Path) -> Work:
    """TRL's GRPOTrainer, its own loop."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class CallbackPacer(TrainerCallback):  # type: ignore[misc]
        def __init__(self, turn: Sampling) -> None:
            self.turn = turn

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.turn.lengths:
                self.turn.parts.append({})
                self.turn.pause()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.turn.lengths.append(float("nan"))
            self.turn.parts.append({})
            self.turn.pause()

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: dict[str, float] | None = None, **__: Any
        ) -> None:
            if logs and "completions/mean_length" in logs:
                self.turn.lengths[-1] = logs["completions/mean_length"]

    def work(turn: Sampling) -> None:
        completions = args.prompts * args.generations
        rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                scratch,
                num_generations=args.generations,
                max_completion_length=args.length,
                per_device_train_batch_size=completions,
                max_steps=args.warmup + args.steps + 1,
                logging_steps=1,
                **trl_options(args),
            )
            trainer = GRPOTrainer(
                load_hf(args, folder),
                even,
                config,
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(folder),
                callbacks=[CallbackPacer(turn)],
            )
            for name, method in (
                ("generation", "_generate"),
                ("rewards", "_calculate_rewards"),
                ("scoring", "_get_per_token_logps_and_entropies"),
            ):
                setattr(trainer, method, timed(turn, name, getattr(trainer, method)))
            trainer.train()

    return work


def timed(turn: Sampling, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, its time added to a part of the step; log-probabilities with gradients are training, not scoring."""

    def measured(*values: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = method(*values, **named)
        if part != "scoring" or not torch.is_grad_enabled():
            turn.parts[-1][part] = turn.parts[-1].get(part, 0.0) + time.perf_counter() - began
        return found

    return measured


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """The model, a tokenizer of a word a token whose end of text lies beyond the model's vocabulary, so that no
    completion ends early."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(args, folder)
    size = vocabulary(args)
    words = Tokenizer(models.WordLevel({**{f"<{i}>": i for i in range(size)}, "<end>": size}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<end>").save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts(args)))


def compared(args: argparse.Namespace, turns: Mapping[str, Sampling], times: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, parts, lengths of completions; megaswift's time as a multiple of TRL's."""
    split = {
        name: split_of(turn.parts[args.warmup : args.warmup + args.steps], [t[name] for t in times])
        for name, turn in turns.items()
    }
    median = by_contender(times, statistics.median)
    used = {name: turn.processor[args.warmup :] for name, turn in turns.items()}
    result = {
        "median_s": median,
        "processor_s": {name: statistics.median(u) for name, u in used.items()},
        "split_s": split,
    }
    result["mean_lengths"] = {name: turn.lengths[: args.steps] for name, turn in turns.items()}
    if len(turns) > 1:
        result["ratio"] = median["megaswift"] / median["trl"]
        result["ratio_of_processor_time"] = statistics.median(
            a / b for a, b in zip(used["megaswift"], used["trl"], strict=True)
        )
        result["ratio_by_round"] = statistics.median(t["megaswift"] / t["trl"] for t in times)
    return result


def split_of(parts: list[dict[str, float]], seconds: list[float]) -> dict[str, float]:
    """Medians of each part; what no other part took is training."""
    rows = [{name: found.get(name, 0.0) for name in PARTS[:-1]} for found in parts]
    rows = [{**row, "training": whole - sum(row.values())} for row, whole in zip(rows, seconds, strict=True)]
    return {name: statistics.median(row[name] for row in rows) for name in PARTS}


def tell(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Medians, parts and ratios."""
    print(
        f"{args.size}, float32, {args.prompts} x {args.generations} completions of {args.prompt_length} + "
        f"{args.length} tokens a step, {args.device}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}; median of {args.steps} alternating "
        "steps"
    )
    for name, seconds in result["median_s"].items():
        split = ", ".join(f"{part} {value * 1e3:.0f}" for part, value in result["split_s"][name].items() if value)
        print(f"  {name:10} {seconds * 1e3:9.1f} ms: {split}")
    if "ratio" in result:
        print(
            f"  megaswift / trl {result['ratio']:.3f} of the medians, {result['ratio_by_round']:.3f} median of the "
            f"rounds' ratios, {result['ratio_of_processor_time']:.3f} of processor time"
        )


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = options(__doc__, NAMES, steps=9, dtypes=("float32",))
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of each")
    parser.add_argument("--prompt_length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=64, help="tokens per completion")
    return parser


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Benchmark({"megaswift": megaswift, "trl": trl}, compared, tell, prepare, Sampling).main(command_line())
