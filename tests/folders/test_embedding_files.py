"""The files of sentence-transformers: what it writes is read, and what is written here it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers.sentence_transformer.modules import Pooling

from megaswift.errors import WeightsError
from megaswift.folders.embedding_files import MODES, EmbeddingFiles, embedding_files, read_embedding_files
from megaswift.losses.options.retrieval import POOLINGS
from megaswift.losses.retrieval.groups import POOLING

FULL = EmbeddingFiles("mean", {"query": "Q: ", "passage": "P: ", "sts": "S: "}, False, 77)


def write(folder: Path, files: EmbeddingFiles) -> Path:
    """A folder with these files."""
    for name, text in embedding_files(files, 8).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("files", [FULL, EmbeddingFiles()])
def test_written_and_read(files: EmbeddingFiles, tmp_path: Path) -> None:
    assert read_embedding_files(write(tmp_path, files), "--model x") == files
    pooling = Pooling.load(str(tmp_path), subfolder="1_Pooling")
    assert pooling.pooling_mode == MODES[files.pooling] and pooling.embedding_dimension == 8


def test_poolings_are_the_same_everywhere() -> None:
    assert set(POOLINGS) == set(MODES) == set(POOLING)


def test_prompts() -> None:
    assert (FULL.query_prompt, FULL.document_prompt) == ("Q: ", "P: ")
    assert FULL.with_prompts("a", "b") == {"query": "a", "passage": "b", "sts": "S: "}
    assert EmbeddingFiles().with_prompts("a", "") == {"query": "a", "document": ""}


@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls", "weightedmean"])
def test_newer_settings(mode: str, tmp_path: Path) -> None:
    folder = write(tmp_path, FULL)
    Pooling(8, mode).save(str(folder / "1_Pooling"))  # type: ignore[arg-type]
    found = read_embedding_files(folder, "--model x")
    assert found is not None and MODES[found.pooling] == mode


def test_no_such_folder(tmp_path: Path) -> None:
    assert read_embedding_files(tmp_path, "--model x") is None


def change(folder: Path, name: str, **values: Any) -> None:
    """Change settings in a file."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    folder = write(tmp_path, FULL)
    change(folder, "1_Pooling/config.json", include_prompt=False)
    with pytest.raises(WeightsError, match="leaves prompts out"):
        read_embedding_files(folder, "--model x")
    Pooling(8, ("mean", "max")).save(str(folder / "1_Pooling"))
    with pytest.raises(WeightsError, match=r"pools by mean\+max"):
        read_embedding_files(folder, "--model x")
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))
    with pytest.raises(WeightsError, match="has the modules Transformer, Pooling, Dense"):
        read_embedding_files(folder, "--model x")
    (folder / "modules.json").write_text("[")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_embedding_files(folder, "--model x")
