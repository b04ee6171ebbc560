"""The sampler of a run whose engines are Ray actors: chunks of prompts go to any of them, and to another one if an
engine ends before it answers.

A completion depends only on its prompt, the weights, the settings and its seed, and the chunks of a call do not depend
on what engines do. So a run whose engines end has the completions of one whose engines do not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Timer
from typing import Any

from torch import Tensor

from megaswift import log
from megaswift.errors import Problem, UserError
from megaswift.launchers.ray_cluster import last_line
from megaswift.log import count_text
from megaswift.rollout.ray_engines.actor import (
    CONTROL,
    SERVED,
    EngineAnswer,
    EngineRequest,
    EngineWeights,
    folder_digest,
)
from megaswift.rollout.ray_engines.cluster import EngineGroup, EngineSettings
from megaswift.rollout.ray_engines.dispatch import PATIENCE_SECONDS, Dispatcher, EngineLost
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.rollout.sync_folders import WeightFolder
from megaswift.rollout.weight_transfer.buckets import state_digest, tensor_checksum

GROUP = 8
"""Prompts that a server is given at a time: mostly the same, so that it computes the prompt once."""
RETRY_SECONDS = 1.0
"""Seconds between questions whether an engine is back."""
STARTS = 10
"""Starts of every engine in a row without an answer after which the run ends; before its first request, of any
engine."""
LOST_SECONDS = 600.0
"""Seconds without a node for any engine after which the run ends: time in which a cluster may replace nodes."""


class RayEngine:
    """An engine's actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def ask(self, request: EngineRequest) -> Future[EngineAnswer]:
        """Ask once: the dispatcher asks another engine."""
        return future_of(self.actor.ask.remote(request))

    def back(self) -> Future[EngineAnswer]:
        """Ask until the engine answers, which Ray starts again. UserError if Ray gives it up. Ray's own retries would
        print a line for each of them, for as long as an engine has no node."""
        found: Future[EngineAnswer] = Future()

        def ask() -> None:
            import ray

            if ray.is_initialized():
                future_of(self.actor.ready.remote(), _lost_or_given_up).add_done_callback(settle)

        def settle(answer: Future[EngineAnswer]) -> None:
            error = answer.exception()
            if isinstance(error, EngineLost):
                again = Timer(RETRY_SECONDS, ask)
                again.daemon = True
                again.start()
            elif error is not None:
                found.set_exception(error)
            else:
                found.set_result(answer.result())

        ask()
        return found

    def interrupt(self, request: EngineRequest) -> None:
        """Interrupt one request."""
        self.actor.interrupt.options(concurrency_group=CONTROL).remote(request.key)


def _lost(error: BaseException) -> Exception:
    return EngineLost(str(error))


def _lost_or_given_up(error: BaseException) -> Exception:
    """Tell an engine that Ray starts again (ActorUnavailableError) from one that it does not (ActorDiedError)."""
    from ray.exceptions import ActorDiedError

    if not isinstance(error, ActorDiedError):
        return _lost(error)
    rule = f"has ended, and Ray does not start it again: {last_line(error)}"
    return UserError(Problem("a sampler engine", rule, "see the logs of Ray's workers (`ray logs`)"))


def future_of(reference: Any, ended: Callable[[BaseException], Exception] = _lost) -> Future[Any]:
    """Return the result of a call of an actor, or the error that `ended` makes if the actor ended before, or its node
    with a result that this process had not read yet."""
    from ray.exceptions import ObjectLostError, RayActorError

    found: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, RayActorError | ObjectLostError):
            error = ended(error)
        if error is None:
            found.set_result(done.result())
        else:
            found.set_exception(error)

    reference.future().add_done_callback(settle)
    return found


class RaySampler:
    """Completions of batches that engines decode."""

    def __init__(self, group: EngineGroup, settings: EngineSettings, folder: Path, rank: int) -> None:
        """Wait until the engines are ready.

        Args:
            group: The engines.
            settings: What they are.
            folder: The model's.
            rank: This process's, by which ranks ask different engines first.
        """
        sync = settings.options.sync_folder
        assert sync is not None, "the engines read weights from it"
        self.group = group
        self.batch = settings.options.batch_size
        self.without_node = 0
        """Engines on no node at the last look."""
        self.lost_since: float | None = None
        """When all of them were first seen without a node."""
        self.weights = WeightFolder(sync, folder)
        engines = [RayEngine(actor) for actor in group.engines]
        self.dispatcher: Dispatcher[EngineRequest, EngineAnswer] = Dispatcher(
            engines, settings.at_once, self._check, rank % len(engines)
        )
        starting = [engine.back() for engine in engines]
        while wait(starting, PATIENCE_SECONDS).not_done:
            self._check(max)  # it waits for all of them
        for future in starting:
            raise_error_of(future.result())

    def restarts(self) -> int:
        """How often engines were started again."""
        return int(self._board("restarts"))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Write completions; all of a chunk are asked of another engine if one ends."""
        return self._write(prompts, sampling, seeds)

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Completion],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Callable[[], bool],
    ) -> list[Completion]:
        """Write on. What an engine that ends has written since the last interruption is written again."""
        return self._write(prompts, sampling, seeds, begun, stop)

    def _write(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        begun: Sequence[Completion] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        weights = self._board("wanted")
        assert weights is not None, "update_weights or update_adapter comes before"
        chunks = self.chunks(prompts)
        requests = [
            EngineRequest(
                weights,
                [tuple(prompts[i]) for i in chunk],
                sampling,
                [seeds[i] for i in chunk],
                None if begun is None else [begun[i] for i in chunk],
                uuid.uuid4().hex,
            )
            for chunk in chunks
        ]
        completions: dict[int, Completion] = {}
        for chunk, answer in zip(chunks, self.dispatcher.run(requests, stop), strict=True):
            if answer is not None:
                completions |= zip(chunk, answer.checked(weights).completions, strict=True)
            else:
                assert begun is not None, "only what may be interrupted is not answered"
                completions |= {i: begun[i] for i in chunk}
        return [completions[i] for i in range(len(prompts))]

    def chunks(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the places of the prompts of each request: of similar length, as many as an engine decodes at a time,
        or one share for each engine."""
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), tuple(prompts[i])))
        size = min(self.batch, -(-len(prompts) // len(self.group.engines)))
        return [order[start : start + size] for start in range(0, len(order), size)]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the weights to the sync folder, from which engines load them: those that are there at once."""
        checksums: dict[str, int] = {}

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                checksums[name] = tensor_checksum(tensor)
                yield name, tensor

        folder = self.weights.write(counted())
        self._load(EngineWeights(str(folder.absolute()), False, state_digest(checksums)))
        self.weights.taken(folder)

    def update_adapter(self, folder: Path) -> None:
        """Let engines load an adapter."""
        self._load(EngineWeights(str(folder.absolute()), True, folder_digest(folder)))

    def _load(self, weights: EngineWeights) -> None:
        """Every engine that is there loads the weights. One that has ended loads them when it is asked for completions;
        its start, which may take minutes, holds up nobody."""
        self._board("want", weights)
        loads = {
            number: future_of(self.group.engines[number].load.remote(weights)) for number in self.dispatcher.there()
        }
        for number, load in loads.items():
            try:
                raise_error_of(load.result())
            except EngineLost:
                self.dispatcher.lose(number)
        if len(self.dispatcher.there()) < len(self.group.engines):
            self._look_for_lost_nodes()

    def _check(self, counted: Callable[[Sequence[int]], int] = min) -> None:
        """UserError if every engine was started many times and has not answered, or has lost its node for long.
        `counted` is `max` where one such engine is enough."""
        starts = counted(self._board("starts_without_answer"))
        if starts > STARTS:
            whose = "each" if counted is min else "one of them"
            rule = f"{whose} ended {starts - 1} times in a row before it answered"
            fix = "see the logs of Ray's workers (`ray logs`): often memory is too small"
            raise UserError(Problem("the sampler engines", rule, fix))
        self._look_for_lost_nodes()

    def _look_for_lost_nodes(self) -> None:
        """Warn of engines whose node is lost. UserError if no engine has had a node for long."""
        before = self.without_node
        self.without_node = self.group.without_node()
        count = len(self.group.engines)
        if self.without_node > before:
            log.warn(
                f"{self.without_node} of {count_text(count, 'sampler engine')} lost their node; Ray starts them again "
                "where it has room, and the others take their prompts"
            )
        if self.without_node < count:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = time.monotonic()
        elif time.monotonic() - self.lost_since > LOST_SECONDS:
            rule = f"have lost their nodes, and Ray has found no room for any of them in {LOST_SECONDS:.0f} seconds"
            raise UserError(Problem("the sampler engines", rule, "add nodes (`ray status`), then resume the run"))

    def _board(self, method: str, *arguments: Any) -> Any:
        """Call the board. UserError if it has ended, and with it the run's engines."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(getattr(self.group.board, method).remote(*arguments))
        except RayError as error:
            rule = f"the run's actors have ended, or the cluster: {last_line(error)}"
            raise UserError(Problem("Ray", rule, "see `ray status`, then resume the run")) from None

    def sleep(self) -> None:
        """Do nothing: engines have their own devices."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the engines, and remove the sync folder's files."""
        self.weights.close()  # first: a cluster that has ended refuses what follows
        self.group.close()


class RayServerSampler(RaySampler):
    """Completions of engines that are servers, which batch requests themselves."""

    def chunks(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return neighbors, which are mostly completions of one prompt."""
        places = [*range(len(prompts))]
        return [places[start : start + GROUP] for start in range(0, len(places), GROUP)]

    def generate_one(self, prompt: Sequence[int], sampling: SamplingParams, seed: int, number: int) -> Completion:
        """Write one completion."""
        return self._write([prompt], sampling, [seed])[0]


def raise_error_of(answer: EngineAnswer) -> None:
    """Raise the UserError that an engine answered with."""
    answer.checked(EngineWeights("", False, answer.digest))


def make_ray_sampler(group: EngineGroup, settings: EngineSettings, folder: Path, rank: int) -> RaySampler:
    """Build the sampler of a process; see `RaySampler.__init__`."""
    kind = RayServerSampler if settings.backend in SERVED else RaySampler
    return kind(group, settings, folder, rank)
