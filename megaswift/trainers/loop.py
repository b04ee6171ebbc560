"""The train loop. Metrics, evaluation, checkpoints, timing and the progress bar are hooks.

The engine computes a step, and the data decide what a batch holds. `run/build.py` makes the parts of a run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from megaswift import distributed
from megaswift.errors import DataError, Problem, UserError, first_line
from megaswift.losses.contract import Batch
from megaswift.trainers import interrupt
from megaswift.trainers.hook import Hook, Run, StepRecord, TakenBatch
from megaswift.trainers.hooks.progress import print_warning

FAILED, SQUARES, BUSY, SAVE = range(len(interrupt.SIGNALS), len(interrupt.SIGNALS) + 4)
"""Indices into the numbers that are summed over the ranks along with the counts of a batch. First, for each signal, how
many ranks have received it; then how many ranks have no batch, `StepRecord.squares`, how many ranks have a hook that
works in the background, and how many (rank 0 alone) have one that wants a checkpoint."""


def train(run: Run) -> None:
    """Train until the last step, a signal or an unusable row; then let the hooks save what was trained. Collective.

    All ranks take the same steps: what only one rank has seen (a signal, an unusable row, a hook that works in the
    background) is summed over the ranks in the reduction that counts the batch, so a step needs no further reduction.
    On several ranks the batch of the next step is taken, and its counts are summed, while the device still works on the
    present one (`take_ahead`).

    Args:
        run: The parts of the run and its position, which the loop moves on.

    Raises:
        UserError: A row was unusable on some rank, or a hook ended the run; hooks have saved unless no step was taken.
        KeyboardInterrupt: A second Ctrl-C arrived.
    """
    try:
        run.emit("on_start")
        with interrupt.listen_for_signals() as signals:
            run.signals = signals
            while run.step < run.total_steps and not run.stopping and run.mistake is None:
                run.emit("on_step_begin")

                # The batch: taken ahead during the previous step, else taken now. A run of one rank looks for signals
                # first. So does a run whose batches take minutes, once the ranks have agreed.
                if run.ahead is None:
                    run.emit("on_batch_begin")
                if run.agree_before_batch:
                    run.interrupted = int(distributed.all_max([signals.number])[0])
                elif distributed.global_world_size() == 1:
                    run.interrupted = signals.number
                if run.interrupted:
                    signals.stop(run.interrupted)
                    break
                taken = run.ahead or start_taking(run)
                run.ahead = None

                # Agreement: the counts arrive, and with them the signals and mistakes of all ranks. If there is any,
                # the data go back to before this batch, so that a resumed run reads it again.
                counted = taken.counts()
                run.busy_ranks = round(counted.further[BUSY])
                run.busy_after = taken.step
                run.wants_checkpoint = counted.further[SAVE] > 0
                run.mistake = taken.mistake
                if counted.further[FAILED] and run.mistake is None:
                    run.mistake = DataError(
                        Problem("the next batch", "another rank found an unusable row; see its message")
                    )
                received = [n for n, ranks in zip(interrupt.SIGNALS, counted.further, strict=False) if ranks]
                run.interrupted = max(received, default=0)
                if run.interrupted or run.mistake is not None:
                    taken.back()
                    if run.interrupted:
                        signals.stop(run.interrupted)
                    break

                # What the loss reads besides the batch: reference log-probabilities, a step of the critic.
                microbatches = taken.microbatches
                if not run.prepare_before_counts:
                    microbatches = run.prepare(run.engine, microbatches, True)

                # Forward, backward, update. A skipped step does not change the weights, so it does not advance the
                # schedule.
                updates = run.step - run.skipped
                rate = run.learning_rate(updates, run.total_steps)
                decay = run.weight_decay(updates, run.total_steps)
                host_work = partial(while_device_works, run)
                result = run.engine.train_batch(microbatches, run.loss, rate, decay, counted, host_work)
                run.step += 1
                run.skipped += result.skipped

                # The record of the step, for the hooks.
                extras = run.step_extras()
                result = replace(result, metrics={**result.metrics, **extras.metrics})
                squares = round(counted.further[SQUARES])
                run.emit("on_step", StepRecord(run.step, taken.epoch, rate, result, squares=squares, extras=extras))

            # The end: hooks save, unless a mistake ended the run before its first step.
            if run.step or run.mistake is None:
                run.emit("on_end")
        if run.mistake is not None:
            raise run.mistake
    finally:
        for hook in run.hooks:
            try:
                hook.close()
            except OSError as error:  # what hooks write late must not hide the run's own error
                print_warning(f"{type(hook).__name__} could not write its last output: {first_line(error)}")


def start_taking(run: Run) -> TakenBatch:
    """Take the next global batch and start to sum its counts, together with what the ranks have to agree on.
    Collective."""
    # The position before the batch, to which the data may have to go back.
    state = run.data.state_dict() if run.mark is None else {}
    back = (lambda: run.data.load_state_dict(state)) if run.mark is None else run.mark()

    # The batch, or the reason why this rank has none; it takes part in the sum in either case.
    microbatches: list[Batch] = []
    mistake = None
    try:
        microbatches = run.data.next()
    except UserError as error:
        mistake = error
    run.emit("on_batch")
    if run.prepare_before_counts and microbatches:
        microbatches = run.prepare(run.engine, microbatches, True)

    # What is summed along with the counts: the signals, then `FAILED` and so on. With `agree_before_batch` signals are
    # left out here: a batch that took minutes is trained on, and the ranks agree before the next batch.
    signals = [run.signals.number == number and not run.agree_before_batch for number in interrupt.SIGNALS]
    layout = run.engine.layout
    # All ranks of a replica have the same batch, so that each adds its share.
    squares = sum(length_squares(batch) for batch in microbatches) / (layout.tp * layout.pp * layout.cp)
    busy = any(hook.busy for hook in run.hooks)
    save = any(hook.wants_checkpoint for hook in run.hooks)
    counts = run.engine.start_count(microbatches, run.loss, [*signals, mistake is not None, squares, busy, save])
    return TakenBatch(microbatches, counts, mistake, run.data.epoch, state, back, run.step)


def while_device_works(run: Run) -> None:
    """Run host-side work once all passes of a step are launched, while the device is still busy. Collective."""
    take_ahead(run)
    run.emit("on_launched")


def take_ahead(run: Run) -> None:
    """On several ranks, take the batch of the next step and start to sum its counts. Collective.

    This happens before the host waits for the numbers of the present step. The counts then arrive together with those
    numbers, and the host need not wait for the device a second time. One rank has nothing to sum. A batch that takes
    minutes, or needs the weights of the present step (`agree_before_batch`), is not taken ahead.
    """
    last = run.step + 1 >= run.total_steps
    if run.ahead is None and not last and not run.agree_before_batch and distributed.global_world_size() > 1:
        run.emit("on_batch_begin")
        run.ahead = start_taking(run)


def length_squares(batch: Batch) -> int:
    """Sum the squared lengths of documents: a document of n tokens has positions 0..n-1, and n^2 = sum of (2 p + 1)."""
    return int(((2 * batch.positions + 1) * batch.valid).sum())


class StepTimer(Hook):
    """Splits the wall time of each step into waiting for data, the data source's own work (such as sampling), and
    training. The first hook of a run: it completes the record of a step before the other hooks read it."""

    def __init__(self) -> None:
        self.began = 0.0
        """When the step began."""
        self.asked = 0.0
        """When the last batch was requested."""
        self.waited = 0.0
        """Seconds that the step has waited for batches."""

    def on_step_begin(self, run: Run) -> None:
        """Start the clock of the step."""
        self.began = time.perf_counter()

    def on_batch_begin(self, run: Run) -> None:
        """Start to measure a wait; a step may wait for its own batch and for the next step's."""
        self.asked = time.perf_counter()

    def on_batch(self, run: Run) -> None:
        """Add the time of the wait."""
        self.waited += time.perf_counter() - self.asked

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Note the seconds of the step and add them to the parts of the run."""
        extras = step.extras
        step.seconds = time.perf_counter() - self.began
        step.data_wait = self.waited - extras.waiting
        self.waited = 0.0
        training = step.seconds - step.data_wait - sum(extras.seconds.values())
        if extras.training:
            step.result = replace(step.result, metrics={**step.result.metrics, extras.training: training})
        for part, seconds in {"waiting for data": step.data_wait, "training steps": training, **extras.seconds}.items():
            run.seconds[part] = run.seconds.get(part, 0.0) + seconds
