"""`megaswift data cache`, also `megaswift export --to_cached_dataset true`: tokenizes data sets once, into folders that
any number of runs train on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaswift.config import load_config
from megaswift.data.options.data import DataConfig
from megaswift.data.show.words import split_own_options
from megaswift.errors import DataError, Problem
from megaswift.log import info
from megaswift.models.options.model import ModelConfig
from megaswift.options.sources import normalize_name
from megaswift.options.values import FALSE, TRUE

USAGE = """\
megaswift data cache DATASET... --model DIR --output_dir FOLDER [options]
megaswift export --to_cached_dataset true --dataset DATASET... --model DIR --output_dir FOLDER [options]

Tokenizes data sets and writes FOLDER/train, and with --val_dataset FOLDER/val. A run with the same tokenizer, chat
template and tokenization options trains on them, on any layout:

  megaswift sft --model DIR --cached_dataset FOLDER/train --cached_val_dataset FOLDER/val

Needs only the model's tokenizer. Accepts a run configuration (.yaml, as the first argument), the options on which
tokens depend (--columns, --system, --chat_template, --enable_thinking, --loss_scale, --model_name, --model_author,
--sample_by, --strict), --dataset_num_proc, --use_hf, --model_revision, --trust_remote_code, --seed, and

  --task TASK         the task of the runs: pt, dpo, kto, grpo, seq_cls, ... (default sft)
  --overwrite true    replace folders that exist (default false)
"""
NODE_RANKS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Variables that hold a node's rank."""
_TO_CACHED = "to_cached_dataset"
READ = frozenset(
    (
        *("dataset", "val_dataset", "model", "use_hf", "model_revision", "trust_remote_code", "columns", "system"),
        *("num_labels", "class_names", "problem_type", "use_chat_template"),
        *("chat_template", "enable_thinking", "loss_scale", "model_name", "model_author", "sample_by", "strict"),
        *("agent_template", "add_non_thinking_prefix", "max_pixels", "external_plugins"),
        *("video_fps", "video_min_frames", "video_max_frames", "video_max_pixels"),
        *("dataset_num_proc", "dataset_cache_dir", "use_dataset_cache", "shuffle", "seed", "data_seed"),
    )
)


def words_of_cached_dataset(argv: Sequence[str]) -> list[str] | None:
    """The words of `megaswift export --to_cached_dataset true` for `main`; None where export writes a model."""
    words = list[str]()
    asked = False
    rest = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or normalize_name(word.lstrip("-")) != _TO_CACHED:
            words.append(word)
            continue
        value = rest.pop(0).lower() if rest and rest[0].lower() in (*TRUE, *FALSE) else "true"
        asked = value in TRUE
    return words if asked else None


def main(argv: Sequence[str], reader_for: Callable[[ModelConfig, DataConfig, str], Any]) -> int:
    """Write the data sets named in `argv` as tokens."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    own, words = split_own_options(argv, {"output_dir": "", "overwrite": "false", "task": ""})
    cfg = load_config(own["task"] or None, words)
    folders = _folders(cfg.model.model, cfg.data, own)
    for notice in cfg.notices:
        info(notice)
    node = node_rank_text()
    idle = ", ".join(f"--{name}" for name in sorted(cfg.given - READ))
    if idle:
        info(f"{idle}: without effect on tokens; for the training run")
    reader = reader_for(cfg.model, cfg.data, cfg.task)

    from megaswift.data.build import data_seed
    from megaswift.data.encode.rows import encode_spec
    from megaswift.data.store.cached import (
        join_writer,
        only_writer,
        write_cached_dataset,
        written_by_another_node,
    )
    from megaswift.data.tokenization import tokenize_datasets
    from megaswift.data.vision.processor import tokenizer_of_tokenizer_or_processor

    data = cfg.data if "use_dataset_cache" in cfg.given else cfg.replace(use_dataset_cache=False).data
    spec = encode_spec(data, reader, cfg.task)
    name = str(tokenizer_of_tokenizer_or_processor(reader).name_or_path)
    with only_writer(folders[0][0].parent):
        for folder, val in _folders(cfg.model.model, cfg.data, own):  # another process may have written in the meantime
            names = data.val_dataset if val else data.dataset
            use = f"--cached_{'val_' * val}dataset {folder}"
            if written_by_another_node(folder, node):
                join_writer(folder, node, spec, names)
                print(f"{folder}: written by another node; {use}")
                continue
            stores = tokenize_datasets(data, reader, cfg.task, val, None if val else data_seed(data, cfg.train))
            write_cached_dataset(folder, stores, spec, name, node, names)
            rows = sum(store.manifest.get("units", len(store)) for _, store in stores)
            tokens = sum(store.manifest["tokens"] for _, store in stores)
            print(f"{folder}: {rows:,} rows, {tokens:,} tokens for {cfg.task}; {use}")
    return 0


def node_rank_text() -> str:
    """This node's rank as its launcher says; empty outside a run of several nodes."""
    return next((rank for name in NODE_RANKS if (rank := os.environ.get(name, "")).isdecimal()), "")


def _folders(model: str | None, data: DataConfig, own: dict[str, str]) -> list[tuple[Path, bool]]:
    """The folders to write, and whether each is of evaluation data; DataError for what is missing."""
    from megaswift.data.sources.files import CACHED_DATASET
    from megaswift.data.store.cached import written_by_another_node

    problems = []
    output = Path(own["output_dir"]).expanduser()
    folders = [(output / "train", False), *([(output / "val", True)] if data.val_dataset else [])]
    if not own["output_dir"]:
        problems.append(Problem("--output_dir", "is missing", "--output_dir FOLDER, for FOLDER/train"))
    for folder, _ in folders if own["output_dir"] else ():
        if folder.exists() and not (folder / CACHED_DATASET).is_file():
            problems.append(Problem(f"--output_dir {output}", f"{folder} holds something else", "another FOLDER"))
        elif folder.exists() and own["overwrite"] != "true" and not written_by_another_node(folder, node_rank_text()):
            problems.append(Problem(f"--output_dir {output}", f"{folder} already exists", "--overwrite true"))
    if not data.dataset:
        problems.append(Problem("--dataset", "is missing", "--dataset data.jsonl"))
    if model is None:
        problems.append(Problem("--model", "is missing: tokens are those of its tokenizer", "--model DIR"))
    if data.streaming:
        problems.append(Problem("--streaming true", "a cached data set holds all rows", "leave it out"))
    if problems:
        raise DataError(problems)
    return folders
