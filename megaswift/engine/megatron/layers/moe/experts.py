"""Experts in torch's grouped products: numbers of tokens stay on the device, where the host does not wait for them.

Weights lie one after another in memory, so that products read them where they are. Megatron-Core's buffers of trained
parameters are filled from the last to the first, hence the order in which they are registered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.mlp import MLPSubmodules, apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.megatron.layers.moe.products import ExpertRows, grouped_product, grouped_weight_gradients


class _GroupedProduct(torch.autograd.Function):
    """x [t, in] to [t, out], each row by the weight [out, in] of its expert; keeps no input where no weight trains."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Tensor, ends: Tensor, layer: GroupedExpertLinear, *trained: Tensor
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(ends, *([counts, x] if trained else ()))
        return grouped_product(x, layer.stacked_weights().transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends, *kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        weights: Sequence[Tensor] = ()
        inputs = grouped_product(grad, ctx.layer.stacked_weights(), ends) if ctx.needs_input_grad[0] else None
        if kept:
            counts, x = kept
            weights = grouped_weight_gradients(grad, x, ExpertRows(counts, ends)).unbind()
        return inputs, None, None, None, *weights


class GroupedExpertLinear(nn.Module):
    """x W^T of all local experts; weight{i} [out, in] and bias{i} [out] are those of expert i.

    Column or row, as the caller's widths are: the token dispatcher gathers and sums over expert-tensor-parallel ranks.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.experts = experts
        self.inputs = inputs
        self.outputs = outputs
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        together = torch.empty(experts, outputs, inputs, dtype=config.params_dtype, device=device)
        for i in reversed(range(experts)):
            self.register_parameter(f"weight{i}", nn.Parameter(together[i]))
        self.biased = bool(config.add_bias_linear)
        for i in reversed(range(experts)) if self.biased else ():
            bias = torch.zeros(outputs, dtype=config.params_dtype, device=device)
            self.register_parameter(f"bias{i}", nn.Parameter(bias))
        self._seen: tuple[int, int] | None = None
        self._in_place = False

    def weights(self) -> list[nn.Parameter]:
        """The weights of expert 0, 1, ..."""
        return [getattr(self, f"weight{i}") for i in range(self.experts)]

    def separate_partly_trained(self) -> None:
        """Where some weights train and others do not, each gets memory of its own: the distributed optimizer moves the
        trained ones into its buffers, and the memory of all would stay for the sake of the others."""
        weights = self.weights()
        if len({w.requires_grad for w in weights}) > 1:
            self._seen = None
            for weight in weights:
                weight.data = weight.data.clone()

    def stacked_weights(self) -> Tensor:
        """[experts, out, in]: the weights themselves where they follow one another in memory, else a copy."""
        weights = self.weights()
        first = weights[0]
        size = weights[0].numel()
        ends = first.data_ptr(), weights[-1].data_ptr()
        if ends != self._seen:  # Megatron-Core moves parameters into its buffers
            at = [first.data_ptr() + i * size * first.element_size() for i in range(self.experts)]
            storage = first.untyped_storage().data_ptr()
            self._in_place = at == [w.data_ptr() for w in weights] and all(
                w.is_contiguous() and w.untyped_storage().data_ptr() == storage for w in weights
            )
            self._seen = ends
        if not self._in_place:
            return torch.stack([w.detach() for w in weights])
        return first.detach().as_strided((self.experts, self.outputs, self.inputs), (size, self.inputs, 1))

    def forward(self, x: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor | None]:
        """(x W^T [t, out] without bias, each row's bias [t, out] or None)."""
        weights = self.weights()
        trained = weights if any(w.requires_grad for w in weights) else []
        out = _GroupedProduct.apply(x, rows.counts, rows.ends, self, *trained)
        if not self.biased:
            return out, None
        biases = torch.stack([getattr(self, f"bias{i}") for i in range(self.experts)])
        return out, biases.repeat_interleave(rows.counts, dim=0, output_size=len(x))


class GroupedExperts(MegatronModule):
    """The local experts' MLPs, as Megatron-Core's `SequentialMLP` computes them."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.groups = pg_collection
        inner = divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        joined = 2 * inner if config.gated_linear_unit else inner
        self.linear_fc1 = submodules.linear_fc1(num_local_experts, config.hidden_size, joined, config)
        self.linear_fc2 = submodules.linear_fc2(num_local_experts, inner, config.hidden_size, config)
        unit = config.use_te_activation_func and submodules.activation_func
        self.unit = build_module(submodules.activation_func, config=config) if unit else None

    def _weighted(self, x: Tensor, factor: Tensor) -> Tensor:
        """The activation times the routing weights, in the dtype of x; in one kernel where Megatron-Core has it."""
        config = self.config
        if self.unit is None and config.bias_activation_fusion and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(x, None, factor, config.activation_func_fp8_input_store)
        return (self._activation(x) * factor).to(x.dtype)

    def _activation(self, x: Tensor) -> Tensor:
        if self.unit is not None:
            return self.unit(x)
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, up = x.chunk(2, dim=-1)
        if (bound := config.activation_func_clamp_value) is not None:
            gate = gate.clamp(max=bound)
            up = up.clamp(min=-bound, max=bound)
        return config.activation_func(gate) * (up + config.glu_linear_offset)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Rows [t, h] in the order of their experts, rows of each expert [experts] on any device, routing weights [t]:
        (their outputs [t, h], no bias left to add)."""
        rows = ExpertRows.of(copy_to_device_async(tokens_per_expert, x.device))
        factor = weights.unsqueeze(-1)
        inner, bias = self.linear_fc1(x, rows)
        inner = self._weighted(inner if bias is None else inner + bias, factor)
        out, bias = self.linear_fc2(inner, rows)
        return out if bias is None else (out + bias * factor).to(out.dtype), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The names, shapes and parts that Megatron-Core's `SequentialMLP` saves."""
        assert metadata is not None, "the group of data-parallel replicas"
        groups = self.groups
        found = {}
        for name, axes in (("linear_fc1", {"weight": 0, "bias": 0}), ("linear_fc2", {"weight": 1})):
            layer: GroupedExpertLinear = getattr(self, name)
            for i in range(layer.experts):
                number = groups.ep.rank() * layer.experts + i
                place = (*sharded_offsets, (len(sharded_offsets), number, groups.ep.size() * layer.experts))
                own = {kind: getattr(layer, f"{kind}{i}") for kind in ("weight", "bias")[: 1 + layer.biased]}
                saved = make_sharded_tensors_for_checkpoint(
                    own, "", axes, place, tp_group=groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
                )
                replace_prefix_for_sharding(saved, "", f"{prefix}experts.{name}.")
                for kind, part in saved.items():
                    gated = name == "linear_fc1" and self.config.gated_linear_unit
                    entry = apply_swiglu_sharded_factory(part, place) if gated else part
                    entry.replica_id = (*entry.replica_id[:2], groups.expt_dp.rank())
                    found[f"{prefix}{name}.{kind}{i}"] = entry
        return found
