"""`megaswift doctor --smoke`: two steps of a tiny model on the devices that are here, in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.diagnosis.finding import Finding

STEPS = 2
LENGTH = 32
LIMIT_S = 300.0
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
OF_LAUNCHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK", "NPROC_PER_NODE"}
OF_LAUNCHERS |= {"MASTER_ADDR", "MASTER_PORT"}


def smoke_finding(processes: int, environ: Mapping[str, str], limit_s: float = LIMIT_S) -> Finding:
    """Trains with `processes` data-parallel ranks."""
    what = f"{STEPS} steps on {processes} process{'es' if processes > 1 else ''}"
    with tempfile.TemporaryDirectory(prefix="megaswift-doctor-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "megaswift", "pt", *run_options(write_inputs(folder), processes)]
        start = time.monotonic()
        code, error = run(words, folder, environ, limit_s)
        seconds = time.monotonic() - start
        losses = read_losses(folder / "out" / "metrics.jsonl")
    again = "megaswift pt --random_init true on a model of your own shows the whole output"
    if code is None:
        found = f"{what} did not end within {limit_s:.0f} s"
        return Finding(
            "smoke run", "problem", found, "set NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL and run it again"
        )
    if code:
        return Finding("smoke run", "problem", f"{what}: exit code {code}: {last_words(error)}", again)
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        return Finding("smoke run", "problem", f"{what}: losses {losses}", f"the loss has to be finite; {again}")
    return Finding("smoke run", "ok", f"{what} in {seconds:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}")


def write_inputs(folder: Path) -> Path:
    """A model's configuration, a tokenizer of letters and a text file."""
    letters = [*"abcdefghijklmnopqrstuvwxyz ."]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<e>", "<unk>", *letters])}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL | {"vocab_size": len(vocabulary)}))
    split = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [_special(i, token) for i, token in enumerate(list(vocabulary)[:3])],
        "pre_tokenizer": split,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<e>",
        "unk_token": "<unk>",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    row = json.dumps({"text": "a text of a few words. " * 4})
    (folder / "data.jsonl").write_text(f"{row}\n" * 64)
    return folder


def _special(number: int, token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token} | flags


def run_options(folder: Path, processes: int) -> list[str]:
    """Returns the options of a run on the files of `write_inputs`."""
    options = {
        "model": folder / "model",
        "dataset": folder / "data.jsonl",
        "dataset_cache_dir": folder / "cache",
        "output_dir": folder / "out",
        "random_init": "true",
        "max_length": LENGTH,
        "truncation_strategy": "right",
        "max_steps": STEPS,
        "global_batch_size": 2 * processes,
        "learning_rate": "1e-3",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return words + (["--nproc_per_node", str(processes)] if processes > 1 else [])


def run(words: list[str], folder: Path, environ: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit code and standard error; None where it did not end, all of its processes are killed then."""
    package = str(Path(__file__).resolve().parents[2])
    path = environ.get("PYTHONPATH", "")
    own = {name: value for name, value in environ.items() if name not in OF_LAUNCHERS}
    own["PYTHONPATH"] = f"{package}:{path}" if path else package
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(words, env=own, cwd=folder, stdout=subprocess.DEVNULL, stderr=output)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                kill_with_descendants(process.pid)
                process.wait()
        output.seek(0)
        return code, output.read()


def kill_with_descendants(pid: int) -> None:
    """torchrun starts its workers in sessions of their own, so they are found by their parents."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            words = file.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(words[1])
    chosen = [pid]
    for one in chosen:
        chosen += [child for child, parent in parents.items() if parent == one]
    for one in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def read_losses(path: Path) -> list[float]:
    """Returns the losses of the steps, in order."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [float(row["loss"]) for row in rows if row.get("loss") is not None]


def last_words(error: str) -> str:
    """The line of standard error that names the cause: our own message, else the last error of Python's."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    own = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    named = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and " " not in line.split(":")[0]
    ]
    return (own or named[-1:] or lines[-1:] or ["no message"])[0]
