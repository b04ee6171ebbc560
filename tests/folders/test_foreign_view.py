"""`--model` names a checkpoint of another program, `--hf_config` the folder of its model: training and inference start
from its weights.

Covers: megaswift/folders/foreign.py, megaswift/bridge/weight_source.py.
"""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from megaswift import deploy, export, infer
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import UserError
from megaswift.folders.checkpoint import shown_model_folder
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.inference.model import load_config_tokenizer_and_processor, load_model_and_prompt_device
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from megaswift.options.files import CONFIG_HEADER
from megaswift.trainers.checkpoints import resume_step_candidates
from megaswift.trainers.hooks.metrics import read_lines
from tests.bridge.folders import tensors_of
from tests.bridge.foreign.megatron_writer import Job
from tests.bridge.test_convert import assert_same
from tests.parity.pool import Pool
from tests.trainers.inputs import logits, write_conversations, write_model
from tests.trainers.runs import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    return write_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Path:
    """Its weights as Megatron-LM keeps them."""
    return hf_to_megatron(folder, folder.parent / "megatron", HfToMegatronOptions({"tp": 2}, megatron_lm=True))


def options(model: Path, hf_config: Path | None = None) -> ModelLoadingOptions:
    return ModelLoadingOptions(model=str(model), hf_config=None if hf_config is None else str(hf_config))


def test_the_folder_that_stands_for_a_checkpoint(folder: Path, foreign: Path) -> None:
    view = locate_model(options(foreign, folder))
    assert locate_model(options(foreign / "release", folder)) == view and not missing_model_file_problems(view, False)
    assert json.loads((view / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (view / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not [*view.glob("*.safetensors")]
    weights = open_weights(view)
    want = tensors_of(folder)
    assert set(weights.names()) == set(want)
    assert all(torch.equal(weights.slice(name), tensor) for name, tensor in want.items())


def test_other_files_are_another_folder(folder: Path, foreign: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    first = locate_model(options(foreign, copy))
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    second = locate_model(options(foreign, copy))
    assert first != second and json.loads((second / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_mistakes(folder: Path, foreign: Path, tmp_path: Path) -> None:
    legacy = tmp_path / "iter_0000001" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(b"x")
    told: list[tuple[Any, str]] = [
        (options(foreign), "--model .* is a checkpoint of another program(.|\n)*--hf_config DIR"),
        (
            options(tmp_path, folder),
            f"legacy(.|\n)*megaswift convert megatron-to-hf {tmp_path} DST --hf_config {folder}",
        ),
        (options(folder, folder), "--hf_config .*: is for checkpoints of other programs"),
        (options(foreign, tmp_path), "--hf_config .*: has no config.json"),
        (options(foreign, tmp_path / "none"), "--hf_config .*: has no config.json"),
    ]
    for given, words in told:
        with pytest.raises(UserError, match=words):
            locate_model(given)
    with pytest.raises(UserError, match="is a checkpoint of another program(.|\n)*convert it first"):
        open_weights(foreign)
    with pytest.raises(UserError, match="is a checkpoint of another program(.|\n)*convert it first"):
        hf_to_megatron(foreign, tmp_path / "again")
    with pytest.raises(UserError, match=f"no run resumes(.|\n)*--model {foreign} --hf_config DIR"):
        resume_step_candidates(str(foreign), tmp_path)


def test_adapters_name_the_checkpoint(folder: Path, foreign: Path, tmp_path: Path) -> None:
    """The folder that stands for it may be gone when they are used; the run tells the configuration."""
    release = foreign / "release"
    assert shown_model_folder(locate_model(options(foreign, folder))) == release
    assert shown_model_folder(folder) == folder
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(release)}))
    config = f"{CONFIG_HEADER}\nmodel: {foreign}\nhf_config: {folder}\ndataset: d\ntask: sft\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    weights = infer.COMMAND.parse(["--adapters", str(adapter), "--dataset", "d"]).sections["weights"]
    assert (weights.model, weights.hf_config) == (str(release), str(folder))


def test_inference(folder: Path, foreign: Path) -> None:
    found = []
    for given in (options(folder), options(foreign, folder)):
        prepared = load_config_tokenizer_and_processor(given, None)
        found.append(logits(load_model_and_prompt_device(prepared, PlacementOptions())[0]))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("engine", [["--tp", "2"], ["--engine", "fsdp2"]], ids=["native", "fsdp2"])
def test_training(engine: list[str], folder: Path, foreign: Path, tmp_path: Path) -> None:
    data = str(write_conversations(tmp_path / "data.jsonl"))
    losses = []
    for number, model in enumerate((["--model", str(folder)], ["--model", str(foreign), "--hf_config", str(folder)])):
        out = tmp_path / f"out-{number}"
        words = [*model, "--dataset", data, "--per_device_train_batch_size", "4", "--max_steps", "3", *engine]
        run(words, out, "--logging_steps", 1)
        losses.append([line["loss"] for line in read_lines(out / "metrics.jsonl")])
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.slow
@pytest.mark.process
def test_adapters_from_training_to_serving(
    folder: Path, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA on two pipeline stages, merged and served: as from the Hugging Face folder with the template of DIR."""
    job = Job(str(folder), str(tmp_path / "megatron" / "iter_0000007"), tp=2, pp=2, padding=3)
    pool.run("tests.bridge.foreign.megatron_writer:run", job, job.world)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7")
    hf = Path(shutil.copytree(folder, tmp_path / "hf"))
    template = "<u>" + (hf / "chat_template.jinja").read_text()
    (hf / "chat_template.jinja").write_text(template)
    described = Path(shutil.copytree(hf, tmp_path / "dir", ignore=shutil.ignore_patterns("*.safetensors")))
    data = str(write_conversations(tmp_path / "data.jsonl"))
    answers: list[Any] = []
    monkeypatch.setattr("megaswift.deploy._serve", lambda cfg, app, listener, blind: answers.append(ask(app, listener)))
    found = []
    for name, model in (
        ("whole", ["--model", str(hf)]),
        ("foreign", ["--model", str(tmp_path / "megatron"), "--hf_config", str(described)]),
    ):
        out = tmp_path / name
        words = [*model, "--dataset", data, "--per_device_train_batch_size", "4", "--max_steps", "3", "--lr", "1e-2"]
        run(words, out, "--train_type", "lora", "--pp", 2, "--logging_steps", 1)
        adapters = ["--adapters", str(out / "adapter")]
        merged = tmp_path / f"{name}-merged"
        assert export.main([*adapters, "--merge_lora", "true", "--output_dir", str(merged)]) == 0
        assert deploy.main([*adapters, "--port", "0", "--served_model_name", "m"]) == 0
        losses = [line["loss"] for line in read_lines(out / "metrics.jsonl")]
        found.append((losses, (merged / "chat_template.jinja").read_text(), tensors_of(merged)))
    (whole, shown, weights), (losses, foreign_shown, foreign_weights) = found
    assert losses == whole and len(losses) == 3
    assert foreign_shown == shown == template
    assert_same(foreign_weights, weights)
    assert answers[0] == answers[1]
    assert answers[0]["usage"]["prompt_tokens"] == len("uu1+2?ea"), "a letter for each token, the template's <u> first"


def ask(app: Any, listener: socket.socket) -> dict[str, Any]:
    """A server's greedy answer with its log-probabilities, and its counts of tokens."""
    listener.close()
    turns = [{"role": "user", "content": "1+2?"}]
    body = {"model": "m", "messages": turns, "max_tokens": 8, "temperature": 0, "logprobs": True}
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    return {name: answer[name] for name in ("usage", "choices")}
