"""Quantized Hugging Face folders, dequantized while they are read.

Owns dequantizing FP8 block scales and MXFP4, slice by slice: of a slice, only the stored bytes behind it are read, in
bands of bounded size. Names, shapes and dtypes are those of the unquantized checkpoint, so that plans, engines and
converters never meet a scale. What config.json says about quantized weights belongs to `models.quantization`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megaswift.bridge.file_tensor import empty_releasable_tensor
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.hf.source import HfSource, Slices, Span, WeightSource, slice_bounds_per_dim
from megaswift.bridge.hf.stored_names import canonical_names
from megaswift.errors import Problem, WeightsError
from megaswift.families import read_config_json
from megaswift.models.quantization import FIELD, Fp8Scheme, Scheme, scheme_of, unreadable_quantization_problem

BAND = 1 << 22
"""Values dequantized at a time: 16 MiB in float32."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
GROUP = 32
"""Values that share an MXFP4 exponent."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 (OCP Microscaling Formats 1.0, table 5); the fourth bit is the sign."""
_SIGNED = torch.tensor([*FP4, *(-x for x in FP4)])
PAIRS = torch.stack([_SIGNED[torch.arange(256) & 15], _SIGNED[torch.arange(256) >> 4]], dim=1)
"""[256, 2]: the two values of a byte, the low half first."""
POWERS = torch.tensor([2.0 ** (e - 127) for e in range(256)], dtype=torch.float64).float()
"""[256]: e8m0 exponents as float32 factors. Byte 255 is infinite, as in transformers."""
HALVES = torch.tensor([[2.0 ** ((e - 127) // 2), 2.0 ** ((e - 126) // 2)] for e in range(256)])
"""[256, 2]: the same as two factors, so that 0 x 2^128 stays 0 and 0.5 x 2^128 finite, as by ldexp."""

_SliceReader = Callable[[str, Slices], Tensor]


class QuantizedWeight(Protocol):
    """One weight in its stored form."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The stored tensors, values first."""

    def fill(self, read: _SliceReader, ranges: Sequence[Span], out: Tensor) -> None:
        """Dequantize the part `ranges` into `out`."""


def _bands(start: int, stop: int, width: int) -> Iterator[Span]:
    """Ranges of rows of `width` values, none over BAND values."""
    step = max(1, BAND // max(1, width))
    return ((first, min(first + step, stop)) for first in range(start, stop, step))


@dataclass(frozen=True)
class Fp8Weight:
    """W [..., n, m] in float8, and a scale for each block of it."""

    name: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    scalar: bool
    """One scale a tensor, in whatever shape."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The stored tensors."""
        return (self.name, self.scale)

    def fill(self, read: _SliceReader, ranges: Sequence[Span], out: Tensor) -> None:
        """Compute W = float32(W) x scale of its block, rounded once: what transformers computes."""
        *lead, (top, bottom), (left, right) = ranges
        rows, columns = self.block
        single_scale = read(self.scale, ()).reshape(1, 1) if self.scalar else None
        for index in itertools.product(*(range(a, b) for a, b in lead)):
            first = tuple(slice(i, i + 1) for i in index)
            target = out[tuple(i - a for i, (a, _) in zip(index, lead, strict=True))]
            near = left // columns
            far = -(-right // columns)
            block_of = torch.arange(left, right) // columns - near
            for start, stop in _bands(top, bottom, right - left):
                up = start // rows
                down = -(-stop // rows)
                scale = (
                    single_scale
                    if single_scale is not None
                    else read(self.scale, (*first, slice(up, down), slice(near, far)))
                )
                factors = _factors(scale.reshape(down - up, far - near))[:, block_of]
                values = read(self.name, (*first, slice(start, stop), slice(left, right))).reshape(
                    stop - start, right - left
                )
                for block, factor in enumerate(factors, up):
                    one = slice(max(start, block * rows), min(stop, (block + 1) * rows))
                    part = values[one.start - start : one.stop - start].float().mul_(factor)
                    target[one.start - top : one.stop - top].copy_(part)


def _factors(scale: Tensor) -> Tensor:
    """Scales as float32; a byte is an e8m0 exponent."""
    return POWERS[scale.long()] if scale.dtype == torch.uint8 else scale.float()


@dataclass(frozen=True)
class Mxfp4Weight:
    """W [E, m, n], stored transposed: blocks [E, n, m / 32, 16] and exponents [E, n, m / 32]."""

    blocks: str
    scales: str
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The stored tensors."""
        return (self.blocks, self.scales)

    def fill(self, read: _SliceReader, ranges: Sequence[Span], out: Tensor) -> None:
        """Compute W = value x 2^exponent, exact in bfloat16 but for what overflows."""
        (first, last), (left, right), (top, bottom) = ranges
        near = left // GROUP
        far = -(-right // GROUP)
        trim = slice(left - near * GROUP, right - near * GROUP)
        for expert in range(first, last):
            for start, stop in _bands(top, bottom, (far - near) * GROUP):
                where = (slice(expert, expert + 1), slice(start, stop), slice(near, far))
                pairs = PAIRS.index_select(0, read(self.blocks, where).reshape(-1).int()).reshape(
                    stop - start, far - near, GROUP
                )
                halves = HALVES.index_select(0, read(self.scales, where).reshape(-1).int()).reshape(
                    stop - start, far - near, 2
                )
                values = pairs.mul_(halves[..., :1]).mul_(halves[..., 1:])
                out[expert - first, :, start - top : stop - top].copy_(values.reshape(stop - start, -1)[:, trim].t())


def _wrong(stored: HfSource, name: str, rule: str) -> Problem:
    return Problem(f"{stored.file(name)}, tensor {name}", rule, "download the model again")


def find_fp8_weights(
    stored: HfSource, scheme: Fp8Scheme, problems: list[Problem]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Find every float8 weight with its scale, of the shape that the block size asks for; scales that scale nothing are
    problems."""
    names = set(stored.names())
    for scale in stored.names():
        weight = scale.removesuffix("_scale_inv")
        if weight != scale and weight not in names:
            problems.append(_wrong(stored, scale, f"is a scale, and {weight} is not in any file"))
        elif weight != scale and stored.dtype_name(weight) != "F8_E4M3":
            problems.append(
                _wrong(stored, scale, f"is a scale, and {weight} is {stored.dtype_name(weight)}, not F8_E4M3")
            )
    for name in stored.names():
        if stored.dtype_name(name) != "F8_E4M3":
            continue
        scale = f"{name}_scale_inv"
        shape = stored.shape(name)
        if scale not in names or len(shape) < 2:
            rule = (
                f"is FP8, and its scale {scale} is not in any file"
                if scale not in names
                else "is FP8, but not a matrix"
            )
            problems.append(_wrong(stored, name, rule))
            continue
        rows, columns = scheme.block or (max(1, shape[-2]), max(1, shape[-1]))
        # the last block of a dimension may be partial, as in DeepSeek-V3's 576 rows by 128; transformers 5.23 divides
        # the shapes instead, and so refuses that projection or takes other blocks
        grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
        scale_shape = stored.shape(scale)
        scalar = scheme.block is None and math.prod(scale_shape) == math.prod(shape[:-2]) == 1
        if scale_shape != grid and not scalar:
            blocks = f"{name} {list(shape)} in blocks of [{rows}, {columns}]"
            rule = f"has shape {list(scale_shape)}; {blocks} requires {list(grid)}"
            problems.append(_wrong(stored, scale, rule))
        elif stored.dtype_name(scale) not in SCALE_DTYPES:
            problems.append(
                _wrong(stored, scale, f"has dtype {stored.dtype_name(scale)}; scales are {', '.join(SCALE_DTYPES)}")
            )
        else:
            yield name, Fp8Weight(name, scale, shape, (rows, columns), scalar)


def find_mxfp4_weights(stored: HfSource, problems: list[Problem]) -> Iterator[tuple[str, QuantizedWeight]]:
    """Find every pair of blocks and exponents; one without the other is a problem."""
    names = set(stored.names())
    for scales in stored.names():
        if scales.endswith("_scales") and scales.removesuffix("_scales") + "_blocks" not in names:
            problems.append(
                _wrong(stored, scales, f"has exponents, and {scales.removesuffix('_scales')}_blocks is not in any file")
            )
    for blocks in stored.names():
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        shape = stored.shape(blocks)
        scales = f"{name}_scales"
        if scales not in names or name in names:
            rule = (
                f"is MXFP4, and {scales} is not in any file"
                if scales not in names
                else f"is MXFP4, and {name} is stored too"
            )
            problems.append(_wrong(stored, blocks, rule))
        elif len(shape) != 4 or shape[-1] * 2 != GROUP or stored.dtype_name(blocks) != "U8":
            rule = f"is {stored.dtype_name(blocks)} {list(shape)}; MXFP4 blocks are U8 [experts, rows, groups, 16]"
            problems.append(_wrong(stored, blocks, rule))
        elif stored.shape(scales) != shape[:-1] or stored.dtype_name(scales) != "U8":
            rule = (
                f"is {stored.dtype_name(scales)} {list(stored.shape(scales))}; {blocks} requires U8 {list(shape[:-1])}"
            )
            problems.append(_wrong(stored, scales, rule))
        else:
            yield name, Mxfp4Weight(blocks, scales, (shape[0], shape[2] * GROUP, shape[1]))


class DequantizedSource:
    """Quantized weights under the names, shapes and dtype that they have without quantization.

    `dtype` is the one config.json names for the model, to which transformers dequantizes too.
    """

    def __init__(self, stored: HfSource, scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> None:
        self.stored = stored
        self.directory = stored.directory
        self.target = dtype
        problems: list[Problem] = []
        weights = (
            find_fp8_weights(stored, scheme, problems)
            if isinstance(scheme, Fp8Scheme)
            else find_mxfp4_weights(stored, problems)
        )
        self._packed = dict(weights)
        if problems:
            raise WeightsError(problems)
        claimed = {part for packed in self._packed.values() for part in packed.parts}
        # Scales of the inputs of FP8 weights: nothing quantizes activations here, as in transformers' dequantized
        # model.
        claimed |= {
            name.removesuffix(".weight") + ".activation_scale" for name in self._packed if name.endswith(".weight")
        }
        self._names = [*(name for name in stored.names() if name not in claimed), *self._packed]

    @property
    def bytes_read(self) -> int:
        """Stored bytes that slices have taken."""
        return self.stored.bytes_read

    def names(self) -> list[str]:
        """Return the names of all tensors, quantized ones under their plain names."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._packed[name].shape if name in self._packed else self.stored.shape(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor after it is dequantized, as a file would spell it."""
        return DTYPE_NAMES[self.target] if name in self._packed else self.stored.dtype_name(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor after it is dequantized."""
        return self.target if name in self._packed else self.stored.dtype(name)

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor (its quantized values)."""
        return self.stored.file(self._packed[name].parts[0] if name in self._packed else name)

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Return a part of a tensor, dequantized."""
        packed = self._packed.get(name)
        if packed is None:
            return self.stored.slice(name, where)
        spans = slice_bounds_per_dim(where, packed.shape)
        out = empty_releasable_tensor([stop - start for start, stop in spans], self.target)
        if out.numel():
            packed.fill(self.stored.slice, spans, out)
        return out

    def close(self) -> None:
        """Close the files."""
        self.stored.close()


def open_hf_weights(directory: Path | str) -> WeightSource:
    """Open the weights of a Hugging Face folder, whatever form they are stored in; all readers come through here."""
    folder = Path(directory)
    config = read_config_json(folder) if (folder / "config.json").exists() else {}
    if problem := unreadable_quantization_problem(config):
        raise WeightsError(Problem(f"{folder / 'config.json'}, {FIELD}", *problem))
    scheme = scheme_of(config)
    stored = HfSource(folder)
    stored.rename(canonical_names(stored.names(), config))
    if scheme is None:
        return stored
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return DequantizedSource(
        stored, scheme, getattr(torch, name) if name in ("bfloat16", "float16", "float32") else torch.bfloat16
    )
