"""Errors of the user's own Python files: importing one, and what its code raises, as messages with the user's lines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, UserError

FRAMES = 3
OURS = str(Path(__file__).parent)


def import_user_file(path: Path, flag: str) -> Mapping[str, Any]:
    """The names that a file defines. It can import modules of its own folder; installed packages have priority."""
    spec = importlib.util.spec_from_file_location(f"megaswift_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with convert_user_code_errors(lambda trace: ConfigError(Problem(flag, f"importing the file failed\n{trace}"))):
        spec.loader.exec_module(module)
    return vars(module)


@contextmanager
def convert_user_code_errors(say: Callable[[str], UserError]) -> Iterator[None]:
    """What code of the user's raises as the error that `say` makes of its traceback."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and call sys.exit
        raise say(user_traceback_text(error)) from error


def user_traceback_text(error: BaseException) -> str:
    """The last frames outside of this package, indented, and what was raised."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((OURS, "<frozen importlib"))
    ]
    lines = [*traceback.format_list(frames[-FRAMES:]), *traceback.format_exception_only(error)]
    return "\n".join("    " + line for entry in lines for line in entry.rstrip().splitlines())
