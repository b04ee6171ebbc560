"""The layout as a text grid: a column per pipeline stage with its layers, a row per position within the stage, ranks in
the cells.

Owns the drawing for terminals; all numbers come from `layout.py` and `pipeline_split.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import ModelChunk, PipelineSplit, model_chunks_by_stage

MOST_ROWS = 8
MOST_COLUMNS = 8
ELISION = "..."

T = TypeVar("T")


def rank_grid_text(
    layout: Layout, num_layers: int, split: PipelineSplit | None = None, prediction_layers: int = 0
) -> str:
    """The grid. Long sides are cut in the middle; ranks of a tensor-parallel group share a cell. `prediction_layers`
    for multi-token prediction stand beside the head.

    TP2 PP2 DP2, 4 layers:
                    stage 0     stage 1
        layers      embed+0-1   2-3+head
        dp 0        ranks 0-1   ranks 4-5
        dp 1        ranks 2-3   ranks 6-7
    """
    chunks = model_chunks_by_stage(num_layers, layout, split)
    stages = _elide(range(layout.pp), MOST_COLUMNS)
    rows = [["", *_each(stages, "stage {}".format)]]
    for v in range(layout.vpp):
        name = "layers" if layout.vpp == 1 else f"chunk {v}"
        rows.append([name, *_each(stages, partial(_chunk, chunks, prediction_layers, v))])
    places = [(dp, cp) for dp in range(layout.dp) for cp in range(layout.cp)]
    for place in _elide(places, MOST_ROWS):
        if place is None:
            rows.append([ELISION] * (len(stages) + 1))
            continue
        dp, cp = place
        name = f"dp {dp}" + (f" cp {cp}" if layout.cp > 1 else "")
        rows.append([name, *_each(stages, partial(_ranks, layout, dp, cp))])
    if layout.ep * layout.etp > 1:
        rows.append(["experts", *_each(stages, lambda p: f"ep {layout.ep} x etp {layout.etp} x edp {layout.edp}")])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _chunk(chunks: Sequence[Sequence[ModelChunk]], prediction_layers: int, chunk: int, pp: int) -> str:
    held = chunks[pp][chunk]
    if held.loss and prediction_layers:
        return f"{held}+{prediction_layers} mtp"
    return str(held)


def _ranks(layout: Layout, dp: int, cp: int, pp: int) -> str:
    first = layout.rank(tp=0, cp=cp, dp=dp, pp=pp)
    last = layout.rank(tp=layout.tp - 1, cp=cp, dp=dp, pp=pp)
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _elide(items: Sequence[T], most: int) -> list[T | None]:
    """At most `most` entries: the first ones, a None, the last one."""
    return list(items) if len(items) <= most else [*items[: most - 2], None, items[-1]]


def _each(stages: Sequence[int | None], cell: Callable[[int], str]) -> list[str]:
    return [ELISION if p is None else cell(p) for p in stages]
