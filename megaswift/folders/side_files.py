"""The files of a model folder that go along with config.json: tokenizer, chat template, generation configuration."""

from __future__ import annotations

from pathlib import Path

from megaswift.base.plain_files import outside_link_problems, refuse_links_outside
from megaswift.errors import Problem

SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
)


def side_files(folder: Path) -> list[Path]:
    """Returns the side files of a model folder, each once.

    Raises:
        WeightsError: One of them is a link out of the folder: what is copied from here is exported and uploaded.
    """
    found = [path for path in _matches(folder) if path.is_file()]
    refuse_links_outside(folder, found)
    return found


def side_file_problems(folder: Path) -> list[Problem]:
    """The same links, and config.json's, as problems."""
    return outside_link_problems(folder, [folder / "config.json", *_matches(folder)])


def _matches(folder: Path) -> list[Path]:
    return list(dict.fromkeys(path for pattern in SIDE_FILES for path in sorted(folder.glob(pattern))))
