"""`megaswift report OUT [OUT ...]`: one page with the curves and completions of several runs."""

from __future__ import annotations

from pathlib import Path

from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.base.versions import run_folder
from megaswift.errors import Problem, UserError, missing_path_hint
from megaswift.run.report.comparison import write_comparison

METRICS = "metrics.jsonl"
DESCRIPTION = """\
Write a page that shows runs in the same plots, finished or not: curves by step, tokens or time, completions, and the
options that differ. The page is one file that needs no other.
"""


def main(argv: list[str]) -> int:
    """Write the page; returns the exit code."""
    parser = UserErrorArgumentParser(prog="megaswift report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", metavar="OUT", type=Path, nargs="+", help="output directory of a run")
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html")
    given = parser.parse_args(argv)
    folders = [run_folder(path, [METRICS]) for path in given.runs]
    problems = [
        Problem(str(path), f"contains no {METRICS}, hence no run", _advice(path))
        for path, folder in zip(given.runs, folders, strict=True)
        if not (folder / METRICS).is_file()
    ]
    page = given.output
    if page.name == "report.html" and (page.parent / METRICS).is_file():
        problems.append(Problem(str(page), "is the report that the run itself writes", "--output compared.html"))
    if problems:
        raise UserError(problems)
    write_comparison(page, folders)
    print(page)
    return 0


def _advice(path: Path) -> str:
    return "give the output directory of a run" if path.exists() else missing_path_hint(path)
