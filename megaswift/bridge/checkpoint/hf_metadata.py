"""The folder `model` of a sharded checkpoint: config.json, tokenizer files and original dtypes, enough to convert it
back to a Hugging Face folder.

    model/config.json       as it was read, without quantization (weights lie dequantized)
    model/weights.json      the dtype that each Hugging Face tensor had
    model/tokenizer*, generation_config.json, chat_template*, ...

Owns writing and reading that folder; where it lies is `folders.checkpoint`'s.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaswift.base.atomic_writes import fsync_path
from megaswift.base.plain_files import read_plain_file
from megaswift.bridge.hf.header import DTYPE_NAMES, DTYPES
from megaswift.errors import CheckpointError, Problem
from megaswift.folders.side_files import side_files
from megaswift.models.quantization import config_without_quantization
from megaswift.models.stored_form import CHECKPOINT_FACTS, StoredForm

FACTS = CHECKPOINT_FACTS
FORMAT = 1


def copy_tokenizer_and_template_files(source: Path, target: Path) -> list[Path]:
    """Copies tokenizer, generation configuration and chat template of a model folder; returns the copies. WeightsError
    where one of them is a link out of the folder."""
    copies = []
    for path in side_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        copies.append(copy)
    return copies


def name_padding_token(folder: Path, config: Mapping[str, Any]) -> None:
    """Give the tokenizer of a reward model's folder the padding token that its config.json says, so that transformers
    pads with what the model does not read. Only a special token can be one."""
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        names = {token["id"]: token["content"] for token in added if token["special"]}
    except (OSError, ValueError, KeyError, TypeError):  # other kinds of tokenizers keep what they have
        return
    name = names.get(config.get("pad_token_id"))
    if name is None:
        return
    for file in (path, folder / "special_tokens_map.json"):  # the latter where transformers 4 has written it
        if file.exists():
            values = settings if file == path else json.loads(file.read_text(encoding="utf-8"))
            text = json.dumps({**values, "pad_token": name}, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")


def write_checkpoint_hf_metadata(
    target: Path,
    config: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    source: Path | None,
    form: StoredForm | None = None,
) -> None:
    """Write the whole folder; side files come from `source`. `form`: unset: what the names of the tensors tell."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(
        json.dumps(config_without_quantization(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    other_dtypes = {name: DTYPE_NAMES[dtype] for name, dtype in dtypes.items() if dtype != usual}
    facts = {"format": FORMAT, "dtype": DTYPE_NAMES[usual], "other_dtypes": other_dtypes}
    facts |= (form or StoredForm.of_names(dtypes.keys())).facts()
    (target / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    copies = copy_tokenizer_and_template_files(source, target) if source is not None else []
    for path in (target / "config.json", target / FACTS, *copies, target):
        fsync_path(path)


@dataclass(frozen=True)
class OriginalTensorDtypes:
    """The dtype each Hugging Face tensor had."""

    usual: torch.dtype
    others: Mapping[str, torch.dtype]

    def __getitem__(self, name: str) -> torch.dtype:
        return self.others.get(name, self.usual)


def read_original_tensor_dtypes(model: Path) -> OriginalTensorDtypes:
    """Read weights.json: the original dtype of each tensor."""
    path = model / FACTS
    try:
        facts = json.loads(read_plain_file(path).decode("utf-8"))
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}; this version reads {FORMAT}")
        return OriginalTensorDtypes(
            DTYPES[facts["dtype"]], {name: DTYPES[dtype] for name, dtype in facts["other_dtypes"].items()}
        )
    except FileNotFoundError:
        raise CheckpointError(
            Problem(
                str(path),
                "is missing: the dtypes of the original tensors are unknown",
                "use a complete checkpoint of this version",
            )
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(Problem(str(path), f"cannot be read ({type(error).__name__}: {error})")) from None
