"""A loaded tokenizer becomes options where it differs from the model's: the run's tokenizer is then the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megaswift import SwiftConfig
from megaswift.data.loaded_tokenizer import options_of_loaded_tokenizer
from megaswift.errors import ConfigError
from tests.trainers.inputs import write_model

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loaded") / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def options(tokenizer: Any, folder: Path) -> dict[str, Any]:
    return options_of_loaded_tokenizer(tokenizer, SwiftConfig(model=str(folder)).model)


def test_the_model_s_own_needs_none(tokenizer: Any, folder: Path) -> None:
    tokenizer(["1", "1+1="], padding=True, truncation=True, max_length=2)  # settings of calls
    tokenizer.padding_side = "left"
    assert options(tokenizer, folder) == {}


def test_a_template_and_new_tokens(tokenizer: Any, folder: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<done>"]})
    found = options(tokenizer, folder)
    assert found == {"chat_template": TEMPLATE, "new_special_tokens": ["<tool>", "<done>"]}
    assert SwiftConfig(model=str(folder), **found).model.new_special_tokens == ("<tool>", "<done>")


def test_a_padding_token_is_told_to_be_left_out(tokenizer: Any, folder: Path, capsys: Any) -> None:
    tokenizer.pad_token = "7"
    assert options(tokenizer, folder) == {}
    assert "its padding token '7' is left out: no loss depends on padding" in capsys.readouterr().err


def _other_end(tokenizer: Any) -> None:
    tokenizer.eos_token = "7"


def _other_words(tokenizer: Any) -> None:
    tokenizer.add_tokens(["hello"])


@pytest.mark.parametrize(("change", "what"), [(_other_end, "end-of-text token"), (_other_words, "vocabulary")])
def test_what_no_option_says_is_refused(change: Any, what: str, tokenizer: Any, folder: Path) -> None:
    change(tokenizer)
    with pytest.raises(ConfigError, match=rf"tokenizer: its {what}.* differs from that of (.|\n)*save_pretrained"):
        options(tokenizer, folder)


def test_something_else_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer: is of type int"):
        options(3, folder)
