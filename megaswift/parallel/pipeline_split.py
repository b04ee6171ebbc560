"""The layers of each pipeline stage and model chunk: evenly, with given counts for the first and last stage, or by a
layout string.

Owns the split and its rules, which are those of Megatron-Core's `TransformerConfig`. Leaves out ranks (`layout.py`) and
what a layer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megaswift.errors import LayoutError, Problem
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_string import parse_layout_string


class SplitOptions(Protocol):
    """What the split reads of `megaswift.config`'s section `parallel`."""

    @property
    def first_stage_layers(self) -> int | None: ...  # noqa: D102
    @property
    def last_stage_layers(self) -> int | None: ...  # noqa: D102
    @property
    def pipeline_layout(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True)
class PipelineSplit:
    """How the layers are spread over the pipeline; evenly when nothing is set."""

    first: int | None = None
    """Layers of the first stage, over all of its chunks; the rest is spread evenly."""
    last: int | None = None
    """Layers of the last stage."""
    custom: str | None = None
    """A layout string, in place of `first` and `last`."""

    @classmethod
    def from_config(cls, parallel: SplitOptions) -> PipelineSplit:
        """The split of a configuration."""
        return cls(parallel.first_stage_layers, parallel.last_stage_layers, parallel.pipeline_layout)


@dataclass(frozen=True)
class ModelChunk:
    """What one model chunk holds."""

    layers: range
    """Layer ids, from 0; may be empty where the chunk is for the embedding or the loss alone."""
    embedding: bool
    """Holds the input embedding."""
    loss: bool
    """Holds the final norm, the output layer and the loss."""

    def __str__(self) -> str:
        parts = []
        if self.embedding:
            parts.append("embed")
        if len(self.layers) > 1:
            parts.append(f"{self.layers[0]}-{self.layers[-1]}")
        elif self.layers:
            parts.append(f"{self.layers[0]}")
        if self.loss:
            parts.append("head")
        return "+".join(parts)


def model_chunks_by_stage(
    num_layers: int, layout: Layout, split: PipelineSplit | None = None
) -> list[list[ModelChunk]]:
    """[pp][vpp]: what every chunk of every stage holds. LayoutError when the layers cannot be spread so.

    A sample passes the stages of chunk 0, then those of chunk 1, and so on: chunk v of stage p is the (v x pp +
    p)-th."""
    split = split or PipelineSplit()
    pp = layout.pp
    vpp = layout.vpp
    problems = split_problems(num_layers, pp, vpp, split)
    if problems:
        raise LayoutError(problems)
    chunks = []
    start = 0
    for letters in _letters(num_layers, pp, vpp, split):
        stop = start + letters.count("t")
        chunks.append(ModelChunk(range(start, stop), "E" in letters, "L" in letters))
        start = stop
    return [[chunks[v * pp + p] for v in range(vpp)] for p in range(pp)]


def _letters(num_layers: int, pp: int, vpp: int, split: PipelineSplit) -> list[str]:
    """The split as the stages of a layout string, whatever it was given by."""
    if split.custom is not None:
        return parse_layout_string(split.custom)
    counts = [count // vpp for count in layers_per_stage(num_layers, pp, split)] * vpp
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return stages


def layers_per_stage(num_layers: int, pp: int, split: PipelineSplit) -> list[int]:
    """Layers of each stage when spread evenly between the given ends."""
    ends = (split.first or 0) + (split.last or 0)
    middle = pp - (split.first is not None) - (split.last is not None)
    counts = [(num_layers - ends) // middle if middle else 0] * pp
    if split.first is not None:
        counts[0] = split.first
    if split.last is not None:
        counts[-1] = split.last
    return counts


def split_problems(num_layers: int, pp: int, vpp: int, split: PipelineSplit) -> list[Problem]:
    """Why `num_layers` cannot be spread over `pp` stages of `vpp` chunks this way; empty when they can."""
    ends = {"--first_stage_layers": split.first, "--last_stage_layers": split.last}
    end_layers = {flag: count for flag, count in ends.items() if count is not None}
    if split.custom is not None:
        problems = _custom_problems(num_layers, pp, vpp, split.custom)
        if end_layers:
            what = " ".join(f"{flag} {count}" for flag, count in end_layers.items())
            problems.append(Problem(what, "conflicts with --pipeline_layout", "keep one of the two"))
        return problems
    if end_layers:
        return _ends_problems(num_layers, pp, vpp, end_layers)
    if num_layers % (pp * vpp):
        return [_even_problem(num_layers, pp, vpp)]
    return []


def _even_problem(num_layers: int, pp: int, vpp: int) -> Problem:
    what = f"--pp {pp}" + (f" --vpp {vpp}" if vpp > 1 else "")
    sizes = f"{pp} x {vpp} = {pp * vpp} chunks" if vpp > 1 else f"{pp} stages"
    rule = f"{num_layers} layers are {'fewer than' if pp * vpp > num_layers else 'not divisible by'} {sizes}"
    fixes = []
    if vpp > 1:
        chunks = [v for v in range(2, num_layers // pp + 1) if num_layers % (pp * v) == 0]
        fixes += [f"--vpp {v}" for v in nearest_values(chunks, vpp)] or (["no --vpp"] if num_layers % pp == 0 else [])
    if not fixes:
        fixes += [f"--pp {p}" + (" without --vpp" if vpp > 1 else "") for p in nearest_values(divisors(num_layers), pp)]
    if pp * vpp <= num_layers and pp > 1:
        fixes.append(f"--pipeline_layout '{balanced_pipeline_layout_string(num_layers, pp * vpp)}'")
    return Problem(what, rule, ", or ".join(fixes))


def _ends_problems(num_layers: int, pp: int, vpp: int, end_layers: dict[str, int]) -> list[Problem]:
    what = " ".join(f"{flag} {count}" for flag, count in end_layers.items())
    # The ends only make sense in a pipeline, and each needs at least one layer.
    if pp == 1:
        return [Problem(what, "needs a pipeline, but --pp is 1", "--pp 2, or leave it out")]
    problems = [
        Problem(f"{flag} {count}", "is not a positive number") for flag, count in end_layers.items() if count < 1
    ]
    if vpp > 1 and len(end_layers) == pp == 2:
        first = next(iter(end_layers))
        rule = "with --pp 2 one of them determines the other, and Megatron-Core's interleaved schedule fails with both"
        problems.append(Problem(what, rule, f"{first} {end_layers[first]} alone"))
    # The layers between the ends must fill the other stages evenly.
    middle_layers = num_layers - sum(end_layers.values())
    stages = pp - len(end_layers)
    if middle_layers < 0 or (middle_layers > 0) != (stages > 0):
        rule = f"leaves {middle_layers} of {num_layers} layers for the other {stages} of {pp} stages"
        enough = num_layers >= pp * vpp
        fix = (
            f"--pipeline_layout '{balanced_pipeline_layout_string(num_layers, pp * vpp)}', or neither"
            if enough
            else f"--pp {num_layers}"
        )
        problems.append(Problem(what, rule, fix))
    elif stages and middle_layers % (stages * vpp):
        chunks = f"{stages} x {vpp} chunks" if vpp > 1 else f"{stages} stages"
        rule = f"the other {middle_layers} of {num_layers} layers are not divisible by {chunks}"
        flag, count = next(iter(end_layers.items()))
        other_end = sum(end_layers.values()) - count
        fits = [
            n
            for n in range(1, num_layers - other_end)
            if (num_layers - other_end - n) % (stages * vpp) == 0 and n % vpp == 0
        ]
        problems.append(Problem(what, rule, ", or ".join(f"{flag} {n}" for n in nearest_values(fits, count))))
    # Each end must divide into the chunks of its stage.
    for flag, count in end_layers.items():
        if count > 0 and count % vpp:
            fits = [n for n in range(vpp, num_layers, vpp)]
            fix = ", or ".join(f"{flag} {n}" for n in nearest_values(fits, count))
            problems.append(
                Problem(f"{flag} {count}", f"is not divisible by the {vpp} chunks of a stage (--vpp {vpp})", fix)
            )
    return problems


def _custom_problems(num_layers: int, pp: int, vpp: int, custom: str) -> list[Problem]:
    what = f"--pipeline_layout {custom}"
    try:
        stages = parse_layout_string(custom)
    except LayoutError as error:
        return error.problems
    flat = "".join(stages)
    model = balanced_pipeline_layout_string(
        num_layers, len(stages) if len(stages) <= num_layers else min(num_layers, pp)
    )
    problems = []
    if len(stages) % pp:
        fits = ", or ".join(f"--pp {p}" for p in nearest_values(divisors(len(stages)), pp))
        problems.append(Problem(what, f"has {len(stages)} stages, which --pp {pp} does not divide", fits))
    elif len(stages) != pp * vpp:
        rule = f"has {len(stages)} stages, and --pp {pp} --vpp {vpp} makes {pp * vpp}"
        problems.append(Problem(what, rule, f"--vpp {len(stages) // pp}, or leave out --vpp"))
    if flat.count("t") != num_layers:
        problems.append(Problem(what, f"has {flat.count('t')} layers (t), the model has {num_layers}", model))
    if flat.count("E") != 1 or not flat.startswith("E") or flat.count("L") != 1 or not flat.endswith("L"):
        problems.append(Problem(what, "must begin with the embedding E and end with the loss L, each once", model))
    if "m" in flat:
        problems.append(
            Problem(what, "has multi-token-prediction layers (m), which are not trained", "remove m from the layout")
        )
    empty = [str(i) for i, stage in enumerate(stages) if not stage]
    if empty:
        problems.append(Problem(what, f"stage {', '.join(empty)} of {len(stages)} is empty", model))
    return problems


def balanced_pipeline_layout_string(num_layers: int, stages: int) -> str:
    """A layout string with counts that differ by one at most; the ends, which have embedding and loss besides, get the
    fewer."""
    base, extra = divmod(num_layers, stages)
    counts = [base] * stages
    middle = sorted(range(stages), key=lambda i: (i in (0, stages - 1), i == 0, i))
    for i in middle[:extra]:
        counts[i] += 1
    text = ["t" if count == 1 else f"t*{count}" for count in counts]
    text = [part if count else "" for part, count in zip(text, counts, strict=True)]
    text[0] = "E" + text[0]
    text[-1] += "L"
    return "|".join(text)


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_values(values: list[int], requested: int) -> list[int]:
    """The one below and the one above `asked` (itself left out), the nearer first."""
    below = [v for v in values if v < requested][-1:]
    above = [v for v in values if v > requested][:1]
    return sorted(below + above, key=lambda v: max(v, requested) / max(1, min(v, requested)))
