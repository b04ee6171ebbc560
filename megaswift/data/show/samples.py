"""`megaswift data show`: samples as tokens with their loss mask, lengths and packing. The first thing to look at when
training goes wrong.

Owns the command and what is in its report. It reads with the same code as training, so it shows what a run trains on;
the tokenizer comes from the caller, who knows where models lie. How parts look belongs to `report.py` and
`page.py`, the check of loss masks to `certificate.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS, TRAINING
from megaswift.data.options.data import DataConfig
from megaswift.data.options.indexed import IndexedBlend, parse_indexed_blend
from megaswift.data.options.loss_scale import parse_loss_scale
from megaswift.data.row_counters import row_count_texts
from megaswift.data.show.report import (
    Block,
    Sample,
    TokenizedText,
    block_lines,
    fold_repeats,
    histogram_of,
    token_texts,
    use_color,
)
from megaswift.data.show.words import split_own_options
from megaswift.errors import DataError, Problem
from megaswift.log import count_text, info
from megaswift.models.options.model import ModelConfig
from megaswift.options.command_line import read_command_line
from megaswift.options.tasks import CLASSIFIERS
from megaswift.trainers.options.training import TrainConfig

if TYPE_CHECKING:
    from megaswift.data.store.documents import Documents

USAGE = """\
megaswift data show DATASET... --model DIR [options]
megaswift data show run.yaml [options]

Prints samples as tokens; label tokens are green (in [brackets] without color), `|` separates tokens, and 你(2) is a
character that is split over two tokens. Then prints lengths, what is longer than --max_length, and packing (without
context parallelism), and checks the loss mask of every row in a second way; exit code 1 where it does not hold. Needs
only the model's tokenizer. Accepts a run configuration (.yaml or .json, as the first argument; training options in it
are ignored), the options of section `data` (--max_length, --packing, --columns, --chat_template, --loss_scale, ...),
--use_hf, --model_revision, --trust_remote_code, and

  --samples N   number of samples (default: 3 in the terminal, 200 on the page)
  --first N     index of the first sample, from 0 (default 0)
  --certify N   rows of each data set whose loss mask is checked: all (default), none, or the first N
  --html FILE   also write the report as a web page, where samples can be searched
  --task TASK   pt: plain text; dpo, orpo, cpo, simpo, rm: pairs; kto: labeled completions; grpo, ppo: prompts
                (default sft: conversations)
"""
PRINTED = 3
ON_PAGE = 200
MODEL_OPTIONS = ("model", "use_hf", "model_revision", "trust_remote_code")
ORDER_OPTIONS = ("shuffle", "dataloader_num_workers")
"""Options of section data without effect here."""
PROMPT_OPTIONS = ("max_completion_length",)
"""Options of section rl that limit the length of a prompt."""
SPLIT_OPTIONS = ("seed", "data_seed")
"""They choose what is held out."""


def _check(model: str | None, data: DataConfig, words: Sequence[str]) -> None:
    """DataError for what this command lacks, and for options on its command line that it would ignore."""
    problems = []
    for given in read_command_line(list(words), TRAINING).givens:
        name = NAMES.get(given.name, "")
        if not name:
            continue  # the task
        if name in (*SPLIT_OPTIONS, "shuffle") and any("#" in d for d in data.dataset):
            continue  # which rows are drawn
        if name in SPLIT_OPTIONS:
            used = data.split_dataset_ratio > 0
            why = "seeds the evaluation split, but no rows are held out"
        else:
            used = name in (*MODEL_OPTIONS, *PROMPT_OPTIONS) or (
                OPTIONS[name].section == "data" and name not in ORDER_OPTIONS
            )
            why = "samples are shown in file order" if name == "shuffle" else "applies only to training"
        if not used:
            problems.append(Problem(given.label, f"would be ignored by data show: {why}", "leave it out"))
    if model is None:
        problems.append(Problem("--model", "is missing: data show needs its tokenizer", "--model DIR"))
    if data.streaming:
        problems.append(
            Problem(
                "--streaming true",
                "data show reads whole data sets",
                "--streaming false, with a subset: data.jsonl#1000",
            )
        )
    if problems:
        raise DataError(problems)


def _number(own: dict[str, str], name: str) -> int:
    if not own[name].isdigit():
        raise DataError(Problem(f"--{name} {own[name]}", "must be an integer, 0 or more", f"--{name} 3"))
    return int(own[name])


def data_summary(docs: Documents, evaluation: Documents | None) -> list[Block]:
    """Counts and lengths."""
    tokens = int(docs.length.sum())
    labels = int(docs.labels.sum())
    happened = ", ".join(row_count_texts(docs.counted))
    blocks: list[Block] = [
        f"{docs.counted['rows']:,} rows{f' ({happened})' if happened else ''}, {tokens:,} tokens, {labels:,} label "
        f"tokens ({100 * labels / tokens:.1f}%)"
    ]
    if evaluation is not None:
        blocks.append(
            f"evaluation: {len(evaluation):,} rows, {int(evaluation.length.sum()):,} tokens, "
            f"{int(evaluation.labels.sum()):,} label tokens"
        )
    return blocks + ["", *_lengths(docs, "tokens per sample")]


def _lengths(docs: Documents, what: str) -> list[Block]:
    """Histograms of lengths and of what was too long."""
    beyond: list[Block] = (
        [histogram_of(docs.beyond, "tokens beyond --max_length of longer rows")] if len(docs.beyond) else []
    )
    return [histogram_of(docs.length, what), *beyond]


def packing_summary(docs: Documents, max_length: int) -> list[Block]:
    """Return how full packed rows are, beside rows of one sample."""
    import numpy as np

    from megaswift.data.batches.collate import PaddingShape
    from megaswift.data.batches.loader import make_document_rows

    rows = make_document_rows(docs, True, max_length, PaddingShape())
    assert rows.packing is not None
    tokens = int(docs.length.sum())
    plain = len(docs) * int(docs.length.max())
    filled = np.add.reduceat(docs.length[rows.packing.documents], rows.packing.offsets[:-1])
    line = (
        f"packed into {count_text(len(rows), 'sequence')} of {max_length:,}: "
        f"{100 * tokens / (len(rows) * max_length):.2f}% filled (without packing, padded to the longest: "
        f"{100 * tokens / plain:.1f}%)"
    )
    return [
        line,
        histogram_of(np.diff(rows.packing.offsets), "samples per packed sequence"),
        histogram_of(filled, "tokens per packed sequence"),
    ]


def main(argv: Sequence[str], reader_for: Callable[[ModelConfig, DataConfig, str], Any]) -> int:
    """Show samples, statistics and the certificate of the data sets named in `argv`. 1 where the certificate fails."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    own, words = split_own_options(argv, {"samples": "", "first": "0", "task": "", "certify": "all", "html": ""})
    cfg = load_config(own["task"] or None, words)
    _check(cfg.model.model, cfg.data, words)
    for notice in cfg.notices:
        info(notice)
    from megaswift.data.sources.files import cached_dataset_folder, resolve_dataset_files

    first = _number(own, "first")
    printed = _number(own, "samples") if own["samples"] else PRINTED
    count = ON_PAGE if own["html"] and not own["samples"] else printed
    named_counts = {"all": None, "none": 0}
    certify = own["certify"]
    certified_rows = named_counts[certify] if certify in named_counts else _number(own, "certify")
    blend = parse_indexed_blend(cfg.data.dataset)
    for name in () if blend else (n for n in cfg.data.dataset if not cached_dataset_folder(n)):
        resolve_dataset_files(name, lambda *_: ())  # of paths; a hub is asked later
    reader = reader_for(cfg.model, cfg.data, cfg.task)
    title = f"megaswift data show: {', '.join(cfg.data.dataset)}"
    if blend is not None:
        blocks = indexed_report(blend, reader, range(first, first + count))
        _print(blocks, printed)
        return _print_and_write(own["html"], title, [], blocks)
    from megaswift.data.build import (
        global_batch_unit,  # brings torch; help and mistakes are answered without
    )

    unit = global_batch_unit(cfg.task)
    which = range(first, first + count)
    if unit == "rows":
        blocks = sample_report(cfg.data, cfg.train, cfg.task, reader, which, "packing" in cfg.given)
    elif unit == "completions":
        blocks = prompt_report(cfg.data, cfg.train, cfg.task, reader, which, cfg.rollout.max_completion_length)
    else:
        blocks = preference_report(cfg.data, cfg.train, cfg.task, reader, which)
    _print(blocks, printed)
    if certified_rows == 0 or cfg.task in ("pt", *CLASSIFIERS):
        return _print_and_write(own["html"], title, [], blocks)
    from megaswift.data.show.certificate import certificate_lines, certify_run_data

    findings, cached = certify_run_data(cfg.data, reader, cfg.task, certified_rows)
    scale = parse_loss_scale(cfg.data.loss_scale)
    lines = ["", *certificate_lines(findings, cfg.task, scale.turns, bool(scale.tables))] if findings.rows else []
    lines += [f"loss mask not checked: {name} is a cached data set, which holds tokens and no rows" for name in cached]
    _print_and_write(own["html"], title, lines, blocks)
    return 1 if findings.faults else 0


def _print(blocks: Sequence[Block], samples: int) -> None:
    """Print a report with at most so many samples; before the first one stands how to read it."""
    color = use_color(sys.stdout)
    lines: list[str] = []
    left = samples
    for block in blocks:
        if isinstance(block, Sample):
            left -= 1
            if left < 0:
                continue
            if left == samples - 1:
                lines.append(_legend(block, color))
        lines += block_lines(block, color)
    print("\n".join(lines), flush=True)


def _legend(sample: Sample, color: bool) -> str:
    """Say how to read a sample; prompts carry no loss."""
    texts = [part for part in sample.parts if isinstance(part, TokenizedText)]
    if not any(token.weight for text in texts for token in text.tokens):
        return "Tokens are separated by |."
    return f"Tokens are separated by |; those that carry loss are {'green' if color else '[in brackets]'}."


def _print_and_write(page: str, title: str, blocks: Sequence[Block], printed: Sequence[Block] = ()) -> int:
    """Print what is left of a report, and write the page of all of it."""
    if blocks:
        _print(blocks, 0)
    if page:
        from megaswift.data.show.page import report_page

        path = Path(page)
        try:
            write_atomically(path, report_page([*printed, *blocks], title).encode())
        except OSError as error:
            fix = "--html FILE in a folder that exists and is writable"
            raise DataError(Problem(f"--html {page}", f"cannot be written ({error.strerror})", fix)) from None
        info(f"report written to {path}")
    return 0


def _shown(which: range, count: int, of: str) -> range:
    if which and which.start >= count:
        raise DataError(
            Problem(
                f"--first {which.start}",
                f"out of range: there are {count} {of}, numbered from 0",
                f"--first {count - 1}",
            )
        )
    return range(which.start, min(which.stop, count))


def indexed_report(blend: IndexedBlend, tokenizer: Any, which: range) -> list[Block]:
    """Some sequences of Megatron-LM's indexed data, in file order, then the lengths of all."""
    import numpy as np

    from megaswift.data.indexed.files import open_indexed_tokens

    blocks: list[Block] = []
    for prefix in blend.prefixes:
        data = open_indexed_tokens(prefix)
        blocks.append(f"=== {prefix}: {data.documents:,} documents, {len(data.lengths):,} sequences")
        for i in _shown(which, len(data.lengths), "sequences"):
            ids = data.read(i, 0, int(data.lengths[i])).tolist()
            texts = token_texts(tokenizer, ids, [0] * len(ids))
            blocks.append(Sample((TokenizedText(f"--- sequence {i}: {len(ids)} tokens", texts),)))
        blocks += ["", histogram_of(np.asarray(data.lengths), "tokens per sequence"), ""]
    return blocks


def sample_report(
    data: DataConfig, train: TrainConfig, task: str, reader: Any, which: range, packing_given: bool
) -> list[Block]:
    """Some samples of SFT or pretraining, then statistics of all.

    Args:
        packing_given: Whether the user has set --packing.
    """
    from megaswift.data.build import load_document_splits
    from megaswift.data.vision.processor import Processor

    docs, evaluation = load_document_splits(data, train, reader, task)
    blocks: list[Block] = []
    for i in _shown(which, len(docs), "samples"):
        blocks.append(Sample((_document(docs, i, reader, f"--- sample {i} (row {docs.sample[i]}): "), "")))
    sees = isinstance(reader, Processor)
    summary = data_summary(docs, evaluation)
    if data.packing or (not sees and not packing_given):
        summary += ["", *packing_summary(docs, data.max_length)[: None if data.packing else 1]]
    return blocks + summary


def preference_report(data: DataConfig, train: TrainConfig, task: str, tokenizer: Any, which: range) -> list[Block]:
    """Some pairs or labeled answers, each of their documents, then statistics of all documents."""
    from megaswift.data.build import global_batch_unit, load_preference_splits

    units, evaluation = load_preference_splits(data, train, tokenizer, task)
    kind = global_batch_unit(task)
    docs = units.docs
    blocks: list[Block] = []
    for i in _shown(which, len(units), kind):
        value = units.values[i]
        pairs = kind == "pairs"
        title = f"--- {kind[:-1]} {i} (row {docs.sample[i * units.width]})"
        if pairs:
            names: tuple[str, ...] = ("chosen", "rejected")
            title += "" if value != value else f", margin {value:g}"
        else:
            names = ("desirable" if value else "undesirable",)
        places = range(i * units.width, (i + 1) * units.width)
        sides = [_document(docs, k, tokenizer, f"{name}: ") for name, k in zip(names, places, strict=True)]
        blocks.append(Sample((title, *(part for side in sides for part in (side, "")))))
    blocks.append(
        f"{len(units):,} {kind}, {len(docs):,} documents"
        if kind == "pairs"
        else f"{len(units):,} examples, {int(units.values.sum()):,} of them desirable"
    )
    blocks += [] if evaluation is None else [f"evaluation: {len(evaluation):,} {kind}"]
    return blocks + data_summary(docs, None)


def prompt_report(
    data: DataConfig, train: TrainConfig, task: str, tokenizer: Any, which: range, completion: int
) -> list[Block]:
    """Some prompts with the columns that rewards see, then their lengths."""
    from megaswift.data.prompts.source import load_prompt_splits

    source, evaluation = load_prompt_splits(data, train, tokenizer, task, completion, 1)
    prompts = source.prompts
    blocks: list[Block] = []
    for i in _shown(which, len(prompts), "prompts"):
        prompt = prompts.read(i)
        title = f"--- prompt {i} (row {prompt.number}): {len(prompt.token_ids)} tokens"
        columns = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in prompt.columns.items()]
        blocks.append(Sample((_document(prompts.docs, i, tokenizer, title, counts=False), *columns, "")))
    happened = ", ".join(row_count_texts(prompts.docs.counted))
    blocks.append(
        f"{len(prompts):,} prompts{f' ({happened})' if happened else ''}"
        + ("" if evaluation is None else f", evaluation: {len(evaluation):,}")
    )
    return blocks + _lengths(prompts.docs, "tokens per prompt")


def _document(docs: Documents, i: int, reader: Any, title: str, counts: bool = True) -> TokenizedText:
    from megaswift.data.vision.processor import tokenizer_of_tokenizer_or_processor

    ids, loss = docs.read(i)
    tokens = token_texts(tokenizer_of_tokenizer_or_processor(reader), ids.tolist(), loss.tolist())
    if docs.image_end[i]:
        tokens = fold_repeats(tokens)
    return TokenizedText(title + f"{docs.length[i]} tokens, {docs.labels[i]} label tokens" * counts, tokens)
