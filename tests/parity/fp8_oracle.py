"""A Hugging Face model whose linear layers multiply in FP8 by the plain torch reference (tests/te/fp8_reference.py).

Megatron-Core multiplies queries, keys and values by one weight, each group of heads together, and gate and up by
another: their operands are quantized together, so the oracle joins them too. The head is not quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from tests.parity.models import by_disk_name
from tests.parity.oracle import Reference, cross_entropy
from tests.te import fp8_reference


class Joined:
    """Several linear layers of one input as a single product; each part is asked for by its layer."""

    def __init__(self, layers: list[torch.nn.Linear], groups: int, recipe: fp8_reference.Recipe) -> None:
        self.layers, self.groups, self.recipe = layers, groups, recipe
        self.parts: list[Tensor] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output of one layer; the first to be asked computes all."""
        if index == 0:
            weights = [w.weight.unflatten(0, (self.groups, -1)) for w in self.layers]
            y = fp8_reference.linear(x, torch.cat(weights, 1).flatten(0, 1), self.recipe)
            sizes = [w.shape[1] for w in weights]
            self.parts = [t.flatten(-2) for t in y.unflatten(-1, (self.groups, -1)).split(sizes, -1)]
        return self.parts[index]


class Experts:
    """The experts of Qwen3-MoE one by one; every product of every expert has its own scales. Megatron-Core applies the
    router's weights before the second product."""

    def __init__(self, experts: Any, recipes: tuple[fp8_reference.Recipe, fp8_reference.Recipe]) -> None:
        self.experts, self.recipes = experts, recipes

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[t, h] of hidden [t, h], chosen experts [t, k] and their weights [t, k]."""
        out = torch.zeros_like(hidden)
        for e in range(self.experts.num_experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            first = fp8_reference.linear(hidden[token], self.experts.gate_up_proj[e], self.recipes[0], str(e))
            gate, up = first.chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up * weights[token, place, None]
            out = out.index_add(
                0, token, fp8_reference.linear(inner, self.experts.down_proj[e], self.recipes[1], str(e))
            )
        return out


def quantize(model: torch.nn.Module, name: str, hybrid: bool) -> list[fp8_reference.Recipe]:
    """The decoder's linear layers, in place; returns each product's recipe. Megatron-Core's default of delayed scaling:
    a scale follows the pass before alone."""
    recipes = []

    def recipe() -> fp8_reference.Recipe:
        recipes.append(fp8_reference.Recipe(name, hybrid, length=1))
        return recipes[-1]

    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp  # type: ignore[union-attr]
        sets: list[tuple[list[Any], int]] = [
            ([attention.q_proj, attention.k_proj, attention.v_proj], model.config.num_key_value_heads),  # type: ignore[union-attr]
            ([attention.o_proj], 1),
        ]
        if hasattr(mlp, "experts"):
            mlp.experts.forward = Experts(mlp.experts, (recipe(), recipe()))
        else:
            sets += [([mlp.gate_proj, mlp.up_proj], 1), ([mlp.down_proj], 1)]
        for linears, groups in sets:
            joined = Joined(linears, groups, recipe())
            for index, linear in enumerate(linears):
                linear.forward = lambda x, joined=joined, index=index: joined.part(x, index)
    return recipes


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Arguments of the model; padding at a row's end is computed as any token."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(batch.input_ids.shape[1]), batch.cu_seqlens[1:], right=True)
        seen = (document[:, None] == document[None]).tril()
        hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        inputs |= {"position_ids": batch.positions, "attention_mask": hidden[None, None]}
    return inputs


def reference(folder: Path, passes: Sequence[Sequence[Batch]], recipe: str, form: str) -> Reference:
    """Loss and gradients of the last of several passes over unchanged weights, each of one row a data-parallel rank;
    recipe "" leaves the layers as they are."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    recipes = quantize(model, recipe, form == "hybrid") if recipe else []
    for batches in passes:
        model.zero_grad()
        total, loss = sum(float(b.loss_weights.sum()) for b in batches), 0.0
        for batch in batches:
            losses = cross_entropy(model(**inputs_of(batch)).logits, batch.labels)
            part = (losses * batch.loss_weights).sum() / total
            part.backward()
            loss += part.item()
        for product in recipes:
            product.end_step()
    grads = {n: g.clone() for n, g in by_disk_name(model, lambda p: p.grad if p.grad is not None else p)}
    return Reference(loss=loss, gradients=grads)
