"""A run of several nodes that ends with exit code 2, 3, 4 or 138, or by a signal to one node's command, ends on all of
them, without a restart; after out of memory it ends on all of them, too, whose launchers then start it once more.

torchrun's agents know nothing of each other's exit codes: the node of the failed rank would start again or end, and the
others would wait for it. The node where such an exit code occurs writes it to the store of the nodes
(`node_wait.py`), which the other agents read while they watch their workers.

`LocalElasticAgent` is the agent that torchrun starts (`torch.distributed.launcher.api`, torch 2.10 to 2.13); torchrun
has no option for another one, so its name there is replaced by the subclass below.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from megaswift.errors import EXIT_OOM_RETRY, NOT_RESTARTED
from megaswift.launchers.worker_failure import first_failure, worker_failures

END = "megaswift/end"
SEEN = "megaswift/end-seen/"
GRACE_SECONDS = 2.0
"""How long a node whose processes failed otherwise (they lost a peer) waits for the exit code of another node."""
LEAVE_SECONDS = 10.0
"""How long node 0, which owns the store, waits for the others to read the exit code."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class RunEnd:
    """The process whose exit code ends the run."""

    code: int
    rank: int
    """The node, where its command got a signal."""
    host: str
    signalled: bool = False
    """The ranks of all nodes save and end together then; a signal to those that have left their loop would kill
    them."""

    def text(self) -> str:
        """The line on the nodes where it did not occur."""
        if self.signalled:
            name = signal.Signals(self.code - 128).name
            return f"megaswift: this node ends too: node {self.rank} ({self.host}) received {name}"
        does = "starts again" if self.code == EXIT_OOM_RETRY else "ends"
        return (
            f"megaswift: this node {does} too: rank {self.rank} on {self.host} exited with code {self.code} (see there)"
        )


class EndedElsewhere(Exception):
    """Another node ended with one of `NOT_RESTARTED`."""

    def __init__(self, end: RunEnd) -> None:
        super().__init__(end.text())
        self.end = end


class NodesEnd:
    """The exit code that the nodes of a run share in their store. Without an answer of the store, as after the loss of
    node 0, there is none."""

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        self._store = store
        self.node = node
        self._nodes = nodes

    def publish(self, end: RunEnd) -> None:
        """Writes this node's exit code, unless another node was first."""
        from torch.distributed import DistError

        try:
            self._store.compare_set(END, "", json.dumps(asdict(end)))
            self._store.set(f"{SEEN}{self.node}", "1")
        except DistError:
            pass

    def read(self, seconds: float = 0.0) -> RunEnd | None:
        """Another node's exit code, waiting for it up to so many seconds."""
        from torch.distributed import DistError

        deadline = time.monotonic() + seconds
        try:
            while not self._store.check([END]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(LOOK_SECONDS)
            self._store.set(f"{SEEN}{self.node}", "1")
            return RunEnd(**json.loads(self._store.get(END)))
        except DistError:
            return None

    def leave(self) -> None:
        """On node 0: waits until all nodes know an exit code that was published."""
        deadline = time.monotonic() + LEAVE_SECONDS
        if self.node == 0 and self.read() is not None:
            while time.monotonic() < deadline:
                if self._store.check([f"{SEEN}{node}" for node in range(self._nodes)]):
                    return
                time.sleep(LOOK_SECONDS)


def end_run_on_all_nodes(ends: NodesEnd) -> None:
    """Makes torchrun's agent in this process publish its exit codes of `NOT_RESTARTED` and end with another node's."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        """The agent, whose watch over its workers covers the other nodes' exit codes."""

        def _invoke_run(self, role: str = "default") -> RunResult:
            try:
                return super()._invoke_run(role)
            except SignalException as signalled:  # before the workers end, whose peers would start them again
                ends.publish(RunEnd(128 + int(signalled.sigval), ends.node, socket.gethostname(), signalled=True))
                raise

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                cause = first_failure(worker_failures(result.failures))
                if cause.code in NOT_RESTARTED or (cause.code == EXIT_OOM_RETRY and not self._remaining_restarts):
                    self._remaining_restarts = 0
                    ends.publish(RunEnd(cause.code, cause.rank, socket.gethostname()))
                    return result
            if result.state != WorkerState.SUCCEEDED:
                failed = result.state == WorkerState.FAILED
                end = ends.read(GRACE_SECONDS if failed else 0.0)
                if end is not None and (failed or not end.signalled):
                    raise EndedElsewhere(end)
            return result

    setattr(api, "LocalElasticAgent", Agent)  # noqa: B010 - a name that type checkers take for constant
