"""`--check_replicas_interval`: ends a run whose data-parallel replicas do not hold the same weights.

A checkpoint is compared before it is written, so that the newest one is never of replicas that differ.
"""

from __future__ import annotations

import socket

from megaswift import distributed
from megaswift.engine.diagnostics.replica_checksums import ReplicaDifference, replica_differences
from megaswift.engine.protocol import Engine
from megaswift.errors import Problem, UserError
from megaswift.trainers.hook import Hook, Run, StepRecord

SHOWN = 4


class ReplicasDiffer(UserError):
    """Weights are not the same on all data-parallel replicas."""

    title = "data-parallel replicas hold different weights"
    exit_code = 1


class ReplicaCheckHook(Hook):
    """Stands before the checkpoint's hook."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.checked = 0
        """The last step whose weights were equal."""

    def on_start(self, run: Run) -> None:
        """Compare the weights that were loaded."""
        self.check(run)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Compares when it is due."""
        if step.number % self.interval == 0:
            self.check(run)

    def check(self, run: Run) -> None:
        """Raise `ReplicasDiffer` on every rank where replicas have different weights. Collective."""
        for folder, engine in {"": run.engine, **run.engines}.items():
            refuse_differing_replicas(engine, run.step, self.checked, f"{folder}: " if folder else "")
        self.checked = run.step


def refuse_differing_replicas(engine: Engine, step: int, checked: int, prefix: str = "") -> None:
    """Raise `ReplicasDiffer`, on every rank, with the tensors and the ranks that hold other values. Collective."""
    own = replica_differences(engine.replicated_weights())
    hosts = distributed.all_gather_objects(socket.gethostname() if own else "")
    problems = [_problem(one, hosts, step, checked, prefix) for one in own]
    distributed.raise_on_all_ranks(problems, ReplicasDiffer, limit=SHOWN)


def _problem(one: ReplicaDifference, hosts: list[str], step: int, checked: int, prefix: str) -> Problem:
    odd = ", ".join(f"{rank} ({hosts[rank]})" for rank in one.odd[:SHOWN])
    rule = f"step {step}: rank{'s' if len(one.odd) > 1 else ''} {odd} hold other values than rank {one.others[0]}"
    rule += f"; equal at step {checked}" if checked != step else ""
    return Problem(f"{prefix}{one.name}", rule, "check the hardware of these ranks; resume from the last checkpoint")
