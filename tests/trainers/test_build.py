"""Putting a run together: what a broken tokenizer folder says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import UserError
from megaswift.trainers.build import tokenizer_of


@pytest.mark.parametrize("text", ["[]", '{"tokenizer_class": 5}', '{"added_tokens_decoder": 3}'])
def test_a_broken_tokenizer_is_the_user_s_mistake(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer_of(SwiftConfig(), tmp_path)
