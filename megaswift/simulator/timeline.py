"""When each pipeline stage computes what: passes in the order of the real schedule, as early as their inputs allow.

Messages between stages take no time. A stage's passes take what the caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaswift.simulator.calls import Pass

IDLE = "."


class Slot(NamedTuple):
    """A pass with the time that it takes."""

    stage: int
    kind: str
    chunk: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of all stages."""

    stages: int
    slots: tuple[Slot, ...]

    @property
    def end(self) -> float:
        """When the last pass ends."""
        return max((slot.end for slot in self.slots), default=0.0)

    def busy(self, stage: int) -> float:
        """Return the time in which a stage computes."""
        return sum(slot.end - slot.start for slot in self.slots if slot.stage == stage)

    @property
    def bubble(self) -> float:
        """The share of time in which stages wait, over all of them."""
        total = self.end * self.stages
        return 1 - sum(map(self.busy, range(self.stages))) / total if total else 0.0

    def text(self, width: int) -> str:
        """Draw a line for each stage: forward passes as the last digit of their micro-batch, backward passes as a
        letter of it, waiting as a point. A column shows what takes most of its time."""
        step = self.end / width
        lines = []
        for stage in range(self.stages):
            shares: list[dict[str, float]] = [{} for _ in range(width)]
            for slot in (s for s in self.slots if s.stage == stage):
                mark = _mark(slot)
                for column in range(int(slot.start / step), min(width, int(slot.end / step) + 1)):
                    share = min(slot.end, (column + 1) * step) - max(slot.start, column * step)
                    shares[column][mark] = shares[column].get(mark, 0.0) + share
            cells = [max(s, key=lambda m: s[m]) if sum(s.values()) > step / 2 else IDLE for s in shares]
            lines.append(f"stage {stage:2} " + "".join(cells))
        return "\n".join(lines)


def _mark(slot: Slot) -> str:
    number = slot.microbatch % 10
    return str(number) if slot.kind == "forward" else "abcdefghij"[number]


def timeline(passes: Mapping[int, Sequence[Pass]], seconds: Callable[[int, Pass], float]) -> Timeline:
    """Return when passes run, by stage in the order in which each stage runs them.

    Args:
        passes: Stage -> its passes in order.
        seconds: The time of a stage's pass.
    """
    stages = len(passes)
    last = max((p.chunk for p in passes[stages - 1]), default=0)
    ends: dict[tuple[int, str, int, int], float] = {}
    free = dict.fromkeys(passes, 0.0)
    at = dict.fromkeys(passes, 0)
    slots = []
    moved = True
    while moved:
        moved = False
        for stage, own in passes.items():
            while at[stage] < len(own):
                p = own[at[stage]]
                needed = _input(stage, p, stages, last)
                if needed is not None and needed not in ends:
                    break
                start = max(free[stage], ends[needed] if needed is not None else 0.0)
                end = start + seconds(stage, p)
                ends[stage, p.kind, p.chunk, p.microbatch] = free[stage] = end
                slots.append(Slot(stage, p.kind, p.chunk, p.microbatch, start, end))
                at[stage] += 1
                moved = True
    assert all(at[stage] == len(own) for stage, own in passes.items()), "a pass waits for one that never comes"
    return Timeline(stages, tuple(slots))


def _input(stage: int, p: Pass, stages: int, last: int) -> tuple[int, str, int, int] | None:
    """The pass whose output another one needs."""
    if p.kind == "forward":
        if stage > 0:
            return stage - 1, "forward", p.chunk, p.microbatch
        return (stages - 1, "forward", p.chunk - 1, p.microbatch) if p.chunk else None
    if stage < stages - 1:
        return stage + 1, "backward", p.chunk, p.microbatch
    return (0, "backward", p.chunk + 1, p.microbatch) if p.chunk < last else (stage, "forward", last, p.microbatch)
