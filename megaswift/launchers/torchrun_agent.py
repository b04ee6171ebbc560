"""torchrun's agent as megaswift starts it: `python -m megaswift.launchers.torchrun_agent TORCHRUN_OPTIONS`.

The same agent and the same workers. What differs is how it ends: one line in place of torchrun's traceback, and the
exit code of the process that failed first in place of 1; on several nodes, some exit codes of one end all
(`node_end.py`). The agent and its workers end with the process that started
them. torchrun's own log is off unless LOGLEVEL is set.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaswift.error_exit import end_process
from megaswift.errors import EXIT_USER_ERROR
from megaswift.launchers.finish_marks import FOLDER, unfinished_text
from megaswift.launchers.node_end import EndedElsewhere, NodesEnd, end_run_on_all_nodes
from megaswift.launchers.node_wait import MissingNodesError, gather_nodes
from megaswift.launchers.options.variables import NODE
from megaswift.launchers.parent_death import PARENT, end_with_parent
from megaswift.launchers.worker_failure import exit_code, failure_text, first_failure, worker_failures


def quiet_torchrun(environ: Mapping[str, str]) -> None:
    """Turns torchrun's log off: its lines repeat the final error message."""
    if "LOGLEVEL" not in environ:
        logging.disable(logging.CRITICAL)


def run_agent(argv: list[str], ends: NodesEnd | None) -> None:
    """torchrun with these options; what it raises, and `EndedElsewhere`."""
    from torch.distributed import run

    if ends is None:
        run.main(argv)
        return
    end_run_on_all_nodes(ends)
    try:
        run.main(argv)
    finally:
        ends.leave()


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun to the end; returns the exit code, which is not 0 where a training process has not finished."""
    words = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="megaswift-unfinished-") as folder:
        os.environ[FOLDER] = folder
        code = _run_to_end(words)
        if code == 0 and (line := unfinished_text(Path(folder))):
            print(line, file=sys.stderr, flush=True)
            return EXIT_USER_ERROR
    return code


def _run_to_end(words: list[str]) -> int:
    end_with_parent(os.environ)
    os.environ[PARENT] = str(os.getpid())
    quiet_torchrun(os.environ)
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    try:
        place = os.environ.get(NODE, "").split()
        store = gather_nodes(os.environ)  # kept: it is the store that torchrun uses
        ends = NodesEnd(store, int(place[0]), int(place[1])) if place else None
        run_agent(words, ends)
    except ChildFailedError as error:
        failure = first_failure(worker_failures(error.failures))
        if line := failure_text(failure):
            print(line, file=sys.stderr, flush=True)
        return exit_code(failure)
    except EndedElsewhere as error:
        print(error.end.text(), file=sys.stderr, flush=True)
        return error.end.code
    except MissingNodesError as error:
        print(error.message(), file=sys.stderr, flush=True)
        return error.exit_code
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before the workers were started
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    end_process(main())
