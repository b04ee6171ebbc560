"""The course of a run whose options and output folder are settled: build, resume, train, export, report.

Owns how a run ends, also when it fails: the page about it, the lock of its folder, its trackers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.data.batches.loader import TokenStoreBatchSource
from megaswift.data.stream.batches import StreamBatchSource
from megaswift.engine.determinism import nondeterministic_op_error
from megaswift.errors import UserError, first_line
from megaswift.folders.source import short_name
from megaswift.models.spec import ModelSpec
from megaswift.run import summary
from megaswift.run.build import BuiltRun, SettledRun, build_run
from megaswift.run.checks.fit import fit_advice
from megaswift.run.checks.ranks import refuse_ranks_that_differ
from megaswift.run.checks.resumed_model import refuse_other_model
from megaswift.run.faults import out_of_memory
from megaswift.run.faults.diagnosis import (
    RankDiagnosis,
    dump_stacks_on_signal,
    lost_ranks_explained,
)
from megaswift.run.faults.oom_retry import retry_after
from megaswift.run.faults.timeout_monitor import CollectiveTimeoutMonitor
from megaswift.run.model_files import export_model
from megaswift.run.next_commands import next_commands
from megaswift.run.output import OutputFolder
from megaswift.run.plan import RunPlan
from megaswift.run.report import loss_png, page
from megaswift.run.report.comparison import run_name
from megaswift.run.tasks import TASKS
from megaswift.trainers import checkpoints
from megaswift.trainers.file_hashes import first_intact_step
from megaswift.trainers.hook import Run, timed
from megaswift.trainers.hooks import trackers
from megaswift.trainers.hooks.checkpoint import CheckpointHook, global_batch_size_change_notice, restore_run
from megaswift.trainers.hooks.step_monitor import SkippedStepAndLossSpikeMonitor
from megaswift.trainers.interrupt import InterruptedBySignal
from megaswift.trainers.loop import train
from megaswift.trainers.options.batch_sizes import batch_plan

PARTS = (
    "start-up",
    "data",
    "model",
    "resume",
    "waiting for data",
    "weight sync",
    "generation",
    "rewards",
    "scoring",
    "critic",
    "training steps",
    "logging",
    "evaluation",
    "checkpoints",
    "export",
)
"""The parts of a run's wall time, in the order of the report."""

REPORT_ERRORS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, ImportError)
"""What drawing and writing the report may fail with: a full disk, lines that another program changed, no matplotlib."""


@dataclass
class Story:
    """What is told of a run, on the screen and in the report."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    rows: summary.Rows = field(default_factory=list)
    """The rows of the first screen; empty until the run is built."""
    status: str = "failed before the first step"
    finished: bool = False
    saved_early: bool = False
    """A signal ended the run, and it can be resumed."""


def run_to_the_end(settled: SettledRun, start_up_seconds: float) -> Path:
    """Build, train, export and report a run, and return its output folder. The report is written also when the run
    fails. Collective."""
    cfg = settled.cfg
    plan = settled.plan
    story = Story()
    story.seconds["start-up"] = start_up_seconds
    sending: list[trackers.TrackerHook] = []
    done = distributed.global_world_size() == 1
    try:
        interrupted: InterruptedBySignal | None = None
        try:
            with lost_ranks_explained(cfg.parallel.ddp_timeout):
                # From here on a rank that waits in vain for another one says so.
                diagnosis = dump_stacks_on_signal(plan.outputs.root)
                monitor = None
                if diagnosis is not None:
                    monitor = CollectiveTimeoutMonitor(diagnosis, cfg.parallel.ddp_timeout)
                advice = partial(memory_advice, cfg, plan, diagnosis)

                # The run, at the step where it starts.
                plan = replace(plan, resumed=step_to_resume(settled, story.seconds))
                warn_of_long_documents(cfg.data.max_length, plan.spec, cfg.model.rope_scaling is not None)
                built = build_run(plan, story.seconds, advice)
                run = built.run
                sending += [hook for hook in run.hooks if isinstance(hook, trackers.TrackerHook)]
                if plan.layout.world_size > 1:
                    refuse_ranks_that_differ({"data": run.data.data_fingerprint})
                if settled.upload is not None:
                    checkpoint_hook(run).after_save = settled.upload.after_save
                if plan.resumed is not None:
                    restore(plan, built, story.seconds)
                facts = built.facts()
                story.rows = summary.summary_rows(cfg, facts)
                if distributed.global_rank() == 0:
                    name = cfg.trackers.run_name or plan.outputs.root.absolute().name
                    log.info(summary.render_summary(f"{facts.title}: {name}", story.rows))

                # Training, and what it leaves.
                train_or_skip(run, story, diagnosis, advice)
                if cfg.checkpoint.export_hf or plan.adapts:
                    with timed(story.seconds, "export"):
                        export_model(run, built.files, plan.outputs, cfg.evaluation.load_best_model_at_end)
                        if settled.upload is not None:
                            whole = not plan.adapts or cfg.lora.merge_lora
                            settled.upload.at_end(plan.outputs.hf if whole else plan.outputs.adapter, run.step)
                why = f": {run.stopping}" if run.stopping else ""
                story.status = f"finished at step {run.step}{why}{step_monitor(run).summary()}"
                story.finished = True
        except InterruptedBySignal as signalled:  # on all ranks
            interrupted = signalled
        finally:
            if distributed.global_rank() == 0 and story.rows:
                write_page(cfg, plan.outputs, story)
                if story.finished:
                    commands = next_commands(cfg, plan.outputs, plan.adapts)
                    log.print_result("\n".join(["next:", *(f"  {command}" for command in commands)]))
                if story.saved_early:
                    log.print_result("saved; resume with the same command and --resume_from_checkpoint latest")
            settled.lock.release()

        # All ranks are here: they end together.
        distributed.barrier()
        if monitor is not None:  # after an error it goes on answering other ranks
            monitor.close()
        end_trackers(sending)
        log.LOG_FILE.close()
        run.signals.restore()
        if interrupted is not None:
            raise interrupted
        done = True
        return plan.outputs.root
    finally:
        # Trackers end last: other ranks do not wait for them.
        end_trackers(sending, trackers.END_S if done else trackers.END_AFTER_ERROR_S)


def end_trackers(sending: list[trackers.TrackerHook], seconds: float = trackers.END_S) -> None:
    """Waits for what trackers still send, at most so long."""
    for tracker in sending:
        tracker.wait(seconds)


def step_to_resume(settled: SettledRun, seconds: dict[str, float]) -> Path | None:
    """Return the checkpoint from which the run resumes. Collective."""
    wanted = settled.cfg.checkpoint.resume_from_checkpoint
    root = settled.plan.outputs.root
    if wanted is None:
        return None
    steps, notes = distributed.run_on_rank0(lambda: checkpoints.resume_step_candidates(wanted, root))
    for note in notes:
        log.info(note)
    with timed(seconds, "resume"):
        step = first_intact_step(steps)
        if step is not None:
            distributed.run_on_rank0(partial(refuse_other_model, step, settled.plan.spec.hf_config))
    log.info(f"resuming from {step}" if step else "no checkpoint yet: starting from the beginning")
    return step


def warn_of_long_documents(max_length: int, spec: ModelSpec, scaled: bool) -> None:
    """Warn of documents longer than those on which the model was trained."""
    if max_length > spec.max_positions and not scaled:
        log.warn(
            f"--max_length {max_length} exceeds the model's max_position_embeddings "
            f"({spec.max_positions}): quality may degrade on longer documents"
        )


def restore(plan: RunPlan, built: BuiltRun, seconds: dict[str, float]) -> None:
    """Takes the run to the checkpoint that it goes on from. Collective."""
    assert plan.resumed is not None
    run = built.run
    options = plan.cfg.train
    with timed(seconds, "resume"):
        manifest = restore_run(
            run,
            plan.resumed,
            built.model_facts,
            lambda saved: tell_changed_options(saved.get("config", {}), built.saved_config),
            not plan.cfg.checkpoint.ignore_data_skip,
        )
        if notice := global_batch_size_change_notice(manifest, batch_plan(options, plan.layout.dp)):
            log.warn(notice)
    # each row as often as was asked, whatever steps took
    epochs = options.max_steps is None and not plan.cfg.checkpoint.ignore_data_skip
    if epochs and isinstance(run.data, TokenStoreBatchSource):
        run.total_steps = run.step + run.data.steps_left(options.num_train_epochs)


LENGTHS = {"max_steps", "num_train_epochs"}
"""Options on which the schedule of the learning rate depends."""


def tell_changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Print `learning_rate 1e-05 -> 2e-05` for every option that has changed since the checkpoint; on rank 0."""
    quiet = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir", "add_version"}
    before = _flat(saved)
    changes = {
        name: f"{name} {before[name]} -> {value}"
        for name, value in _flat(now).items()
        if name not in quiet and name in before and before[name] != value
    }
    if changes and distributed.global_rank() == 0:
        follows = "" if LENGTHS.isdisjoint(changes) else "; the learning rate follows the new length"
        log.info("differs from the checkpoint's run: " + ", ".join(changes.values()) + follows)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the sections, so that a checkpoint from before an option moved to another section compares."""
    sections = [values for values in config.values() if isinstance(values, dict)]
    return {name: value for values in sections for name, value in values.items()}


def train_or_skip(
    run: Run, story: Story, diagnosis: RankDiagnosis | None, advice: Callable[[], AbstractContextManager[None]]
) -> None:
    """Train, unless the checkpoint is at the last step. Collective.

    Raises:
        InterruptedBySignal: a signal ended the run early, and its state is saved.
    """
    if run.step >= run.total_steps:
        log.info(f"step {run.step} of {run.total_steps} is already done: only the export and the report are written")
        for hook in run.hooks:
            hook.check_progress(run)
        return
    story.status = f"failed after step {run.step}"
    why = ""

    def next_step() -> int:
        return run.step + 1

    if diagnosis is not None:
        diagnosis.step = next_step
    try:
        with advice():
            train(run)
        if diagnosis is not None:
            diagnosis.step = int
    except UserError as error:
        why = failure_reason(error, f"step {run.step}")
        raise
    finally:
        story.status = f"failed after step {run.step}{why or step_monitor(run).summary()}"
        tell_streamed_rows(run.data, story.rows)
    if not run.interrupted:
        return
    story.saved_early = run.step > 0
    if story.saved_early:
        story.status = f"interrupted after step {run.step} of {run.total_steps}"
    else:
        story.status = "interrupted before the first step: there is nothing to save"
    raise InterruptedBySignal(run.interrupted)


@contextmanager
def memory_advice(cfg: SwiftConfig, plan: RunPlan, diagnosis: RankDiagnosis | None) -> Iterator[None]:
    """Turns the device's out-of-memory error into one that says what to try."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, MemoryError) as error:
        if (refusal := nondeterministic_op_error(cfg.train.deterministic, error)) is not None:
            raise refusal from None
        if not out_of_memory.is_out_of_memory(error):
            raise
        if diagnosis is not None:
            diagnosis.states.ask()  # the other ranks wait for this one
        profile = plan.outputs.profile if cfg.profiling.profile else None
        fit = fit_advice(cfg, plan.spec, plan.layout)
        final = out_of_memory.out_of_memory_error(cfg, plan.spec.experts, error, profile, fit)
        raise retry_after(final, cfg, plan.layout.dp, os.environ) from None


def tell_streamed_rows(source: object, rows: summary.Rows) -> None:
    """Report the rows of a stream that were left out since this start, on the screen and on the page."""
    if not isinstance(source, StreamBatchSource):
        return
    text = summary.streamed_rows_text(source.stats)
    if text and distributed.global_rank() == 0:
        rows.append(("rows", text))
        log.warn(f"{', '.join(s.name for s in source.sources)}: {text}")


def write_page(cfg: SwiftConfig, outputs: OutputFolder, story: Story) -> None:
    """Write loss.png and report.html from the files on disk. Rank 0. What fails here hides no error of the run
    itself."""
    name = run_name(outputs.root)
    task = f"{TASKS.get(cfg.task).title} of {short_name(str(cfg.model.model))}"
    try:
        loss_png.draw_loss_png(outputs.metrics, outputs.evaluation, outputs.curves, f"{name} · {task}")
        times = {part: spent for part, spent in story.seconds.items() if spent}
        header = page.RunReportHeaderAndTimes(name, task, story.status, story.rows, times)
        page.write_report(outputs.report, cfg, header, (outputs.metrics, outputs.evaluation, outputs.completions))
    except REPORT_ERRORS as error:
        log.warn(f"{outputs.report} could not be written: {first_line(error)}")
        log.print_result(story.status)
    else:
        with_curves = " with curves" if outputs.metrics.is_file() and outputs.metrics.stat().st_size else ""
        log.print_result(f"{story.status}; report{with_curves}: {outputs.report}")


def checkpoint_hook(run: Run) -> CheckpointHook:
    """Return the hook that saves."""
    return next(hook for hook in run.hooks if isinstance(hook, CheckpointHook))


def step_monitor(run: Run) -> SkippedStepAndLossSpikeMonitor:
    """Return the hook that counts skipped steps."""
    return next(hook for hook in run.hooks if isinstance(hook, SkippedStepAndLossSpikeMonitor))


def failure_reason(error: UserError, where: str) -> str:
    """Write `: OPTION: the rule` for the status of a failed run, in one line; `where` is known already."""
    first = error.problems[0]
    lines = (text.partition("\n")[0] for text in (first.what, first.rule) if text and text != where)
    return "".join(f": {line}" for line in lines)
