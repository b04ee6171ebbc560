"""Time per optimizer step: megaswift's engine on one process, a plain PyTorch loop over the Hugging Face model, and TRL's SFTTrainer.

    python scripts/bench_step.py                      # about 20 M parameters, float32, CPU
    python scripts/bench_step.py --size 1b --dtype bfloat16          # on a GPU
    python scripts/bench_step.py --memory             # peak memory, one process a contender

The same weights, the same batches, one process: the contenders take turns, a step each (the first one of a round moves on), and
the median counts. Each runs in its own thread, TRL in its own train loop, which waits for its turn in the trainer's
callbacks. In bfloat16 the engine keeps float32 main weights; the two others run float32 weights under autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contest import Turn, rounds  # noqa: E402

from megaswift.losses.contract import Batch  # noqa: E402
from megaswift.losses.sft import CrossEntropy  # noqa: E402

FIELDS = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SIZES = {
    "tiny": (64, 2, 128, 4, 2, 16, 512), "20m": (384, 8, 1024, 6, 3, 64, 8192), "1b": (2048, 16, 6144, 16, 8, 128, 65536),
    "4b": (2560, 36, 9728, 32, 8, 128, 151936),
}
NAMES = ("megaswift", "plain", "trl")
LR, CLIP, DECAY, BETAS, EPS = 1e-4, 1.0, 0.1, (0.9, 0.95), 1e-8


def batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids [rows, length], one tensor a step."""
    generator = torch.Generator().manual_seed(3)
    shape = (args.rows, args.length)
    return [torch.randint(3, SIZES[args.size][-1], shape, generator=generator) for _ in range(args.warmup + args.steps + 1)]


def make_model(args: argparse.Namespace, folder: Path) -> None:
    """Writes a random Qwen3 of the asked size, and a tokenizer that TRL accepts, as a Hugging Face folder."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    size = dict(zip(FIELDS, SIZES[args.size], strict=True))
    config = AutoConfig.for_model("qwen3", **size, tie_word_embeddings=False, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(size["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>").save_pretrained(folder)


def load_hf(args: argparse.Namespace, folder: Path) -> Any:
    """The transformers model: float32 weights, SDPA attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(args.device).train()


def megaswift(args: argparse.Namespace, folder: Path) -> Callable[[Turn], None]:
    """The engine on one process."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.megatron.context import ParallelContext
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout

    def work(turn: Turn) -> None:
        cfg = SwiftConfig(
            task="sft", model=str(folder), torch_dtype=args.dtype, learning_rate=LR, weight_decay=DECAY, max_grad_norm=CLIP,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, distributed_optimizer=args.device == "cuda")
        hf_config = json.loads((folder / "config.json").read_text())
        context = ParallelContext(Layout(1), timeout_s=600, seed=1)
        engine = MegatronEngine(family_of(hf_config).spec(hf_config), cfg, context)
        engine.load_hf(folder)
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
            model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True if args.fused_adam else None)
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

    class Pacer(TrainerCallback):  # type: ignore[misc]
        def __init__(self, turn: Turn) -> None:
            self.turn = turn

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.turn.losses:
                self.turn.pause()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.turn.losses.append(float("nan"))
            self.turn.pause()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                self.turn.losses[-1] = logs["loss"]

    def work(turn: Turn) -> None:
        data = batches(args)
        rows = [{"input_ids": row, "labels": row} for ids in data for row in ids.tolist()]
        with tempfile.TemporaryDirectory() as scratch:
            config = SFTConfig(
                scratch, per_device_train_batch_size=args.rows, gradient_accumulation_steps=1, max_steps=len(data), learning_rate=LR,
                lr_scheduler_type="constant", weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
                max_grad_norm=CLIP, max_length=args.length, gradient_checkpointing=False, bf16=args.dtype == "bfloat16", report_to="none",
                save_strategy="no", logging_strategy="steps", logging_steps=10**6, logging_first_step=True, disable_tqdm=True,
                use_cpu=args.device == "cpu",
                train_sampling_strategy="sequential", dataloader_pin_memory=False, packing=False)
            trainer = SFTTrainer(
                load_hf(args, folder), config, train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[Pacer(turn)])
            trainer.train()

    return work


MAKERS: dict[str, Callable[[argparse.Namespace, Path], Callable[[Turn], None]]] = {"megaswift": megaswift, "plain": plain, "trl": trl}


def compete(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs all contenders by turns, a step each a round; who goes first moves on."""
    turns = {name: Turn(MAKERS[name](args, folder)) for name in args.only}
    times = rounds(turns, args)
    median = {name: statistics.median(t[name] for t in times) for name in turns}
    others = [name for name in turns if name != "megaswift"] if "megaswift" in turns else []
    return {
        "median_s": median,
        "best_s": {name: min(t[name] for t in times) for name in turns},
        "first_losses": {name: turn.losses[:2] for name, turn in turns.items()},
        "ratio": {other: median["megaswift"] / median[other] for other in others},
        "ratio_by_round": {other: statistics.median(t["megaswift"] / t[other] for t in times) for other in others},
    }


def peak_memory(args: argparse.Namespace, folder: Path) -> float:
    """GiB at the peak of a few steps of the one contender: device memory on a GPU, resident memory on a CPU."""
    (name,) = args.only
    turn = Turn(MAKERS[name](args, folder))
    turn.start()
    for _ in range(3):
        turn.step()
    on_gpu = args.device == "cuda"
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memories(args: argparse.Namespace) -> dict[str, float]:
    """The peak of each contender in a process of its own."""
    found = {}
    same = [f"--{key}={getattr(args, key)}" for key in ("size", "dtype", "device", "rows", "length", "threads")]
    for name in args.only:
        command = [sys.executable, __file__, "--peak", "--only", name, *same]
        found[name] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
    return found


def contest_options(text: str | None, names: Sequence[str], steps: int) -> argparse.ArgumentParser:
    """The options of every contest of this kind."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20m", help="model size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument("--only", nargs="+", default=list(names), choices=names, help="contenders")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    return parser


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_options(__doc__, NAMES, steps=9)
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--fused_adam", action="store_true", help="the plain loop takes AdamW(fused=True)")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Prints the medians and their ratios, or the peaks."""
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
    print(f"{args.size}, {args.dtype}, {args.rows} x {args.length} tokens a step, {args.device}, {torch.get_num_threads()} threads, "
          f"{platform.processor() or platform.machine()}, torch {torch.__version__}; median of {args.steps} alternating steps")
    for name, seconds in result["median_s"].items():
        print(f"  {name:10} {seconds * 1e3:9.1f} ms   (best {result['best_s'][name] * 1e3:.1f} ms)   losses {result['first_losses'][name]}")
    for other, ratio in result["ratio"].items():
        print(f"  megaswift / {other:6} {ratio:.3f} of the medians, {result['ratio_by_round'][other]:.3f} median of the rounds' ratios")


if __name__ == "__main__":
    main()
