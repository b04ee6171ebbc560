"""Two sets of weights, tensor by tensor, bit by bit.

Owns what counts as equal and the digests. Tensors are read in blocks, one of each side at a time, so that models far
larger than memory can be compared. How the result is shown belongs to `megaswift.commands.verify`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.convert.job import read_tensor_blocks, split_region_into_blocks
from megaswift.bridge.file_tensor import bytes_view
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.plan import INV_FREQ, TIED_HEAD
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import Problem, WeightsError
from megaswift.families import FAMILIES, family_of, read_config_json
from megaswift.folders.checkpoint import find_intact_checkpoint
from megaswift.models.quantization import config_without_quantization

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMBEDDING = "model.embed_tokens.weight"
GOOD = ("equal", "ignored")


@dataclass(frozen=True)
class WeightComparisonSide:
    """One of the two."""

    path: Path
    weights: WeightSource
    model: Path
    """Where config.json and the tokenizer lie."""
    config: Mapping[str, Any] | None
    """Its config.json without quantization; None where the folder has none."""

    @classmethod
    def open(cls, path: Path | str) -> WeightComparisonSide:
        """Open a Hugging Face folder or a checkpoint; only headers are read."""
        folder = Path(path)
        weights = open_weights(folder)
        checkpoint = find_intact_checkpoint(folder)
        model = checkpoint.model if checkpoint is not None else folder
        return cls(
            folder,
            weights,
            model,
            config_without_quantization(read_config_json(model)) if (model / "config.json").exists() else None,
        )


@dataclass(frozen=True)
class TensorVerdict:
    """The verdict on one tensor. `status`: equal, different, shape, dtype, missing (B lacks it), extra (A lacks it),
    ignored."""

    name: str
    status: str
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    different: int | None = None
    """Elements whose bits differ (of unlike dtypes: whose values differ)."""
    max_abs_diff: float | None = None
    """nan where one side alone is not a number."""
    sha256_a: str | None = None
    sha256_b: str | None = None
    why: str = ""

    @property
    def good(self) -> bool:
        """Whether it leaves the two equal."""
        return self.status in GOOD


def check_same_architecture(a: WeightComparisonSide, b: WeightComparisonSide) -> None:
    """Refuse to compare two different kinds of model, before any tensor is read."""
    for key in ("model_type", "architectures"):
        value_a, value_b = ((side.config or {}).get(key) for side in (a, b))
        if value_a and value_b and value_a != value_b:
            raise WeightsError(
                Problem(
                    f"{b.path}, config.json, {key} {value_b!r}",
                    f"is a different architecture from {value_a!r} of {a.path}",
                    "give two copies of the same model",
                )
            )


def model_spec_differences(a: WeightComparisonSide, b: WeightComparisonSide) -> list[tuple[str, Any, Any]] | None:
    """Return (setting, of A, of B) where the two config.json describe different models; None where they cannot be read
    as models."""
    sides = []
    for side in (a, b):
        if side.config is None or str(side.config.get("model_type")) not in FAMILIES:
            return None
        try:
            spec = family_of(side.config).spec(side.config).to_dict()
        except WeightsError:  # a field that the family does not know: the tensors can be compared all the same
            return None
        sides.append(dict(_flat({key: value for key, value in spec.items() if key not in ("hf_config", "dtype")})))
    return [
        (key, sides[0].get(key), sides[1].get(key))
        for key in sorted({*sides[0], *sides[1]})
        if sides[0].get(key) != sides[1].get(key)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def bytes_to_compare(a: WeightComparisonSide, b: WeightComparisonSide) -> int:
    """Return the bytes that `compare_weights` reads of A, and of B alone."""
    names = set(a.weights.names())
    return sum(_nbytes(a, n) for n in names) + sum(_nbytes(b, n) for n in b.weights.names() if n not in names)


def _nbytes(side: WeightComparisonSide, name: str) -> int:
    return int(torch.Size(side.weights.shape(name)).numel()) * side.weights.dtype(name).itemsize


def compare_weights(
    a: WeightComparisonSide,
    b: WeightComparisonSide,
    dtype: torch.dtype | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> Iterator[TensorVerdict]:
    """Yield a verdict on each tensor, those of A first, in its order. `dtype`: both are cast first; `done` is called
    with the bytes read."""
    names_a = a.weights.names()
    names_b = b.weights.names()
    known_a = set(names_a)
    known_b = set(names_b)
    for name in names_a:
        yield _both(a, b, name, dtype, done) if name in known_b else _one(a, name, "missing", dtype, done)
    for name in names_b:
        if name not in known_a:
            yield _one(b, name, "extra", dtype, done)


def _facts(side: WeightComparisonSide, name: str, end: str) -> dict[str, Any]:
    return {
        f"shape_{end}": side.weights.shape(name),
        f"dtype_{end}": str(side.weights.dtype(name)).removeprefix("torch."),
    }


def _one(
    side: WeightComparisonSide, name: str, status: str, dtype: torch.dtype | None, done: Callable[[int], None]
) -> TensorVerdict:
    """A tensor that the other side lacks."""
    digest = hashlib.sha256()
    end = "a" if status == "missing" else "b"
    why = extra_tensor_ignore_reason(side, name)
    for part in read_tensor_blocks(side.weights, name):
        digest.update(bytes_view(_cast(part, dtype)))
    done(_nbytes(side, name))
    facts = {**_facts(side, name, end), f"sha256_{end}": digest.hexdigest()}
    return TensorVerdict(name, "ignored" if why else status, why=why, **facts)


def extra_tensor_ignore_reason(side: WeightComparisonSide, name: str) -> str:
    """Return why a tensor of one side alone carries nothing of its own; the empty string when it does."""
    if INV_FREQ.matches(name):
        return INV_FREQ.why
    weights = side.weights
    if (
        TIED_HEAD.matches(name)
        and (side.config or {}).get("tie_word_embeddings") is True
        and EMBEDDING in weights.names()
    ):
        is_tied_head = (weights.shape(name), weights.dtype(name)) == (
            weights.shape(EMBEDDING),
            weights.dtype(EMBEDDING),
        )
        pairs = (
            zip(read_tensor_blocks(weights, name), read_tensor_blocks(weights, EMBEDDING), strict=True)
            if is_tied_head
            else ()
        )
        return TIED_HEAD.why if is_tied_head and all(_same_bits(x, y) for x, y in pairs) else ""
    return ""


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)) if x.numel() else True


def _both(
    a: WeightComparisonSide, b: WeightComparisonSide, name: str, dtype: torch.dtype | None, done: Callable[[int], None]
) -> TensorVerdict:
    """A tensor of both sides. While the bits are the same, one digest serves both."""
    facts = {**_facts(a, name, "a"), **_facts(b, name, "b")}
    if facts["shape_a"] != facts["shape_b"]:
        row_a = _one(a, name, "missing", dtype, done)
        row_b = _one(b, name, "extra", dtype, lambda _: None)
        return TensorVerdict(name, "shape", sha256_a=row_a.sha256_a, sha256_b=row_b.sha256_b, **facts)
    same_dtype = dtype is not None or facts["dtype_a"] == facts["dtype_b"]
    digests = [hashlib.sha256()]
    different = 0
    worst = 0.0
    width = max(side.weights.dtype(name).itemsize for side in (a, b))
    spans = [(0, n) for n in a.weights.shape(name)]
    for where in split_region_into_blocks(spans, width):
        x, y = (_cast(side.weights.slice(name, where), dtype) for side in (a, b))
        same = same_dtype and x.dtype == y.dtype and _same_bits(x, y)
        if not same and len(digests) == 1:
            digests.append(digests[0].copy())
        for digest, part in zip(digests, (x, y), strict=False):
            digest.update(bytes_view(part))
        if not same:
            count, gap = differing_count_and_max_abs_diff(x, y)
            different = different + count
            worst = math.nan if math.isnan(worst + gap) else max(worst, gap)
        done(x.numel() * a.weights.dtype(name).itemsize)
    status = "different" if different else "equal"
    if not same_dtype:
        status = "dtype"
    return TensorVerdict(
        name,
        status,
        different=different,
        max_abs_diff=worst,
        sha256_a=digests[0].hexdigest(),
        sha256_b=digests[-1].hexdigest(),
        **facts,
    )


def _cast(part: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (part if dtype is None or not part.is_floating_point() else part.to(dtype)).contiguous()


def differing_count_and_max_abs_diff(x: Tensor, y: Tensor) -> tuple[int, float]:
    """Return how many elements differ, and the largest |x - y|; nan where one side alone is not a number."""
    if x.dtype == y.dtype:
        unequal = x.view(BITS[x.element_size()]) != y.view(BITS[y.element_size()])
    else:
        unequal = (x.double() != y.double()) & ~(x.double().isnan() & y.double().isnan())
    p = x[unequal].double()
    q = y[unequal].double()
    gap = torch.where((p == q) | (p.isnan() & q.isnan()), 0.0, (p - q).abs())
    return int(unequal.sum()), float(gap.max()) if gap.numel() else 0.0


def verdict_json_rows(rows: Sequence[TensorVerdict]) -> list[dict[str, Any]]:
    """Return the rows of a report; nan is written as text, because JSON lacks it."""
    records = [asdict(row) for row in rows]
    for row in records:
        worst = row["max_abs_diff"]
        if worst is not None and not math.isfinite(worst):
            row["max_abs_diff"] = str(worst)
    return records
