"""A model's folder with another config.json, more tokens, or both: OUT/base_model, which the run starts from.

Files that do not change are hard links. New rows of the embedding and the head are the mean of the old ones, as
transformers' `resize_token_embeddings` makes them but for its noise of 1e-9 of their variance; the shards that hold
these tensors are written anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.base.plain_files import refuse_links_outside
from megaswift.bridge.hf.source import INDEX
from megaswift.data.tokenizer import load_tokenizer
from megaswift.errors import Problem, WeightsError

CONFIG = "config.json"
MARK = "changed.json"
VOCABULARY = "vocab_size"
PER_TOKEN = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "lm_head.weight",
    "lm_head.bias",
    "embed_out.weight",
)
"""Ends of the names of tensors that have a row for each token."""


def link_weights_copy_rest(source: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Give `target` every file of `source` but these: weights as hard links (copies where the file system has none),
    the others as copies, so that an edited one leaves `source` as it is.

    Symbolic links would lead out of the folder, which `WeightSource` rejects in a model's folder; WeightsError where
    `source` has such a link.
    """
    target.mkdir(parents=True, exist_ok=True)
    files = [path for path in sorted(source.iterdir()) if path.is_file() and path.name not in without]
    refuse_links_outside(source, files)
    for path in files:
        if path.suffix == ".safetensors":
            with suppress(OSError):  # another file system, or one without hard links
                (target / path.name).hardlink_to(path.resolve())
                continue
        shutil.copyfile(path, target / path.name)


def tokenizer_with_tokens(source: Path, trust: bool, tokens: Sequence[str]) -> Any:
    """Return the folder's tokenizer with these further special tokens."""
    tokenizer = load_tokenizer(source, trust, "use the model's own tokenizer files")
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


def write_changed_model_folder(
    source: Path, target: Path, config: Mapping[str, Any], tokenizer: Any, weights: bool
) -> Path:
    """Write to `target` the model of `source` with `config`, and with `tokenizer` where it is given; embeddings have
    `config`'s number of rows. What an earlier start has made of the same model is kept."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    words = "" if tokenizer is None else json.dumps(sorted(tokenizer.get_vocab().items()))
    mark = json.dumps(
        {
            "files": "copies",
            "source": str(source.resolve()),
            "sha256": hashlib.sha256((text + words).encode()).hexdigest(),
        }
    )
    if (target / MARK).is_file() and (target / MARK).read_text(encoding="utf-8") == mark:
        return target
    shutil.rmtree(target, ignore_errors=True)
    made = target / "tokenizer-files"
    if tokenizer is not None:
        tokenizer.save_pretrained(made)
    # a template is text of any kind: unlike the tokenizer's own files, its link is looked at though it is replaced
    replaced = [path.name for path in made.glob("*") if not path.name.startswith("chat_template")]
    link_weights_copy_rest(source, target, [CONFIG, MARK, *replaced])
    (target / CONFIG).write_text(text, encoding="utf-8")
    if tokenizer is not None:
        for path in made.iterdir():
            (target / path.name).unlink(missing_ok=True)
            path.rename(target / path.name)
        made.rmdir()
    before = json.loads((source / CONFIG).read_text(encoding="utf-8")).get(VOCABULARY)
    if weights and config.get(VOCABULARY) != before:
        _grow(source, target, int(before), int(config[VOCABULARY]))
    (target / MARK).write_text(mark, encoding="utf-8")
    return target


def _grow(source: Path, target: Path, before: int, after: int) -> None:
    """Writes the shards anew that have tensors with a row for each token."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    grown = 0
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(PER_TOKEN)]  # noqa: SIM118
            names = [name for name in names if file.get_slice(name).get_shape()[0] == before]
            if not names:
                continue
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        for name in names:
            more = with_mean_rows(tensors[name], after)
            grown += more.nbytes - tensors[name].nbytes
            tensors[name] = more
        (target / path.name).unlink()
        with safetensors_errors_as_oserror(target / path.name):
            save_file(tensors, target / path.name, metadata=metadata)
    if not grown:
        rule = f"has no embedding of {before} rows whose name ends in one of {', '.join(PER_TOKEN)}"
        raise WeightsError(Problem(str(source), rule, "use a model folder with the extended tokenizer and embeddings"))
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text(encoding="utf-8"))
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] += grown
        (target / INDEX).unlink()
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def with_mean_rows(tensor: Tensor, rows: int) -> Tensor:
    """Extend a tensor to [rows, ..]; new rows are the mean of the old ones."""
    mean = tensor.float().mean(dim=0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - tensor.shape[0], *tensor.shape[1:])]).contiguous()
