"""Which layouts are proven: every legal one up to 8 processes (slow tier), and a set of few in which every pair of
choices occurs.

Owns the tables of choices and the rule of what is legal, written out by hand: `megaswift.parallel.checks` is
tested against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from tests.parity.cases import Case, parse
from tests.parity.models import is_moe

RANKS = 8
HEADS, KV_HEADS, LAYERS, EXPERTS = 8, 4, 4, 4
"""Of the models `dense` and `moe`."""
HYBRID = ("qwen3_5", "qwen3_5_moe")
"""Models with gated delta nets: as many heads, layers and experts, but as many KV heads and key heads as follow."""
HYBRID_KV_HEADS, KEY_HEADS = 2, 4
POWERS = (1, 2, 4, 8)
_DELTA: dict[str, tuple[object, ...]] = {
    "do": (True, False),
    "recompute": ("none", "full", "selective"),
    "packed": (False, True),
}
_DENSE: dict[str, tuple[object, ...]] = {**_DELTA, "tied": (False, True)}
SWITCHES: dict[str, dict[str, tuple[object, ...]]] = {
    "dense": _DENSE,
    "moe": {**_DENSE, "allgather": (False, True)},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, "recompute": ("none", "full", "moe")},
}
SMALL = {
    "dense": (
        "single",
        "tp2",
        "tp2 sp",
        "pp2",
        "pp2 vpp2",
        "cp2",
        "cp2 packed",
        "dp2",
        "dp2 do",
        "pp2 tied",
        "tp2 packed",
        "pp3 first2",
        "dp3",
        "recompute=block",
        "recompute=mlp",
        "tp8 sp",
        "cp8 packed recompute=full",
        "dp8 do",
        "pp2 dp4 tied recompute=full",
        "pp4 cp2 do",
        "cp4 dp2 do packed recompute=selective",
        "tp2 pp2 vpp2 cp2 sp do packed tied recompute=selective",
    ),
    "moe": (
        "single",
        "dp2 ep2 do",
        "tp8 etp8 sp",
        "tp2 sp",
        "pp2 packed",
        "cp2",
        "tp2 sp ep2",
        "pp2 last1",
        "recompute=moe",
        "tp2 sp pp2 recompute=block",
        "cp8 ep4 etp2 packed",
        "dp8 ep2 etp4 do",
    ),
    "qwen3_5": ("packed", "tp2", "tp4 packed recompute=selective", "tp2 cp2 packed recompute=full"),
    "qwen3_5_moe": ("single", "tp4 sp ep4 packed", "cp4 do packed", "dp4 ep4 do", "pp4"),
}
"""One axis at a time on few ranks, uneven stages, sizes that are no power of two: what to look at first when others
fail."""
AXES = ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")


def legal(c: Case) -> bool:
    """The rule by hand, for sizes that are powers of two."""
    kv_heads = HYBRID_KV_HEADS if c.model in HYBRID else KV_HEADS
    whole_groups = kv_heads % c.tp == 0 or c.tp % kv_heads == 0  # beyond the KV heads, ranks share one
    if c.model in HYBRID and KEY_HEADS % (c.tp * c.cp):
        return False
    if c.world > RANKS or HEADS % c.tp or not whole_groups or LAYERS % (c.pp * c.vpp):
        return False
    if (c.sp and c.tp == 1) or (c.vpp > 1 and c.pp == 1):
        return False
    if not c.moe:
        return c.ep == c.etp == 1
    experts_fit = EXPERTS % c.ep == 0 and c.world % (c.etp * c.ep * c.pp) == 0
    return experts_fit and (c.sp or c.tp == 1)  # Megatron-Core trains experts under TP with sequence parallelism only


def layouts(model: str) -> list[Case]:
    """Every legal layout of a model, switches at their defaults, small worlds first."""
    experts = (POWERS, POWERS) if is_moe(model) else ((1,), (1,))
    cases = [
        Case(model, tp=tp, sp=sp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp)
        for tp, sp, pp, vpp, cp, dp, ep, etp in product(POWERS, (False, True), POWERS, (1, 2), POWERS, POWERS, *experts)
    ]
    return sorted((c for c in cases if legal(c)), key=lambda c: c.world)


def switched(model: str) -> Iterator[Case]:
    """Every layout with every setting of the switches."""
    switches = SWITCHES[model]
    for case in layouts(model):
        for values in product(*switches.values()):
            yield replace(case, **dict(zip(switches, values, strict=True)))


@cache
def every(model: str) -> tuple[Case, ...]:
    """Every layout, with and without the distributed optimizer; the other switches go round, so that all occur on most
    shapes.

    Of models with gated delta nets, to which that optimizer is nothing new, it goes round too.
    """
    both: list[dict[str, bool]] = [{}] if model in HYBRID else [{"do": True}, {"do": False}]
    switches = {k: v for k, v in SWITCHES[model].items() if k not in both[0]}
    turns = list(product(*switches.values()))
    found = []
    for n, (case, fixed) in enumerate(product(layouts(model), both)):
        chosen = dict(zip(switches, turns[n * 5 % len(turns)], strict=True))  # 5 is coprime to the 12 and 24 settings
        found.append(Case(**{**case.to_dict(), **chosen, **fixed}))
    return tuple(found)


def paired(model: str) -> list[Case]:
    """The cases of which the default run combines every two choices: an axis of 8 is left to one case each and the slow
    tier.

    Eight ranks cost the time of four, and no other axis goes with eight of one. Models with gated delta nets, most of
    whose parts the others prove, have at most two on an axis; those without experts have the small cases alone.
    """
    if model == "qwen3_5":
        return list(small(model))
    if model in HYBRID:
        return [c for c in switched(model) if c.world <= 4 and max(getattr(c, axis) for axis in AXES) <= 2]
    return [case for case in switched(model) if max(case.tp, case.cp, case.dp, case.etp) < RANKS]


def small(model: str) -> tuple[Case, ...]:
    """One axis at a time."""
    return tuple(parse(text, model=model) for text in SMALL[model])


def cover_pairs(keys: Sequence[str], candidates: Sequence[Case], covered: Iterable[Case] = ()) -> list[Case]:
    """Candidates, smallest world first, in which any two choices that some candidate combines go together.

    Greedy and deterministic: of those that add most pairs to the `covered` ones the smallest world is taken.
    """
    by_world = sorted(candidates, key=lambda c: c.world)
    column: dict[tuple[str, object], int] = {}
    rows = [[column.setdefault((key, getattr(c, key)), len(column)) for key in keys] for c in by_world]
    first, second = np.triu_indices(len(column), 1)

    def pairs(rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Pairs of choices x cases: which occur in which."""
        has = np.zeros((len(column), len(rows)), dtype=bool)
        for n, row in enumerate(rows):
            has[row, n] = True
        return has[first] & has[second]

    occurs = pairs(rows)
    settings = [[(key, getattr(c, key)) for key in keys] for c in covered]
    left = occurs.any(1) & ~pairs([[column[s] for s in row if s in column] for row in settings]).any(1)
    added = occurs[left].sum(0)
    chosen: list[Case] = []
    while left.any():
        best = int(added.argmax())  # the first of equals
        new = occurs[:, best] & left
        chosen.append(by_world[best])
        added -= occurs[new].sum(0)
        left &= ~new
    return sorted(chosen, key=lambda c: c.world)


@cache
def default(model: str) -> tuple[Case, ...]:
    """What the default run proves: the small cases, and with them a cover of all pairs of choices of this model.

    Pairs of the dense model also occur in cases of the one with experts.
    """
    keys = (*AXES, *SWITCHES[model])
    elsewhere = default("moe") if model == "dense" else ()
    return (*small(model), *cover_pairs(keys, paired(model), (*small(model), *elsewhere)))
