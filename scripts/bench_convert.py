"""Speed of the converters against a plain copy of the same files on the same disk, in one run, with the growth over
sizes.

    python scripts/bench_convert.py --sizes 1 4 16 --folder /some/disk

For each size (GB of bfloat16 weights, random bytes): `cp -r --reflink=never` and sync, HF -> checkpoint, the copy
again, checkpoint -> HF. All read from the page cache if the machine's memory holds the files, as the copy does; each is
on disk when its time ends. Where memory does not hold twice the files, what is left of them in the cache depends on
what ran before: `--cold` reads all from the disk. Imports and the making of the files are not counted. Peak memory is
that of the converting process, which each conversion has to itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LAYER = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
ROW = "{:>8} {:<18} {:>9} {:>9} {:>9} {:>12}"


def write_model(folder: Path, gigabytes: float) -> int:
    """A Qwen3 folder of about this size; its bytes."""
    import torch

    from megaswift.bridge.hf.writer import HfWriter
    from megaswift.bridge.plan import WeightPlan
    from megaswift.families import family_of

    layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 32768 * 4096) / (2 * 193e6)))
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        **LAYER,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    family = family_of(config)
    metas = WeightPlan(family, family.spec(config)).hf_tensors(torch.bfloat16)
    noise = torch.randint(-(2**15), 2**15, (32768 * 4096 + 4096,), dtype=torch.int16).view(torch.bfloat16)
    with HfWriter(folder, metas) as writer:
        for i, (name, meta) in enumerate(metas.items()):
            writer.add(name, noise[i : i + torch.Size(meta.shape).numel()].view(meta.shape))
        writer.close(config=config)
    return writer.total_bytes


def copy(source: Path, target: Path) -> None:
    """The yardstick."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    os.sync()


def forget(folder: Path) -> None:
    """Puts the files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[Path, Path], object], source: Path, target: Path) -> float:
    """Seconds."""
    os.sync()
    began = time.perf_counter()
    work(source, target)
    return time.perf_counter() - began


def converting(way: str, source: Path, target: Path, out: str) -> None:
    """One conversion in a process of its own: seconds and peak bytes into `out`."""
    from megaswift.bridge.convert.to_hf import megatron_to_hf
    from megaswift.bridge.convert.to_megatron import hf_to_megatron

    seconds = timed(hf_to_megatron if way == "hf-to-megatron" else megatron_to_hf, source, target)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    Path(out).write_text(json.dumps([seconds, peak]), encoding="utf-8")


def convert(way: str, source: Path, target: Path) -> tuple[float, int]:
    """(seconds, peak bytes)."""
    with tempfile.NamedTemporaryFile() as out:
        process = multiprocessing.get_context("spawn").Process(target=converting, args=(way, source, target, out.name))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{way} failed")
        seconds, peak = json.loads(Path(out.name).read_text(encoding="utf-8"))
    return seconds, peak


def bench(gigabytes: float, folder: Path, cold: bool) -> None:
    """Prints the rows of one size."""
    hf, megatron, back, other = (folder / name for name in ("hf", "megatron", "back", "copy"))
    size = write_model(hf, gigabytes)
    for way, source, target in (("hf-to-megatron", hf, megatron), ("megatron-to-hf", megatron, back)):
        if cold:
            forget(source)
        plain = timed(copy, source, other)
        shutil.rmtree(other)
        if cold:
            forget(source)
        seconds, peak = convert(way, source, target)
        print(ROW.format(f"{size / 1e9:.2f}", "cp + sync", f"{plain:.1f}", f"{size / plain / 1e9:.2f}", "", ""))
        share = f"{plain / seconds:.0%}"
        memory = f"{peak / 2**20:.0f} MiB"
        print(ROW.format("", way, f"{seconds:.1f}", f"{size / seconds / 1e9:.2f}", share, memory), flush=True)
    same = (
        all((back / path.name).read_bytes() == path.read_bytes() for path in hf.glob("*.safetensors"))
        if size < 2e9
        else True
    )
    assert same, "the round trip changed a byte"
    for path in (hf, megatron, back):
        shutil.rmtree(path)


def main() -> None:
    """The table, and how time grows with size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4], metavar="GB")
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: a temporary folder)"
    )
    parser.add_argument("--cold", action="store_true", help="read the source from the disk, not from the page cache")
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        need = 3.2e9 * max(given.sizes)
        free = shutil.disk_usage(scratch).free
        if need > free:
            raise SystemExit(
                f"{max(given.sizes)} GB need {need / 1e9:.0f} GB of disk, and {free / 1e9:.0f} GB are free"
            )
        print(ROW.format("GB", "", "seconds", "GB/s", "of copy", "peak memory"))
        for size in sorted(given.sizes):
            bench(size, Path(scratch), given.cold)


if __name__ == "__main__":
    main()
