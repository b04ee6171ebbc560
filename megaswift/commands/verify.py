"""`megaswift convert verify A B`: compares two sets of weights; prints a table, writes a JSON report, returns an exit
code.

Owns what is printed and written; options are read by `megaswift.commands.convert`. Comparing belongs to
`convert.weight_comparison` and `convert.logit_comparison`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megaswift.bridge.convert import logit_comparison as scores
from megaswift.bridge.convert import weight_comparison as tensors
from megaswift.bridge.convert.job import ProgressMeter
from megaswift.bridge.convert.weight_comparison import TensorVerdict, WeightComparisonSide
from megaswift.errors import ConfigError, Problem
from megaswift.version import __version__

DIFFERENT = 1
"""Exit code; 0: equal, 2: a mistake in the command or files that cannot be read."""
TOLD = {
    "missing": "missing in B",
    "extra": "extra: not in A",
    "shape": "different shape",
    "dtype": "different dtype",
    "different": "different",
    "equal": "equal",
    "ignored": "ignored",
}


def verify_weights(options: argparse.Namespace) -> int:
    """Compare, print, report; `options` as `megaswift convert verify` reads them, the dtype by torch's name."""
    _check(options)
    a = WeightComparisonSide.open(options.a)
    b = WeightComparisonSide.open(options.b)
    tensors.check_same_architecture(a, b)
    facts: dict[str, Any] = {
        "megaswift": __version__,
        "a": str(options.a),
        "b": str(options.b),
        "compared": "logits" if options.logits else "tensors",
    }
    same = _logits(a, b, options, facts) if options.logits else _tensors(a, b, options, facts)
    if options.report is not None:
        _write(options.report, {**facts, "equal": same})
        print(f"report: {options.report}")
    return 0 if same else DIFFERENT


def _check(options: argparse.Namespace) -> None:
    """Options that would do nothing, and a report that could not be written, before hours of reading."""
    problems = []
    for name in () if options.logits else ("prompts", "trust_remote_code"):
        if getattr(options, name):
            problems.append(Problem(f"--{name}", "applies only with --logits", "add --logits, or leave it out"))
    for name in ("dtype", "all") if options.logits else ():
        if getattr(options, name):
            problems.append(Problem(f"--{name}", "applies only to tensors, not with --logits", "leave it out"))
    if options.report is not None and (options.report.is_dir() or not options.report.absolute().parent.is_dir()):
        problems.append(
            Problem(f"--report {options.report}", "cannot be written there", "give a file in a folder that exists")
        )
    if problems:
        raise ConfigError(problems)


def _tensors(
    a: WeightComparisonSide, b: WeightComparisonSide, options: argparse.Namespace, facts: dict[str, Any]
) -> bool:
    dtype = getattr(torch, options.dtype) if options.dtype else None
    settings = tensors.model_spec_differences(a, b)
    meter = ProgressMeter(tensors.bytes_to_compare(a, b), 0)
    try:
        rows = list(tensors.compare_weights(a, b, dtype, meter.add))
    finally:
        meter.close()
    counts = Counter(row.status for row in rows)
    visible = [row for row in rows if options.all or row.status != "equal"]
    if visible:
        print(
            text_table(
                [("tensor", "shape", "dtype A", "dtype B", "result"), *(verdict_table_cells(row) for row in visible)]
            )
        )
    for key, value_a, value_b in settings or ():
        print(f"config.json: {key} is {value_a!r} in A and {value_b!r} in B")
    if settings is None:
        print("config.json: not compared, because A and B do not both have one of a supported model family")
    print(f"{len(rows)} tensors: " + ", ".join(f"{counts[status]} {status}" for status in TOLD if counts[status]))
    facts |= {
        "dtype": str(dtype).removeprefix("torch.") if dtype else None,
        "counts": dict(counts),
        "config": None if settings is None else [{"setting": k, "a": x, "b": y} for k, x, y in settings],
        "tensors": tensors.verdict_json_rows(rows),
    }
    return bool(rows) and all(row.good for row in rows) and not settings


def verdict_table_cells(row: TensorVerdict) -> tuple[str, ...]:
    """A line of the table."""
    shape = " / ".join(str(list(s)) for s in dict.fromkeys((row.shape_a, row.shape_b)) if s is not None)
    result = TOLD[row.status]
    if row.status in ("different", "dtype"):
        result += f": {row.different} elements, max abs diff {row.max_abs_diff:.3g}"
    return row.name, shape, row.dtype_a or "-", row.dtype_b or "-", f"{result} ({row.why})" if row.why else result


def text_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, the last one free."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _logits(
    a: WeightComparisonSide, b: WeightComparisonSide, options: argparse.Namespace, facts: dict[str, Any]
) -> bool:
    prompts = (
        scores.read_probe_prompts(options.prompts, a.model, options.trust_remote_code)
        if options.prompts is not None
        else None
    )
    rows, tolerance, between = scores.compare_logits(a, b, prompts, options.trust_remote_code)
    good = [row.max_abs_diff <= tolerance for row in rows]
    lines = [
        (
            r.prompt,
            str(r.tokens),
            f"{r.largest:.4g}",
            f"{r.spread:.3g}",
            f"{r.max_abs_diff:.3g}",
            "ok" if ok else "DIFFERENT",
        )
        for r, ok in zip(rows, good, strict=True)
    ]
    print(text_table([("prompt", "tokens", "largest logit", "HF's spread", "max |A - B|", "result"), *lines]))
    print(f"tolerance {tolerance:.3g}: {scores.TIMES:g} x the largest difference of A's own logits between {between}")
    facts |= {
        "tolerance": tolerance,
        "spread_between": between,
        "prompts": [
            {**asdict(row), "max_abs_diff": row.max_abs_diff if row.max_abs_diff < float("inf") else "inf", "ok": ok}
            for row, ok in zip(rows, good, strict=True)
        ],
    }
    return all(good)


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(Problem(f"--report {path}", f"cannot be written: {error}")) from None
