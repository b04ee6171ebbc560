"""The course of one run once its process group stands: data, model, checkpoint, loop, export, report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.config import SwiftConfig
from megaswift.config.absolute_paths import absolute
from megaswift.config.batch import batch_plan
from megaswift.config.data import RL
from megaswift.data.loader import StoredSource
from megaswift.data.stream import StreamSource
from megaswift.engine.determinism import prevented
from megaswift.errors import UserError, first_line
from megaswift.families.model_source import short_name
from megaswift.families.spec import ModelSpec
from megaswift.trainers import (
    agree,
    build,
    commit,
    curves,
    finish,
    memory,
    outputs,
    report,
    screen,
    stacks,
)
from megaswift.trainers.checkpoint import other_batch, restore
from megaswift.trainers.interrupt import Interrupted
from megaswift.trainers.loop import Loop
from megaswift.trainers.rl import assemble as rl
from megaswift.trainers.run_lock import RunLock
from megaswift.trainers.same_model import refuse_other_model
from megaswift.trainers.schedule import check_warmup, lr_at
from megaswift.trainers.timing import timed
from megaswift.trainers.verified import first_intact
from megaswift.trainers.watch import Watch

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


class Session:
    """A run between the start of its processes and their end."""

    def __init__(self, cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any) -> None:
        self.cfg, self.spec = cfg, spec
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.rows: screen.Rows = []
        self.status = "failed before the first step"
        self.lock = RunLock(Path(cfg.train.output_dir))
        made = agree.on_main(lambda: outputs.prepare(cfg, self.lock))
        self.build = build.Build(cfg, spec, folder, context, made)

    def run(self) -> Path:
        """Everything, in order; a page about it also when it fails."""
        try:
            stacks.listen(self.build.outputs.root)
            loop = self.prepare()
            self.train(loop)
            if self.cfg.train.export_hf or self.build.adapts:
                with timed(self.seconds, "export"):
                    finish.export(loop.engine, self.build)
            self.status = f"finished at step {loop.step}{watch_of(loop).summary()}"
        finally:
            if agree.rank() == 0 and self.rows:
                self.tell_story()
            self.lock.release()
        agree.barrier()
        return self.build.outputs.root

    def prepare(self) -> Loop:
        """Data first: a malformed row stops the run before a model is built."""
        cfg, b = self.cfg, self.build
        resume = b.resumed = self.resume()
        if cfg.data.max_length > self.spec.max_positions:
            log.warn(
                f"--max_length {cfg.data.max_length} is more than the {self.spec.max_positions} positions that the "
                "model's config.json names (max_position_embeddings): it may do badly on documents longer than that"
            )
        with timed(self.seconds, "data"):
            source: Any
            held: Any
            source, held = rl.prompts(b) if cfg.task in RL else b.data()
            total = build.count_steps(cfg, source)
        check_warmup(total, cfg.optim)
        with timed(self.seconds, "model"), self.memory_advice():
            engine = b.engine(fresh=resume is None, total_steps=total)
            hooks = b.hooks(engine, None if cfg.task in RL else held)
        loop = Loop(
            engine,
            source,
            b.task.loss(cfg),
            lambda step: lr_at(step, total, cfg.optim),
            total,
            hooks,
            seconds=self.seconds,
        )
        if cfg.task in RL:
            rl.attach(b, loop, source, held)
        elif (preparation := b.preparation()) is not None:
            loop.hooks, loop.prepare = [preparation, *hooks], preparation.prepare
        if resume is not None:
            with timed(self.seconds, "resume"):
                manifest = restore(
                    loop, resume, b.model_facts(), lambda m: build.changed(m.get("config", {}), absolute(cfg.to_dict()))
                )
                if told := other_batch(manifest, batch_plan(cfg.train, b.layout.dp)):
                    log.warn(told)
            # each row as often as was asked, whatever steps took
            if cfg.train.max_steps is None and isinstance(source, StoredSource):
                loop.total_steps = total = loop.step + source.steps_left(cfg.train.num_train_epochs)
        facts = b.facts(engine, source, None if cfg.task in RL else held, total, loop.step)
        if cfg.task in RL:
            facts = rl.with_more(facts, b, source, loop.engines.get(rl.CRITIC))
        self.rows = screen.rows(cfg, facts)
        if agree.rank() == 0:
            log.info(screen.render(facts.title, self.rows))
        return loop

    def resume(self) -> Path | None:
        """The checkpoint to go on from."""
        wanted = self.cfg.train.resume_from_checkpoint
        if wanted is None:
            return None
        steps, notes = agree.on_main(lambda: commit.steps_for(wanted, self.build.outputs.root))
        for note in notes:
            log.info(note)
        with timed(self.seconds, "resume"):
            found = first_intact(steps)
            if found is not None:
                agree.on_main(partial(refuse_other_model, found, self.spec.hf_config))
        log.info(f"going on from {found}" if found else "no checkpoint yet: starting from the beginning")
        return found

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
        try:
            with self.memory_advice():
                loop.run()
        except UserError as error:
            why = reason(error, f"step {loop.step}")
            raise
        finally:
            self.status = f"failed after step {loop.step}{why or watch_of(loop).summary()}"
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
                    ", saved; go on with the same command and --resume_from_checkpoint latest"
                    if loop.step
                    else ": there is nothing to save"
                )
            )
            raise Interrupted(loop.interrupted)

    @contextmanager
    def memory_advice(self) -> Iterator[None]:
        """Turns the device's out-of-memory error into one that says what to try."""
        try:
            yield
        except UserError:
            raise
        except (RuntimeError, MemoryError) as error:
            if (told := prevented(self.cfg, error)) is not None:
                raise told from None
            if not memory.is_out_of_memory(error):
                raise
            raise memory.out_of_memory(self.cfg, self.spec.experts, error) from None

    def tell_rows(self, source: object) -> None:
        """What was left out of a stream since this start, on the screen and in the report."""
        if isinstance(source, StreamSource) and (text := screen.read_text(source.stats)) and agree.rank() == 0:
            self.rows.append(("rows", text))
            log.warn(f"{', '.join(s.name for s in source.sources)}: {text}")

    def tell_story(self) -> None:
        """loss.png and report.html from what is on disk. Rank 0. What fails here hides no error of the run itself."""
        out = self.build.outputs
        title = f"{self.build.task.title}: {short_name(str(self.cfg.model.model))}"
        try:
            curves.draw(out.metrics, out.evaluation, out.curves, title)
            story = report.Story(title, self.status, self.rows, {k: v for k, v in self.seconds.items() if v})
            report.write(out.report, self.cfg, story, (out.metrics, out.evaluation, out.completions))
        except REPORT_ERRORS as error:
            log.warn(f"{out.report} could not be written: {first_line(error)}")
        else:
            log.result(f"{self.status}; report with curves: {out.report}")


def watch_of(loop: Loop) -> Watch:
    """The hook that counts skipped steps."""
    return next(hook for hook in loop.hooks if isinstance(hook, Watch))


def reason(error: UserError, where: str) -> str:
    """`: OPTION: the rule`, in one line, for the status of a run that failed; `where` says it already."""
    first = error.problems[0]
    lines = (text.partition("\n")[0] for text in (first.what, first.rule) if text and text != where)
    return "".join(f": {line}" for line in lines)
