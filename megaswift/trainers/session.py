"""The course of a run after its process group is created: data, model, checkpoint, loop, export, report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megaswift import distributed, log
from megaswift.bridge.merge_adapter_folder import merge_adapter_folder_into_base
from megaswift.bridge.write_folder_with_new_config_or_vocab import write_changed_model_folder
from megaswift.bridge.write_pissa_olora_loftq_weights import write_initial_adapter
from megaswift.config import SwiftConfig
from megaswift.config.absolute_paths_in_saved_config import with_absolute_paths
from megaswift.config.adapter_rules import starts_otherwise
from megaswift.config.batch_arithmetic import batch_plan
from megaswift.data.loader import TokenStoreBatchSource
from megaswift.data.stream_batches import StreamBatchSource
from megaswift.engine.determinism import nondeterministic_op_error
from megaswift.engine.protocol import Engine
from megaswift.errors import UserError, first_line
from megaswift.folders.source import short_name
from megaswift.models.family import read_config_json
from megaswift.models.spec import ModelSpec
from megaswift.trainers import (
    checkpoint_store,
    failed_collective_diagnosis_and_stacks,
    loss_png,
    out_of_memory,
    output_folder,
    report,
    rope_scaling_and_new_tokens,
    run_builder,
    startup_summary,
    trackers,
)
from megaswift.trainers.agreement_of_ranks_at_start import refuse_ranks_that_differ, refuse_unshared_output_folder
from megaswift.trainers.best_model import best_checkpoint, copy_export, load_best_checkpoint
from megaswift.trainers.checkpoint_hook import CheckpointHook, global_batch_size_change_notice, restore_run
from megaswift.trainers.collective_timeout_monitor import CollectiveTimeoutMonitor
from megaswift.trainers.hub_upload import hub_upload_of
from megaswift.trainers.interrupt import InterruptedBySignal
from megaswift.trainers.loop import Loop
from megaswift.trainers.oom_retry import forget_earlier_retry, retry_after
from megaswift.trainers.resumed_model_config_check import refuse_other_model
from megaswift.trainers.run_builder import RunBuilder
from megaswift.trainers.run_lock import RunLock
from megaswift.trainers.skipped_step_and_loss_spike_monitor import SkippedStepAndLossSpikeMonitor
from megaswift.trainers.verify_checkpoint_hashes_split_over_ranks import first_intact_step
from megaswift.trainers.wall_time_by_part import timed

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
"""Of a run's wall time, in the order of the report."""

REPORT_ERRORS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, ImportError)
"""What drawing and writing the report may fail with: a full disk, lines that another program changed, no matplotlib."""


class TrainingSession:
    """A run between the start of its processes and their end."""

    def __init__(
        self, cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any, names: Sequence[str] = ()
    ) -> None:
        self.cfg, self.spec = cfg, spec
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.rows: startup_summary.Rows = []
        self.status = "failed before the first step"
        self.lock = RunLock(Path(cfg.train.output_dir))
        prepared = distributed.run_on_rank0(lambda: output_folder.prepare_output_folder(cfg, self.lock, names))
        refuse_unshared_output_folder(prepared.config)
        if distributed.global_rank() == 0:
            forget_earlier_retry(prepared.root, os.environ)
        folder = base_model_folder(cfg, folder, prepared.root)
        cfg, folder = with_initial_adapter(cfg, folder, prepared.root)
        self.upload = hub_upload_of(cfg)
        self.build = run_builder.RunBuilder(cfg, spec, folder, context, prepared)
        self.trackers: list[trackers.TrackerHook] = []
        self.diagnosis: failed_collective_diagnosis_and_stacks.RankDiagnosis | None = None

    def run(self) -> Path:
        """Everything, in order; a page about it also when it fails. Trackers end last: other ranks do not wait for
        them."""
        done = distributed.global_world_size() == 1
        try:
            root = self._run()
            done = True
            return root
        finally:
            self.end_trackers(trackers.END_S if done else trackers.END_AFTER_ERROR_S)

    def end_trackers(self, seconds: float = trackers.END_S) -> None:
        """Waits for what trackers still send, at most so long."""
        for tracker in self.trackers:
            tracker.wait(seconds)

    def _run(self) -> Path:
        interrupted: InterruptedBySignal | None = None
        try:
            self.diagnosis = failed_collective_diagnosis_and_stacks.dump_stacks_on_signal(self.build.outputs.root)
            monitor = (
                None
                if self.diagnosis is None
                else CollectiveTimeoutMonitor(self.diagnosis, self.cfg.parallel.ddp_timeout)
            )
            loop = self.prepare()
            self.train(loop)
            if self.cfg.train.export_hf or self.build.adapts:
                with timed(self.seconds, "export"):
                    export_model(loop, self.build)
                    self.push_to_hub(loop)
            why = f": {loop.stopping}" if loop.stopping else ""
            self.status = f"finished at step {loop.step}{why}{find_step_monitor(loop).summary()}"
        except InterruptedBySignal as signalled:  # on all ranks
            interrupted = signalled
        except RuntimeError as error:
            if not failed_collective_diagnosis_and_stacks.is_lost_rank_error(error):
                raise
            raise failed_collective_diagnosis_and_stacks.explain_lost_rank(
                error, self.cfg.parallel.ddp_timeout
            ) from error
        finally:
            if distributed.global_rank() == 0 and self.rows:
                self.tell_story()
            self.lock.release()
        distributed.barrier()
        if monitor is not None:  # after an error it goes on answering other ranks
            monitor.close()
        self.end_trackers()
        log.LOG_FILE.close()
        loop.signals.restore()
        if interrupted is not None:
            raise interrupted
        return self.build.outputs.root

    def push_to_hub(self, loop: Loop) -> None:
        """The export, where the run uploads: the whole model, else the adapters."""
        if self.upload is not None:
            outputs, whole = self.build.outputs, not self.build.adapts or self.cfg.lora.merge_lora
            self.upload.at_end(outputs.hf if whole else outputs.adapter, loop.step)

    def prepare(self) -> Loop:
        """The loop of the task, at the step where it starts."""
        cfg, b = self.cfg, self.build
        b.resumed = resume = self.resume()
        if cfg.data.max_length > self.spec.max_positions and cfg.model.rope_scaling is None:
            log.warn(
                f"--max_length {cfg.data.max_length} exceeds the model's max_position_embeddings "
                f"({self.spec.max_positions}): quality may degrade on longer documents"
            )
        built = b.task.build(self)
        loop = built.loop
        self.trackers = [hook for hook in loop.hooks if isinstance(hook, trackers.TrackerHook)]
        if b.layout.world_size > 1:
            refuse_ranks_that_differ({"data": loop.source.data_fingerprint})
        if self.upload is not None:
            next(h for h in loop.hooks if isinstance(h, CheckpointHook)).after_save = self.upload.after_save
        if resume is not None:
            with timed(self.seconds, "resume"):
                manifest = restore_run(
                    loop,
                    resume,
                    b.model_facts(),
                    lambda m: run_builder.changed_options(m.get("config", {}), with_absolute_paths(b.cfg.to_dict())),
                    not cfg.train.ignore_data_skip,
                )
                if notice := global_batch_size_change_notice(manifest, batch_plan(cfg.train, b.layout.dp)):
                    log.warn(notice)
            # each row as often as was asked, whatever steps took
            epochs = cfg.train.max_steps is None and not cfg.train.ignore_data_skip
            if epochs and isinstance(loop.source, TokenStoreBatchSource):
                loop.total_steps = loop.step + loop.source.steps_left(cfg.train.num_train_epochs)
        facts = built.facts()
        self.rows = startup_summary.summary_rows(cfg, facts)
        if distributed.global_rank() == 0:
            log.info(startup_summary.render_summary(facts.title, self.rows))
        return loop

    def resume(self) -> Path | None:
        """The checkpoint to go on from."""
        wanted = self.cfg.train.resume_from_checkpoint
        if wanted is None:
            return None
        steps, notes = distributed.run_on_rank0(
            lambda: checkpoint_store.resume_step_candidates(wanted, self.build.outputs.root)
        )
        for note in notes:
            log.info(note)
        with timed(self.seconds, "resume"):
            step = first_intact_step(steps)
            if step is not None:
                distributed.run_on_rank0(partial(refuse_other_model, step, self.spec.hf_config))
        log.info(f"resuming from {step}" if step else "no checkpoint yet: starting from the beginning")
        return step

    def train(self, loop: Loop) -> None:
        """The loop; nothing is left to do when the checkpoint is at the last step."""
        if loop.step >= loop.total_steps:
            log.info(
                f"step {loop.step} of {loop.total_steps} is already done: only the export and the report are written"
            )
            for hook in loop.hooks:
                hook.check_progress(loop)
            return
        self.status = f"failed after step {loop.step}"
        why = ""
        if self.diagnosis is not None:
            self.diagnosis.step = lambda: loop.step + 1
        try:
            with self.memory_advice():
                loop.run()
            if self.diagnosis is not None:
                self.diagnosis.step = int
        except UserError as error:
            why = failure_reason(error, f"step {loop.step}")
            raise
        finally:
            self.status = f"failed after step {loop.step}{why or find_step_monitor(loop).summary()}"
            self.tell_rows(loop.source)
        if loop.interrupted:
            self.status = (
                f"interrupted after step {loop.step} of {loop.total_steps}"
                if loop.step
                else "interrupted before the first step"
            )
            log.info(
                self.status
                + (
                    ", saved; resume with the same command and --resume_from_checkpoint latest"
                    if loop.step
                    else ": there is nothing to save"
                )
            )
            raise InterruptedBySignal(loop.interrupted)

    @contextmanager
    def memory_advice(self) -> Iterator[None]:
        """Turns the device's out-of-memory error into one that says what to try."""
        try:
            yield
        except UserError:
            raise
        except (RuntimeError, MemoryError) as error:
            if (refusal := nondeterministic_op_error(self.cfg.train.deterministic, error)) is not None:
                raise refusal from None
            if not out_of_memory.is_out_of_memory(error):
                raise
            if self.diagnosis is not None:
                self.diagnosis.states.ask()  # the other ranks wait for this one
            profile = self.build.outputs.profile if self.cfg.train.profile else None
            final = out_of_memory.out_of_memory_error(self.cfg, self.spec.experts, error, profile)
            raise retry_after(final, self.cfg, self.build.layout.dp, os.environ) from None

    def tell_rows(self, source: object) -> None:
        """What was left out of a stream since this start, on the screen and in the report."""
        if (
            isinstance(source, StreamBatchSource)
            and (text := startup_summary.streamed_rows_text(source.stats))
            and distributed.global_rank() == 0
        ):
            self.rows.append(("rows", text))
            log.warn(f"{', '.join(s.name for s in source.sources)}: {text}")

    def tell_story(self) -> None:
        """loss.png and report.html from what is on disk. Rank 0. What fails here hides no error of the run itself."""
        out = self.build.outputs
        title = f"{self.build.task.title}: {short_name(str(self.cfg.model.model))}"
        try:
            loss_png.draw_loss_png(out.metrics, out.evaluation, out.curves, title)
            story = report.RunReportHeaderAndTimes(
                title, self.status, self.rows, {k: v for k, v in self.seconds.items() if v}
            )
            report.write_report(out.report, self.cfg, story, (out.metrics, out.evaluation, out.completions))
        except REPORT_ERRORS as error:
            log.warn(f"{out.report} could not be written: {first_line(error)}")
        else:
            log.print_result(f"{self.status}; report with curves: {out.report}")


def base_model_folder(cfg: SwiftConfig, folder: Path, output: Path) -> Path:
    """The folder that the run starts from: `folder`, or OUT/base_model, which rank 0 makes. Collective."""
    if not rope_scaling_and_new_tokens.changes_model(cfg):
        return folder

    def make() -> Path:
        config, tokenizer = rope_scaling_and_new_tokens.changed_config_and_tokenizer(cfg, folder)
        more = config.get("vocab_size", 0) - read_config_json(folder).get("vocab_size", 0)
        if more:
            log.info(
                f"new_special_tokens: {log.count_text(more, 'new row')} in the embedding, each the mean of the old"
            )
        weights = not cfg.model.random_init
        return write_changed_model_folder(folder, output / rope_scaling_and_new_tokens.BASE, config, tokenizer, weights)

    return distributed.run_on_rank0(make, hours=24)


def with_initial_adapter(cfg: SwiftConfig, folder: Path, output: Path) -> tuple[SwiftConfig, Path]:
    """The configuration of a run that starts from OUT/initial_adapter, and the model that it belongs to, which rank 0
    makes (`--init_weights`). Collective."""
    if not starts_otherwise(cfg):
        return cfg, folder
    adapter, residual = output / rope_scaling_and_new_tokens.ADAPTER, output / rope_scaling_and_new_tokens.RESIDUAL
    base = distributed.run_on_rank0(lambda: write_initial_adapter(cfg, folder, adapter, residual), hours=24)
    return cfg.with_adapter_folder(str(adapter)), base


def find_step_monitor(loop: Loop) -> SkippedStepAndLossSpikeMonitor:
    """The hook that counts skipped steps."""
    return next(hook for hook in loop.hooks if isinstance(hook, SkippedStepAndLossSpikeMonitor))


def failure_reason(error: UserError, where: str) -> str:
    """`: OPTION: the rule`, in one line, for the status of a run that failed; `where` says it already."""
    first = error.problems[0]
    lines = (text.partition("\n")[0] for text in (first.what, first.rule) if text and text != where)
    return "".join(f": {line}" for line in lines)


def export_model(loop: Loop, build: RunBuilder) -> None:
    """The weights of all ranks, or of the best checkpoint, each tensor in the dtype it was loaded with. An export of an
    earlier start is replaced once it is whole."""
    outputs = build.outputs
    best = best_checkpoint(loop, outputs.store.root) if build.cfg.train.load_best_model_at_end else None
    if best is not None and not build.adapts:
        load_best_checkpoint(loop, best)
    if build.adapts:
        export_adapters_and_merged_model(loop.engine, build, best)
        return
    if best is not None and (best / run_builder.HF).is_dir():  # of weights only
        copy_export(best / run_builder.HF, outputs.hf)
    else:
        loop.engine.export(outputs.hf, build.folder)
        distributed.run_on_rank0(lambda: build.write_template(outputs.hf))
    log.print_result(f"exported {outputs.hf}")


def export_adapters_and_merged_model(engine: Engine, build: RunBuilder, best: Path | None) -> None:
    """OUT/adapter, of the checkpoint `best` where there is one; with --merge_lora OUT/hf from it and the base model's
    own files, so that nothing is rounded twice."""
    if best is not None:
        copy_export(best / "adapter", build.outputs.adapter)
    else:
        engine.write_adapter(build.outputs.adapter, build.base)
    log.print_result(f"wrote {build.outputs.adapter}, which PEFT loads")
    if build.cfg.lora.merge_lora:
        distributed.run_on_rank0(lambda: _merge(build), hours=24)
        log.print_result(f"exported {build.outputs.hf}, adapters merged in")


def _merge(build: RunBuilder) -> None:
    merge_adapter_folder_into_base(build.folder, build.outputs.adapter, build.outputs.hf, overwrite=True)
    build.write_template(build.outputs.hf)
