"""The page of bisect: a picture of layers and stages of a step by how far they are off, and the first differences."""

from __future__ import annotations

import math
from html import escape

from megaswift.bisection.compare import Comparison, Verdict
from megaswift.bisection.report import NAMED, agreement_text, suspect, verdict_text
from megaswift.bisection.trace_folder import BACKWARD, DIVISION, GATHERED, KINDS, WEIGHT
from megaswift.parallel.layout import Layout

GROUP = 108
NARROWEST = 26
GAP = 4
LEFT = 150
TOP = 52
ROW = 24
ROWS_SHOWN = 40
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem;margin:0 0 .3rem} p{margin:.3rem 0} .first{font-weight:600;overflow-wrap:anywhere}
svg text{font:12px system-ui,sans-serif;fill:currentColor} .scroll{overflow-x:auto;margin:1.2rem 0}
table{border-collapse:collapse;width:100%} th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #d8dde3}
td.n{text-align:right;font-variant-numeric:tabular-nums} .bad td{background:#fdecea}
@media(prefers-color-scheme:dark){body{color:#e6e9ed;background:#16191d}th,td{border-color:#363c44}
.bad td{background:#4a1f1c}}
"""
SHORT = {DIVISION: "division", BACKWARD: "output gradient", WEIGHT: "main weight", GATHERED: "model's weight"}
AHEAD = "MTP "
"""Before the number of a layer for multi-token prediction."""
NO_TENSOR = "#8884"


def color(ratio: float) -> str:
    """Green up to the tolerance, then from yellow to dark red over four powers of ten."""
    if ratio <= 1:
        return f"hsl(140 {30 + 15 * ratio:.0f}% {62 - 8 * ratio:.0f}%)"
    share = 1.0 if not math.isfinite(ratio) else min(1.0, math.log10(ratio) / 4)
    return f"hsl({48 - 48 * share:.0f} 85% {58 - 18 * share:.0f}%)"


def _row_of(verdict: Verdict) -> str:
    """The row of the picture: a layer, or what stands before or after the layers."""
    parts = verdict.name.split(".")
    if parts[0] == "layers":
        return f"layer {parts[1]}"
    if parts[0] == "mtp":
        return f"{AHEAD}{int(parts[2]) + 1}"
    return {"output_layer": "head"}.get(parts[0], parts[0])


def _cell_of(verdict: Verdict) -> tuple[str, tuple[str, int]]:
    return _row_of(verdict), (verdict.kind, verdict.place.pp)


def _place(row: str) -> tuple[int, int]:
    if row.startswith("layer "):
        return 2, int(row[6:])
    if row.startswith(AHEAD):
        return 5, int(row.removeprefix(AHEAD))
    order = ("input_ids", "labels", "loss_weights", "valid", "cu_seqlens")
    if row in order:
        return 0, order.index(row)
    return {"embedding": (1, 0), "final_layernorm": (3, 0), "head": (4, 0), "loss": (6, 0)}.get(row, (7, 0))


def _columns(found: Comparison) -> list[tuple[str, int]]:
    """(kind, pipeline stage): a column of the picture each."""
    stages = sorted({v.place.pp for v in found.verdicts})
    kinds = [kind for kind in (DIVISION, *KINDS) if any(v.kind == kind for v in found.verdicts)]
    return [(kind, stage) for kind in kinds for stage in stages]


def picture(found: Comparison, layout: Layout) -> str:
    """An SVG: rows are layers, columns stages of the step on pipeline stages; the color is the worst tensor's."""
    columns = _columns(found)
    stages = len({stage for _, stage in columns})
    cell = max(NARROWEST, GROUP // max(stages, 1) - GAP)
    worst: dict[tuple[str, tuple[str, int]], Verdict] = {}
    for verdict in found.verdicts:
        key = _cell_of(verdict)
        if key not in worst or verdict.ratio > worst[key].ratio:
            worst[key] = verdict
    rows = sorted({row for row, _ in worst}, key=_place)
    framed = None if found.first is None else _cell_of(found.first)
    width = LEFT + len(columns) * (cell + GAP)
    height = TOP + len(rows) * (ROW + GAP)
    out = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    for x, (kind, stage) in enumerate(columns):
        left = LEFT + x * (cell + GAP)
        if x == 0 or columns[x - 1][0] != kind:
            words = SHORT.get(kind, NAMED[kind])
            out.append(f'<text x="{left}" y="18">{escape(words)}</text>')
        out.append(f'<text x="{left}" y="40">pp {stage}</text>')
    for y, row in enumerate(rows):
        top = TOP + y * (ROW + GAP)
        out.append(f'<text x="{LEFT - 10}" y="{top + 16}" text-anchor="end">{escape(row)}</text>')
        for x, column in enumerate(columns):
            left = LEFT + x * (cell + GAP)
            shown = worst.get((row, column))
            fill = NO_TENSOR if shown is None else color(shown.ratio)
            edge = ' stroke="currentColor" stroke-width="3"' if framed == (row, column) else ""
            title = "" if shown is None else f"<title>{escape(verdict_text(shown, layout))}</title>"
            opacity = ' opacity=".25"' if shown is None else ""
            out.append(
                f'<rect x="{left}" y="{top}" width="{cell}" height="{ROW}" rx="3" fill="{fill}"{edge}{opacity}>'
                f"{title}</rect>"
            )
    return "".join([*out, "</svg>"])


def page(found: Comparison, layout: Layout, against: str) -> str:
    """The whole page, without anything from elsewhere."""
    first = found.first
    if first is None:
        head = '<p class="first">No difference beyond rounding.</p>'
    else:
        agreeing = agreement_text(found, layout)
        where = f"<p>computed in the backward pass of {escape(suspect(found))}</p>" if first.kind == BACKWARD else ""
        facts = f"<p>{escape(agreeing)}</p>{where}"
        head = f'<p class="first">First difference: {escape(verdict_text(first, layout))}</p>{facts}'
    listed = [v for v in found.verdicts if v.bad][:ROWS_SHOWN] or found.verdicts[:ROWS_SHOWN]
    rows = "".join(
        f'<tr class="{"bad" if v.bad else ""}"><td>{escape(v.name)}</td><td>{escape(NAMED[v.kind])}</td>'
        f'<td class="n">{"" if v.microbatch is None else v.microbatch}</td><td class="n">{v.rank}</td>'
        f'<td class="n">{v.difference:.1e}</td><td class="n">{v.expected:.1e}</td></tr>'
        for v in listed
    )
    bad = sum(v.bad for v in found.verdicts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>megaswift bisect</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>megaswift bisect: {escape(layout.describe())} against {escape(against)}</h1>{head}"
        f"<p>{len(found.verdicts)} tensors compared, {bad} differ. Green is within rounding; yellow to red is how far "
        "a tensor lies beyond, by powers of ten. The frame is the first difference.</p>"
        f'<div class="scroll">{picture(found, layout)}</div>'
        '<div class="scroll"><table><thead><tr><th>tensor</th><th>of</th>'
        "<th>micro-batch</th><th>rank</th><th>difference</th><th>expected at most</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></body></html>"
    )
