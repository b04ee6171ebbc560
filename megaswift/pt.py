"""Pretraining on plain text: `torchrun megaswift/pt.py`, `torchrun -m megaswift.pt`, `megaswift pt`."""

import sys
from pathlib import Path

if not __package__:  # run as a file: python has put megaswift/ itself on the path, where it would hide other packages
    _root = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [_root, *(p for p in sys.path if p != _root and Path(p).resolve() != Path(_root, "megaswift"))]

from megaswift.commands.training import main  # noqa: E402
from megaswift.error_exit import end_process  # noqa: E402

if __name__ == "__main__":
    end_process(main("pt"))
