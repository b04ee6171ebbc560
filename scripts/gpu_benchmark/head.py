"""Times the Triton kernels of the vocabulary head and its product into main gradients, and what memory and matrix
units allow: one line of JSON for each.

    python scripts/gpu_benchmark/head.py [--small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from gpu_benchmark.case_process import seconds_of  # noqa: E402
from megaswift.engine import logit_fields as head  # noqa: E402

ROWS, WIDTH, HIDDEN = 4096, 151_936, 4096
SMALL = 8, 512, 32
BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 770e12
"""Measured on an H200: a copy on the device, and a large bf16 product."""


def milliseconds(work: Callable[[], object]) -> float:
    """The median of ten after three to warm up."""
    return 1e3 * statistics.median([seconds_of(work) for _ in range(13)][3:])


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small shape; always so without a GPU")
    cuda = torch.cuda.is_available()
    rows, width, hidden = SMALL if parser.parse_args().small or not cuda else (ROWS, WIDTH, HIDDEN)
    device = "cuda" if cuda else "cpu"
    products = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    labels = torch.randint(0, width, (rows,), device=device)
    shard = head.VocabularyHeadShardSpec(0, width, None, 1.0, ("logprobs",), ("logprobs",))
    found = head.join_shards(head.row_statistics(products, labels, shard), labels, width, shard)
    coefficients = head.gradient_coefficients(torch.ones(1, rows, device=device), found, width, shard)
    out = torch.empty_like(products)
    states = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
    total = torch.zeros(width, hidden, device=device)

    def into_main_gradients() -> None:
        if cuda:
            torch.addmm(total, products.t(), states, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(products.float().t(), states.float())

    size = products.numel() * products.element_size()
    timed = {
        "statistics": (lambda: head.row_statistics(products, labels, shard), size / BYTES_A_SECOND),
        "gradient": (
            lambda: head.write_gradient(products, labels, coefficients, shard, out),
            2 * size / BYTES_A_SECOND,
        ),
        "addmm": (into_main_gradients, 2.0 * rows * width * hidden / FLOPS_A_SECOND),
    }
    for name, (work, ideal) in timed.items():
        line = {"head": name, "shape": [rows, width, hidden], "ms": milliseconds(work)}
        print(json.dumps(line | {"ideal_ms": 1e3 * ideal if rows == ROWS else None}), flush=True)


if __name__ == "__main__":
    main()
