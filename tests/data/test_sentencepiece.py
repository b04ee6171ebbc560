"""Tokenizers of model folders: SentencePiece's own file alone, and packages that cannot read it.

Covers: megaswift/data/tokenizer.py.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from google.protobuf.runtime_version import VersionError

from megaswift.data.tokenizer import load_tokenizer
from megaswift.errors import WeightsError

TEXT = "the quick brown fox jumps over the lazy dog\nhello world, again and again\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer is a SentencePiece model alone, as Llama 2 and others have it."""
    import sentencepiece

    root = tmp_path_factory.mktemp("sentencepiece")
    (root / "text").write_text(TEXT * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "text"), model_prefix=str(root / "tokenizer"), vocab_size=60, model_type="bpe", minloglevel=2
    )
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 60}))
    kind = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (root / "tokenizer_config.json").write_text(json.dumps(kind))
    return root


def test_a_sentencepiece_model_is_loaded(folder: Path) -> None:
    """It fails where an extra of pyproject.toml installs a protobuf that sentencepiece does not go with."""
    import sentencepiece

    tokenizer = load_tokenizer(folder, False, "-")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for line in ("the lazy fox", "hello world, again"):
        ids = tokenizer(line, add_special_tokens=False).input_ids
        assert ids == oracle.encode(line) and tokenizer.decode(ids) == line


@pytest.mark.parametrize("error", [VersionError("gencode 7.36.1 runtime 6.33.6"), ImportError("no module")])
def test_packages_that_do_not_go_together_are_named(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        assert name == "sentencepiece.sentencepiece_model_pb2"
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(WeightsError) as caught:
        load_tokenizer(folder, False, "-")
    (problem,) = caught.value.problems
    assert str(error) in problem.rule and "sentencepiece and protobuf" in problem.rule
    assert problem.fix == "pip install 'sentencepiece<0.2.3'"
