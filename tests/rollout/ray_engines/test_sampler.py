"""The sampler over engines that end at random, against one in the process, bit by bit.

Covers: megaswift/rollout/ray_engines/sampler.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from megaswift.errors import UserError, WeightsError
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.ray_engines import dispatch
from megaswift.rollout.ray_engines import sampler as module
from megaswift.rollout.ray_engines.actor import EngineAnswer, SamplerEngine
from megaswift.rollout.ray_engines.cluster import EngineSettings
from megaswift.rollout.ray_engines.dispatch import EngineLost
from megaswift.rollout.ray_engines.sampler import RayEngine, RaySampler, RayServerSampler, future_of, make_ray_sampler
from megaswift.rollout.sampler import (
    Completion,
    InterruptibleSampler,
    RestartedSampler,
    SamplerOptions,
    SamplingParams,
    SinglePromptSampler,
)
from tests.parity.lora import ATTENTION, MLP, make_adapter
from tests.rollout.ray_engines.actors import Reference, end_actors, engine_group
from tests.rollout.test_transformers import weights
from tests.trainers.inputs import write_model

PROMPTS = [[3, 9, 12, 2], [3, 30, 31, 32, 33, 2], [3, 8, 2]] * 4
SEEDS = [*range(100, 100 + len(PROMPTS))]
DRAWN = SamplingParams(12, temperature=1.3, stop_token_ids=(1,))
NONE = Completion((), (), False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engines") / "model")


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Actors end before what their calls need is undone."""
    yield
    end_actors(monkeypatch)


def settings(model: Path, folder: Path, engines: int = 3, **more: Any) -> EngineSettings:
    options = SamplerOptions(dtype="float32", batch_size=2, sync_folder=folder / "sync", **more)
    return EngineSettings("transformers", engines, 1, 0, str(model), options, str(folder))


def made(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: float = 0.0, engines: int = 3, **more: Any
) -> RaySampler:
    plan = settings(model, folder, engines, **more)
    return make_ray_sampler(engine_group(plan, monkeypatch, ends), plan, model, 1)


def alone(model: Path, factor: float) -> list[Completion]:
    """What a sampler in the process draws."""
    sampler = build(model, SamplerOptions(dtype="float32", batch_size=2))
    sampler.update_weights([(n, t * factor) for n, t in weights(model)])
    return sampler.generate(PROMPTS, DRAWN, SEEDS)


@pytest.mark.wide
@pytest.mark.parametrize("ends", [0.0, 0.5])
def test_engines_that_end_change_nothing(
    ends: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of weights; the folders of old ones are removed."""
    sampler = made(model, tmp_path, monkeypatch, ends)
    for factor in (1.5, 0.5):
        sampler.update_weights([(n, t * factor) for n, t in weights(model)])
        assert sampler.generate(PROMPTS, DRAWN, SEEDS) == alone(model, factor)
        assert len([*(tmp_path / "sync").iterdir()]) == 1
    assert (sampler.restarts() > 3) == (ends > 0)
    sampler.close()
    assert not (tmp_path / "sync").exists()


@pytest.mark.wide
def test_adapters_come_back_with_an_engine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the model's own weights and the adapter again."""
    adapter = make_adapter(model, tmp_path / "adapter", (*ATTENTION, *MLP))
    one = build(model, SamplerOptions(dtype="float32", batch_size=2, lora_rank=4))
    one.update_adapter(adapter)
    sampler = made(model, tmp_path, monkeypatch, 0.5, lora_rank=4)
    sampler.update_adapter(adapter)
    assert sampler.generate(PROMPTS, DRAWN, SEEDS) == one.generate(PROMPTS, DRAWN, SEEDS) != alone(model, 1.0)
    assert sampler.restarts() > 0


def test_interrupted_completions_go_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal weights, interruptions change no token."""
    sampler = made(model, tmp_path, monkeypatch, 0.3)
    sampler.update_weights([(n, t * 1.5) for n, t in weights(model)])
    end = time.monotonic() + 0.05
    written = sampler.extend(PROMPTS, [NONE] * len(PROMPTS), DRAWN, SEEDS, lambda: time.monotonic() > end)
    left = [i for i, one in enumerate(written) if not one.finished and len(one.token_ids) < DRAWN.max_tokens]
    more = sampler.extend([PROMPTS[i] for i in left], [written[i] for i in left], DRAWN, [SEEDS[i] for i in left], bool)
    whole = dict(enumerate(written)) | dict(zip(left, more, strict=True))
    assert left and [whole[i].token_ids for i in range(len(PROMPTS))] == [one.token_ids for one in alone(model, 1.5)]
    assert sampler.extend(PROMPTS, [NONE] * len(PROMPTS), DRAWN, SEEDS, lambda: True) == [NONE] * len(PROMPTS)


def test_each_completion_goes_on_from_its_own_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which there are none, one or two."""
    sampler = made(model, tmp_path, monkeypatch)
    sampler.update_weights([(n, t * 1.5) for n, t in weights(model)])
    whole = alone(model, 1.5)
    kept = [min(i % 3, len(one.token_ids) - 1) for i, one in enumerate(whole)]
    begun = [Completion(c.token_ids[:n], c.logprobs[:n], False) for c, n in zip(whole, kept, strict=True)]
    found = sampler.extend(PROMPTS, begun, DRAWN, SEEDS, bool)
    assert len({*kept}) == 3 and [c.token_ids for c in found] == [c.token_ids for c in whole]


def test_an_engine_with_old_weights_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers with what it has."""
    sampler = made(model, tmp_path, monkeypatch)
    sampler.update_weights([(n, t * 1.5) for n, t in weights(model)])
    monkeypatch.setattr(SamplerEngine, "_having", lambda self, wanted: self._sampler())
    sampler.update_weights([(n, t * 0.5) for n, t in weights(model)])
    with pytest.raises(WeightsError, match="answered with weights"):
        sampler.generate(PROMPTS, DRAWN, SEEDS)


@pytest.mark.wide
def test_engines_that_always_end_end_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", 0.2)
    sampler = made(model, tmp_path, monkeypatch, 1.0, 1)
    sampler.update_weights(weights(model))
    monkeypatch.setattr(module, "STARTS", 1)
    monkeypatch.setattr(SamplerEngine, "ready", lambda self: time.sleep(1))
    with pytest.raises(UserError, match="the sampler engines: each ended .* times in a row"):
        sampler.generate(PROMPTS, DRAWN, SEEDS)


def test_one_engine_that_always_ends_at_the_start_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are ready, and wait for it. It would come up after ten seconds and more."""
    from ray.exceptions import ActorUnavailableError

    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    starts = itertools.count()
    ended = Event()
    answered = Event()

    def ready(self: SamplerEngine) -> EngineAnswer:
        if self.number == 1 and next(starts) < 1000 and not ended.is_set():
            self.board.begin.remote(1)
            raise ActorUnavailableError("restarting", None)
        if self.number == 1:
            answered.set()
        return EngineAnswer()

    monkeypatch.setattr(SamplerEngine, "ready", ready)
    with pytest.raises(UserError, match="the sampler engines: one of them ended .* times in a row"):
        made(model, tmp_path, monkeypatch)
    ended.set()
    assert answered.wait(10), "an engine that answers is asked no more, so that no thread outlives the test"


def test_the_weights_in_the_sync_folder_do_not_outlive_a_cluster_that_has_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close() -> None:
        raise ConnectionError

    sampler = made(model, tmp_path, monkeypatch)
    sampler.update_weights(weights(model))
    monkeypatch.setattr(sampler.group, "close", close)
    with pytest.raises(ConnectionError):
        sampler.close()
    assert not (tmp_path / "sync").exists()


def test_an_engine_that_cannot_be_made_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not start it again: an error of its own."""
    from ray.exceptions import ActorDiedError

    def ready(self: SamplerEngine) -> None:
        raise ActorDiedError

    monkeypatch.setattr(SamplerEngine, "ready", ready)
    with pytest.raises(UserError, match="a sampler engine: has ended, and Ray does not start it again"):
        made(model, tmp_path, monkeypatch)


@pytest.mark.wide
def test_engines_that_have_lost_their_nodes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning for each that is lost; the run ends when none has had a node for long."""
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", 0.2)
    sampler = made(model, tmp_path, monkeypatch)
    sampler.update_weights(weights(model))
    monkeypatch.setattr(RayEngine, "back", lambda self: Future())
    lost = [1, 1, 0, 2, 3]
    monkeypatch.setattr(sampler.group, "without_node", lambda: lost.pop(0) if len(lost) > 1 else 3)
    monkeypatch.setattr(module, "LOST_SECONDS", 0.1)
    for engine in sampler.group.engines:
        engine.ends = 1.0
    with pytest.raises(UserError, match="have lost their nodes, and Ray has found no room") as error:
        sampler.generate(PROMPTS, DRAWN, SEEDS)
    assert "add nodes (`ray status`), then resume the run" in error.value.message()
    said = [line for line in capsys.readouterr().err.splitlines() if "lost their node" in line]
    assert [line.split()[2] for line in said] == ["1", "2", "3"]


def test_an_engine_that_is_away_holds_up_no_sync(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the weights when it is asked again."""
    sampler = made(model, tmp_path, monkeypatch)
    started: Future[None] = Future()
    sampler.dispatcher.away[0] = started
    sampler.update_weights([(n, t * 1.5) for n, t in weights(model)])
    assert sampler.generate(PROMPTS, DRAWN, SEEDS) == alone(model, 1.5)
    engines = [actor.inner for actor in sampler.group.engines]
    assert engines[0].digest == "" and engines[1].digest == engines[2].digest != ""
    started.set_result(None)
    sampler.generate(PROMPTS, DRAWN, SEEDS)
    assert sampler.generate(PROMPTS, DRAWN, SEEDS) == alone(model, 1.5) and engines[0].digest == engines[1].digest


def test_an_engine_that_ends_during_a_sync_is_away(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = made(model, tmp_path, monkeypatch)
    monkeypatch.setattr(RayEngine, "back", lambda self: Future())
    sampler.group.engines[2].ends = 1.0
    sampler.update_weights(weights(model))
    assert sampler.dispatcher.there() == [1, 0]


def test_time_without_any_node_counts_from_the_last_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has had a node since begins it anew."""
    sampler = made(model, tmp_path, monkeypatch)
    for now, lost in ((0, 3), (500, 2), (700, 3), (1200, 3)):
        monkeypatch.setattr(module.time, "monotonic", lambda now=now: now)
        monkeypatch.setattr(sampler.group, "without_node", lambda lost=lost: lost)
        sampler._check()
    monkeypatch.setattr(module.time, "monotonic", lambda: 1301)
    with pytest.raises(UserError, match="have lost their nodes"):
        sampler._check()


def test_a_server_s_engine_writes_one_prompt_with_its_seed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a batch, whatever its number."""
    plan = settings(model, tmp_path)
    sampler = RayServerSampler(engine_group(plan, monkeypatch), plan, model, 4)
    assert sampler.dispatcher.order == [1, 2, 0], "ranks begin with different engines"
    sampler.update_weights([(n, t * 1.5) for n, t in weights(model)])
    found = [sampler.generate_one(PROMPTS[i], DRAWN, SEEDS[i], i).token_ids for i in (0, 4)]
    whole = alone(model, 1.5)
    assert found == [whole[0].token_ids, whole[4].token_ids]


def test_an_answer_that_was_lost_with_its_node() -> None:
    """Ray keeps long answers on the node of the engine until they are read."""
    from ray.exceptions import ObjectLostError

    for error, wanted in ((ObjectLostError("ab", None, "answer"), EngineLost), (ValueError("x"), ValueError)):
        answer: Future[Any] = Future()
        answer.set_exception(error)
        with pytest.raises(wanted):
            future_of(Reference(answer)).result()


def test_kinds_of_engines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers get neighbors, single prompts too; our own loop batches of similar length, whatever the engines do."""
    plan = settings(model, tmp_path)
    sampler = make_ray_sampler(engine_group(plan, monkeypatch), plan, model, 0)
    assert isinstance(sampler, InterruptibleSampler) and isinstance(sampler, RestartedSampler)
    assert not isinstance(sampler, SinglePromptSampler) and isinstance(RayServerSampler, type)
    assert sampler.chunks([[1], [1, 2], [2], [3, 4]]) == [[1, 3], [0, 2]] and plan.at_once == 1
    assert RayServerSampler.chunks(sampler, [[i] for i in range(10)]) == [[*range(8)], [8, 9]]  # type: ignore[arg-type]
    assert isinstance(object.__new__(RayServerSampler), SinglePromptSampler)


def test_checksums_of_the_trainer_are_those_of_the_files(model: Path, tmp_path: Path) -> None:
    from megaswift.rollout.ray_engines.actor import folder_digest
    from megaswift.rollout.sync_folders import WeightFolder
    from megaswift.rollout.weight_transfer.buckets import state_digest, tensor_checksum

    mixed = [("a", torch.arange(5, dtype=torch.bfloat16)), ("b", torch.randn(3, 3).T)]
    folder = WeightFolder(tmp_path, model).write(mixed)
    assert folder_digest(folder) == state_digest({name: tensor_checksum(tensor) for name, tensor in mixed})
