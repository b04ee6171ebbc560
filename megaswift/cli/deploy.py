"""`megaswift deploy` under a path of ms-swift: `torchrun megaswift/cli/deploy.py`."""

import sys
from pathlib import Path

if not __package__:  # run as a file: python has put its folder on the path, where it would hide other packages
    _here = Path(__file__).resolve()
    sys.path[:] = [str(_here.parents[2]), *(p for p in sys.path if not Path(p).resolve().is_relative_to(_here.parent))]

from megaswift.cli import main  # noqa: E402
from megaswift.error_exit import end_process  # noqa: E402

if __name__ == "__main__":
    end_process(main(["deploy", *sys.argv[1:]]))
