"""PPO's critic: a model with a scalar head and its own engine on the policy's ranks, which predicts returns.

The critic takes one step before each step of the policy, on the same micro-batches, whose fields hold its targets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Batch
from megaswift.losses.value import PARTS, ValueLoss, explained_variance
from megaswift.trainers.batch_fields import BatchTransform
from megaswift.trainers.hook import Rate, Run
from megaswift.trainers.hooks.step_monitor import SkippedStepAndLossSpikeMonitor


class CriticTrainer(BatchTransform):
    """Trains the critic, one step before each step of the policy."""

    def __init__(self, engine: Engine, loss: ValueLoss, learning_rate: Rate) -> None:
        self.engine = engine
        self.loss = loss
        self.learning_rate = learning_rate
        self.steps = 0
        self.total_steps = 0
        self.watch = SkippedStepAndLossSpikeMonitor(of=" of the critic")
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def on_start(self, run: Run) -> None:
        """Set the position in the schedule to that of the run."""
        self.steps = run.step
        self.total_steps = run.total_steps

    def on_end(self, run: Run) -> None:
        """Check the critic's progress: like the policy, a critic that has learned nothing fails the run."""
        self.watch.on_end(run)

    def check_progress(self, run: Run) -> None:
        """Check the critic's progress where a resumed run has no step left."""
        self.watch.check_progress(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of skipped steps."""
        return self.watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.watch.load_state_dict(state)

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Train the critic on the micro-batches, and return them unchanged."""
        began = time.perf_counter()
        rate = self.learning_rate(self.steps - self.watch.skipped, self.total_steps)
        result = self.engine.train_batch(batches, self.loss, rate)
        self.steps += 1
        self.watch.skips(self.steps, result)
        explained = explained_variance(result.metrics)
        self.metrics = {name: value for name, value in result.metrics.items() if name not in PARTS}
        self.metrics |= {"value/grad_norm": result.grad_norm or 0.0}
        if explained is not None:
            self.metrics["value/explained_variance"] = explained
        self.seconds = time.perf_counter() - began
        return batches
