"""The tokenizer of a model folder: broken files, the template of the configuration, hub ids and exports.

Covers: megaswift/folders/adapter.py.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from megaswift.config import SwiftConfig
from megaswift.data.model_tokenizer import read_tokenizer
from megaswift.errors import UserError
from megaswift.folders.source import locate_model, missing_model_file_problems, short_name
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.trainers import checkpoints
from tests.trainers.inputs import TEMPLATE, write_model


@pytest.mark.parametrize("text", ["[]", '{"tokenizer_class": 5}', '{"added_tokens_decoder": 3}'])
def test_a_broken_tokenizer_is_the_user_s_mistake(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        read_tokenizer(tmp_path, False, None)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Nope"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"added_tokens": 5},
        None,
    ],
)
def test_a_tokenizer_json_that_the_library_cannot_parse(tmp_path: Path, change: dict | None) -> None:
    """tokenizers raises plain `Exception` for the first two."""
    folder = write_model(tmp_path / "model")
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text[:300] if change is None else json.dumps({**json.loads(text), **change}))
    with pytest.raises(UserError, match="cannot be read"):
        read_tokenizer(folder, False, None)


def test_the_template_of_the_configuration_is_read_as_the_data_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_tokenizer(folder, False, None).chat_template == TEMPLATE
    for value in ("~/other.jinja", (tmp_path / "other.jinja").read_text()):
        made = read_tokenizer(folder, False, value)
        assert made.chat_template == (tmp_path / "other.jinja").read_text()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/data/runs/helpful/hf", "helpful"),
        ("out/checkpoints/step-20", "step-20"),
        ("mine/model/", "mine"),
    ],
)
def test_short_names_of_models_differ(model: str, name: str) -> None:
    assert short_name(model) == name


@pytest.mark.parametrize(("package", "options"), [("huggingface_hub", {}), ("modelscope", {"use_hf": False})])
def test_a_model_id_is_requested_from_the_chosen_hub(
    package: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for both clients: which of them is asked, for what, and what is said when it gives nothing. Of several
    ranks on a node one asks."""
    asked: list[tuple[str, str, str | None, bool]] = []

    def client(name: str) -> ModuleType:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)

        def snapshot_download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((name, model, revision, "*.safetensors" in allow_patterns))
            if model == "some/other":
                raise OSError("no such model")
            return str(tmp_path)

        made.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        return made

    for name in ("huggingface_hub", "modelscope"):
        monkeypatch.setitem(sys.modules, name, client(name))
    model = SwiftConfig(model="some/model", model_revision="v2", **options).model
    assert locate_model(model) == locate_model(model, weights=False) == tmp_path
    assert asked == [(package, "some/model", "v2", True), (package, "some/model", "v2", False)]
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert locate_model(model) == locate_model(model) == tmp_path and len(asked) == 3
    hub = "ModelScope" if options else "Hugging Face"
    with pytest.raises(UserError, match=f"some/other: no such local folder, and {hub} could not provide it"):
        locate_model(SwiftConfig(model="some/other", **options).model)


@pytest.mark.parametrize("engine", ["megatron", "torch"])
def test_a_run_of_adapters_is_no_model(engine: str, tmp_path: Path) -> None:
    """Told with the model that they are of, by names and small files alone."""
    store = checkpoints.CheckpointStore(tmp_path / "OUT" / "checkpoints")
    saving = store.begin(4)
    write_model(saving / "model")
    (saving / "adapter").mkdir()
    (saving / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    (saving / "engine" / "state").mkdir(parents=True)
    if engine == "megatron":
        (saving / "engine" / ".metadata").write_text("")
    step = store.finish(4, checkpoints.hash_files(saving, checkpoints.unhashed_files(saving, ())), {})
    for name in (tmp_path / "OUT", step):
        folder = locate_model(ModelLoadingOptions(model=str(name)))
        (problem,) = missing_model_file_problems(folder, random_init=False)
        assert problem.rule == "contains the adapters of a LoRA run, not a model"
        assert problem.fix == f"--model models/base --adapters {step / 'adapter'}"
    assert missing_model_file_problems(folder, random_init=True) == []
    with pytest.raises(UserError, match="contains the adapters of a LoRA run"):
        locate_model(ModelLoadingOptions(model=str(step / "adapter")))
