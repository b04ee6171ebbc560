"""The checkpoint hook: saves every `save_steps` or epoch, at the end and on a signal; restores a run from a checkpoint.

Owns which rank does what and what the trainer itself must remember. How a folder becomes a checkpoint is `commit`'s,
what the engine writes is the engine's. With `--async_save` a `BackgroundWriter` writes while training goes on.
"""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megaswift import distributed
from megaswift.base.byte_size import bytes_text
from megaswift.engine.protocol import FileEntries, StartedSave
from megaswift.errors import ROOM, CheckpointError, Problem, first_line
from megaswift.folders import saved_steps
from megaswift.folders.checkpoint import ENGINE
from megaswift.trainers import checkpoints
from megaswift.trainers.file_hashes import damaged_file_problems_all_ranks
from megaswift.trainers.hook import BEST, NO, Every, Hook, Run, StepInterval, StepRecord
from megaswift.trainers.hooks.best_model import BestModelHook
from megaswift.trainers.hooks.progress import duration_text, print_line, print_warning
from megaswift.trainers.options.batch_sizes import BatchPlan
from megaswift.trainers.options.checkpoint import INTERVAL, KEPT, LONG_RUN


class BackgroundWriter:
    """Writes what engines have started to save. The thread ends with the process: files that it leaves behind belong to
    no checkpoint."""

    def __init__(self, saves: Mapping[str, StartedSave]) -> None:
        self.saves = saves
        self.written = False
        self.reason = ""
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            for save in self.saves.values():
                save.write()
            self.written = True
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self.reason = first_line(error)

    @property
    def busy(self) -> bool:
        """Whether it still writes."""
        return self._thread.is_alive()

    def finish(self, what: str) -> FileEntries:
        """Waits for all ranks' writers; the entries of this rank's files, by path within the step. Collective;
        CheckpointError on every rank where one could not write."""
        self._thread.join()
        problems = []
        if not self.written:
            why = self.reason or "see the error above"
            problems = [Problem(what, f"could not be written in the background ({why})", ROOM)]
        distributed.raise_on_all_ranks(problems)
        return {f"{part}/{name}": entry for part, save in self.saves.items() for name, entry in save.finish().items()}


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    """The state of the trainer, as it was at this step."""
    best: int | None
    writer: BackgroundWriter
    began: float
    blocked: float
    """Seconds that training has waited for it so far."""


class TimedSaves:
    """Decides when a run without an option about saving is saved: every half hour, if it expects to last over an hour.

    Only rank 0 reads the clock. The loop tells all ranks what rank 0 wants (`SAVE` in `loop.py`): they save after the
    same step.
    """

    def __init__(self, size: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        """Bytes of a checkpoint; 0 where they are unknown."""
        self.clock = clock
        self.steps: dict[int, bool] = {}
        """Steps that this run has saved, the newest last, and whether the clock asked for each; a resumed run goes on
        with them."""
        self.expected: float | None = None
        """Seconds that the run takes from its first step here, once two steps are measured."""
        self._first = self._began = self._warm = self._saved = 0.0

    def start(self, run: Run) -> None:
        """Start the clock before the first step."""
        self._first = run.step
        self._began = self._saved = self.clock()

    def measure(self, run: Run) -> None:
        """Estimate the length of the run after a step. The first step counts apart: it compiles and allocates."""
        now = self.clock()
        taken = run.step - self._first
        left = run.total_steps - run.step
        if taken == 1:
            self._warm = now
            if now - self._began >= INTERVAL:  # no step compiles that long
                self.expected = (now - self._began) * (1 + left)
        elif taken > 1:
            self.expected = now - self._began + left * (now - self._warm) / (taken - 1)

    def note_save(self, step: int, by_clock: bool) -> None:
        """Begin the next interval, and note the step among those of this run."""
        self._saved = self.clock()
        self.steps = {known: asked for known, asked in self.steps.items() if known < step} | {step: by_clock}

    @property
    def is_long(self) -> bool:
        """Whether the run is saved before its end."""
        return self.expected is not None and self.expected > LONG_RUN

    @property
    def due(self) -> bool:
        """Whether a checkpoint should be written after the next step."""
        return self.is_long and self.clock() - self._saved >= INTERVAL

    def surplus(self, step: int) -> list[int]:
        """Return the steps to delete once the checkpoint of `step` is complete: of those that the clock asked for, all
        that are older than the last two."""
        complete = [known for known in self.steps if known <= step]
        return [known for known in complete[:-KEPT] if self.steps[known]]


class CheckpointHook(Hook):
    """Writes checkpoints. Stands last in the list: the lines of the step are on disk before it."""

    part = "checkpoints"

    def __init__(
        self, store: checkpoints.CheckpointStore, every: Every, limit: int | None, facts: Mapping[str, Any]
    ) -> None:
        self.store = store
        self.limit = limit
        self.facts = facts
        self.interval = StepInterval(every)
        self.best: BestModelHook | None = None
        """The hook of a run that compares its evaluations: the best step is not deleted."""
        self.attach: Callable[[Path], None] = lambda folder: None
        """Writes what makes the folder usable by itself (config.json, tokenizer); rank 0."""
        self.write_more: Callable[[Path], None] = lambda folder: None
        """Writes what of the engine others read (a PEFT folder); every rank."""
        self.write_weights_only: Callable[[Path], None] | None = None
        """Writes the model alone, in place of all states (--save_only_model); every rank."""
        self.before_save: Callable[[Run], None] = lambda run: None
        """What has to hold of a state that is saved; every rank."""
        self.after_save: Callable[[Path, int], None] = lambda folder, step: None
        """What is done with a complete checkpoint; every rank."""
        self.background = False
        """Checkpoints are written while training goes on (--async_save)."""
        self.pending: PendingCheckpoint | None = None
        self.exit_interval: int | None = None
        """The run ends after a step that is divisible by it, and is saved then."""
        self.timed: TimedSaves | None = None
        """Saves a long run by the clock, where no option says when."""
        self.size = 0
        """Bytes of the last checkpoint, on rank 0; before the first one, what it holds at least."""
        self.saved = -1
        """The step of the last checkpoint, or of the one the run went on from."""

    def on_start(self, run: Run) -> None:
        """Start the interval; the restored step needs no saving."""
        self.saved = run.step
        self.interval.start(run)
        if self.timed is not None:
            self.timed.start(run)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Saves when it is due; a checkpoint that all ranks have written in the background counts from now on."""
        if self.pending is not None and self.pending.step <= run.busy_after and not run.busy_ranks:
            self.finish_pending()
        improved = self.interval.every == BEST and self.best is not None and self.best.improved_at(step.number)
        exits = self.exit_interval is not None and step.number % self.exit_interval == 0
        by_clock = self._due_by_time(run)
        if self.interval.due(step) or improved or exits or by_clock:
            self.save(run, self.background, by_clock and not exits)
        if exits and step.number < run.total_steps and not run.stopping:
            run.stopping = f"exit_interval {self.exit_interval}; --resume_from_checkpoint latest goes on"

    def _due_by_time(self, run: Run) -> bool:
        """Whether the ranks have agreed on a checkpoint, and none was saved after rank 0 had asked."""
        if self.timed is None:
            return False
        known = self.timed.is_long
        self.timed.measure(run)
        if self.timed.is_long and not known:
            self._tell_length(self.timed)
        return run.wants_checkpoint and self.saved <= run.busy_after

    def _tell_length(self, timed: TimedSaves) -> None:
        size = f" of about {bytes_text(timed.size)}" if timed.size else ""
        print_line(
            f"the run takes about {duration_text(timed.expected or 0.0)}: it writes a checkpoint{size} every "
            f"{INTERVAL / 60:.0f} minutes to {self.store.root} and keeps the last {self.limit or KEPT} "
            "(other intervals: --save_steps N)"
        )

    def on_end(self, run: Run) -> None:
        """Saves the last step. A run that saves nothing saves it only where it ended early. Nothing is left in the
        background."""
        self.finish_pending()
        early = bool(run.interrupted) or run.mistake is not None
        if self.saved != run.step and (early or self.interval.every != NO):
            in_place_of_clock = early and self.timed is not None and self.timed.is_long
            self.save(run, by_clock=in_place_of_clock)

    def close(self) -> None:
        """Give up a checkpoint that is still being written after an error: other ranks may have ended."""
        if self.pending is not None:
            print_warning(f"the checkpoint of step {self.pending.step} was still being written, and is not used")
            self.pending = None

    @property
    def busy(self) -> bool:  # type: ignore[override]
        """Whether this rank writes a checkpoint in the background."""
        return self.pending is not None and self.pending.writer.busy

    @property
    def wants_checkpoint(self) -> bool:  # type: ignore[override]
        """Whether half an hour has passed on rank 0."""
        return self.timed is not None and distributed.global_rank() == 0 and self.timed.due

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the interval, and the steps that were saved by the clock."""
        timed = {} if self.timed is None else {"timed": [*self.timed.steps.items()]}
        return self.interval.state_dict() | timed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the interval."""
        self.interval.load_state_dict(state)
        if self.timed is not None:
            self.timed.steps = {int(step): bool(asked) for step, asked in state.get("timed", ())}

    def save(self, run: Run, background: bool = False, by_clock: bool = False) -> None:
        """Save a checkpoint, on every rank together; it is complete when this returns unless it is written in the
        `background`. `by_clock`: nothing but the time that has passed asks for it, or the early end of a run that is
        saved by the clock."""
        self.finish_pending()
        began = time.perf_counter()
        self.before_save(run)
        if self.best is not None:
            self.best.before_save(run.step)
        if self.timed is not None:
            self.timed.note_save(run.step, by_clock)
        hooks = {type(h).__name__: state for h in run.hooks if (state := h.state_dict())}
        steps = {"total_steps": run.total_steps, "skipped_steps": run.skipped}
        state = {**self.facts, **steps, "data": run.position, "hooks": copy.deepcopy(hooks)}
        engines = {} if self.write_weights_only else {ENGINE: run.engine, **run.engines}
        if self.write_weights_only:
            state[saved_steps.WEIGHTS_ONLY] = True
        folder = distributed.run_on_rank0(lambda: self._open(run.step, [*engines]))
        best = self.best.saved[0] if self.best is not None and self.best.saved is not None else None
        self.saved = run.step
        if background:
            saves = {name: engine.start_save(folder / name) for name, engine in engines.items()}
            self.write_more(folder)
            writer = BackgroundWriter(saves)
            blocked = time.perf_counter() - began
            self.pending = PendingCheckpoint(run.step, folder, state, best, writer, began, blocked)
            return
        files = {f"{part}/{file}": e for part, one in engines.items() for file, e in one.save(folder / part).items()}
        (self.write_weights_only or self.write_more)(folder)
        self._publish(run.step, files, (state, best), lambda: f"{time.perf_counter() - began:.1f} s")

    def finish_pending(self) -> None:
        """Waits for the checkpoint that is written in the background, if any, and publishes it. Collective."""
        if self.pending is None:
            return
        done = self.pending
        self.pending = None
        began = time.perf_counter()
        files = done.writer.finish(f"checkpoint of step {done.step}")

        def seconds() -> str:
            now = time.perf_counter()
            waited = done.blocked + now - began
            return f"complete after {now - done.began:.2f} s; training waited {waited:.2f} s"

        self._publish(done.step, files, (done.state, done.best), seconds)

    def _publish(
        self, step: int, own: FileEntries, kept: tuple[Mapping[str, Any], int | None], seconds: Callable[[], str]
    ) -> None:
        """Makes a written step a checkpoint: files without an entry are hashed by all ranks together, then rank 0 marks
        and renames the folder and deletes older ones. `seconds` is what the line says then of the time. Collective."""
        rank = distributed.global_rank()
        ranks = distributed.global_world_size()
        folder = self.store.saving(step)
        state, best = kept
        files = FileEntries()
        for part in distributed.gather_on_rank0(own) or ():
            files |= part
        rest = distributed.run_on_rank0(lambda: checkpoints.unhashed_files(folder, files))
        for part in distributed.gather_on_rank0(checkpoints.hash_files(folder, rest[rank::ranks])) or ():
            files |= part
        done = distributed.run_on_rank0(lambda: self.store.finish(step, files, state))
        distributed.run_on_rank0(lambda: self._delete_older(step, best))
        self.size = sum(entry["bytes"] for entry in files.values())
        print_line(f"step {step}: checkpoint {done} ({self.size / 2**20:,.1f} MiB, {seconds()})")
        self.after_save(done, step)

    def _delete_older(self, step: int, best: int | None) -> None:
        """Deletes what `save_total_limit` leaves no room for, and checkpoints that the clock asked for. Those of other
        runs in the folder stay: nobody asked for a limit."""
        self.store.rotate(self.limit, best)
        if self.timed is None or self.limit is not None:
            return
        older = [self.store.folder(number) for number in self.timed.surplus(step) if number != best]
        self.store.remove([folder for folder in older if folder.is_dir()])

    def _open(self, step: int, names: Sequence[str]) -> Path:
        check_space(self.store.root, self.size, step)
        folder = self.store.begin(step)
        for name in names:
            (folder / name).mkdir()
        if names:
            self.attach(folder)
        return folder


def check_space(root: Path, size: int, step: int) -> None:
    """Raise CheckpointError where the file system has no room for another checkpoint of `size` bytes."""
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise CheckpointError(
            Problem(
                f"checkpoint of step {step}",
                f"needs about {bytes_text(size)}, but {there} has only {bytes_text(free)} free; older checkpoints "
                "are deleted only after the new one is complete",
                "free space, or use a smaller --save_total_limit for the next run or another --output_dir",
            )
        )


def restore_run(
    run: Run,
    folder: Path,
    model: Mapping[str, Any],
    on_manifest: Callable[[Mapping[str, Any]], object] = lambda manifest: None,
    data: bool = True,
) -> dict[str, Any]:
    """Restore a run to where `folder` was saved, on this or another layout, and return the manifest.

    `data` False: the data begin with their first row (ignore_data_skip).

    `on_manifest` is called with the manifest before anything is loaded, so that a notice of changed options comes
    before a refusal that they cause.
    """
    manifest = distributed.run_on_rank0(lambda: saved_steps.load_manifest_or_problem(folder))
    if isinstance(manifest, Problem):
        raise CheckpointError(manifest)
    if manifest.get(saved_steps.WEIGHTS_ONLY):
        rule = "contains weights only (--save_only_model): a run needs the optimizer's states to resume"
        part = f"--adapters {folder / 'adapter'}" if (folder / "adapter").is_dir() else f"--model {folder / 'hf'}"
        raise CheckpointError(Problem(str(folder), rule, f"{part} starts from these weights"))
    if absent := [name for name in ("data", "hooks") if name not in manifest]:
        rule = f"lacks the state of {' and '.join(absent)}, which a run needs to resume"
        raise CheckpointError(Problem(str(folder / checkpoints.MARKER), rule, "use another step of the run"))
    problems = [*resume_format_and_model_mismatch_problems(manifest, model), *damaged_file_problems_all_ranks(folder)]
    if problems:
        raise CheckpointError(problems)
    on_manifest(manifest)
    if data:
        _load_states(folder, [("data", run.data, manifest["data"])])
    for name, engine in {ENGINE: run.engine, **run.engines}.items():
        engine.load(folder / name)
    named = {type(hook).__name__: hook for hook in run.hooks}
    hooks = manifest["hooks"]
    _load_states(folder, [(f"hooks, {name}", hook, hooks[name]) for name, hook in named.items() if name in hooks])
    run.step = manifest["step"]
    run.skipped = manifest.get("skipped_steps", 0)
    return manifest


class _Stateful(Protocol):
    def load_state_dict(self, state: Any) -> None: ...


def _load_states(folder: Path, states: Sequence[tuple[str, _Stateful, Any]]) -> None:
    """Loads states of the manifest into their owners; CheckpointError for one that cannot be read."""
    for name, owner, state in states:
        try:
            owner.load_state_dict(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            rule = f"has a value for {name} that cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(
                Problem(str(folder / checkpoints.MARKER), rule, "use another step of the run")
            ) from error


def global_batch_size_change_notice(manifest: Mapping[str, Any], plan: BatchPlan) -> str:
    """Return the notice for steps that are larger or smaller than the checkpoint's, as on other data-parallel ranks
    without a given global batch."""
    size = plan.global_batch_size
    was = manifest.get("global_batch_size", size)  # absent from older checkpoints
    fix = "fewer data-parallel ranks keep" if was % (size // plan.accumulation) else f"--global_batch_size {was} keeps"
    return "" if was == size else f"the global batch size is {size}; it was {was} in the checkpoint's run: {fix} it"


def resume_format_and_model_mismatch_problems(manifest: Mapping[str, Any], model: Mapping[str, Any]) -> list[Problem]:
    """Report what makes a checkpoint unfit for this run: another format, another model."""
    problems = []
    if manifest["format"] != checkpoints.FORMAT:
        rule = f"has format {manifest['format']}; this version reads {checkpoints.FORMAT}"
        problems.append(Problem("checkpoint", rule, "use the version that wrote it"))
    saved = manifest.get("model", {})
    problems += [
        Problem(
            f"model's {name}",
            f"is {saved[name]} in the checkpoint and {model[name]} in --model",
            "use the checkpoint's model",
        )
        for name in model
        if name in saved and saved[name] != model[name]
    ]
    return problems
