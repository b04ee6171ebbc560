"""Faults of adapters: kinds, how each is planted, and the layouts on which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.bisection.faults import FC1, FC2, OF_STAGES, PROJ, QKV, Fault, modules_of, planted

LORA = (("train_type", "lora"), ("lora_rank", 4), ("lora_alpha", 6.0))
EXPERTS = "mlp.experts.linear_fc1"


def adapters_of(fault: Fault, engine: Any) -> list[Any]:
    """The adapters of the layer that a fault names, where this rank has it."""
    return [module.lora for module in modules_of(fault, engine)]


@planted
def scaled_adapter(fault: Fault, engine: Any) -> None:
    """alpha / r is applied twice."""
    for adapters in adapters_of(fault, engine):
        adapters.adapters = tuple(replace(one, scale=one.scale**2) for one in adapters.adapters)


@planted
def scaled_by_root(fault: Fault, engine: Any) -> None:
    """alpha / sqrt(r), rsLoRA's scale."""
    for adapters in adapters_of(fault, engine):
        adapters.adapters = tuple(replace(one, scale=one.scale * one.rank**0.5) for one in adapters.adapters)


@planted
def dropped_adapter(fault: Fault, engine: Any) -> None:
    """The layer computes without its adapter."""
    for adapters in adapters_of(fault, engine):
        adapters.enabled = False


@planted
def dropped_expert_adapter(fault: Fault, engine: Any) -> None:
    """One expert of a rank computes without its adapter."""
    for adapters in adapters_of(fault, engine):
        own = adapters._of_all_experts

        def without_one(n: int, half: str, own: Callable[[int, str], Tensor] = own) -> Tensor:
            matrices = own(n, half)
            return torch.cat([torch.zeros_like(matrices[:1]), matrices[1:]])

        adapters._of_all_experts = without_one


@planted
def no_sum_between(fault: Fault, engine: Any) -> None:
    """What A of a row-parallel layer computes is not summed over tensor-parallel ranks."""

    def local(h: Tensor) -> Tensor:
        return h.chunk(engine.layout.tp)[engine.context.coordinates.tp] if engine.config.sequence_parallel else h

    for adapters in adapters_of(fault, engine):
        adapters._between = local


@planted
def no_backward_sum_between(fault: Fault, engine: Any) -> None:
    """The gradient of what A of a column-parallel layer computes is not summed over tensor-parallel ranks."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    def gathered(h: Tensor) -> Tensor:
        if not engine.config.sequence_parallel:
            return h
        group = engine.context.groups.tp
        return gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=False, group=group)

    for adapters in adapters_of(fault, engine):
        adapters._between = gathered


@planted
def exchanged_adapters(fault: Fault, engine: Any) -> None:
    """Two modules of a layer have each other's B: gate and up."""
    for adapters in adapters_of(fault, engine):
        own = adapters.matrices

        def matrices(half: str, own: Callable[[str], list[nn.Parameter]] = own) -> list[nn.Parameter]:
            return own(half)[::-1] if half == "B" else own(half)

        adapters.matrices = matrices


@planted
def unsynced_adapter(fault: Fault, engine: Any) -> None:
    """The gradients of matrices that every tensor-parallel rank has are not summed under sequence parallelism."""
    for adapters in adapters_of(fault, engine):
        for p in adapters.parameters():
            p.sequence_parallel = False


@planted
def own_draw_of_a(fault: Fault, engine: Any) -> None:
    """A rank has drawn its A from another seed."""
    for adapters in adapters_of(fault, engine):
        for p in adapters.matrices("A"):
            p.data.copy_(p.data.flip(1))


@planted
def lost_adapter_gradient(fault: Fault, engine: Any) -> None:
    """A replica's gradient of B does not get into the sum."""
    for adapters in adapters_of(fault, engine):
        for p in adapters.matrices("B"):
            p.register_hook(torch.zeros_like)


@planted
def frozen_input(fault: Fault, engine: Any) -> None:
    """What the frozen embedding puts out requires no gradient: recomputed layers have none then."""
    for chunk in engine.plain:
        if chunk.pre_process:
            chunk.embedding._forward_hooks.clear()


@planted
def unsummed_expert_adapter(fault: Fault, engine: Any) -> None:
    """Gradients of matrices that every expert-tensor-parallel rank has are not summed over these ranks."""
    for adapters in adapters_of(fault, engine):
        for p in adapters.parameters():
            p.partial_over_etp = False


@planted
def counted_twice(fault: Fault, engine: Any) -> None:
    """The gradient norm counts the copies of replicated matrices of experts."""
    for chunk in engine.plain:
        for p in chunk.parameters():
            p.shared = False


@planted
def stale_adapter(fault: Fault, engine: Any) -> None:
    """A rank's adapter misses the update of the weights that the optimizer has computed."""
    [train] = [engine.train_batch]
    held = [p for adapters in adapters_of(fault, engine) for p in adapters.matrices("A")]

    def trained(*args: Any, **kwargs: Any) -> Any:
        before = [p.data.clone() for p in held]
        result = train(*args, **kwargs)
        for p, old in zip(held, before, strict=True):
            p.data.copy_(old)
        return result

    engine.train_batch = trained


def frozen_adapter() -> None:
    """A layer's adapter does not train: the optimizer does not have it."""
    from megaswift.engine.megatron.lora import layers

    own = layers.Adapters._new_parameter

    def new(self: Any, adapter: Any, half: Any, data: Tensor) -> nn.Parameter:
        return own(self, adapter, half, data).requires_grad_(adapter.module != "model.layers.2.mlp.down_proj")

    layers.Adapters._new_parameter = new  # type: ignore[method-assign]


OF_STAGES["frozen_adapter"] = frozen_adapter


def _fault(
    case: str, kind: str, layer: int = 0, module: str = "", axis: str = "", answers: tuple[str, ...] = ()
) -> Fault:
    named = answers or (f"layers.{layer}.{module}",)
    return Fault(case, kind, layer, module, axis, 1 if axis else 0, named, "LoRA", options=LORA)


LORA_FAULTS: tuple[Fault, ...] = (
    _fault("dense tp2", "scaled_adapter", 2, FC1, "tp"),
    _fault("dense tp2 pp2", "scaled_adapter", 3, PROJ),
    _fault("dense cp2", "scaled_by_root", 1, QKV),
    _fault("dense tp2 pp2", "dropped_adapter", 2, FC2),
    _fault("dense tp2", "no_sum_between", 1, PROJ),
    _fault("dense tp2 sp", "no_sum_between", 2, FC2),
    _fault("dense tp2", "no_backward_sum_between", 2, QKV),
    _fault("dense tp2 sp", "no_backward_sum_between", 1, FC1),
    _fault("dense tp2 pp2", "exchanged_adapters", 1, FC1),
    _fault("dense tp2 sp", "unsynced_adapter", 2, QKV),
    _fault("dense tp2 sp", "unsynced_adapter", 1, PROJ),
    _fault("dense tp2", "own_draw_of_a", 1, FC1, "tp"),
    _fault("dense dp2 do", "lost_adapter_gradient", 2, PROJ, "dp"),
    _fault("dense dp2 do", "stale_adapter", 1, QKV, "dp"),
    _fault("dense pp2", "frozen_adapter", answers=(f"layers.2.{FC2}",)),
    _fault("dense recompute=full", "frozen_input", answers=("@gradient",)),
    _fault("moe dp2 ep2", "dropped_expert_adapter", 1, EXPERTS, "ep", answers=("layers.1.mlp",)),
    _fault("moe tp2 sp ep2 etp2 dp2", "unsummed_expert_adapter", 2, EXPERTS, answers=("layers.2.mlp.experts",)),
    _fault("moe tp2 sp ep2 etp2 dp2", "counted_twice", answers=("@clipped_gradient",)),
)
