"""The program in which the board checks a run: `python -m megaswift.board.check`.

It reads a request in JSON, makes the checks that the run would make before it loads anything, and prints the problems.
A process of its own, because plugins of the run are imported, and because a library may end or block it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megaswift.commands.training import further_problems_of_refused_config, process_count
from megaswift.config import load_config
from megaswift.config.sections import NAMES
from megaswift.errors import UserError, storage_error
from megaswift.launchers.launcher import launcher_of
from megaswift.options.spelling import errors_as_typed


def main() -> int:
    """Answer the request on standard input; returns the exit code."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # of libraries
        answer = checked(request["task"], request["words"])
    print(json.dumps(answer))
    return 0


def checked(task: str | None, words: Sequence[str]) -> dict[str, Any]:
    """Check a run.

    Args:
        task: The task; None where the file in `words` names it.
        words: The words behind the command.

    Returns:
        `problems`, each with `what`, `rule` and `fix`; where there are none, `output_dir` and `notices`.
    """
    try:
        return _checked(task, words)
    except UserError as error:
        problems = error.problems
    except OSError as error:
        refused = storage_error(error)
        if refused is None:
            raise
        problems = refused.problems
    return {"problems": [asdict(problem) for problem in problems]}


def _checked(task: str | None, words: Sequence[str]) -> dict[str, Any]:
    cfg = load_config(task, words, complete=True, beyond=further_problems_of_refused_config)
    with errors_as_typed(cfg.typed, NAMES):
        if missing := launcher_of(cfg.launch).missing(cfg.launch):
            return {"problems": [asdict(problem) for problem in missing]}
        from megaswift.run.checks.engine_choice import resolve_engine
        from megaswift.run.checks.sampler_backend import resolve_sampler_backend
        from megaswift.run.training import preflight

        world = process_count(cfg.launch)
        preflight(resolve_sampler_backend(resolve_engine(cfg, world, tell=False), tell=False), world)
    return {"problems": [], "output_dir": cfg.checkpoint.output_dir, "notices": list(cfg.notices)}


if __name__ == "__main__":
    raise SystemExit(main())
