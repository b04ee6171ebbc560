"""Tokenize, mask and pack conversations: megaswift beside TRL's SFTTrainer.

Both sides get the same file, the same tokenizer (trained on the spot), the same marked chat template, assistant-only
loss, best-fit packing, the same number of processes and empty caches, each in a process tree of its own, one after the
other. Timed for megaswift: everything from the file to packed rows (reading, hashing, tokenizing, writing the store,
packing). Timed for TRL: `SFTTrainer._prepare_dataset` alone; its reading of the file is printed apart and not counted.

    python scripts/bench_data.py                  # 100,000 conversations
    python scripts/bench_data.py --rows 5000      # a quick look
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_data(folder: Path, rows: int) -> None:
    """A file of conversations with log-normal lengths over a Zipf vocabulary, and a tokenizer trained on its
    beginning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    words = [
        "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", weights=range(26, 0, -1), k=rng.randint(1, 10)))
        for _ in range(20_000)
    ]
    weights = [1 / (i + 10) for i in range(len(words))]
    pool = rng.choices(words, weights=weights, k=2_000_000)

    def text(mean: float) -> str:
        length = min(1500, int(rng.lognormvariate(mean, 1.1)) + 1)
        at = rng.randrange(len(pool) - length)
        return " ".join(pool[at : at + length])

    with (folder / "data.jsonl").open("w") as f:
        for _ in range(rows):
            turns = range(rng.choices((1, 2, 3, 5), weights=(6, 2, 1, 1))[0])
            messages = [
                m
                for _ in turns
                for m in ({"role": "user", "content": text(2.8)}, {"role": "assistant", "content": text(4.0)})
            ]
            f.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [" ".join(pool[i : i + 1000]) for i in range(0, 300_000, 1000)],
        trainers.BpeTrainer(
            vocab_size=16_000,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "tokenizer")


def cpu_seconds() -> float:
    """CPU time of this process and of its finished children: steadier than the clock on a machine with other work."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def ours(folder: Path, processes: int, max_length: int) -> dict[str, float]:
    """megaswift's side."""
    sys.path.insert(0, str(ROOT))
    from transformers import AutoTokenizer

    from megaswift.config import SwiftConfig
    from megaswift.data.batches.collate import PaddingShape
    from megaswift.data.batches.loader import make_document_rows
    from megaswift.data.build import load_document_splits

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    cfg = SwiftConfig(
        task="sft",
        model="unused",
        dataset=[str(folder / "data.jsonl")],
        max_length=max_length,
        packing=True,
        truncation_strategy="right",
        dataset_num_proc=processes,
        dataset_cache_dir=str(folder / "cache"),
    )
    began = time.perf_counter()
    cpu_began = cpu_seconds()
    docs, _ = load_document_splits(cfg.data, cfg.train, tokenizer)
    rows = make_document_rows(docs, True, max_length, PaddingShape())
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() - cpu_began
    tokens = int(docs.length.sum())
    return {
        "seconds": seconds,
        "cpu": cpu,
        "rows": len(docs),
        "packed": len(rows),
        "tokens": tokens,
        "labels": int(docs.labels.sum()),
        "fill": tokens / (len(rows) * max_length),
    }


def trl(folder: Path, processes: int, max_length: int) -> dict[str, float]:
    """TRL's side."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "hf")
    from datasets import load_dataset
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    began = time.perf_counter()
    data = load_dataset("json", data_files=str(folder / "data.jsonl"), split="train")
    reading = time.perf_counter() - began
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    args = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        packing=True,
        packing_strategy="bfd",
        report_to=[],
        max_length=max_length,
        dataset_num_proc=processes,
        use_cpu=True,
        bf16=False,
    )
    spent: list[float] = []
    cpus: list[float] = []

    class Timed(SFTTrainer):
        """Times the preparation alone."""

        def _prepare_dataset(self, *args: object, **kwargs: object) -> object:
            start, cpu = time.perf_counter(), cpu_seconds()
            out = super()._prepare_dataset(*args, **kwargs)
            spent.append(time.perf_counter() - start)
            cpus.append(cpu_seconds() - cpu)
            return out

    packed = Timed(model, args, train_dataset=data, processing_class=tokenizer).train_dataset
    lengths = sum(sum(r) for r in packed["seq_lengths"])
    labels = sum(int((row != -100).sum()) for row in packed.with_format("numpy")["labels"])
    return {
        "seconds": sum(spent),
        "cpu": sum(cpus),
        "reading": reading,
        "rows": len(data),
        "packed": len(packed),
        "tokens": lengths,
        "labels": labels,
        "fill": lengths / (len(packed) * max_length),
    }


def tree_memory(pid: int) -> int:
    """Proportional set size of a process and its descendants, in bytes: shared pages are counted once."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) * 1024
        except OSError:  # it ended while we looked
            continue
    return total


def run_side(side: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One side in a process tree of its own, its memory watched."""
    out = folder / f"{side}.json"
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--folder",
        str(folder),
        "--processes",
        str(args.processes),
        "--max_length",
        str(args.max_length),
    ]
    with (folder / f"{side}.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        peak, stop = [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.25):
                peak[0] = max(peak[0], tree_memory(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        stop.set()
        watcher.join()
    if code:
        sys.exit(f"{side} failed:\n" + (folder / f"{side}.log").read_text()[-3000:])
    return json.loads(out.read_text()) | {"peak_gib": peak[0] / 2**30}


def report(results: dict[str, dict[str, float]], processes: int) -> None:
    """The table and the ratios."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, {processes} processes, Python {platform.python_version()}")
    for side, r in results.items():
        extra = f"  (and {r['reading']:.1f} s to read the file)" if "reading" in r else ""
        speed = f"{r['seconds']:8.1f} s {r['rows'] / r['seconds']:8,.0f} rows/s  {r['cpu']:.1f} s of CPU"
        print(
            f"{side:10} {speed}  peak {r['peak_gib']:.2f} GiB  {r['tokens']:,} tokens, {r['labels']:,} labels in "
            f"{r['packed']:,} rows, fill {100 * r['fill']:.2f}%{extra}"
        )
    a, b = results["megaswift"], results["trl"]
    print(
        f"{b['seconds'] / a['seconds']:.2f} x the speed of TRL ({b['cpu'] / a['cpu']:.2f} x by CPU time), "
        f"{a['peak_gib'] / b['peak_gib']:.2f} x its memory; same tokens: {a['tokens'] == b['tokens']}, "
        f"same labels: {a['labels'] == b['labels']}"
    )


def main() -> None:
    """Parse, generate, run both sides, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=4096)
    parser.add_argument("--side", choices=("megaswift", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        result = (ours if args.side == "megaswift" else trl)(args.folder, args.processes, args.max_length)
        (args.folder / f"{args.side}.json").write_text(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as name:
        make_data(Path(name), args.rows)
        report({side: run_side(side, Path(name), args) for side in ("megaswift", "trl")}, args.processes)


if __name__ == "__main__":
    main()
