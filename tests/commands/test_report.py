"""`megaswift report`: where it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.commands.report import main
from megaswift.errors import UserError
from tests.run.report.runs import line, write_folder


def test_it_writes_a_page_into_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "a", [line(1)])
    write_folder(tmp_path / "output" / "v0-20261128-000000", [line(1)])
    write_folder(tmp_path / "output" / "v1-20261129-000000", [line(1)])
    monkeypatch.chdir(tmp_path)
    assert main(["a", "output"]) == 0 and capsys.readouterr().out == "report.html\n"
    assert "<title>a and output/v1-20261129-000000</title>" in Path("report.html").read_text(), "the newest version"


def test_it_refuses_what_is_no_run_and_the_place_of_a_runs_own_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_folder(tmp_path / "run", [line(1)])
    (run / "report.html").write_text("the run's own")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(run)
    with pytest.raises(UserError) as caught:
        main([".", "../empty", "../rum"])
    problems = [str(problem) for problem in caught.value.problems]
    assert "../empty: contains no metrics.jsonl" in problems[0] and "did you mean run?" in problems[1]
    assert "report.html: is the report that the run itself writes\n    try: --output compared.html" in problems[2]
    assert Path("report.html").read_text() == "the run's own"
    assert main([".", "--output", "compared.html"]) == 0
