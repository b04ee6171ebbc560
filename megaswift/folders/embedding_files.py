"""The files by which sentence-transformers knows a model: how tokens are pooled, and prompts by name. No torch.

Read from the folder that a run starts from, and written beside an export. The names of modules and of their settings
are those that all its versions since 2.0 read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaswift.base.plain_files import read_plain_file
from megaswift.errors import Problem, WeightsError

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
SCORE = "1_LogitScore/config.json"
"""For a reranker that is a language model: the tokens whose logits give the score."""
MODES = {
    "last": "lasttoken",
    "mean": "mean",
    "cls": "cls",
    "weightedmean": "weightedmean",
}
"""The name of a pooling in the newer form of its settings."""
KEYS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}
"""The switch of each pooling in the older form; the last two cannot be trained here."""
QUERY, DOCUMENT = "query", "document"
DOCUMENT_NAMES = (DOCUMENT, "passage", "corpus")


@dataclass(frozen=True)
class EmbeddingFiles:
    """What the files of an embedding model say."""

    pooling: str = "last"
    prompts: Mapping[str, str] = field(default_factory=dict)
    normalizes: bool = True
    max_length: int | None = None

    @property
    def query_prompt(self) -> str:
        """The text before queries."""
        return self.prompts.get(QUERY, "")

    @property
    def document_prompt(self) -> str:
        """The text before documents."""
        return next((self.prompts[name] for name in DOCUMENT_NAMES if name in self.prompts), "")

    def with_prompts(self, query: str, document: str) -> Mapping[str, str]:
        """Return the prompts with these two in place of the folder's own."""
        names = [name for name in DOCUMENT_NAMES if name in self.prompts] or [DOCUMENT]
        return {**self.prompts, QUERY: query, **dict.fromkeys(names, document)}


def read_embedding_files(folder: Path, flag: str) -> EmbeddingFiles | None:
    """Return what a folder's files say; None where it is no folder of sentence-transformers.

    Raises:
        WeightsError: The model has parts that a run here would not train or apply.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = _json(folder / MODULES)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    paths = [str(module.get("path", "")) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]) or paths[0]:
        rule = f"has the modules {', '.join(kinds)}; Transformer, Pooling and Normalize can be trained"
        raise WeightsError(Problem(flag, rule, f"remove {folder / MODULES} to train the Transformer alone"))
    settings = _json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    lengths = _json(folder / LENGTH) if (folder / LENGTH).is_file() else {}
    if "message" in (lengths.get("modality_config") or {}):
        rule = "writes texts by the chat template (message in modality_config); training reads them as they are"
        fix = 'remove "message" from modality_config'
        raise WeightsError(Problem(f"{flag}, {LENGTH}", rule, fix))
    pooling = _json(folder / paths[1] / "config.json")
    mode = _pooling(pooling)
    if mode not in MODES:
        rule = f"pools by {mode}, which cannot be trained"
        raise WeightsError(Problem(f"{flag}, {paths[1]}/config.json", rule, f"use one of {', '.join(MODES)}"))
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
    if not pooling.get("include_prompt", True) and mode != "last":
        rule = "leaves prompts out of the pooling (include_prompt false)"
        raise WeightsError(Problem(f"{flag}, {paths[1]}/config.json", rule, 'set "include_prompt": true'))
    return EmbeddingFiles(mode, prompts, "Normalize" in kinds, lengths.get("max_seq_length"))


def _json(path: Path) -> Any:
    try:
        return json.loads(read_plain_file(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(Problem(str(path), f"cannot be read: {error}")) from None


def _pooling(settings: Mapping[str, Any]) -> str:
    """The pooling under our name, or another under its own; several joined by +."""
    named = settings.get("pooling_mode")
    if named is not None:
        names = [named] if isinstance(named, str) else [str(name) for name in named]
        ours = {theirs: name for name, theirs in MODES.items()}
        return "+".join(ours.get(name, name) for name in names)
    return "+".join(name for name, key in KEYS.items() if settings.get(key)) or "mean"


def embedding_files(files: EmbeddingFiles, hidden_size: int) -> dict[str, str]:
    """Return the texts of the files of an embedding model, by path within its folder."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * files.normalizes
    pooling = {"word_embedding_dimension": hidden_size}
    pooling |= {key: name == files.pooling for name, key in KEYS.items()}
    texts: dict[str, Any] = {
        MODULES: [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
        SETTINGS: {
            "prompts": dict(files.prompts),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {**pooling, "include_prompt": True},
        LENGTH: {"max_seq_length": files.max_length, "do_lower_case": False},
    }
    return {path: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for path, value in texts.items()}
