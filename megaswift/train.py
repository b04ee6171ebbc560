"""Training of the task that the options name: `megaswift train`, `torchrun megaswift/train.py --config FILE`.

Owns finding the task: `task`, `--algorithm`, `--training_task`, `--rlhf_type` or the file's; without any it is sft.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: python has put megaswift/ itself on the path, where it would hide other packages
    _root = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [_root, *(p for p in sys.path if p != _root and Path(p).resolve() != Path(_root, "megaswift"))]

from megaswift.base.command_words import HELP  # noqa: E402
from megaswift.commands import training  # noqa: E402
from megaswift.config import load_config  # noqa: E402
from megaswift.error_exit import end_process, exit_worker, print_error_once  # noqa: E402
from megaswift.errors import UserError  # noqa: E402
from megaswift.launchers.options.variables import without_local_rank  # noqa: E402

USAGE = """\
megaswift train: the command of the task that the options name (task, --algorithm, --rlhf_type), else megaswift sft

  megaswift train --config run.yaml
  megaswift train --algorithm dpo --model DIR --dataset pairs.jsonl
  torchrun --nproc_per_node 4 megaswift/train.py --config run.yaml

megaswift sft --help shows the options; any other task has its own"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code of the task's command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or any(word in HELP for word in words):
        print(USAGE)
        return 0 if words else 2
    try:
        task = load_config(None, without_local_rank(words, os.environ)).task
    except UserError as error:
        exit_worker(print_error_once(error, os.environ), os.environ)
    return training.main(task, words)


if __name__ == "__main__":
    end_process(main())
