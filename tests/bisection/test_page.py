"""The report of a comparison that is made by hand: the screen, JSON, and the page in a browser.

Covers: megaswift/bisection/page.py, megaswift/bisection/report.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megaswift.bisection.compare import Comparison, Verdict, misplaced_layers
from megaswift.bisection.page import page
from megaswift.bisection.report import report_json, screen, verdict_text
from megaswift.bisection.trace_folder import KINDS
from megaswift.parallel.layout import Layout
from tests.browser import evaluated, needs_browser

LAYOUT = Layout(8, tp=2, pp=4)


def comparison() -> Comparison:
    """Eight layers on four stages; on the second tensor-parallel rank layer 3 has no number, and all that follows is
    wrong."""
    found = Comparison([], repeated=["micro-batch 0 of replica 0, micro-batch 0 of replica 1"])
    for number, kind in enumerate(KINDS[1:]):
        for layer in range(8):
            for tp in range(2):
                rank = layer // 2 * 2 + tp
                place = LAYOUT.coordinates(rank)
                difference = 1e-7
                if number == 0 and layer >= 3 and tp == 1:
                    difference = math.nan if layer == 3 else 1e-3
                order = (number + 1, 0, 0, float(layer), f"layers.{layer}")
                microbatch = 0 if number < 4 else None
                verdict = Verdict(rank, place, kind, f"layers.{layer}", microbatch, difference, 1e-6, order)
                found.verdicts.append(verdict)
    found.verdicts.sort(key=lambda v: (v.order, v.rank))
    return found


def test_the_screen_and_json() -> None:
    """What is no number differs, and is null in JSON."""
    lines = screen(comparison(), LAYOUT, "OUT").splitlines()
    assert lines[0] == "compared 128 tensors of 8 ranks against OUT, TP2 PP4 DP1"
    assert lines[1] == (
        "first difference: layers.3, output, micro-batch 0, rank 3 (tp 1, pp 1): nan, expected <= 1.0e-06"
    )
    assert lines[2] == "ranks differ along tp; layers 0 to 2 agree everywhere"
    assert [line.split()[-3:] for line in lines[5:6]] == [["16", "5", "layers.3"]]
    assert lines[-1] == "replicas have the same rows: micro-batch 0 of replica 0, micro-batch 0 of replica 1"
    facts = json.loads(json.dumps(report_json(comparison(), LAYOUT, "OUT"), allow_nan=False))
    assert facts["first"]["difference"] is None and facts["suspect"] == "layers.3" and not facts["agrees"]


def test_a_layer_on_two_stages_and_one_on_none() -> None:
    """The input of a stage, under the name of the layer before it, does not count."""
    layout = Layout(4, tp=2, pp=2)
    right = {0: {"layers.0.mlp", "layers.1.mlp.linear_fc1.weight"}, 2: {"layers.1", "layers.2.mlp", "layers.3.mlp"}}
    assert misplaced_layers(right, 4, layout) == misplaced_layers(right, None, layout) == []
    assert [v.name for v in misplaced_layers({0: {"layers.0.mlp", "layers.2.mlp"}}, None, layout)] == ["layers.1"]
    assert misplaced_layers({0: {"layers.0"}, 2: {"layers.1"}}, 4, layout) == [], "whole layers only"
    wrong = {**right, 2: {"layers.0", "layers.1.mlp", "layers.2.mlp"}}
    found = Comparison(misplaced_layers(wrong, 4, layout))
    texts = [verdict_text(v, layout) for v in found.verdicts]
    assert texts == ["layers.1 is on 2 pipeline stages, the last of them pp 1", "layers.3 is on no pipeline stage"]
    lines = screen(found, layout, "hf").splitlines()
    assert lines[1] == f"first difference: {texts[0]}" and lines[2] == "no layer agrees everywhere"
    assert texts[1] in page(found, layout, "hf")


@needs_browser
@pytest.mark.process
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Four stages fit a laptop; on a narrow screen the picture scrolls and the page does not. The frame is on the row
    of layer 3, in the column of outputs on stage 1; red cells are those of the stages that differ."""
    file = tmp_path / "page.html"
    file.write_text(page(comparison(), LAYOUT, "OUT"))
    script = """
    const svg = document.querySelector("svg"), box = svg.parentElement.getBoundingClientRect();
    const center = (e) => { const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; };
    const texts = [...svg.querySelectorAll("text")], at = (t) => texts.filter((e) => e.textContent === t);
    const framed = svg.querySelector('rect[stroke-width="3"]'), row = center(at("layer 3")[0]);
    const hue = (e) => Number(e.getAttribute("fill").match(/hsl\\((\\d+)/)?.[1] ?? -1);
    return {
      fits: svg.getBoundingClientRect().width <= box.width,
      still: document.documentElement.scrollWidth <= window.innerWidth,
      row: Math.abs(center(framed)[1] - row[1]) < 8,
      column: at("pp 1")[0].getBoundingClientRect().left - framed.getBoundingClientRect().left,
      red: [...svg.querySelectorAll("rect")].filter((e) => hue(e) >= 0 && hue(e) < 60).length,
      title: framed.textContent,
    };
    """
    wide = evaluated(file, script, 1280)
    assert wide["fits"] and wide["still"] and wide["row"] and abs(wide["column"]) < 3
    assert wide["red"] == 5 and wide["title"].startswith("layers.3, output, micro-batch 0, rank 3 (tp 1, pp 1)")
    narrow = evaluated(file, script, 500)
    assert not narrow["fits"] and narrow["still"]
