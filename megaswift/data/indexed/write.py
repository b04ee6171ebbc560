"""`megaswift data index`: text rows as Megatron-LM's indexed data, tokenized once for any number of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaswift.config import load_config
from megaswift.data.options.data import DataConfig
from megaswift.data.show.words import split_own_options
from megaswift.errors import DataError, Problem
from megaswift.log import info
from megaswift.models.options.model import ModelConfig

USAGE = """\
megaswift data index DATASET... --model DIR --output PREFIX [options]

Tokenizes text (rows as for `megaswift pt`) and writes PREFIX.bin and PREFIX.idx, Megatron-LM's indexed data: a sequence
per document, each ending with the end-of-text token. `megaswift pt --dataset PREFIX` trains on them. Needs only the
model's tokenizer. Accepts --dataset_num_proc, --columns, --sample_by, --strict, --dataset_cache_dir, --use_hf,
--model_revision, --trust_remote_code, and

  --output PREFIX     the files to write
  --overwrite true    replace files that exist (default false)
"""
BLOCK = 1 << 22
"""Tokens that are written at a time."""
READ = frozenset(
    ("dataset", "model", "columns", "sample_by", "strict", "dataset_num_proc", "dataset_cache_dir", "use_dataset_cache")
) | {"use_hf", "model_revision", "trust_remote_code"}


def main(argv: Sequence[str], reader_for: Callable[[ModelConfig, DataConfig, str], Any]) -> int:
    """Write the data sets named in `argv` as indexed data."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    own, words = split_own_options(argv, {"output": "", "overwrite": "false"})
    cfg = load_config("pt", words)
    _check(cfg.given, cfg.model.model, own)
    for notice in cfg.notices:
        info(notice)
    tokenizer = reader_for(cfg.model, cfg.data, cfg.task)

    import numpy as np

    from megaswift.data.indexed.files import smallest_token_type, write_indexed_tokens
    from megaswift.data.tokenization import tokenize_datasets
    from megaswift.data.tokenizer import largest_token_id

    data = cfg.data if "use_dataset_cache" in cfg.given else cfg.replace(use_dataset_cache=False).data
    stores = [store for _, store in tokenize_datasets(data, tokenizer, "pt")]
    lengths = np.concatenate([np.diff(store.offsets) for store in stores])
    if not len(lengths):
        raise DataError(Problem(", ".join(cfg.data.dataset), "has no rows", "give more data"))
    blocks = (s.tokens[at : at + BLOCK] for s in stores for at in range(0, len(s.tokens), BLOCK))
    kind = smallest_token_type(largest_token_id(tokenizer) + 1)
    write_indexed_tokens(own["output"], lengths, blocks, kind)
    print(
        f"{own['output']}.bin and .idx: {len(lengths):,} documents, {int(lengths.sum()):,} tokens of {kind.name}; "
        f"megaswift pt --dataset {own['output']} --max_steps N"
    )
    return 0


def _check(given: frozenset[str], model: str | None, own: dict[str, str]) -> None:
    problems = [
        Problem(f"--{name}", "would be ignored by data index: it applies only to training", "leave it out")
        for name in sorted(given - READ)
    ]
    output = Path(own["output"]).expanduser()
    if not own["output"]:
        problems.append(Problem("--output", "is missing", "--output PREFIX, for PREFIX.bin and PREFIX.idx"))
    elif not output.parent.is_dir():
        problems.append(Problem(f"--output {output}", "its folder does not exist", f"mkdir -p {output.parent}"))
    elif own["overwrite"] != "true":
        there = [p.name for p in (Path(f"{output}.bin"), Path(f"{output}.idx")) if p.exists()]
        if there:
            rule = (
                f"{' and '.join(there)} already exists" if len(there) == 1 else f"{' and '.join(there)} already exist"
            )
            problems.append(Problem(f"--output {output}", rule, "--overwrite true, or another PREFIX"))
    if model is None:
        problems.append(Problem("--model", "is missing: data index needs its tokenizer", "--model DIR"))
    if problems:
        raise DataError(problems)
