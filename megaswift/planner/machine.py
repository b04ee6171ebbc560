"""The machine that a plan is for: GPUs of one kind in nodes, and how long its links take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megaswift.parallel.hardware import Gpu, Shares
from megaswift.parallel.layout import GRIDS, Layout
from megaswift.parallel.link_rates import bus_factor, hardware_figure

GIGA = 1e9
TERA = 1e12
LINK = "NVLink"
NETWORK = "network"


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes of equal size."""

    gpu: Gpu
    gpus_per_node: int
    fp8: bool = False
    """Whether its steps compute in FP8."""

    @property
    def shares(self) -> Shares:
        """Return the shares of the GPU's figures that steps reach."""
        return self.gpu.fp8 if self.fp8 else self.gpu.bf16

    @property
    def domain(self) -> int:
        """Ranks whose GPUs reach each other without the network."""
        return self.gpu.domain or self.gpus_per_node

    @property
    def memory(self) -> int:
        """Bytes of a GPU."""
        assert self.gpu.memory_gib is not None
        return int(self.gpu.memory_gib * 2**30)

    def product_rate(self, fp8: bool, half: bool = True) -> float:
        """FLOP/s that large products reach; in float32 TF32 has half of bfloat16's."""
        gpu = self.gpu
        assert gpu.bf16_tflops is not None
        peak = gpu.bf16_tflops if half else gpu.bf16_tflops / 2
        if fp8 and gpu.fp8_tflops is not None:
            peak = gpu.fp8_tflops
        return peak * TERA * self.shares.products

    def attention_rate(self, half: bool = True) -> float:
        """FLOP/s of flash attention."""
        assert self.gpu.bf16_tflops is not None
        return self.gpu.bf16_tflops * TERA * self.shares.attention / (1 if half else 2)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that kernels read and write."""
        assert self.gpu.hbm_gbs is not None
        return self.gpu.hbm_gbs * GIGA * self.gpu.hbm_share

    def link(self, layout: Layout, axes: str) -> str:
        """Return the links that a group of these axes crosses: the network if any of its ranks is on another node."""
        stride, ranks = _stride_and_ranks(layout, axes)
        return NETWORK if stride * ranks > self.domain else LINK

    @property
    def link_rate(self) -> float:
        """Bytes per second between two GPUs of a node."""
        assert self.gpu.link_gbs is not None
        return self.gpu.link_gbs * GIGA * self.shares.link

    def places(self, layout: Layout, axes: str) -> int:
        """Return the nodes that the ranks of a group of these axes are on."""
        stride, ranks = _stride_and_ranks(layout, axes)
        return len({rank * stride // self.domain for rank in range(ranks)})

    def seconds(self, operation: str, size: float, layout: Layout, axes: str) -> float:
        """Seconds of a collective of `size` bytes, or of a message between neighbours (`send_recv`); 0 for a group of
        one rank."""
        stride, ranks = _stride_and_ranks(layout, axes)
        if ranks == 1 or not size:
            return 0.0
        rate = _bus_rate(operation, stride, ranks, self.domain, self.gpu.link_gbs, self.gpu.network_gbs)
        return size * bus_factor(operation, ranks) / (rate * GIGA * self.shares.link)


def _stride_and_ranks(layout: Layout, axes: str) -> tuple[int, int]:
    """Distance of neighbours in a group, and its ranks; the axes are neighbours in their grid (`dp-cp`)."""
    inside = axes.split("-")
    grid = next(grid for grid in GRIDS.values() if set(inside) <= set(grid))
    stride = 1
    for axis in grid:
        if axis in inside:
            break
        stride *= getattr(layout, axis)
    return stride, layout.size(axes)


@cache
def _bus_rate(operation: str, stride: int, ranks: int, domain: int, link: float | None, network: float | None) -> float:
    """GB/s of bus bandwidth. Neighbours of a pipeline all send at once, most of them to another node if any does."""
    assert link is not None and network is not None
    if operation == "send_recv":
        return link if stride * ranks <= domain else network
    rate = hardware_figure(operation, [rank * stride // domain for rank in range(ranks)], link, network)
    assert rate is not None
    return rate
