"""Rules for `--moe_pad_expert_input_to_capacity`: where each rank can know the capacity of experts by itself. No torch.

Experts drop by the tokens of the whole micro-batch, on every layout; the padding is Megatron-Core's, by the tokens of
one rank. Both are the same where one rank has the micro-batch.
"""

from __future__ import annotations

import math

from megaswift.config.rule import ConflictingOptions, Test
from megaswift.config.sections import Sections
from megaswift.errors import Problem

OFF = "--moe_pad_expert_input_to_capacity false"


def _padded_and(when: Test) -> Test:
    return lambda c: c.model.moe_pad_expert_input_to_capacity and when(c)


_CLASHES: tuple[tuple[tuple[str, ...], Test, str, str], ...] = (
    (
        ("moe_expert_capacity_factor",),
        lambda c: c.model.moe_expert_capacity_factor is None,
        "needs a capacity",
        "--moe_expert_capacity_factor 1.25",
    ),
    (
        ("moe_token_dispatcher_type",),
        lambda c: c.model.moe_token_dispatcher_type == "flex",  # allgather takes no capacity
        "is supported with alltoall only",
        "--moe_token_dispatcher_type alltoall",
    ),
    (
        ("tensor_parallel_size", "context_parallel_size"),
        lambda c: c.parallel.tensor_parallel_size > 1 or c.parallel.context_parallel_size > 1,
        "is not supported where several ranks share a micro-batch: each would pad and drop by its own tokens",
        OFF,
    ),
    (
        ("padding_free", "expert_parallel_size"),
        lambda c: c.data.padding_free and c.parallel.expert_parallel_size > 1,
        "needs micro-batches of one shape",
        "--padding_free false",
    ),
)

EXPERT_CAPACITY_CLASHES: tuple[ConflictingOptions, ...] = tuple(
    ConflictingOptions(("moe_pad_expert_input_to_capacity", *reads), _padded_and(when), why, fix)
    for reads, when, why, fix in _CLASHES
)


def expert_capacity_problems(c: Sections, experts: int, topk: int) -> list[Problem]:
    """A capacity above the tokens that there are to fill it."""
    factor = c.model.moe_expert_capacity_factor
    if not c.model.moe_pad_expert_input_to_capacity or not experts or factor is None or factor * topk <= experts:
        return []
    rule = f"pads experts beyond all tokens of a micro-batch: of {experts} experts a token goes to {topk}"
    most = math.floor(100 * experts / topk) / 100
    return [Problem(f"--moe_expert_capacity_factor {factor:g}", rule, f"--moe_expert_capacity_factor {most:g} or less")]
