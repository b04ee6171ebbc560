"""What all command lines share: the words that ask for help, and the answer to a command that is none."""

from __future__ import annotations

from collections.abc import Iterable

from megaswift.errors import Problem, UserError, nearest

HELP = ("-h", "--help")


def no_command(program: str, word: str, commands: Iterable[str]) -> UserError:
    """The mistake of asking `program` for `word`."""
    known = list(commands)
    return UserError(
        Problem(
            f"{program} {word}",
            f"is no command; commands are {', '.join(known)}",
            nearest(word, known) or f"{program} --help",
        )
    )
