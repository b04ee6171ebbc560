"""Faults of gated delta nets on ranks, each put in by name where the engine looks its functions up.

The tests of this folder and of tests/parity show that they are found. Some were other toolkits' own: a missing sum of
the output norm's gradient (NVIDIA/Megatron-LM#7452), a first product cut across its components
(NVIDIA/Megatron-LM#1989), documents that leak into each other (modelscope/ms-swift#9618).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def norm_not_summed() -> None:
    """Each tensor-parallel rank keeps its own part of the shared output norm's gradient."""
    from megaswift.engine.megatron.layers import delta_net

    delta_net.copy_to_tensor_model_parallel_region = lambda weight, group: weight


def heads_off_by_one() -> None:
    """Context-parallel ranks take the heads after those whose parameters they use."""
    from megaswift.engine.megatron.layers import delta_net

    there, back = delta_net.exchange_slices_for_heads, delta_net.exchange_heads_for_slices
    delta_net.exchange_slices_for_heads = lambda local, *args: there(local.roll(-1, 2), *args)
    delta_net.exchange_heads_for_slices = lambda heads, *args: back(heads, *args).roll(1, 2)


def slices_not_sorted() -> None:
    """Rows come in the order of ranks, not of tokens."""
    from megaswift.engine.megatron.layers import delta_net

    there, back = delta_net.exchange_slices_for_heads, delta_net.exchange_heads_for_slices
    delta_net.exchange_slices_for_heads = lambda x, order, group: there(x, order.sort().values, group)
    delta_net.exchange_heads_for_slices = lambda x, order, group: back(x, order.sort().values, group)


def cut_across_components() -> None:
    """Ranks hold equal pieces of [queries; keys; values; gates; write strengths; steps] of all heads."""
    from megaswift.engine.megatron.layers.delta_net import GatedDeltaNet

    forward = GatedDeltaNet.forward

    def misplaced(module: Any, hidden_states: Tensor, **more: Any) -> Any:
        config = module.config
        per_group = config.linear_num_value_heads // config.linear_num_key_heads
        values = per_group * config.linear_value_head_dim
        widths = [config.linear_key_head_dim] * 2 + [values] * 2 + [per_group] * 2
        own = module.in_proj.weight.detach()
        parts = [torch.empty_like(own) for _ in range(module.tp_group.size())]
        dist.all_gather(parts, own, group=module.tp_group)
        grouped = torch.cat(parts).unflatten(0, (-1, sum(widths))).split(widths, dim=1)
        by_component = torch.cat([part.flatten(0, 1) for part in grouped])
        mine = by_component.chunk(module.tp_group.size())[module.tp_group.rank()]
        cut = mine.split([module.groups * width for width in widths])
        wrong = torch.cat([part.unflatten(0, (module.groups, -1)) for part in cut], dim=1).flatten(0, 1)
        changed = {"in_proj.weight": module.in_proj.weight + (wrong - own)}
        GatedDeltaNet.forward = forward
        try:
            return torch.func.functional_call(module, changed, (hidden_states,), more)
        finally:
            GatedDeltaNet.forward = misplaced

    GatedDeltaNet.forward = misplaced


def state_goes_on() -> None:
    """A document begins with the state of the one before."""
    from megaswift.engine import gated_delta

    rule = gated_delta.gated_delta_rule
    gated_delta.gated_delta_rule = lambda *args: rule(*args[:5])


def convolution_goes_on() -> None:
    """Taps reach into the document before."""
    from megaswift.engine import gated_delta

    convolution = gated_delta.causal_convolution
    gated_delta.causal_convolution = lambda x, weight, _documents: convolution(x, weight)


def rates_in_bfloat16() -> None:
    """A_log is rounded."""
    from megaswift.engine.megatron.layers import delta_net

    compute = delta_net.gated_delta_net

    def rounded(projected: Tensor, weights: Any, documents: Any) -> Tensor:
        rates = weights.log_decay
        return compute(projected, replace(weights, log_decay=rates.bfloat16().to(rates.dtype)), documents)

    delta_net.gated_delta_net = rounded


def values_for_gates() -> None:
    """Values and output gates are exchanged."""
    from megaswift.engine.megatron.layers import delta_net

    compute = delta_net.gated_delta_net

    def exchanged(projected: Tensor, weights: Any, documents: Any) -> Tensor:
        convolved, gates, write, step = weights.group_widths
        qk, values, z, rest = projected.split([convolved - gates, gates, gates, write + step], dim=-1)
        return compute(torch.cat([qk, z, values, rest], dim=-1), weights, documents)

    delta_net.gated_delta_net = exchanged


def gates_of_first_heads() -> None:
    """Attention with more ranks than KV heads: every rank takes the gates of the group's first heads."""
    from megatron.core.transformer.attention import SelfAttention

    from megaswift.engine.megatron.layers.delta_net import OutputGatedSelfAttention

    def narrowed(module: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, gate = SelfAttention.get_query_key_value_tensors(module, *args, **kwargs)
        return query, key, value, gate.narrow(2, 0, query.shape[2])

    OutputGatedSelfAttention.get_query_key_value_tensors = narrowed


def gates_of_all_heads() -> None:
    """The same, but the gates are not narrowed (NVIDIA/Megatron-LM#3575)."""
    from megaswift.engine.megatron.layers.delta_net import OutputGatedSelfAttention

    del OutputGatedSelfAttention.get_query_key_value_tensors


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        norm_not_summed,
        heads_off_by_one,
        slices_not_sorted,
        cut_across_components,
        state_goes_on,
        convolution_goes_on,
        rates_in_bfloat16,
        values_for_gates,
        gates_of_first_heads,
        gates_of_all_heads,
    )
}


def plant(name: str) -> None:
    """Puts a fault into this process; the empty name puts in none."""
    if name:
        FAULTS[name]()
