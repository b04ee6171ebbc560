"""`megaswift data show`: samples as tokens with their loss mask, lengths and packing. The first thing to look at when
training goes wrong.

Owns this command's text. It reads with the same code as training, so it shows what a run trains on; the
tokenizer comes from the caller, who knows where models lie.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from megaswift.config import SwiftConfig, load_config
from megaswift.config.indexed_data_rules import IndexedBlend, parse_indexed_blend
from megaswift.config.read_config_file_and_command_line import read_command_line
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.data.data_command_words import split_own_options
from megaswift.data.row_count_names_and_texts import row_count_texts
from megaswift.errors import DataError, Problem
from megaswift.log import count_text, info

if TYPE_CHECKING:
    import numpy as np

    from megaswift.data.gather_and_truncate_dataset_documents import Documents

USAGE = """\
megaswift data show DATASET... --model DIR [options]
megaswift data show run.yaml [options]

Prints samples as tokens; label tokens are green (in [brackets] without color), `|` separates tokens. Then prints
lengths and packing (without context parallelism). Needs only the model's tokenizer. Accepts a run configuration
(.yaml or .json, as the first argument; training options in it are ignored), the options of section `data`
(--max_length, --packing, --columns, --chat_template, --loss_scale, ...), --use_hf, --model_revision,
--trust_remote_code, and

  --samples N   number of samples to print (default 3)
  --first N     index of the first sample, from 0 (default 0)
  --task TASK   pt: plain text; dpo, orpo, cpo, simpo, rm: pairs; kto: labeled completions; grpo, ppo: prompts
                (default sft: conversations)
"""
MODEL_OPTIONS = ("model", "use_hf", "model_revision", "trust_remote_code")
ORDER_OPTIONS = ("shuffle", "dataloader_num_workers")
"""Of the section data, but without effect here."""
PROMPT_OPTIONS = ("max_completion_length",)
"""Of the section rl: how long a prompt may be."""
SPLIT_OPTIONS = ("seed", "data_seed")
"""They choose what is held out."""
GREEN, DIM, OFF = "\033[1;32m", "\033[2m", "\033[0m"
BARS = 12


def _check(cfg: SwiftConfig, words: Sequence[str]) -> None:
    """DataError for what this command lacks, and for options on its command line that it would ignore."""
    problems = []
    for given in read_command_line(list(words)).givens:
        name = NAMES.get(given.name, "")
        if not name:
            continue  # the task
        if name in (*SPLIT_OPTIONS, "shuffle") and any("#" in d for d in cfg.data.dataset):
            continue  # which rows are drawn
        if name in SPLIT_OPTIONS:
            used, why = cfg.data.split_dataset_ratio > 0, "seeds the evaluation split, but no rows are held out"
        else:
            used = name in (*MODEL_OPTIONS, *PROMPT_OPTIONS) or (
                OPTIONS[name].section == "data" and name not in ORDER_OPTIONS
            )
            why = "samples are shown in file order" if name == "shuffle" else "applies only to training"
        if not used:
            problems.append(Problem(given.label, f"would be ignored by data show: {why}", "leave it out"))
    if cfg.model.model is None:
        problems.append(Problem("--model", "is missing: data show needs its tokenizer", "--model DIR"))
    if cfg.data.streaming:
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


def use_color(out: TextIO) -> bool:
    """Color only where someone looks: a terminal, and no NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's text, line ends shown as ⏎; bytes of a character that is spread over several tokens as they are
    stored."""
    texts = []
    for i in ids:
        text = tokenizer.decode([i], clean_up_tokenization_spaces=False)
        text = str(tokenizer.convert_ids_to_tokens(i)) if "\ufffd" in text else text
        texts.append(text.replace("\n", "⏎"))
    return texts


def fold_repeats(texts: Sequence[str], mask: Sequence[float]) -> tuple[list[str], list[float]]:
    """(texts, mask) with long runs of one token without loss, as images have them, as one: `<image> x 64`."""
    out: list[str] = []
    folded_mask: list[float] = []
    position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and texts[end] == texts[position] and not mask[end]:
            end += 1
        run = end - position
        out += [f"{texts[position]} x {run}"] if run > 3 else texts[position : max(end, position + 1)]
        folded_mask += [0] if run > 3 else mask[position : max(end, position + 1)]
        position = max(end, position + 1)
    return out, folded_mask


def loss_highlighted_text(texts: Sequence[str], mask: Sequence[float], color: bool) -> str:
    """The tokens of one sample; runs with loss in green, or in brackets, after their weight where it is not 1."""
    out, position = [], 0
    while position < len(texts):
        end = position
        while end < len(texts) and mask[end] == mask[position]:
            end += 1
        weight = "" if mask[position] in (0, 1) else f"{mask[position]:g} x: "
        run = weight + "|".join(texts[position:end])
        if color:
            out.append(f"{GREEN if mask[position] else DIM}{run}{OFF}")
        else:
            out.append(f"[{run}]" if mask[position] else run)
        position = end
    return ("|" if color else " ").join(out).replace("⏎", "⏎\n")


def histogram(values: np.ndarray, title: str, width: int = 40) -> list[str]:
    """Text bars over at most BARS equal classes."""
    import numpy as np

    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // BARS))
    counts = np.bincount((values - low) // step)
    lines = [
        (
            f"{title}: {len(values):,} in total, {low:,} to {high:,}, mean {values.mean():,.1f}, median "
            f"{np.median(values):,.0f}"
        )
    ]
    for i, count in enumerate(counts.tolist()):
        first = low + i * step
        lines.append(
            f"  {first:>9,} - {min(high, first + step - 1):<9,} {'█' * round(width * count / counts.max()):<{width}} "
            f"{count:,}"
        )
    return lines


def data_summary(docs: Documents, evaluation: Documents | None, max_length: int, packing: bool = True) -> list[str]:
    """Counts, lengths, and how rows would be packed."""
    tokens, labels = int(docs.length.sum()), int(docs.labels.sum())
    happened = ", ".join(row_count_texts(docs.counted))
    lines = [
        f"{docs.counted['rows']:,} rows{f' ({happened})' if happened else ''}, {tokens:,} tokens, {labels:,} label "
        f"tokens ({100 * labels / tokens:.1f}%)"
    ]
    if evaluation is not None:
        lines.append(
            f"evaluation: {len(evaluation):,} rows, {int(evaluation.length.sum()):,} tokens, "
            f"{int(evaluation.labels.sum()):,} label tokens"
        )
    lines += ["", *histogram(docs.length, "tokens per sample")]
    return lines + ["", *packing_summary(docs, max_length)] if packing else lines


def packing_summary(docs: Documents, max_length: int) -> list[str]:
    """How full packed rows are, beside rows of one sample."""
    import numpy as np

    from megaswift.data.collate import PaddingShape
    from megaswift.data.loader import make_document_rows

    rows = make_document_rows(docs, True, max_length, PaddingShape())
    assert rows.packing is not None
    tokens, plain = int(docs.length.sum()), len(docs) * int(docs.length.max())
    filled = np.add.reduceat(docs.length[rows.packing.documents], rows.packing.offsets[:-1])
    line = (
        f"packed into {count_text(len(rows), 'sequence')} of {max_length:,}: "
        f"{100 * tokens / (len(rows) * max_length):.2f}% filled (without packing, padded to the longest: "
        f"{100 * tokens / plain:.1f}%)"
    )
    return [
        line,
        *histogram(np.diff(rows.packing.offsets), "samples per packed sequence"),
        *histogram(filled, "tokens per packed sequence"),
    ]


def main(argv: Sequence[str], reader_for: Callable[[SwiftConfig], Any]) -> int:
    """Show samples and statistics of the data sets named in `argv`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    own, words = split_own_options(argv, {"samples": "3", "first": "0", "task": ""})
    cfg = load_config(own["task"] or None, words)
    _check(cfg, words)
    for notice in cfg.notices:
        info(notice)
    from megaswift.data.resolve_dataset_files import resolve_dataset_files

    first, count = _number(own, "first"), _number(own, "samples")
    blend = parse_indexed_blend(cfg.data.dataset)
    for name in () if blend else cfg.data.dataset:
        resolve_dataset_files(name, lambda *_: ())  # of paths; a hub is asked later
    reader = reader_for(cfg)
    if blend is not None:
        print("\n".join(indexed_report_lines(blend, reader, range(first, first + count))))
        return 0
    from megaswift.data.build_batch_sources import (
        global_batch_unit,  # brings torch; help and mistakes are answered without
    )

    show = {"rows": sample_report_lines, "completions": prompt_report_lines}.get(
        global_batch_unit(cfg.task), preference_report_lines
    )
    print("\n".join(show(cfg, cfg.task, reader, range(first, first + count))))
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


def indexed_report_lines(blend: IndexedBlend, tokenizer: Any, which: range) -> list[str]:
    """Some sequences of Megatron-LM's indexed data, in file order, then the lengths of all."""
    import numpy as np

    from megaswift.data.megatron_index_files import open_indexed_tokens

    lines = []
    for prefix in blend.prefixes:
        data = open_indexed_tokens(prefix)
        lines.append(f"=== {prefix}: {data.documents:,} documents, {len(data.lengths):,} sequences")
        for i in _shown(which, len(data.lengths), "sequences"):
            ids = data.read(i, 0, int(data.lengths[i])).tolist()
            lines += [f"--- sequence {i}: {len(ids)} tokens", "|".join(token_texts(tokenizer, ids)).replace("⏎", "⏎\n")]
        lines += ["", *histogram(np.asarray(data.lengths), "tokens per sequence"), ""]
    return lines


def sample_report_lines(cfg: SwiftConfig, task: str, reader: Any, which: range) -> list[str]:
    """Some samples of SFT or pretraining, then statistics of all."""
    from megaswift.data.build_batch_sources import load_document_splits
    from megaswift.data.vision_processor import Processor

    docs, evaluation = load_document_splits(cfg.data, cfg.train, reader, task)
    lines = []
    for i in _shown(which, len(docs), "samples"):
        lines += [f"--- sample {i} (row {docs.sample[i]}): {_counts(docs, i)}", _document(docs, i, reader) + "\n"]
    sees = isinstance(reader, Processor)
    show_packing = not sees and (bool(cfg.data.packing) or "packing" not in cfg.given)
    return lines + data_summary(docs, evaluation, cfg.data.max_length, show_packing)


def preference_report_lines(cfg: SwiftConfig, task: str, tokenizer: Any, which: range) -> list[str]:
    """Some pairs or labeled answers, each of their documents, then statistics of all documents."""
    from megaswift.data.build_batch_sources import global_batch_unit, load_preference_splits

    units, evaluation = load_preference_splits(cfg.data, cfg.train, tokenizer, task)
    kind, docs, lines = global_batch_unit(task), units.docs, []
    for i in _shown(which, len(units), kind):
        value = units.values[i]
        pairs = kind == "pairs"
        names = ("chosen", "rejected") if pairs else ("desirable" if value else "undesirable",)
        lines.append(
            f"--- {kind[:-1]} {i} (row {docs.sample[i * units.width]})"
            + f", margin {value:g}" * bool(pairs and value == value)
        )
        for name, k in zip(names, range(i * units.width, (i + 1) * units.width), strict=True):
            lines += [f"{name}: {_counts(docs, k)}", _document(docs, k, tokenizer) + "\n"]
    lines.append(
        f"{len(units):,} {kind}, {len(docs):,} documents"
        if kind == "pairs"
        else f"{len(units):,} examples, {int(units.values.sum()):,} of them desirable"
    )
    lines += [] if evaluation is None else [f"evaluation: {len(evaluation):,} {kind}"]
    return lines + data_summary(docs, None, cfg.data.max_length, packing=False)


def prompt_report_lines(cfg: SwiftConfig, task: str, tokenizer: Any, which: range) -> list[str]:
    """Some prompts with the columns that rewards see, then their lengths."""
    from megaswift.data.rl_prompts import load_prompt_splits

    source, evaluation = load_prompt_splits(cfg, tokenizer, 1)
    prompts, lines = source.prompts, []
    for i in _shown(which, len(prompts), "prompts"):
        prompt = prompts.read(i)
        lines += [
            f"--- prompt {i} (row {prompt.number}): {len(prompt.token_ids)} tokens",
            _document(prompts.docs, i, tokenizer),
        ]
        lines += [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in prompt.columns.items()] + [""]
    happened = ", ".join(row_count_texts(prompts.docs.counted))
    lines.append(
        f"{len(prompts):,} prompts{f' ({happened})' if happened else ''}"
        + ("" if evaluation is None else f", evaluation: {len(evaluation):,}")
    )
    return lines + histogram(prompts.docs.length, "tokens per prompt")


def _counts(docs: Documents, i: int) -> str:
    return f"{docs.length[i]} tokens, {docs.labels[i]} label tokens"


def _document(docs: Documents, i: int, reader: Any) -> str:
    from megaswift.data.vision_processor import tokenizer_of_tokenizer_or_processor

    ids, loss = docs.read(i)
    texts, mask = token_texts(tokenizer_of_tokenizer_or_processor(reader), ids.tolist()), loss.tolist()
    if docs.image_end[i]:
        texts, mask = fold_repeats(texts, mask)
    return loss_highlighted_text(texts, mask, use_color(sys.stdout))
