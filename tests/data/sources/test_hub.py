"""Data sets by their ids: both hubs' own clients against a server on this machine, subsets, `USE_HF`, ids that differ
between the hubs.

Covers: megaswift/data/options/hub_ids.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_document_splits
from megaswift.data.options.hub_ids import SAME_DATASETS, id_on_hub, names_hub_dataset, with_hub_of_ids
from megaswift.errors import DataError
from megaswift.infer import COMMAND as INFER
from megaswift.serve.prompt_rows import prompt_dataset_files
from tests.data.dataset_hub_server import TOKEN, DatasetHub, dataset_hub_server
from tests.data.makers import chat, tokenizer

CARD = "---\nconfigs:\n- config_name: zh\n  data_files: zh.jsonl\n- config_name: en\n  data_files: en.jsonl\n---\n"
CHINESE = "AI-ModelScope/alpaca-gpt4-data-zh"


def rows(*texts: str) -> bytes:
    return "".join(json.dumps(chat(text, f"answer {text}")) + "\n" for text in texts).encode()


@pytest.fixture(params=["false", "true"])
def use_hf(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DatasetHub]:
    files = {
        "org/plain": {"README.md": b"# rows\n", "train.jsonl": rows("a", "b", "c"), "test.jsonl": rows("t")},
        "org/two": {"README.md": CARD.encode(), "zh.jsonl": rows("z"), "en.jsonl": rows("e", "f")},
        "org/splits": {"test.jsonl": rows("x"), "validation.jsonl": rows("y")},
        "org/a-b": {"train.jsonl": rows("dash")},
        "org/a_b": {"train.jsonl": rows("underscore")},
        CHINESE: {"train.jsonl": rows("modelscope")},
        "llm-wizard/alpaca-gpt4-data-zh": {"train.jsonl": rows("huggingface")},
    }
    with dataset_hub_server(DatasetHub(files)) as server:
        for module in ("huggingface_hub.constants", "datasets.config"):
            monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        datasets.disable_progress_bars()
        yield server


def configured(tmp_path: Path, *words: str, environ: dict[str, str] | None = None) -> SwiftConfig:
    options = ["--model", "unused", "--dataset_cache_dir", str(tmp_path / "cache"), *words]
    return load_config("sft", options, environ=environ or {})


def texts(tmp_path: Path, *words: str, environ: dict[str, str] | None = None) -> list[str]:
    cfg = configured(tmp_path, *words, environ=environ)
    reader = tokenizer("qwen", "qwen2_5")
    docs, _ = load_document_splits(cfg.data, cfg.train, reader)
    return [reader.decode(docs.read(i)[0]).split("answer ")[1].split("<")[0] for i in range(len(docs))]


def refused(tmp_path: Path, *words: str) -> str:
    with pytest.raises(DataError) as caught:
        texts(tmp_path, *words)
    return str(caught.value)


def test_the_training_split_of_either_hub(tmp_path: Path, hub: DatasetHub, use_hf: str) -> None:
    given = ["--use_hf", use_hf, "--dataset"]
    assert texts(tmp_path, *given, "org/plain") == ["a", "b", "c"]
    assert texts(tmp_path, *given, "org/plain#:2") == ["a", "b"]
    assert all(r.startswith(("GET /api/v1/", "GET /api/agent")) for r in hub.requests) == (use_hf == "false")
    before = len(hub.requests)
    assert texts(tmp_path, *given, "org/plain") == ["a", "b", "c"] and len(hub.requests) == before


def test_prompts_of_either_hub(hub: DatasetHub, use_hf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infer --dataset`, with the option or with the variable."""
    for words, variable in (["--use_hf", use_hf], "1"), ([], "1" if use_hf == "true" else "0"):
        monkeypatch.setenv("USE_HF", variable)
        parsed = INFER.parse(["--model", "unused", *words, "--dataset", "org/plain", CHINESE])
        first, second = prompt_dataset_files(parsed.sections["file"].dataset)
        (row,) = pyarrow.parquet.read_table(second.files[0]).to_pylist()
        hub_of_row = "huggingface" if use_hf == "true" else "modelscope"
        assert first.files and row["messages"][0]["content"] == hub_of_row


def test_names_that_differ_by_a_sign_are_stored_apart(tmp_path: Path, hub: DatasetHub, use_hf: str) -> None:
    given = ["--use_hf", use_hf, "--dataset"]
    assert [texts(tmp_path, *given, name) for name in ("org/a-b", "org/a_b")] == [["dash"], ["underscore"]]


@pytest.mark.wide
def test_subsets(tmp_path: Path, hub: DatasetHub, use_hf: str) -> None:
    given = ["--use_hf", use_hf, "--dataset"]
    assert texts(tmp_path, *given, "org/two:en") == ["e", "f"]
    assert texts(tmp_path, *given, "org/two:zh/en#:2") == ["z", "e"]
    assert "org/two:fr: has no subset fr; subsets are zh, en" in refused(tmp_path, *given, "org/two:fr")
    assert "org/two: has no default subset; subsets are zh, en" in refused(tmp_path, *given, "org/two")
    assert "try: --dataset org/splits:" in refused(tmp_path, *given, "org/splits")
    assert texts(tmp_path, *given, "org/splits:test", "org/splits:validation") == ["x", "y"]


def test_what_a_hub_does_not_have(tmp_path: Path, hub: DatasetHub, use_hf: str) -> None:
    text = refused(tmp_path, "--use_hf", use_hf, "--dataset", "org/none")
    asked, other = ("Hugging Face", "--use_hf false") if use_hf == "true" else ("ModelScope", "--use_hf true")
    assert f"org/none: no such local file or folder, and {asked} could not provide it" in text and other in text


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, hub: DatasetHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients try again for half a minute each time."""

    def unreachable(*_: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    text = refused(tmp_path, "--use_hf", "true", "--dataset", "org/two")
    assert "Hugging Face could not provide it (Couldn't reach the hub)" in text and not hub.requests


def test_a_private_data_set(tmp_path: Path, hub: DatasetHub, use_hf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = ("org/plain",)
    given = ["--use_hf", use_hf, "--dataset", "org/plain"]
    assert "could not provide it" in refused(tmp_path, *given)
    monkeypatch.setenv("HF_TOKEN" if use_hf == "true" else "MODELSCOPE_API_TOKEN", TOKEN)
    assert texts(tmp_path, *given) == ["a", "b", "c"]


def test_streaming_and_evaluation_data(tmp_path: Path, hub: DatasetHub) -> None:
    words = ["--model", "m", "--use_hf", "false", "--dataset", "org/two:zh", "--streaming", "--max_steps", "1"]
    cfg = load_config("sft", [*words, "--val_dataset", "org/two:en", "--dataset_cache_dir", str(tmp_path)], environ={})
    source, evaluation = build_train_and_eval_sources(
        cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry()
    )
    assert len(source.next()) == 1 and evaluation is not None and len(evaluation.data) == 2
    assert all("/api/v1/" in request for request in hub.requests)


def test_ids_that_differ_between_the_hubs(tmp_path: Path, hub: DatasetHub, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (CHINESE, "llm-wizard/alpaca-gpt4-data-zh"):
        assert texts(tmp_path, "--use_hf", "true", "--dataset", name) == ["huggingface"]
        assert texts(tmp_path, "--use_hf", "false", "--dataset", name) == ["modelscope"]
    assert f"{CHINESE}: on Hugging Face its ID is llm-wizard/alpaca-gpt4-data-zh" in capsys.readouterr().err
    modelscope, hugging_face = zip(*SAME_DATASETS, strict=True)
    assert len({*modelscope, *hugging_face}) == 2 * len(SAME_DATASETS) and id_on_hub("a/b", "MS") == "a/b"


def test_the_environment_and_prefixes_choose_the_hub(tmp_path: Path, hub: DatasetHub) -> None:
    for environ, options, wanted in [
        ({"USE_HF": "0"}, [], "modelscope"),
        ({"USE_MODELSCOPE_HUB": "1"}, [], "modelscope"),
        ({"USE_HF": "1"}, [], "huggingface"),
        ({"USE_HF": "1"}, ["--use_hf", "false"], "modelscope"),
        ({}, [], "huggingface"),
    ]:
        assert texts(tmp_path, *options, "--dataset", CHINESE, environ=environ) == [wanted]
    both = ["--dataset", f"MS::{CHINESE}", f"HF::{CHINESE}#:1", f"ms::{CHINESE}"]
    assert texts(tmp_path, *both) == ["modelscope", "huggingface", "modelscope"]


@pytest.mark.parametrize("use", [True, False])
def test_local_data_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: bool) -> None:
    (tmp_path / "org" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    local = ("org/data", "org/data:train#3", "a.jsonl", "x/y.json#3", "./a/b", "/x/y", "a/b/c", "corpus")
    assert with_hub_of_ids(local, use) == local and not any(names_hub_dataset(entry) for entry in local)
    hub_ids: list[Any] = ["org/other", "org/other:s#3", "org/v1.5", "org/other:a/b"]
    assert with_hub_of_ids(hub_ids, use) == tuple(hub_ids if use else [f"MS::{entry}" for entry in hub_ids])
    assert with_hub_of_ids(["HF::a/b", "ms::a/b"], use) == ("HF::a/b", "ms::a/b")
    saved = load_config("sft", ["--model", "/", "--dataset", "org/other", "--use_hf", str(use).lower()], environ={})
    assert SwiftConfig.from_dict(saved.to_dict()).data.dataset == saved.data.dataset
