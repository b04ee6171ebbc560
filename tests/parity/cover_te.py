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
        "cp4 do comm=a2a+p2p recompute=full",
        "pp4 tied attn=unfused",
        "dp4 do overlap",
    ),
    "moe": ("dp4 ep4 do overlap", "tp4 sp ep2 etp2 packed", "cp4 etp4 comm=p2p"),
}
"""Four of one axis: in the cover of pairs are sizes 1 and 2."""
KEYS = (*cover.AXES, "do", "recompute", "packed", "tied", "allgather", "comm", "attn", "overlap")


def exchanges(case: Case) -> tuple[str, ...]:
    """The exchanges of context parallelism that a case can have.

    `a2a` divides heads among ranks, `a2a+p2p` among two; `all_gather` and `a2a+p2p` have no packed rows in Transformer
    Engine.
    """
    if case.cp == 1:
        return ("",)
    found = ["p2p"]
    if cover.HEADS % (case.tp * case.cp) == 0 and cover.KV_HEADS % (case.tp * case.cp) == 0:
        found.append("a2a")
    if not case.packed:
        found.append("all_gather")
    if not case.packed and case.cp > 2 and cover.KV_HEADS % (case.tp * 2) == 0:
        found.append("a2a+p2p")
    return tuple(found)


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


def search() -> list[Case]:
    """A cover of both models together: any two choices go together on one of them, and each choice occurs on each.
    Takes 15 s: its result is COVER."""
    four = [replace(parse(text, model=model), te=True) for model, texts in FOUR.items() for text in texts]
    together = [case for model in FOUR for case in candidates(model)]
    return [*cover.cover_pairs(("model", *KEYS), together, four), *four]


COVER = (
    "moe do te recompute=moe attn=unfused",
    "dense cp2 do te recompute=mlp comm=p2p attn=fused",
    "moe cp2 do te recompute=moe comm=all_gather attn=fused",
    "moe pp2 vpp2 cp2 etp2 do tied allgather te recompute=selective comm=all_gather attn=fused",
    "moe tp2 dp2 ep2 sp packed tied allgather te overlap recompute=moe attn=fused",
    "dense pp2 vpp2 dp2 do packed te overlap recompute=mlp attn=unfused",
    "dense tp2 cp2 sp te recompute=mlp comm=all_gather attn=fused",
    "moe cp2 dp2 ep2 etp2 do tied allgather te overlap recompute=full comm=a2a attn=fused",
    "moe tp2 pp2 vpp2 ep2 sp packed allgather te recompute=selective attn=unfused",
    "moe pp2 vpp2 cp2 etp2 do te recompute=moe comm=p2p attn=fused",
    "moe tp2 cp2 ep2 etp2 sp do packed tied allgather te comm=p2p attn=fused",
    "dense cp2 dp2 do te overlap recompute=selective comm=p2p attn=fused",
    "moe tp2 dp2 etp2 sp do te recompute=full attn=unfused",
    "dense pp2 cp2 do packed tied te recompute=mlp comm=a2a attn=fused",
    "moe cp2 dp2 ep2 do te overlap comm=all_gather attn=fused",
    "dense pp2 vpp2 cp2 do te comm=a2a attn=fused",
    "dense pp2 vpp2 cp2 do te recompute=full comm=all_gather attn=fused",
    "dense tp2 cp2 do te recompute=selective comm=a2a attn=fused",
    "moe tp2 cp2 sp do te recompute=moe comm=a2a attn=fused",
    "dense tp4 sp do te",
    "dense cp4 packed te recompute=full comm=p2p",
    "dense cp4 te comm=a2a",
    "dense cp4 do te recompute=full comm=a2a+p2p",
    "dense pp4 tied te attn=unfused",
    "dense dp4 do te overlap",
    "moe dp4 ep4 do te overlap",
    "moe tp4 ep2 etp2 sp packed te",
    "moe cp4 etp4 te comm=p2p",
)
"""What `search` finds: `python -m tests.parity.cover_te` prints it. tests/parity/test_te.py holds that it is a
cover."""


@cache
def joint() -> tuple[Case, ...]:
    """The default run's cases of both models."""
    return tuple(parse(text) for text in COVER)


def default(model: str) -> tuple[Case, ...]:
    """The default run's cases of `dense` or `moe`."""
    return tuple(case for case in joint() if case.model == model)


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


if __name__ == "__main__":
    print("\n".join(f'    "{case}",' for case in search()))
