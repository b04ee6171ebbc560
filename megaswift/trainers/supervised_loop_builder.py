"""Builds the loop of tasks that train on a data set: supervised, pretraining, preference and reward-model tasks.
Reinforcement learning: `rl/rollout_loop_builder.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaswift.config.cuda_graph_rules import uses_cuda_graphs
from megaswift.config.data import PROMPTED
from megaswift.data.build_batch_sources import share_prompts
from megaswift.data.loader import TokenStoreBatchSource
from megaswift.trainers.add_preference_loss_fields_to_batches import LastTokens
from megaswift.trainers.choose_prefix_sharing import shares_prefixes
from megaswift.trainers.choose_step_packing import choose_step_packing
from megaswift.trainers.learning_rate_schedule import check_schedule_length, count_steps, lr_at, weight_decay_at
from megaswift.trainers.loop import Loop, unchanged
from megaswift.trainers.reduce_lr_on_plateau import allowed_rate
from megaswift.trainers.startup_summary import SummaryFacts
from megaswift.trainers.wall_time_by_part import StepTimer, timed

if TYPE_CHECKING:
    from megaswift.trainers.session import TrainingSession


@dataclass(frozen=True)
class LoopWithRunSummary:
    """What a task hands to the session: a loop that is ready to be restored and run."""

    loop: Loop
    facts: Callable[[], SummaryFacts]
    """The run summary, asked for once the loop stands at its first step. Collective."""


def build_supervised_loop(session: TrainingSession) -> LoopWithRunSummary:
    """Data first: a malformed row stops the run before a model is built."""
    build = session.build
    with timed(session.seconds, "data"):
        source, evaluation = build.data()
        cfg = build.cfg = choose_step_packing(build.cfg, build.spec, build.layout, source, evaluation)
        if cfg.task in PROMPTED and shares_prefixes(cfg, build.spec, build.layout):
            share_prompts((source, evaluation))
        total = count_steps(cfg, source)
    check_schedule_length(total, cfg.optim)
    with timed(session.seconds, "model"), session.memory_advice():
        engine = build.engine(fresh=build.resumed is None, total_steps=total)
        hooks = build.hooks(engine, evaluation)
    if isinstance(source, TokenStoreBatchSource):
        source.prepare_ahead = engine.prepare_ahead
        # Megatron-Core captures the graphs of backward passes at the end of the first step, in the mode in which no
        # other thread may allocate pinned memory
        source.alone = int(uses_cuda_graphs(build.cfg))
    transform = build.preparation()
    loop = Loop(
        engine,
        source,
        build.task.loss(cfg),
        # a resumed run may have another number of steps
        lambda step: allowed_rate(lr_at(step, loop.total_steps, cfg.optim), hooks),
        total,
        [StepTimer(), *(() if transform is None else (transform,)), *hooks],
        unchanged if transform is None else transform.prepare,
        prepare_before_counts=isinstance(transform, LastTokens),
        seconds=session.seconds,
        weight_decay=lambda step: weight_decay_at(step, loop.total_steps, cfg.optim),
    )
    return LoopWithRunSummary(loop, lambda: build.facts(engine, source, evaluation, loop.total_steps, loop.step))
