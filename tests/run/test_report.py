"""report.html: one well-formed file that needs nothing from outside and tells what the run's files say.

Covers: megaswift/run/charts.py.
"""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.run import charts, report
from megaswift.trainers.hooks.metrics import strict_json_text

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Strict(HTMLParser):
    """Every tag is closed in order; links and texts are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def line(step: int, **other: object) -> dict:
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 4.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "tokens": 100,
        "label_tokens": 40,
        "step_time": 0.5,
        "data_wait": 0.0,
        "tokens_per_second": 200.0 + step,
        "tokens_per_second_per_device": 50.0,
        "tflops_per_device": 1.5,
        "mfu": None,
        "memory_gib": 2.5,
        **other,
    }


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path, Path, SwiftConfig]:
    cfg = SwiftConfig(task="sft", model="<b>DIR</b>", dataset="d.jsonl", lr=3e-4, output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("".join(strict_json_text(line(i)) + "\n" for i in range(1, 21)))
    (tmp_path / "eval.jsonl").write_text(strict_json_text({"step": 20, "epoch": 2.0, "loss": 0.75}) + "\n")
    return tmp_path / "report.html", tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl", cfg


def parsed(run: tuple[Path, Path, Path, SwiftConfig], **story: object) -> tuple[str, Strict]:
    path, metrics, evaluation, cfg = run
    rows = [("model", "qwen3"), ("layout", "TP2 PP2 on 4 processes\n  ranks 0-1   ranks 2-3")]
    made = report.RunReportHeaderAndTimes(
        title="sft: tiny & <small>", status="finished", rows=rows, seconds={"data": 1.25, "metrics": 3.0}, **story
    )
    report.write_report(path, cfg, made, (metrics, evaluation, metrics.with_name("completions.jsonl")))
    text = path.read_text(encoding="utf-8")
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return text, parser


def test_the_page_is_well_formed_and_self_contained(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    text, parser = parsed(run)
    assert parser.links == [] and "script" not in parser.tags and "link" not in parser.tags
    assert not re.search(r"https?://|url\(|@import", text)
    assert parser.tags.count("svg") == 6


def test_it_tells_figures_configuration_layout_timings_and_versions(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    _, parser = parsed(run)
    said = set(parser.texts)
    assert {
        "sft: tiny & <small>",
        "<b>DIR</b>",
        "4 → 0.2",
        "0.75",
        "20",
        "2,000",
        "tokens, 800 with a label",
        "211",
        "2.50 GiB",
    } <= said
    assert {
        "TP2 PP2 on 4 processes\n  ranks 0-1   ranks 2-3",
        "1.25 s",
        "torch",
        "python",
        "learning_rate",
        "0.0003",
    } <= said


def test_preference_learning_has_its_curves_and_figures(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    told = {"rewards/accuracies": 0.5, "rewards/margins": 0.25, "rewards/chosen": 0.1, "rewards/rejected": -0.15}
    run[1].write_text("".join(strict_json_text(line(i, **told)) + "\n" for i in range(1, 21)))
    run[2].write_text(
        strict_json_text({"step": 20, "epoch": 2.0, "loss": 0.75, **told, "rewards/accuracies": 0.96}) + "\n"
    )
    text, parser = parsed(run)
    assert parser.tags.count("svg") == 10
    assert {"96%", "of pairs ranked correctly, in evaluation"} <= set(parser.texts)
    assert "evaluation, step 20: 0.96" in text and "training, step 20: 0.5" in text


def test_each_reward_has_a_curve_where_there_are_several(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    one = {"reward": 0.5, "reward_std": 0.1, "rewards/exact/mean": 0.5, "rewards/exact/std": 0.1}
    run[1].write_text("".join(strict_json_text(line(i, **one)) + "\n" for i in range(1, 21)))
    assert not [text for text in parsed(run)[1].texts if text.startswith("reward exact")], "it is the reward itself"
    both = one | {"rewards/a<b/mean": 0.25}
    run[1].write_text("".join(strict_json_text(line(i, **(one if i < 3 else both))) + "\n" for i in range(1, 21)))
    text, parser = parsed(run)
    assert {"reward exact, mean", "reward a<b, mean"} <= set(parser.texts), "a reward that no first line has too"
    assert "reward a&lt;b, mean, step 20: 0.25" in text


def test_each_prediction_layer_has_a_curve(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    ahead = {"mtp_1_loss": 2.5, "mtp_2_loss": 2.75}
    run[1].write_text("".join(strict_json_text(line(i, **ahead)) + "\n" for i in range(1, 21)))
    text, parser = parsed(run)
    assert {"loss of prediction layer 1", "loss of prediction layer 2"} <= set(parser.texts)
    assert "training, step 20: 2.75" in text


def test_the_last_completions_with_their_rewards(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    """A dozen of the last generation; conversations turn by turn; nothing of a text is markup."""
    first = {"step": 1, "prompt": "old", "completion": "gone", "reward": 0.0, "advantage": 0.0}
    last = [
        {
            "step": 5,
            "prompt": [{"role": "user", "content": f"<i>{i}</i>"}],
            "completion": f"answer {i}",
            "reward": 0.5,
            "tokens": 3,
            "rewards/format": 0.25,
            "rewards/digits": 1.0,
            "advantage": -0.125,
            "finished": True,
        }
        for i in range(14)
    ]
    last[0] |= {"rewards/format": None, "reward": 1.0}  # a function that did not apply
    last[1]["completion"] = [{"role": "assistant", "content": "hm"}, {"role": "tool", "content": "42"}]
    run[1].with_name("completions.jsonl").write_text("".join(strict_json_text(row) + "\n" for row in [first, *last]))
    text, parser = parsed(run)
    said = "".join(parser.texts)
    assert (
        "Completions of step 5" in parser.texts and parser.texts.count("format 0.25, digits 1; advantage -0.125") == 11
    )
    assert "format none, digits 1; advantage -0.125" in parser.texts
    assert "user: <i>0</i>\n→ answer 0" in parser.texts and "→ assistant: hm\ntool: 42" in said and "<i>0" not in text
    assert "answer 11" in said and "answer 12" not in said and "gone" not in said
    run[1].with_name("completions.jsonl").unlink()
    assert "Completions of step" not in parsed(run)[0]


def test_options_that_were_set_are_marked(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    text, _ = parsed(run)
    assert "<tr class=given><td>learning_rate</td>" in text and "<tr><td>weight_decay</td>" in text


def test_a_run_without_a_line_has_a_page_too(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    run[1].unlink()
    run[2].unlink()
    _, parser = parsed(run)
    assert "logged steps" in parser.texts and "svg" not in parser.tags


def test_nan_lines_do_not_reach_the_drawing(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    run[1].write_text("".join(strict_json_text(line(i, loss=math.nan, grad_norm=math.inf)) + "\n" for i in range(1, 4)))
    text, _ = parsed(run)
    drawing = "".join(re.findall(r"<svg.*?</svg>", text))
    assert "nan" not in drawing and "inf" not in drawing


def test_a_long_curve_is_thinned_without_losing_its_spike() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    kept = charts.thin_points(points)
    assert len(kept) <= charts.MOST_POINTS + 2 and (54_321.0, 9.0) in kept
    assert kept == sorted(kept) and kept[0] == points[0] and kept[-1] == points[-1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 5, 10]), (0.13, 0.47, [0.2, 0.3, 0.4]), (1, 600, [200, 400, 600]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.axis_ticks(low, high, 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high"), [(0.6531, 0.6535), (9.99e-6, 1e-5), (5.0001, 5.0003), (12345, 12347), (1e6, 1.0004e6)]
)
def test_a_narrow_range_has_no_two_labels_alike(low: float, high: float) -> None:
    values = charts.axis_ticks(low, high, 4)
    texts = charts.axis_labels(values)
    assert len(set(texts)) == len(values) >= 3
    for value, text in zip(values, texts, strict=True):
        read = float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
        assert read == pytest.approx(value, abs=0.01 * (values[1] - values[0])), "a label says its value"


def test_labels_of_a_wide_range_stay_short() -> None:
    assert charts.axis_labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]
    assert charts.axis_labels([0.0, 1e-5, 2e-5]) == ["0", "1e-05", "2e-05"]
    assert charts.axis_labels([10000.0, 20000.0]) == ["10k", "20k"]


def test_a_gap_does_not_move_the_axis() -> None:
    """Steps without a finite value: the chart has the range of steps of the others."""
    points = [(1.0, 2.0), *((float(step), math.nan) for step in range(2, 12))]
    svg = charts.line_chart_svg("norm", [charts.ChartSeries("norm", points, "mean")], (1.0, 3.0))
    assert f'cx="{charts.LEFT:.1f}"' in svg, "step 1 is at the left end"
    assert ">10</text>" in svg and ">0</text>" not in svg


def test_huge_numbers_have_short_labels() -> None:
    assert charts.axis_label(1e30) == "1e+30" and charts.axis_label(2.5e12) == "2500G"


def test_skipped_steps_are_a_figure(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    run[1].write_text(
        "".join(strict_json_text(line(i, **({"skipped": 2} if i > 17 else {}))) + "\n" for i in range(1, 21))
    )
    texts = parsed(run)[1].texts
    assert texts[texts.index("of these skipped: gradient not finite") - 1] == "6"


def test_points_are_placed_by_their_values() -> None:
    svg = charts.line_chart_svg(
        "t", [charts.ChartSeries("a", [(0, 0), (10, 1)], "mean")], (0, 1), width=176, height=138
    )
    assert 'points="62.0,112.0 162.0,12.0"' in svg and "<title>a, step 10: 1</title>" in svg
