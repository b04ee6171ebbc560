"""`megaswift deploy` for the board's chat: `python -m megaswift.board.model_server ...`, which ends with the board.

The board holds the other end of standard input, and the system closes that however the board ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from megaswift.cli import main as command


def main(argv: Sequence[str]) -> int:
    """Serve a model until the board ends; returns the exit code."""
    threading.Thread(target=_end_with_board, name="board", daemon=True).start()
    return command(["deploy", *argv])


def _end_with_board() -> None:
    while os.read(sys.stdin.fileno(), 1 << 12):  # not its buffer, whose lock Python wants when it ends
        pass
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
