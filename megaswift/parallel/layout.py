"""Rank placement: the rank arithmetic of every parallel axis, from one table.

Owns sizes, coordinates and groups of ranks, in Megatron-Core's order. Leaves out what a model allows
(`checks.py`), which layers a stage holds (`pipeline_split.py`) and process groups (the engine makes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

from megaswift.errors import LayoutError, Problem
from megaswift.parallel.pipeline_string import parse_layout_string

GRIDS = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
"""The ranks 0 .. world - 1 as two grids, the fastest axis first: one of attention and dense layers, one of experts.
Megatron-Core's order `tp-cp-ep-dp-pp`: neighbours share a tensor-parallel group, pipeline stages lie furthest apart."""

PROCESSES = "(--nproc_per_node)"
"""How a fix ends that asks for another number of processes."""
FLAGS = {"tp": "--tp", "pp": "--pp", "vpp": "--vpp", "cp": "--cp", "ep": "--ep", "etp": "--etp"}
"""The axes that a user sets; dp and edp are what is left of the world."""


class LayoutOptions(Protocol):
    """What the layout reads of `megaswift.config`'s section `parallel`."""

    @property
    def tensor_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def pipeline_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def virtual_pipeline_parallel_size(self) -> int | None: ...  # noqa: D102
    @property
    def context_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def expert_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def expert_tensor_parallel_size(self) -> int: ...  # noqa: D102
    @property
    def sequence_parallel(self) -> bool | None: ...  # noqa: D102
    @property
    def pipeline_layout(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True)
class Coordinates:
    """One rank's index on every axis."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class AxisSizes:
    """The sizes of the axes that a user sets, over `world_size` ranks; not known to go together."""

    world_size: int
    tp: int = 1
    """Tensor parallel: ranks that share each matrix."""
    pp: int = 1
    """Pipeline parallel: stages of consecutive layers."""
    vpp: int = 1
    """Model chunks on each pipeline rank (interleaved schedule); 1 is the plain schedule."""
    cp: int = 1
    """Context parallel: ranks that share each sequence."""
    ep: int = 1
    """Expert parallel: ranks that share each layer's experts."""
    etp: int = 1
    """Tensor parallel within each expert."""

    @property
    def axes(self) -> dict[str, int]:
        """The sizes by short name."""
        return {axis: getattr(self, axis) for axis in FLAGS}


@dataclass(frozen=True)
class Layout(AxisSizes):
    """Axes that divide the ranks. LayoutError when they do not."""

    sequence_parallel: bool = False
    """Norms and residuals split over the sequence within a tensor-parallel group."""

    def __post_init__(self) -> None:
        problems = size_problems(self.world_size, self.axes)
        if problems:
            raise LayoutError(problems)

    @classmethod
    def from_config(cls, parallel: LayoutOptions, world_size: int) -> Layout:
        """The layout of a configuration, vpp from the layout string if there is one."""
        axes = requested_axis_sizes(parallel)
        return cls(world_size, **axes, sequence_parallel=uses_sequence_parallel(axes["tp"], parallel.sequence_parallel))

    @property
    def dp(self) -> int:
        """Data-parallel ranks: copies of the model that read different rows (context-parallel ranks read the same
        ones)."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axes: str) -> int:
        """Ranks in one group of `axes`: `tp`, `dp-cp`, `etp-ep`."""
        return prod(getattr(self, axis) for axis in _grid_of(axes)[1])

    def check_processes(self, count: int) -> None:
        """LayoutError where this many processes are not what the layout is for."""
        if count != self.world_size:
            fix = f"--nproc_per_node {self.world_size}"
            raise LayoutError(Problem(f"{count} processes", f"the layout is for {self.world_size}", fix))

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return Coordinates(**{axis: i for grid in GRIDS.values() for axis, i in self._indices(rank, grid).items()})

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these dense coordinates: the inverse of `coordinates`."""
        index = 0
        stride = 1
        coords = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for axis in GRIDS["dense"]:
            assert 0 <= coords[axis] < getattr(self, axis), f"{axis} index {coords[axis]} of {getattr(self, axis)}"
            index += coords[axis] * stride
            stride *= getattr(self, axis)
        return index

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of ranks that differ only along `axes` (one axis, or several of one grid joined by `-`), in
        Megatron's order."""
        grid, inside = _grid_of(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            indices = self._indices(rank, grid)
            groups.setdefault(tuple(indices[axis] for axis in grid if axis not in inside), []).append(rank)
        return list(groups.values())

    def group(self, axes: str, rank: int) -> list[int]:
        """The group of `axes` that holds `rank`."""
        return next(group for group in self.groups(axes) if rank in group)

    def describe(self) -> str:
        """One line: `TP2 SP PP2 VPP2 DP1`, axes of size 1 left out (data parallelism always shown)."""
        parts = [
            f"{axis.upper()}{getattr(self, axis)}"
            for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")
            if getattr(self, axis) > 1
        ]
        if self.sequence_parallel:
            parts.insert(1 if self.tp > 1 else 0, "SP")
        return " ".join([*parts, f"DP{self.dp}"])

    def _indices(self, rank: int, grid: tuple[str, ...]) -> dict[str, int]:
        indices = {}
        for axis in grid:
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return indices


def _grid_of(axes: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The grid that has all of `axes`, and the axes."""
    inside = tuple(axes.split("-"))
    for grid in GRIDS.values():
        if set(inside) <= set(grid):
            return grid, inside
    raise AssertionError(f"no grid has all of {axes}; grids are {list(GRIDS.values())}")


def uses_sequence_parallel(tp: int, requested: bool | None) -> bool:
    """What the user set, else on when tp > 1."""
    return tp > 1 if requested is None else requested


def requested_axis_sizes(parallel: LayoutOptions) -> dict[str, int]:
    """The sizes that a configuration asks for, unchecked, by short name."""
    pp = parallel.pipeline_parallel_size
    vpp = parallel.virtual_pipeline_parallel_size
    if parallel.pipeline_layout is not None and vpp is None and pp > 0:
        vpp = max(1, len(parse_layout_string(parallel.pipeline_layout)) // pp)
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": pp,
        "vpp": 1 if vpp is None else vpp,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
    }


def size_problems(world_size: int, axes: dict[str, int]) -> list[Problem]:
    """What is wrong with the sizes alone, whatever the model."""
    low = [
        Problem(f"{FLAGS[axis]} {size}", "is not a positive number", f"{FLAGS[axis]} 1")
        for axis, size in axes.items()
        if size < 1
    ]
    if world_size < 1:
        low.append(Problem(f"world size {world_size}", "is not a positive number of processes"))
    if low:
        return low
    problems = []
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        product = prod(axes[n] for n in names)
        if world_size % product:
            used = [n for n in names if axes[n] > 1]
            sizes = " x ".join(str(axes[n]) for n in used) + (f" = {product}" if len(used) > 1 else "")
            rule = f"requires a multiple of {sizes} processes; there are {world_size}"
            problems.append(
                Problem(" ".join(f"{FLAGS[n]} {axes[n]}" for n in used), rule, _world_fix(world_size, product))
            )
    if axes["vpp"] > 1 and axes["pp"] == 1:
        fix = f"--pp 2 --vpp {axes['vpp']}, or leave out --vpp"
        problems.append(Problem(f"--vpp {axes['vpp']}", "model chunks need a pipeline, but --pp is 1", fix))
    return problems


def _world_fix(world_size: int, product: int) -> str:
    below = world_size // product * product
    counts = [str(n) for n in (below, below + product) if n]
    return f"use {' or '.join(counts)} processes {PROCESSES}"
