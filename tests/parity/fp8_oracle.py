"""A Hugging Face model whose linear layers multiply in FP8 by the plain torch reference (tests/te/fp8_reference.py).

Megatron-Core multiplies queries, keys and values by one weight, each group of heads together, and gate and up by
another: their operands are quantized together, so the oracle joins them too. The head is not quantized. On
tensor-parallel ranks each shard is quantized by itself (tests/te/fp8_shards.py), and so are the tokens of every data-
and context-parallel rank; an expert quantizes those of all ranks of its expert-parallel group together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from tests.parity.models import by_disk_name
from tests.parity.oracle import Oracle, Recipe, Reference, cross_entropy
from tests.te import fp8_reference
from tests.te.fp8_shards import column_parallel, row_parallel


@dataclass(frozen=True)
class Products:
    """How products are computed: by which recipe, on how many tensor-parallel ranks, and those of experts; on how many
    context- and expert-parallel ranks the tokens are."""

    recipe: str
    hybrid: bool = True
    tp: int = 1
    etp: int = 1
    cp: int = 1
    ep: int = 1


class Tokens:
    """Which tokens of a pass each rank has, as places in the flat rows [b x s]; all together until `place` is
    called."""

    def __init__(self, cp: int, ep: int) -> None:
        self.cp, self.ep = cp, ep
        self.ranks: list[Tensor] = []

    def place(self, rows: Sequence[Batch]) -> None:
        """One row a data-parallel rank, each document cut into 2 x cp chunks of which a rank has its own and the one as
        far from the end."""
        self.ranks, start = [], 0
        for row in rows:
            length = row.input_ids.shape[1]
            bounds = [0, length] if row.cu_seqlens is None else row.cu_seqlens.tolist()
            documents = [torch.arange(start + a, start + b) for a, b in zip(bounds, bounds[1:], strict=False)]
            for rank in range(self.cp):
                own = (rank,) if self.cp == 1 else (rank, 2 * self.cp - 1 - rank)
                pieces = 1 if self.cp == 1 else 2 * self.cp
                self.ranks.append(torch.cat([d.chunk(pieces)[c] for d in documents for c in own]))
            start += length

    def groups(self, tokens: int) -> list[Tensor]:
        """The places that an expert's copies have: of the ranks of each expert-parallel group."""
        if not self.ranks:
            return [torch.arange(tokens)]
        return [torch.cat(self.ranks[i : i + self.ep]) for i in range(0, len(self.ranks), self.ep)]

    def by_rank(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """[b, s, n] of x [b, s, k]: the function of each rank's tokens [t, k]."""
        if not self.ranks:
            return function(x)
        flat = x.flatten(0, 1)
        parts = torch.cat([function(flat[own]) for own in self.ranks])
        return parts[torch.cat(self.ranks).argsort()].unflatten(0, x.shape[:2])


class Joined:
    """Several linear layers of one input as a single column-parallel product; each part is asked for by its layer."""

    def __init__(self, layers: list[torch.nn.Linear], groups: int, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.layers, self.groups, self.product = layers, groups, product
        self.parts: list[Tensor] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output of one layer; the first to be asked computes all."""
        if index == 0:
            weights = [w.weight.unflatten(0, (self.groups, -1)) for w in self.layers]
            y = self.product(x, torch.cat(weights, 1).flatten(0, 1))
            sizes = [w.shape[1] for w in weights]
            self.parts = [t.flatten(-2) for t in y.unflatten(-1, (self.groups, -1)).split(sizes, -1)]
        return self.parts[index]


class Experts:
    """The experts of Qwen3-MoE one by one; every product of every expert has its own scales. Megatron-Core applies the
    router's weights before the second product."""

    def __init__(self, experts: Any, ranks: int, tokens: Tokens, recipes: list[fp8_reference.Recipe]) -> None:
        self.experts, self.ranks, self.tokens, self.recipes = experts, ranks, tokens, recipes

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[t, h] of hidden [t, h], chosen experts [t, k] and their weights [t, k]."""
        out = torch.zeros_like(hidden)
        for own in self.tokens.groups(len(hidden)):
            for e in range(self.experts.num_experts):
                token, place = (chosen[own] == e).nonzero(as_tuple=True)
                token = own[token]
                out = out.index_add(0, token, self._expert(e, hidden[token], weights[token, place, None]))
        return out

    def _expert(self, e: int, x: Tensor, weights: Tensor) -> Tensor:
        """[t, h] of one expert's tokens; each rank has the same part of both projections."""
        both = self.experts.gate_up_proj[e].unflatten(0, (2, self.ranks, -1)).transpose(0, 1).flatten(0, 2)
        first = column_parallel(x, both, self.ranks, self.recipes[0], str(e))
        gate, up = (t.flatten(1) for t in first.unflatten(-1, (self.ranks, 2, -1)).unbind(2))
        inner = torch.nn.functional.silu(gate) * up * weights
        return row_parallel(inner, self.experts.down_proj[e], self.ranks, self.recipes[1], str(e))


def quantize(model: torch.nn.Module, products: Products) -> tuple[list[fp8_reference.Recipe], Tokens]:
    """The decoder's linear layers, in place; returns each product's recipe, and where tokens are. Megatron-Core's
    default of delayed scaling: a scale follows the pass before alone."""
    recipes: list[fp8_reference.Recipe] = []
    tokens = Tokens(products.cp, products.ep)

    def recipe() -> fp8_reference.Recipe:
        recipes.append(fp8_reference.Recipe(products.recipe, products.hybrid, length=1))
        return recipes[-1]

    def split_rows(linears: list[Any], groups: int) -> None:
        own = recipe()
        joined = Joined(
            linears, groups, lambda x, w: tokens.by_rank(x, lambda t: column_parallel(t, w, products.tp, own))
        )
        for index, linear in enumerate(linears):
            linear.forward = lambda x, index=index: joined.part(x, index)

    def split_columns(linear: Any) -> None:
        own = recipe()
        linear.forward = lambda x: tokens.by_rank(x, lambda t: row_parallel(t, linear.weight, products.tp, own))

    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp  # type: ignore[union-attr]
        split_rows([attention.q_proj, attention.k_proj, attention.v_proj], model.config.num_key_value_heads)  # type: ignore[union-attr]
        split_columns(attention.o_proj)
        if hasattr(mlp, "experts"):
            mlp.experts.forward = Experts(mlp.experts, products.etp, tokens, [recipe(), recipe()])
        else:
            split_rows([mlp.gate_proj, mlp.up_proj], products.tp)
            split_columns(mlp.down_proj)
    return recipes, tokens


def inputs_of(rows: Sequence[Batch]) -> dict[str, Any]:
    """Arguments of the model; padding at a row's end is computed as any token."""
    inputs: dict[str, Any] = {"input_ids": torch.cat([row.input_ids for row in rows])}
    if rows[0].cu_seqlens is not None:
        masks = []
        for row in rows:
            assert row.cu_seqlens is not None
            document = torch.bucketize(torch.arange(row.input_ids.shape[1]), row.cu_seqlens[1:], right=True)
            seen = (document[:, None] == document[None]).tril()
            masks.append(torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min))
        positions = torch.cat([row.positions for row in rows])
        inputs |= {"position_ids": positions, "attention_mask": torch.stack(masks)[:, None]}
    return inputs


def reference(folder: Path, passes: Sequence[Sequence[Batch]], products: Products | None) -> Reference:
    """Loss and gradients of the last of several passes over unchanged weights, each of one row a data-parallel rank;
    without `products` the layers are as they are."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    recipes, tokens = quantize(model, products) if products else ([], None)
    for rows in passes:
        model.zero_grad()
        if tokens:
            tokens.place(rows)
        losses = cross_entropy(model(**inputs_of(rows)).logits, torch.cat([row.labels for row in rows]))
        weights = torch.cat([row.loss_weights for row in rows])
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        for recipe in recipes:
            recipe.end_step()
    grads = {n: g.clone() for n, g in by_disk_name(model, lambda p: p.grad if p.grad is not None else p)}
    return Reference(loss=loss.item(), gradients=grads)


def trajectory(
    folder: Path, steps: Sequence[Sequence[Batch]], optimizer: Recipe, products: Products | None
) -> Reference:
    """Losses, gradient norms and weights of optimizer steps, for recipes whose scales do not depend on earlier
    steps."""
    oracle = Oracle(folder, optimizer, "eager")
    if products:
        assert products.recipe != "delayed"
        quantize(oracle.model, products)
    return oracle.trajectory(steps)
