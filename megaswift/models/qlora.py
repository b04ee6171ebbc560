"""Which weights of a model are held in four bits (--train_type qlora), and on how many ranks they can be.

Owns the choice and the fit of blocks to shards. Pure: names and shapes, no tensors, no torch; the numbers are the
bridge's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from megaswift.errors import Problem
from megaswift.models.family import Family
from megaswift.models.spec import ModelSpec
from megaswift.models.targets import WEIGHT
from megaswift.models.weights.rules import TensorParallelShard, WeightRule, shard_dim

BLOCK = 64
"""Inputs of a row that share a scale (QLoRA, arXiv:2305.14314)."""
BAND = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Values that are quantized or dequantized at a time: on a CPU those that its cache holds."""
NO_DORA = Problem(
    "--train_type qlora",
    "does not support DoRA, which would use the row norms of the quantized weights",
    "--train_type lora, or adapters without DoRA",
)


def is_four_bit_weight(rule: WeightRule) -> bool:
    """Whether a weight is a linear layer's inside a decoder layer, experts included: no embedding, head, norm, router,
    gate or bias."""
    leaf = rule.megatron.removesuffix(WEIGHT).rsplit(".", 1)[-1]
    return rule.scope != "model" and rule.megatron.endswith(WEIGHT) and leaf.startswith("linear_")


def _inputs(rule: WeightRule, spec: ModelSpec) -> int:
    """Length of a row of Megatron's whole weight."""
    dim = shard_dim(rule)
    pieces = rule.pieces(spec, TensorParallelShard(expert=0))
    return sum(p.length for p in pieces) if dim == 1 else pieces[0].shape(rule.shapes(spec)[pieces[0].source], dim)[1]


def four_bit_block_size_problems(family: Family, spec: ModelSpec, tp: int, etp: int) -> list[Problem]:
    """Rows, or a rank's parts of them, that are no whole number of blocks; each kind of layer once."""
    active = [
        rule for rule in family.weights if is_four_bit_weight(rule) and (not rule.when or getattr(spec, rule.when))
    ]
    layers = {rule.megatron.removesuffix(WEIGHT).split(".", 3)[-1].replace(".{E}", ""): rule for rule in active}
    return [
        p
        for name, rule in layers.items()
        if spec.experts or rule.scope not in ("moe", "expert")
        if not (rule.scope == "dense" and all(spec.moe_layers))
        for p in _unfit(name, rule, spec, (tp, etp))
    ]


def _unfit(name: str, rule: WeightRule, spec: ModelSpec, sizes: tuple[int, int]) -> Iterator[Problem]:
    width = _inputs(rule, spec)
    ranks, option = (sizes[1], "etp") if rule.scope == "expert" else (sizes[0], "tp")
    if width % BLOCK:
        yield Problem(
            "--train_type qlora",
            f"{name} of this model has {width} inputs, which is not a multiple of {BLOCK}, the NF4 block size",
            "--train_type lora",
        )
    elif shard_dim(rule) == 1 and width % (ranks * BLOCK):
        fitting = next(n for n in range(ranks, 0, -1) if ranks % n == 0 and width % (n * BLOCK) == 0)
        yield Problem(
            f"--{option} {ranks}",
            f"leaves {width / ranks:g} of the {width} inputs of {name} on a rank, which is not a multiple of {BLOCK}, "
            "the NF4 block size (--train_type qlora)",
            f"--{option} {fitting}",
        )


def four_bit_trainable_problems(family: Family, saved: Iterable[str]) -> list[Problem]:
    """Those of the Hugging Face tensors that are to train fully that are held in four bits."""
    stuck = [hf for rule in family.weights if is_four_bit_weight(rule) for hf in rule.hf]
    patterns = [re.escape(hf).replace(r"\{L\}", r"\d+").replace(r"\{E\}", r"\d+") for hf in stuck]
    return [
        Problem(
            f"--modules_to_save {name.removesuffix(WEIGHT)}",
            "is stored in NF4 (--train_type qlora), which cannot be trained",
            "use --target_modules for an adapter on it, or --train_type lora",
        )
        for name in saved
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    ]
