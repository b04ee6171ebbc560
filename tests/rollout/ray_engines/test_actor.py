"""An engine as an object of this process: which weights it answers with, and what it says of mistakes.

Covers: megaswift/rollout/ray_engines/actor.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift.errors import WeightsError
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.backends.vllm_server_sampler import VllmServerSampler
from megaswift.rollout.ray_engines import actor
from megaswift.rollout.ray_engines.actor import (
    EngineAnswer,
    EngineBoard,
    EngineRequest,
    EngineWeights,
    SamplerEngine,
    folder_digest,
    load_with_digest,
)
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.sync_folders import WeightFolder
from tests.rollout.test_transformers import weights
from tests.trainers.inputs import write_model

PROMPTS = [[3, 9, 12, 2], [3, 30, 31, 2]]
DRAWN = SamplingParams(8, stop_token_ids=(1,))
OPTIONS = SamplerOptions(dtype="float32")


class Board:
    """An `EngineBoard` whose methods are called as an actor's."""

    def __init__(self, engines: int) -> None:
        self.inner = EngineBoard(engines)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.inner, name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "model")


def rounds(model: Path, folder: Path) -> list[EngineWeights]:
    """Two syncs of different weights."""
    writer = WeightFolder(folder, model)
    written = [writer.write([(n, t * factor) for n, t in weights(model)]) for factor in (1.5, 0.5)]
    return [EngineWeights(str(one), False, folder_digest(one)) for one in written]


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board(1)
    monkeypatch.setattr(actor, "find_board", lambda: made)
    return made


def engine(model: Path, folder: Path) -> SamplerEngine:
    return SamplerEngine(0, "transformers", str(model), OPTIONS, str(folder / "log"))


def request(wanted: EngineWeights) -> EngineRequest:
    return EngineRequest(wanted, PROMPTS, DRAWN, [5, 6])


def drawn(model: Path, wanted: EngineWeights) -> list[Completion]:
    """What a sampler without an engine draws."""
    alone = build(model, OPTIONS)
    alone.update_weights(load_file(Path(wanted.folder) / "model-00000.safetensors").items())
    return alone.generate(PROMPTS, DRAWN, [5, 6])


def test_an_engine_has_the_weights_that_a_request_asks_for(model: Path, tmp_path: Path, board: Board) -> None:
    """New ones, and after a restart without a word from the trainer."""
    first, second = rounds(model, tmp_path)
    one = engine(model, tmp_path)
    assert one.ready().checked(EngineWeights("", False, "")).completions == []
    for wanted in (first, second, first):
        answer = one.ask(request(wanted)).checked(wanted)
        assert answer.completions == drawn(model, wanted) and answer.digest == wanted.digest
    assert drawn(model, first) != drawn(model, second)
    again = engine(model, tmp_path)
    assert board.inner.restarts() == 1 and board.inner.starts_without_answer() == [1]
    assert again.ask(request(second)).checked(second).completions == drawn(model, second)
    assert board.inner.starts_without_answer() == [0]


def test_weights_are_loaded_once(model: Path, tmp_path: Path) -> None:
    """A request with the weights that an engine has reads no file."""
    first, _ = rounds(model, tmp_path)
    one = engine(model, tmp_path)
    assert one.load(first).error is None
    (Path(first.folder) / "model-00000.safetensors").unlink()
    assert one.ask(request(first)).error is None


def test_what_arrives_with_another_checksum_is_refused(model: Path, tmp_path: Path) -> None:
    """A changed file, a folder that this node does not see, and an answer by other weights."""
    first, second = rounds(model, tmp_path)
    one = engine(model, tmp_path)
    file = Path(first.folder) / "model-00000.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + torch.eye(*tensors[name].shape) * 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="arrived with the digest"):
        one.ask(request(first)).checked(first)
    gone = EngineWeights(str(tmp_path / "gone"), False, "0")
    with pytest.raises(WeightsError, match="does not exist on"):
        one.load(gone).checked(gone)
    with pytest.raises(WeightsError, match="answered with weights"):
        EngineAnswer([], first.digest).checked(second)
    assert one.ask(request(second)).checked(second).completions == drawn(model, second), "it loads what is asked next"


def test_weights_that_arrived_damaged_are_not_those_before(model: Path, tmp_path: Path) -> None:
    """An engine that has read them loads the earlier ones again."""
    first, second = rounds(model, tmp_path)
    one = engine(model, tmp_path)
    assert one.load(first).error is None
    file = Path(second.folder) / "model-00000.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="arrived with the digest"):
        one.load(second).checked(second)
    assert one.ask(request(first)).checked(first).completions == drawn(model, first)


def test_a_server_gets_no_folder_with_another_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rounds(model, tmp_path)
    loaded: list[Path] = []
    monkeypatch.setattr(VllmServerSampler, "load_folder", lambda self, folder: loaded.append(folder))
    server = object.__new__(VllmServerSampler)
    assert load_with_digest(server, replace(first, digest=second.digest)) == first.digest and loaded == []
    assert load_with_digest(server, first) == first.digest and loaded == [Path(first.folder)]


def test_a_request_is_interrupted_by_its_key(model: Path, tmp_path: Path) -> None:
    """Before it begins too; what is written stays."""
    first, _ = rounds(model, tmp_path)
    one = engine(model, tmp_path)
    begun = [Completion((7,), (-1.0,), False), Completion((), (), False)]
    asked = EngineRequest(first, PROMPTS, DRAWN, [5, 6], begun, "a")
    one.interrupt("a")
    assert one.ask(asked).checked(first).completions == begun
    whole = one.ask(EngineRequest(first, PROMPTS, DRAWN, [5, 6], [Completion((), (), False)] * 2, "b"))
    assert [c.token_ids for c in whole.completions] == [c.token_ids for c in drawn(model, first)]
    assert one.interrupted == set()
