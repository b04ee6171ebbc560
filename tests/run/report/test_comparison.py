"""Several runs on one page."""

from __future__ import annotations

from pathlib import Path

from megaswift.run.report.comparison import differing_options, distinct_names, run_name, write_comparison
from tests.run.report.runs import line, write_folder


def test_a_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    assert run_name(tmp_path / "warm") == "warm"
    assert run_name(tmp_path / "output" / "v3-20261129-181500") == "output/v3-20261129-181500"


def test_names_are_as_long_as_it_takes_to_tell_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "x" / "run", tmp_path / "b" / "x" / "run", tmp_path / "c"]
    assert distinct_names(folders) == ["a/x/run", "b/x/run", "c"]
    assert distinct_names([folders[0], folders[0]])[0].endswith("a/x/run"), "one run twice ends too"


def test_options_that_differ() -> None:
    options = [{"lr": 1e-3, "seed": 1, "output_dir": "a"}, {"lr": 1e-4, "seed": 1, "output_dir": "b", "tp": 2}]
    assert differing_options(options) == [("lr", ["0.001", "0.0001"]), ("tp", ["default", "2"])]


def test_a_default_that_is_written_out_differs_from_nothing() -> None:
    """A configuration leaves out what its algorithm does not read."""
    options = [{"gamma": 1.0, "loss_type": [], "epsilon": 0.2}, {"epsilon": 0.3, "loss_type": ["mine"]}]
    assert differing_options(options) == [("loss_type", ["default", "['mine']"]), ("epsilon", ["0.2 (default)", "0.3"])]


def test_the_page_has_both_runs(tmp_path: Path) -> None:
    config = "task: sft\noptimizer:\n  learning_rate: {}\n"
    first = write_folder(tmp_path / "fast", [line(i) for i in range(1, 5)], [{"step": 4, "loss": 1.25}])
    second = write_folder(tmp_path / "slow", [line(1, loss=3.5)], config=config.format(1e-4))
    (first / "config.yaml").write_text(config.format(1e-3))
    write_comparison(tmp_path / "both.html", [first, second])
    text = (tmp_path / "both.html").read_text()
    assert "<title>fast and slow</title>" in text
    assert "<tr><td>last evaluation loss</td><td>1.25</td><td></td></tr>" in text
    assert "<tr><td>time of training steps</td><td>0:02</td><td>0:00</td></tr>" in text
    assert "<tr><td>learning_rate</td><td>0.001</td><td>0.0001</td></tr>" in text
    assert "<td>task</td>" not in text


def test_a_configuration_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", [line(1)], config=": [")
    write_comparison(tmp_path / "page.html", [run])
    assert "Options that differ" not in (tmp_path / "page.html").read_text()
