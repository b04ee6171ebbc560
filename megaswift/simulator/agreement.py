"""Do ranks call the same collectives, in the same order, with shapes that fit? Finds what would hang or mix up data.

Each group's calls are compared call by call between its ranks, messages between their two ends, and the order across
groups by running all ranks at once: a rank waits in a collective until the others of its group are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from megaswift.simulator.calls import Call, Form, Group, Trace

MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Disagreement:
    """Two ranks that do not fit together."""

    kind: str
    """`call`, `shape`, `line`, `missing` or `order`."""
    group: Group
    number: int
    """Which of the group's calls, or of the messages from one rank to the other, from 1."""
    ranks: tuple[int, int]
    calls: tuple[Call | None, Call | None]
    """Of the two ranks; None: it calls nothing more."""

    def __str__(self) -> str:
        """In words, with both lines of code."""
        lines = [f"group {self.group.name} ({_ranks(self.group.ranks)}), call {self.number}: {REASONS[self.kind]}"]
        for rank, call in zip(self.ranks, self.calls, strict=True):
            lines.append(f"  rank {rank}: " + ("no further call" if call is None else call_text(call)))
        return "\n".join(lines)


REASONS = {
    "call": "the ranks call different operations",
    "shape": "the tensors do not fit together",
    "line": "the same operation from different lines",
    "missing": "one of the ranks does not call it",
    "order": "each rank waits for the other in another group",
}


def call_text(call: Call) -> str:
    """Write a call in one line."""
    form = call.sent or call.received
    tensors = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in form[:3]) + (", ..." if len(form) > 3 else "")
    end = "" if call.peer is None else f", {'to' if call.name == 'send' else 'from'} rank {call.peer}"
    return f"{call.name} {tensors}{end} at {call.where} ({call.phase})"


def _ranks(ranks: Sequence[int]) -> str:
    return "ranks " + (", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}")


def disagreements(traces: Mapping[int, Trace]) -> list[Disagreement]:
    """Return the first disagreement of each group that does not fit, and of each pair of ranks that exchange messages.
    Where all fit, one of the order across groups, and where there is none either, calls from different lines."""
    groups = list(_of_collectives(traces))
    wrong = [first for first, fits in groups if not fits]
    return [*wrong, *_of_messages(traces)] or [*_of_order(traces)] or [first for first, _ in groups]


def compared_calls(traces: Mapping[int, Trace]) -> tuple[int, int]:
    """Return how many calls of the traces have another rank's beside them, and how many have not."""
    both = [
        len(traces.keys() & (set(call.group.ranks) if call.name not in MESSAGES else {call.peer, trace.rank})) > 1
        for trace in traces.values()
        for call in trace.calls
    ]
    return sum(both), len(both) - sum(both)


def _of_collectives(traces: Mapping[int, Trace]) -> Iterator[tuple[Disagreement, bool]]:
    """The first difference within each group, and whether its calls fit together all the same."""
    by_group: dict[Group, dict[int, list[Call]]] = defaultdict(dict)
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.name not in MESSAGES:
                by_group[call.group].setdefault(rank, []).append(call)
    for group, calls in by_group.items():
        first, *others = (rank for rank in group.ranks if rank in traces)
        for other in others:
            if found := list(_differences(group, first, other, calls)):
                yield found[0], all(one.kind == "line" for one in found)
                break


def _differences(group: Group, one: int, other: int, calls: Mapping[int, list[Call]]) -> Iterator[Disagreement]:
    for number, (a, b) in enumerate(zip_longest(calls.get(one, []), calls.get(other, [])), 1):
        if kind := _difference(a, b, group, one, other):
            yield Disagreement(kind, group, number, (one, other), (a, b))


def _difference(a: Call | None, b: Call | None, group: Group, one: int, other: int) -> str:
    """The kind of a difference between two ranks' calls of one collective; empty where there is none."""
    if a is None or b is None:
        return "missing"
    if a.name != b.name or a.peer != b.peer:
        return "call"
    if a.name == "all_to_all":
        fits = _rows_fit(a, b, group.ranks.index(one), group.ranks.index(other))
    else:
        fits = (a.detail == b.detail) and _elements(a) == _elements(b)
    if not fits:
        return "shape"
    return "" if a.where == b.where else "line"


def _elements(call: Call) -> tuple[tuple[str, int], ...]:
    """Dtype and elements of what the collective moves; a root's tensors are another number than the others'."""
    form: Form = call.received if call.name in ("broadcast", "scatter") else call.sent
    return tuple((dtype, prod(shape)) for shape, dtype in form)


def _rows_fit(a: Call, b: Call, one: int, other: int) -> bool:
    """Return whether one gives what the other takes, in rows of one width."""
    widths = {(form[0][0][1:], form[0][1]) for form in (a.sent, a.received, b.sent, b.received)}
    a_takes, a_gives = a.detail
    b_takes, b_gives = b.detail
    return len(widths) == 1 and a_gives[other] == b_takes[one] and b_gives[one] == a_takes[other]


def _of_messages(traces: Mapping[int, Trace]) -> Iterator[Disagreement]:
    sent: dict[tuple[Group, int, int], list[Call]] = defaultdict(list)
    taken: dict[tuple[Group, int, int], list[Call]] = defaultdict(list)
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.name in MESSAGES and call.peer is not None and call.peer in traces:
                if call.name == "send":
                    sent[call.group, rank, call.peer].append(call)
                else:
                    taken[call.group, call.peer, rank].append(call)
    for key in dict.fromkeys([*sent, *taken]):
        group, source, target = key
        for number, (a, b) in enumerate(zip_longest(sent[key], taken[key]), 1):
            if a is None or b is None or a.sent != b.received:
                kind = "missing" if a is None or b is None else "shape"
                yield Disagreement(kind, group, number, (source, target), (a, b))
                break


def _of_order(traces: Mapping[int, Trace]) -> Iterator[Disagreement]:
    """Ranks that wait for each other for ever. Messages are taken as posted ahead: they wait for nobody."""
    calls = {rank: [c for c in trace.calls if c.name not in MESSAGES] for rank, trace in traces.items()}
    at = dict.fromkeys(calls, 0)
    todo = set(calls)
    while todo:
        rank = todo.pop()
        while at[rank] < len(calls[rank]):
            group = calls[rank][at[rank]].group
            others = [r for r in group.ranks if r in calls]
            if any(at[r] == len(calls[r]) or calls[r][at[r]].group != group for r in others):
                break
            for r in others:
                at[r] += 1
            todo |= set(others) - {rank}
    for rank, number in at.items():
        if number < len(calls[rank]):
            own = calls[rank][number]
            other = next(r for r in own.group.ranks if r in calls and calls[r][at[r]].group != own.group)
            yield Disagreement("order", own.group, number + 1, (rank, other), (own, calls[other][at[other]]))
            return
