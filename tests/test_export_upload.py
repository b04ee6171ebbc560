"""`megaswift export --push_to_hub` to servers on this machine, by both hubs' own clients.

Covers: megaswift/export.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaswift.errors import UserError
from megaswift.export import COMMAND, main
from megaswift.inference.options.parser import ParsedCommand
from tests.inference.models import adapters, folder
from tests.trainers.hub_server import TOKEN, USER, Hub, hub_server
from tests.trainers.modelscope_server import ModelScope, modelscope_server

PUSH = ["--push_to_hub", "true", "--hub_token", TOKEN]
modelscope = pytest.fixture(modelscope_server)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("upload") / "model")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path = adapters(tmp_path_factory.mktemp("adapters") / "my-run" / "adapter", model)
    (path / "README.md").rename(path.parent / "README.md")  # PEFT's model card
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_adapters(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To a repository of the run's name; a base model on this machine is a warning; the token is not printed."""
    before = contents(adapter)
    assert main(["--adapters", str(adapter), *PUSH, "--hub_private_repo"]) == 0
    name = f"{USER}/my-run"
    assert hub.files == {name: before} and hub.private == {name: True} and hub.commits == [(name, "upload my-run")]
    assert contents(adapter) == before
    said = capsys.readouterr()
    assert f"uploaded {adapter} to {name}" in said.out and "names a folder of this machine" in said.err
    assert TOKEN not in said.out + said.err


def test_a_model_card_that_the_hub_refuses(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    shutil.copy(adapter.parent / "README.md", tmp_path / "adapter")
    with pytest.raises(UserError, match=r'"base_model" with value "/.*" is not valid') as caught:
        main(["--adapters", str(tmp_path / "adapter"), *PUSH, "--hub_model_id", "a"])
    assert f"correct {tmp_path / 'adapter' / 'README.md'}, then hf upload {USER}/a" in str(caught.value)


def test_a_model_folder(modelscope: ModelScope, model: Path) -> None:
    words = ["--model", str(model), *PUSH, "--use_hf", "false", "--hub_model_id", "org/m", "--commit_message", "first"]
    assert main(words) == 0
    assert modelscope.files == {"org/m": contents(model)} and modelscope.private == {"org/m": False}
    assert [message.partition(" (")[0] for _, message in modelscope.commits] == ["first"]


def test_the_export_of_a_run(hub: Hub, model: Path, tmp_path: Path) -> None:
    """--model OUT is OUT/hf."""
    shutil.copytree(model, tmp_path / "run" / "hf")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert main(["--model", str(tmp_path / "run"), *PUSH]) == 0
    assert hub.files == {f"{USER}/run": contents(model)}


def test_a_merged_model_is_what_is_uploaded(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert main(["--adapters", str(adapter), "--merge_lora", "--output_dir", str(target), *PUSH]) == 0
    assert hub.files == {f"{USER}/merged": contents(target)} and "model.safetensors" in contents(target)


@pytest.mark.parametrize("use_hf", ["true", "false"])
def test_a_wrong_token_is_found_before_anything_is_written(
    hub: Hub, modelscope: ModelScope, adapter: Path, tmp_path: Path, use_hf: str
) -> None:
    target = tmp_path / "merged"
    words = ["--push_to_hub", "--hub_token", "hf_wrongwrongwrong", "--use_hf", use_hf, "--output_dir", str(target)]
    with pytest.raises(UserError, match="the hub does not give access to merged") as caught:
        main(["--adapters", str(adapter), "--merge_lora", *words])
    assert "hf_wrong" not in str(caught.value) and not target.exists()


def test_an_upload_that_fails_names_the_command(modelscope: ModelScope, model: Path, tmp_path: Path) -> None:
    def failing(name: str, asked: object) -> tuple[int, object]:
        return 403, {"Code": 403, "Message": "no quota"}

    modelscope.commit = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(UserError, match=f"try: ms upload org/m {model}"):
        main(["--model", str(model), *PUSH, "--use_hf", "false", "--hub_model_id", "org/m"])


def test_a_folder_without_weights_is_not_uploaded(hub: Hub, model: Path, tmp_path: Path) -> None:
    """As STEP/model, whose weights are in STEP/engine."""
    (tmp_path / "model").mkdir()
    shutil.copy(model / "config.json", tmp_path / "model")
    with pytest.raises(UserError, match="--to_hf true --mcore_model"):
        main(["--model", str(tmp_path / "model"), *PUSH])
    assert hub.private == {}


def parsed(*words: str) -> ParsedCommand:
    return COMMAND.parse(list(words))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--model me/m --push_to_hub", "--model me/m: is not a folder on this machine"),
        ("--adapters A B --push_to_hub", "export once per folder"),
        ("--model M --to_mcore --push_to_hub", "leave out --to_mcore"),
        (
            "--model M --push_to_hub --output_dir new",
            "new: would be ignored: applies to a folder that is written",
        ),
        ("--model M --push_to_hub --hub_strategy every_save", "uploaded once"),
        ("--model M", "needs --merge_lora, --quantization_bit, --quant_method, --to_mcore"),
        ("--adapters A --push_to_hub --quant 4", "--adapters A: would be ignored"),
    ],
)
def test_refusals(words: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M").mkdir()
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "M"}))
    with pytest.raises(UserError) as caught:
        parsed(*words.split())
    assert answer in str(caught.value)


def test_upload_options_without_an_upload(tmp_path: Path) -> None:
    words = ["--quant", "4", "--output_dir", str(tmp_path / "q"), "--hub_model_id", "a/b"]
    assert any("--hub_model_id a/b has no effect" in told for told in parsed("--model", str(tmp_path), *words).notices)
