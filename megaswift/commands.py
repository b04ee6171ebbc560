"""What all command lines share: the words that ask for help, a parser whose mistakes are ours, and the answer to a
command that is none."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import NoReturn

from megaswift.confidential import masked_text
from megaswift.errors import ConfigError, Problem, UserError, nearest

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


class Parser(argparse.ArgumentParser):
    """Mistakes become one of our messages."""

    def error(self, message: str) -> NoReturn:
        """Never returns."""
        wrong = re.search(r"unrecognized arguments: (\S+)", message)
        known = [option for action in self._actions for option in action.option_strings]
        fix = nearest(wrong[1], known) if wrong else ""
        raise ConfigError(Problem(self.prog, masked_text(message), fix or f"{self.prog} --help"))
