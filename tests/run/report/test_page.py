"""report.html: one well-formed file that needs nothing from outside and tells what the run's files say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.run.report import page
from megaswift.trainers.hooks.metrics import strict_json_text
from tests.run.report.runs import completion, line

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


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path, Path, SwiftConfig]:
    cfg = SwiftConfig(task="sft", model="<b>DIR</b>", dataset="d.jsonl", lr=3e-4, output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("".join(strict_json_text(line(i)) + "\n" for i in range(1, 21)))
    (tmp_path / "eval.jsonl").write_text(strict_json_text({"step": 20, "epoch": 2.0, "loss": 0.75}) + "\n")
    return tmp_path / "report.html", tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl", cfg


def parsed(run: tuple[Path, Path, Path, SwiftConfig]) -> tuple[str, Strict]:
    path, metrics, evaluation, cfg = run
    rows = [("model", "qwen3"), ("layout", "TP2 PP2 on 4 processes\n  ranks 0-1   ranks 2-3")]
    made = page.RunReportHeaderAndTimes(
        "tiny & <small>", "sft of model", "finished", rows, {"data": 1.25, "metrics": 3}
    )
    page.write_report(path, cfg, made, (metrics, evaluation, metrics.with_name("completions.jsonl")))
    text = path.read_text(encoding="utf-8")
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return text, parser


def data_of(parser: Strict) -> dict:
    """What the page's script reads."""
    return json.loads(next(text for text in parser.texts if text.startswith('{"charts":')))


def test_the_page_is_well_formed_and_self_contained(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    text, parser = parsed(run)
    assert parser.links == [] and "link" not in parser.tags and parser.tags.count("script") == 2
    outside = re.sub(r"http://www.w3.org/2000/svg", "", text)  # the name of a vocabulary, which nobody fetches
    assert not re.search(r"https?://|url\(|@import|import\(|fetch\(", outside)


def test_only_the_pages_own_script_may_run(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    text, _ = parsed(run)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_no_text_ends_the_data(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    """Texts of the model, names of rewards and of the run are data: no character of theirs is markup."""
    evil = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028 &lt;"
    row = completion(
        1, prompt=evil, completion=evil, token_texts=[evil], token_logprobs=[-1.0], **{f"rewards/{evil}": 1}
    )
    run[1].with_name("completions.jsonl").write_text(strict_json_text(row) + "\n")
    run[1].write_text(strict_json_text(line(1, **{f"rewards/{evil}/mean": 1.0, "rewards/b/mean": 1.0})) + "\n")
    text, parser = parsed(run)
    assert parser.tags.count("script") == 2 and "img" not in parser.tags
    shown = data_of(parser)["runs"][0]["completions"]["steps"][0]["rows"][0]
    assert shown["completion"] == shown["prompt"] == shown["token_texts"][0] == evil


def test_it_tells_figures_configuration_layout_timings_and_versions(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    _, parser = parsed(run)
    said = set(parser.texts)
    assert {
        "tiny & <small>",
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
    _, parser = parsed(run)
    assert {"96%", "of pairs ranked correctly, in evaluation"} <= set(parser.texts)
    data = data_of(parser)
    assert ["rewards/accuracies", "share of pairs ranked correctly"] in data["charts"]
    assert data["runs"][0]["evals"]["curves"]["rewards/accuracies"] == [0.96]


def test_each_prediction_layer_has_a_curve(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    ahead = {"mtp_1_loss": 2.5, "mtp_2_loss": 2.75}
    run[1].write_text("".join(strict_json_text(line(i, **ahead)) + "\n" for i in range(1, 21)))
    data = data_of(parsed(run)[1])
    assert ["mtp_2_loss", "loss of prediction layer 2"] in data["charts"]
    assert data["runs"][0]["curves"]["mtp_2_loss"]["mean"][19] == 2.75


def test_options_that_were_set_are_marked(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    text, _ = parsed(run)
    assert "<tr class=given><td>learning_rate</td>" in text and "<tr><td>weight_decay</td>" in text


def test_a_run_without_a_line_has_a_page_too(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    run[1].unlink()
    run[2].unlink()
    _, parser = parsed(run)
    assert "logged steps" in parser.texts and "Curves" not in parser.texts


def test_skipped_steps_are_a_figure(run: tuple[Path, Path, Path, SwiftConfig]) -> None:
    run[1].write_text(
        "".join(strict_json_text(line(i, **({"skipped": 2} if i > 17 else {}))) + "\n" for i in range(1, 21))
    )
    texts = parsed(run)[1].texts
    assert texts[texts.index("of these skipped: gradient not finite") - 1] == "6"
