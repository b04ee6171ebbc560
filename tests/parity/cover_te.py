"""Which layouts are proven on Transformer Engine's modules: a cover of all pairs of choices in the default run, every
layout in the slow tier.

Owns the choices that only these modules have: the exchange of context parallelism, the kernel of attention, the overlap
of data-parallel communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from tests.parity import cover
from tests.parity.cases import Case, parse

RANKS = 4
"""Of a case of the default run: eight ranks take as long as four cases, and are in the slow tier."""
FOUR = {
    "dense": (
        "tp4 sp do",
        "cp4 packed comm=p2p recompute=full",
        "cp4 comm=a2a",
        "pp4 tied attn=unfused",
        "dp4 do overlap",
    ),
    "moe": ("dp4 ep4 do overlap", "tp4 sp ep2 etp2 packed", "cp4 etp4 comm=p2p"),
}
"""Four of one axis: in the cover of pairs are sizes 1 and 2."""
COMM = ("p2p", "a2a", "all_gather")
KEYS = (*cover.AXES, "do", "recompute", "packed", "tied", "allgather", "comm", "attn", "overlap")


def exchanges(case: Case) -> tuple[str, ...]:
    """The exchanges of context parallelism that a case can have.

    `a2a` divides heads among ranks; `all_gather` has no packed rows in Transformer Engine.
    """
    if case.cp == 1:
        return ("",)
    divided = cover.HEADS % (case.tp * case.cp) == 0 and cover.KV_HEADS % (case.tp * case.cp) == 0
    return ("p2p", *(("a2a",) if divided else ()), *(() if case.packed else ("all_gather",)))


def kernels(case: Case) -> tuple[str, ...]:
    """The kernels of attention: under context parallelism the fused one alone."""
    return ("fused", "unfused") if case.cp == 1 else ("fused",)


def recomputed(case: Case) -> tuple[str, ...]:
    """Kinds of recomputation that the default run pairs with everything else: `mlp` and `block` beside experts, and
    `block` without, are the slow tier's and torch's modules'."""
    return ("none", "full", "selective", "moe" if case.moe else "mlp")


def overlaps(case: Case) -> tuple[bool, ...]:
    """Communication beside the passes, where ranks share the data."""
    return (False, True) if case.dp > 1 else (False,)


def candidates(model: str) -> Iterator[Case]:
    """Every case of up to four ranks, at most two on an axis, with every choice."""
    for case in cover.layouts(model):
        if case.world > RANKS or max(getattr(case, axis) for axis in cover.AXES) > 2:
            continue
        gathers = (False, True) if case.moe else (False,)
        switches = product((True, False), (False, True), (False, True), gathers, recomputed(case))
        for do, packed, tied, allgather, recompute in switches:
            chosen = replace(case, te=True, do=do, packed=packed, tied=tied, allgather=allgather, recompute=recompute)
            for comm, attn, overlap in product(exchanges(chosen), kernels(chosen), overlaps(chosen)):
                yield replace(chosen, comm=comm, attn=attn, overlap=overlap)


@cache
def default(model: str) -> tuple[Case, ...]:
    """The default run's cases of `dense` or `moe`."""
    four = tuple(replace(parse(text, model=model), te=True) for text in FOUR[model])
    return (*cover.cover_pairs(KEYS, list(candidates(model)), four), *four)


@cache
def every(model: str) -> tuple[Case, ...]:
    """Every legal layout up to eight ranks, with and without the distributed optimizer, under each exchange; the other
    choices go round."""
    found, turn = [], 0
    for case in cover.every(model):
        case = replace(case, te=True)
        for comm in exchanges(case):
            attn, overlap = kernels(case), overlaps(case)
            spread = overlap[turn // 2 % len(overlap)]
            found.append(replace(case, comm=comm, attn=attn[turn % len(attn)], overlap=spread))
            turn += 1
    return tuple(found)
