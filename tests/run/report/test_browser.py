"""What the page's script draws, in a real browser."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megaswift.run.report.comparison import write_comparison
from tests.browser import document, evaluated, needs_browser
from tests.run.report.runs import completion, line, write_folder

pytestmark = [needs_browser, pytest.mark.process]

CHART = 'const chart = (name) => document.querySelector(`[data-metric="${name}"]`);'
TEXTS = "const texts = (name, kind) => [...chart(name).querySelectorAll(`text.${kind}`)].map((t) => t.textContent);"
CHOOSE = """
const choose = (name, value) => {
  const control = document.querySelector(`[name=${name}]`);
  control.value = value;
  control.dispatchEvent(new Event(control.type === "range" ? "input" : "change"));
};
"""
HELP = CHART + TEXTS + CHOOSE


def page_of(folder: Path, *runs: Path) -> Path:
    """The page of these runs."""
    write_comparison(folder / "page.html", runs)
    return folder / "page.html"


def falling(count: int = 90, **other: Any) -> list[dict[str, Any]]:
    """A loss from 7.9 to 0.06, as a run of the quickstart has it."""
    rate = math.log(0.06 / 7.9) / (count - 1)
    return [line(i, loss=7.9 * math.exp(rate * (i - 1)), **other) for i in range(1, count + 1)]


def test_values_near_the_end_can_be_read(tmp_path: Path) -> None:
    """A loss that falls by two orders of magnitude has a logarithmic axis, a linear one on request."""
    page = page_of(tmp_path, write_folder(tmp_path / "run", falling(), [{"step": 90, "loss": 0.075}]))
    found = evaluated(
        page,
        f"""{HELP}
        const automatic = texts("loss", "y");
        choose("scale", "linear");
        const key = chart("loss").querySelector(".key").innerText;
        return [automatic, texts("loss", "y"), texts("learning_rate", "y"), key];
        """,
    )
    automatic, linear, rate, key = found
    assert automatic == ["0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"] and linear[0] == "0" and len(linear) >= 5
    assert len(set(rate)) == len(rate) >= 3
    assert "0.06" in key and "0.075" in key, "the last values as numbers"


def test_a_constant_zero_has_no_axis_below_zero(tmp_path: Path) -> None:
    lines = [line(i, **{"reward": -1.0 * (i % 2), "completions/clipped_ratio": 0.0}) for i in range(1, 9)]
    page = page_of(tmp_path, write_folder(tmp_path / "run", lines))
    clipped, reward = evaluated(page, f'{HELP} return [texts("completions/clipped_ratio", "y"), texts("reward", "y")];')
    assert clipped[0] == "0" and not any(text.startswith("-") for text in clipped)
    assert reward[0] == "-1"


def test_axis_by_step_tokens_and_time(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_folder(tmp_path / "run", falling(tokens=50_000, step_time=60.0)))
    found = evaluated(
        page,
        f"""{HELP}
        return ["step", "tokens", "time"].map((axis) => {{ choose("x", axis); return texts("loss", "x").at(-1); }});
        """,
    )
    assert found == ["80", "4M", "80"], "minutes"
    hours = page_of(tmp_path, write_folder(tmp_path / "run", falling(step_time=600.0)))
    assert evaluated(hours, f'{HELP} choose("x", "time"); return texts("loss", "x").at(-1);') == "15"


def test_smoothing_is_a_median_of_a_share_of_the_run(tmp_path: Path) -> None:
    lines = [line(i, loss=50.0 if i == 45 else 2.0) for i in range(1, 91)]
    page = page_of(tmp_path, write_folder(tmp_path / "run", lines))
    found = evaluated(
        page,
        f"""{HELP}
        const drawn = () => [chart("loss").querySelectorAll("path.raw").length, smooth([2, 2, 50, 1, 1], windowOf(90))];
        const smoothed = drawn();
        choose("smoothing", 0);
        return [smoothed, drawn(), smooth([1, null, 3], 3)];
        """,
    )
    assert found == [[1, [2, 2, 2, 1, 1]], [0, [2, 2, 50, 1, 1]], [1, None, 3]]


def test_two_runs_in_a_plot_and_one_of_them_hidden(tmp_path: Path) -> None:
    slow = write_folder(tmp_path / "slow", falling(40))
    page = page_of(tmp_path, write_folder(tmp_path / "fast", falling()), slow)
    found = evaluated(
        page,
        f"""{HELP}
        const state = () => [
          chart("loss").querySelectorAll("path.mean").length, chart("loss").querySelector(".key").innerText];
        const both = state();
        document.querySelector(".run input").click();
        return [both, state()];
        """,
    )
    (count, key), (fewer, other) = found
    assert count == 2 and "fast" in key and "slow" in key
    assert fewer == 1 and "fast" not in other and "slow" in other


def test_a_range_that_is_marked_is_shown_alone(tmp_path: Path) -> None:
    """Values near the end fill the chart; the button brings the whole run back."""
    page = page_of(tmp_path, write_folder(tmp_path / "run", falling()))
    found = evaluated(
        page,
        f"""{HELP}
        const svg = chart("loss").querySelector("svg");
        const box = svg.getBoundingClientRect();
        const at = (share) => ({{ clientX: box.left + share * box.width, pointerType: "mouse" }});
        svg.dispatchEvent(new PointerEvent("pointerdown", at(0.8)));
        svg.dispatchEvent(new PointerEvent("pointermove", at(0.9)));
        const key = chart("loss").querySelector(".key").innerText;
        svg.dispatchEvent(new PointerEvent("pointerup", at(0.95)));
        const zoomed = [texts("loss", "x"), texts("grad_norm", "x")];
        document.getElementById("whole").click();
        return [key, zoomed, texts("loss", "x")];
        """,
    )
    key, (zoomed, norm), whole = found
    assert re.search(r"step [78]\d", key), "the values under the pointer"
    assert zoomed == norm and all(65 < int(text) <= 90 for text in zoomed) and int(whole[0]) < 40


def test_labels_of_an_axis_differ_and_say_their_values(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_folder(tmp_path / "run", [line(1)]))
    ranges = [[0.6531, 0.6535], [9.99e-6, 1e-5], [5.0001, 5.0003], [12345, 12347], [1e6, 1.0004e6], [0, 1], [-1, 1]]
    found = evaluated(page, f"return {ranges}.map(([a, b]) => [linearTicks(a, b, 6), labels(linearTicks(a, b, 6))]);")
    for (low, high), (ticks, texts) in zip(ranges, found, strict=True):
        assert len(set(texts)) == len(ticks) >= 4 and low <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)
        for value, text in zip(ticks, texts, strict=True):
            read = float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
            assert read == pytest.approx(value, abs=0.01 * (ticks[1] - ticks[0]))


def test_completions_of_every_step_with_colors_of_tokens(tmp_path: Path) -> None:
    tokens = {"token_texts": ["4", "<tool>", "!"], "token_logprobs": [-5.0, None, -0.25]}
    rows = [
        completion(1, completion="first"),
        completion(3, completion="poor", reward=0.1, **{"rewards/style": 0.5}),
        completion(3, completion="good", reward=0.9, **tokens, token_advantages=[1.0, None, -0.5]),
    ]
    page = page_of(tmp_path, write_folder(tmp_path / "run", [line(1), line(3)], completions=rows))
    found = evaluated(
        page,
        f"""{HELP}
        const shown = () => document.getElementById("samples").innerText;
        const colors = () => [...document.querySelectorAll(".token")].map((t) => t.style.background);
        const last = [shown(), colors(), document.querySelector(".token").title];
        choose("colors", "token_advantages");
        const advantages = colors();
        choose("order", "best");
        const best = shown();
        choose("step", 0);
        return [last, advantages, best, shown()];
        """,
    )
    (last, likely, title), advantages, best, first = found
    assert last.index("poor") < last.index("4<tool>!") and "first" not in last and "style 0.5" in last
    assert likely == ["rgba(var(--low),0.75)", "", "rgba(var(--low),0.04)"] and title.startswith("log-probability -5 (")
    assert advantages == ["rgba(var(--good),0.75)", "", "rgba(var(--bad),0.38)"]
    assert best.index("4<tool>!") < best.index("poor") and "→ first" in first and "poor" not in first


def test_neither_a_completion_nor_a_name_can_inject(tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    rows = [
        completion(1, completion=evil, prompt=evil, token_texts=[evil], token_logprobs=[-1.0], **{f"rewards/{evil}": 1})
    ]
    metrics = [line(i, **{evil: i, f"rewards/{evil}/mean": i, "rewards/b/mean": 1}) for i in (1, 2)]
    named = write_folder(tmp_path / "<img src=x onerror=document.title=1>", metrics, completions=rows)
    page = page_of(tmp_path, named, write_folder(tmp_path / "other", metrics))
    found = document(page)
    assert "<title>&lt;img src=x onerror=document.title=1&gt; and other</title>" in found
    assert "<img" not in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL)
    assert found.count("&lt;/script&gt;") >= 4, "the texts are shown"
    # The policy holds even where a text were to become markup.
    page.write_text(page.read_text().replace("</main>", "<script>document.title='taken'</script></main>"))
    assert "<title>taken" not in document(page)


def test_on_a_narrow_screen_nothing_is_wider_than_it(tmp_path: Path) -> None:
    rows = [completion(1, completion="word " * 50)]
    run = write_folder(tmp_path / "run", falling(), completions=rows)
    too_wide, size = evaluated(
        page_of(tmp_path, run),
        f"""{HELP}
        const text = getComputedStyle(chart("loss").querySelector("text"));
        return [document.documentElement.scrollWidth - innerWidth, text.fontSize];
        """,
        width=500,
    )
    assert too_wide <= 0 and size == "11px"
