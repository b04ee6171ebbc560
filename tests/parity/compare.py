"""Differences between two sets of numbers, as one readable table, and the limits they must keep (design, section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tests.parity.oracle import Recipe, Reference

LOSS = 1e-6
GRADIENT = 5e-6
WEIGHT = 1e-4
NORM = 1e-5


@dataclass(frozen=True)
class Difference:
    """One number or tensor that was compared: its error in units of its own scale, and the limit."""

    name: str
    error: float
    limit: float
    detail: str = ""

    @property
    def bad(self) -> bool:
        """True when the limit is passed, and for NaN."""
        return not self.error <= self.limit

    def __str__(self) -> str:
        return (
            f"{'FAIL' if self.bad else 'ok  '} {self.error:9.2e} (limit {self.limit:.0e})  {self.name}  {self.detail}"
        )


def number(name: str, got: float | None, want: float, limit: float) -> Difference:
    """Relative difference of two numbers, absolute where the wanted one is 0."""
    if got is None:
        return Difference(name, math.inf, limit, "missing")
    return Difference(name, abs(got - want) / (abs(want) or 1.0), limit, f"{got:.9g} for {want:.9g}")


def tensors(
    kind: str,
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    limit: float,
    noise: Mapping[str, float] | None = None,
) -> list[Difference]:
    """Per tensor the largest difference over the wanted tensor's largest value (absolute where that is all zero).

    `noise`: what Hugging Face's own float32 is off in the same unit; twice as much is allowed where that is more.
    """
    noise = noise or {}
    out = [Difference(f"{kind} {n}", math.inf, limit, "missing") for n in sorted(want.keys() - got.keys())]
    out += [
        Difference(f"{kind} {n}", math.inf, limit, "unknown to Hugging Face") for n in sorted(got.keys() - want.keys())
    ]
    for name in sorted(want.keys() & got.keys()):
        a, b = got[name], want[name]
        if a.shape != b.shape:
            out.append(Difference(f"{kind} {name}", math.inf, limit, f"shape {tuple(a.shape)} for {tuple(b.shape)}"))
            continue
        scale = float(b.abs().max())
        ratio = float(a.double().norm() / b.double().norm()) if scale else math.nan
        allowed = max(limit, 2 * noise.get(name, 0.0))
        error = float((a - b).abs().max()) / (scale or 1.0)
        out.append(Difference(f"{kind} {name}", error, allowed, f"norm ratio {ratio:.6f}"))
    return out


def distances(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, how far each tensor is off, as `tensors` measures it."""
    return {d.name.removeprefix("x "): d.error for d in tensors("x", got, want, 0.0)}


def compare(got: Reference, want: Reference, recipe: Recipe) -> list[Difference]:
    """Everything that the parity tests hold equal."""
    out = [number("loss of accumulate", got.loss, want.loss, LOSS)]
    out += tensors("gradient", got.gradients, want.gradients, GRADIENT, want.noise)
    for k in range(len(got.losses)):
        out.append(number(f"loss of step {k}", got.losses[k], want.losses[k], LOSS if k == 0 else NORM))
        out.append(number(f"grad norm of step {k}", got.norms[k], want.norms[k], NORM))
        for n, (mine, theirs) in enumerate(zip(got.mtp_losses[k], want.mtp_losses[k], strict=True), 1):
            out.append(number(f"loss of step {k}, layer ahead {n}", mine, theirs, LOSS if k == 0 else NORM))
        if recipe.aux_coeff:
            out.append(number(f"aux loss of step {k}", got.aux_steps[k], want.aux_steps[k], NORM))
        if recipe.z_coeff:
            out.append(number(f"z loss of step {k}", got.z_steps[k], want.z_steps[k], NORM))
    return out + tensors("weight", got.weights, want.weights, WEIGHT)


def table(title: str, differences: Iterable[Difference], most: int = 14) -> str:
    """Numbers first, then the worst tensors by how far they pass their limits."""
    rows = list(differences)
    singles = [d for d in rows if not d.name.startswith(("gradient ", "weight "))]
    by_excess = sorted(
        (d for d in rows if d not in singles), key=lambda d: -d.error / d.limit if d.error == d.error else -math.inf
    )
    failed = sum(d.bad for d in rows)
    lines = [f"{title}: {failed} of {len(rows)} comparisons fail", *(f"  {d}" for d in singles)]
    return "\n".join([*lines, "  worst tensors:", *(f"  {d}" for d in by_excess[:most])])
