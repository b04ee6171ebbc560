"""Entry point of the data layer: builds batch sources from options and a tokenizer.

Owns the wiring and the checks of the whole data set (anything to train on? enough for a batch?). Every step has a file
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megaswift import log
from megaswift.data import vocabulary
from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.batches.loader import (
    BatchSource,
    DocumentRows,
    EvaluationSource,
    IndexedRows,
    TokenStoreBatchSource,
    make_document_rows,
)
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.encode.rows import EncodeSpec, RowEncoder, encode_spec
from megaswift.data.groups.documents import (
    GroupDataset,
    GroupDocuments,
    gather_groups,
    hold_out_groups,
    without_long_groups,
)
from megaswift.data.groups.rows import GroupTexts
from megaswift.data.indexed.batches import build_indexed_sources
from megaswift.data.labeled.collate import LabeledRows, StoredLabels
from megaswift.data.labeled.encode import LabeledTextEncoder, LabeledWordsEncoder, label_width
from megaswift.data.labeled.stream import LabeledStreamProcessor
from megaswift.data.options.indexed import parse_indexed_blend
from megaswift.data.preference.collate import PreferenceCollator, PreferenceDataset
from megaswift.data.preference.documents import (
    CUT_CAUSES,
    PreferenceDocuments,
    apply_truncation_to_preferences,
    gather_preferences,
    hold_out_preferences,
)
from megaswift.data.preference.encode import PreferenceEncoder
from megaswift.data.preference.stream import PreferenceStreamProcessor
from megaswift.data.sources.mixture import (
    interleave_documents,
    interleave_groups,
    interleave_preferences,
    interleaving_of,
)
from megaswift.data.store.documents import (
    Documents,
    apply_truncation_strategy,
    gather_documents,
    hold_out_documents,
)
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.stream.batches import StreamBatchSource, StreamOptions, StreamRowProcessor
from megaswift.data.stream.rows import StreamRowEncoderAndPacker
from megaswift.data.tokenization import (
    check_renamed_columns_exist,
    resolve_or_download_dataset_files,
    tokenize_datasets,
)
from megaswift.data.tokenizer import padding_token_of
from megaswift.data.vision.batches import StreamedRowImages, VisionCollator
from megaswift.data.vision.encode import VisionRowTokenEncoder
from megaswift.data.vision.media import IMAGE, VIDEO
from megaswift.data.vision.processor import Processor, tokenizer_of_tokenizer_or_processor
from megaswift.errors import DataError, Problem
from megaswift.options.tasks import CLASSIFIERS, EXAMPLES, PAIRS, PREFERENCES, RETRIEVAL, RL


def data_seed(data: Any, train: Any) -> int:
    """`--data_seed`, or `--seed` where it is not given."""
    return int(train.seed if data.data_seed is None else data.data_seed)


def load_document_splits(
    data: Any, train: Any, tokenizer: Any, task: str = "sft"
) -> tuple[Documents, Documents | None]:
    """(training, evaluation) documents, cut to length; DataError when there is nothing to train on."""
    check_split_truncation_option(data, task)
    seed = data_seed(data, train)
    gathered = gather_documents(tokenize_datasets(data, tokenizer, task, seed=seed))
    docs = apply_truncation_strategy(
        interleave_documents(gathered, interleaving_of(data, seed)),
        data.max_length,
        data.truncation_strategy,
    )
    _tell(docs, data, data.dataset)
    if data.val_dataset:
        return docs, _held_out(data, tokenizer, task)
    return hold_out_documents(docs, data.split_dataset_ratio, seed)


def load_preference_splits(
    data: Any, train: Any, tokenizer: Any, task: str
) -> tuple[PreferenceDocuments, PreferenceDocuments | None]:
    """(training, evaluation) pairs or labeled answers of a task of preferences, cut to length."""
    check_split_truncation_option(data, task)
    seed = data_seed(data, train)
    gathered = gather_preferences(tokenize_datasets(data, tokenizer, task, seed=seed))
    mixed = interleave_preferences(gathered, interleaving_of(data, seed))
    truncated = apply_truncation_to_preferences(mixed, data.max_length, data.truncation_strategy)
    _tell(truncated.docs, data, data.dataset)
    if data.val_dataset:
        return truncated, _held_out_units(data, tokenizer, task)
    return hold_out_preferences(truncated, data.split_dataset_ratio, seed)


def load_group_splits(
    data: Any, train: Any, tokenizer: Any, task: str, texts: GroupTexts
) -> tuple[GroupDocuments, GroupDocuments | None]:
    """(training, evaluation) queries with their documents."""
    seed = data_seed(data, train)
    strategy = data.truncation_strategy
    gathered = gather_groups(tokenize_datasets(data, tokenizer, task, seed=seed, groups=texts))
    mixed = interleave_groups(gathered, interleaving_of(data, seed))
    groups = without_long_groups(mixed, data.max_length, strategy)
    _tell(groups.docs, data, data.dataset)
    if data.val_dataset:
        held_out = gather_groups(tokenize_datasets(data, tokenizer, task, val=True, groups=texts))
        held_out = without_long_groups(held_out, data.max_length, strategy)
        _tell(held_out.docs, data, data.val_dataset)
        return groups, held_out
    return hold_out_groups(groups, data.split_dataset_ratio, seed)


def global_batch_unit(task: str) -> str:
    """What a task's global batch counts: `rows`, `pairs`, `examples` or, of reinforcement learning, `completions`."""
    units = (("completions", RL), ("pairs", PAIRS), ("examples", EXAMPLES))
    return next((unit for unit, tasks in units if task in tasks), "rows")


def check_split_truncation_option(data: Any, task: str) -> None:
    """DataError for options that the task's data cannot serve."""
    if data.truncation_strategy != "split":
        return
    if task != "pt":
        raise DataError(
            Problem(
                "--truncation_strategy split",
                "is only for plain text (pt): conversations cannot be split",
                "--truncation_strategy delete, left or right",
            )
        )
    if data.streaming and not data.packing:
        raise DataError(
            Problem(
                "--truncation_strategy split",
                "without packing, streaming would keep only the first piece",
                "--packing true, or --truncation_strategy right",
            )
        )


def _tell(docs: Documents, data: Any, names: Sequence[str]) -> None:
    """Warnings of what happened to the rows of the data sets; DataError when none of them carries loss."""
    if not docs.labels.any():
        raise DataError(
            Problem(
                ", ".join(names),
                f"none of {len(docs)} rows has label tokens",
                "use rows with assistant messages (not all `loss: false`), a larger --max_length, or --loss_scale all",
            )
        )
    where = "" if names == data.dataset else f"{', '.join(names)}: "
    for what in ("deleted", "truncated", "empty"):
        if docs.counted.get(what):
            log.warn(
                f"{where}{docs.counted[what]} of {docs.counted['rows']} rows {what} "
                + ("(no tokens)" if what == "empty" else f"(longer than --max_length {data.max_length})")
            )
    for what in CUT_CAUSES:
        if docs.counted.get(what):
            log.warn(
                f"{where}{docs.counted[what]} of {docs.counted['rows']} rows skipped with {what} (--max_length "
                f"{data.max_length})"
            )
    silent = int((docs.labels == 0).sum())
    if silent:
        log.warn(f"{where}{silent} of {len(docs)} rows have no label tokens")


def _held_out(data: Any, tokenizer: Any, task: str) -> Documents:
    documents = apply_truncation_strategy(
        gather_documents(tokenize_datasets(data, tokenizer, task, val=True)), data.max_length, data.truncation_strategy
    )
    _tell(documents, data, data.val_dataset)
    return documents


def _held_out_units(data: Any, tokenizer: Any, task: str) -> PreferenceDocuments:
    units = apply_truncation_to_preferences(
        gather_preferences(tokenize_datasets(data, tokenizer, task, val=True)),
        data.max_length,
        data.truncation_strategy,
    )
    _tell(units.docs, data, data.val_dataset)
    return units


def padding_shape_of(tokenizer: Any, geometry: LoaderGeometry) -> PaddingShape:
    """Padding as the geometry asks for; the padding id is the tokenizer's, or its end of text."""
    return PaddingShape(geometry.doc_multiple, geometry.row_multiple, padding_token_of(tokenizer, geometry.vocabulary))


def build_train_and_eval_sources(
    data: Any,
    train: Any,
    tokenizer: Any,
    geometry: LoaderGeometry,
    task: str = "sft",
    prompt_labels: bool = False,
    groups: GroupTexts | None = None,
) -> tuple[BatchSource, EvaluationSource | None]:
    """(training, evaluation) sources. Evaluation takes `per_device_eval_batch_size` rows a micro-batch, one micro-batch
    at a time.

    `tokenizer`: of a vision-language model its `Processor`; rows may then have images.
    `prompt_labels`: of preferences, prompts carry labels too (ORPO).
    `groups`: of embedding models and rerankers, how rows become texts.
    """
    # An indexed blend has its own splits, so it goes its own way.
    words = tokenizer_of_tokenizer_or_processor(tokenizer)
    shape = padding_shape_of(words, geometry)
    blend = parse_indexed_blend(data.dataset)
    if blend is not None:
        return build_indexed_sources(data, train, words, (geometry, shape))
    # Shapes: evaluation has micro-batches of its own size, one at a time.
    training_shape = replace(shape, minimum=data.max_length) if geometry.full_length else shape
    per_device = train.per_device_eval_batch_size or geometry.per_device
    apart = replace(geometry, per_device=per_device, accumulation=1)
    check_split_truncation_option(data, task)
    processor = tokenizer if isinstance(tokenizer, Processor) else None
    if data.streaming:
        # Streaming: training rows are encoded as they come; only evaluation rows are held in full.
        evaluation: IndexedRows | None = None
        if data.val_dataset and task in PREFERENCES:
            evaluation = PreferenceDataset(
                _held_out_units(data, tokenizer, task), data.packing is not False, prompt_labels
            )
        elif data.val_dataset:
            held_out = _held_out(data, tokenizer, task)
            evaluation = _rows_of_documents(held_out, data, shape, processor, task)
        vocabulary.check_dataset_token_ids([] if evaluation is None else [evaluation.docs], words, geometry.vocabulary)
        spec = encode_spec(data, tokenizer, task)
        stream = _stream(data, train, (spec, processor), (geometry, training_shape), prompt_labels)
        stream.watched = vocabulary.tokenizer_exceeds_embedding(words, geometry.vocabulary)
        source: BatchSource = stream
    else:
        processor = tokenizer if isinstance(tokenizer, Processor) else None
        # Stored: rows are tokenized before the run, and a part of them is held out for evaluation.
        if task in PREFERENCES:
            some, others = load_preference_splits(data, train, tokenizer, task)
            packs = data.packing is not False and processor is None
            rows: list[IndexedRows] = [
                PreferenceDataset(u, packs, prompt_labels, processor) for u in (some, others) if u is not None
            ]
        elif task in RETRIEVAL:
            assert groups is not None
            splits = [g for g in load_group_splits(data, train, tokenizer, task, groups) if g is not None]
            rows = [GroupDataset(g, data.packing is not False, max(2, g.width)) for g in splits]
        else:
            docs, apart_docs = load_document_splits(data, train, tokenizer, task)
            rows = [_rows_of_documents(d, data, shape, processor, task) for d in (docs, apart_docs) if d is not None]
        vocabulary.check_dataset_token_ids([r.docs for r in rows], words, geometry.vocabulary)
        source = _stored(rows[0], data, train, (geometry, training_shape))
        evaluation = rows[1] if len(rows) > 1 else None
    return source, None if evaluation is None else EvaluationSource(evaluation, apart, shape)


def _rows_of_documents(
    docs: Documents, data: Any, shape: PaddingShape, processor: Processor | None, task: str
) -> DocumentRows:
    """Rows of one document each, or packed; with labels for classifiers."""
    rows = make_document_rows(docs, data.packing, data.max_length, shape, processor)
    if task not in CLASSIFIERS:
        return rows
    labels = None if task == "token_cls" else StoredLabels(docs.stores)
    return LabeledRows(docs, rows.packing, rows.pack_shape, labels=labels)


def share_prompts(sources: Sequence[BatchSource | EvaluationSource | None]) -> None:
    """Sources of pairs lay the prompt of each once, from their first batch on."""
    for source in sources:
        rows = getattr(source, "data", None)
        if isinstance(rows, PreferenceDataset):
            rows.shares_prefixes = True
        elif isinstance(source, StreamBatchSource) and isinstance(source.contents, PreferenceStreamProcessor):
            source.contents.layout = replace(source.contents.layout, shares_prefixes=True)


def _stored(
    rows: IndexedRows, data: Any, train: Any, where: tuple[LoaderGeometry, PaddingShape]
) -> TokenStoreBatchSource:
    geometry, shape = where
    if len(rows) < geometry.global_batch:
        count = len(rows.docs)
        unit = "row"
        if isinstance(rows, PreferenceDataset):
            count = len(rows)
            unit = "pair" if rows.units.width == 2 else "example"
        packed = f", packed into {len(rows)}" if count != len(rows) else ""
        fits = "1" if len(rows) == 1 else f"{len(rows)} or less"
        enough = (
            -(-geometry.global_batch * count * 21 // (20 * len(rows))) if packed else geometry.global_batch
        )  # rows may lie closer
        raise DataError(
            Problem(
                ", ".join(data.dataset),
                f"{log.count_text(count, unit)}{packed}, fewer than one global batch of {geometry.global_batch}",
                f"--global_batch_size {fits}, use more data, or give {data.dataset[0]}#{enough} to repeat rows",
            )
        )
    order = EpochOrder(len(rows), data.shuffle, data_seed(data, train))
    if data.group_by_length:
        order.lengths = rows.row_lengths()
        order.batch = geometry.global_batch
    return TokenStoreBatchSource(rows, geometry, shape, order, data.dataloader_num_workers)


def _stream(
    data: Any,
    train: Any,
    reader: tuple[EncodeSpec, Processor | None],
    where: tuple[LoaderGeometry, PaddingShape],
    prompt_labels: bool,
) -> StreamBatchSource:
    spec, processor = reader
    geometry, shape = where
    units = spec.task in PREFERENCES
    datasets = [
        resolve_or_download_dataset_files(name, data_cache_folder(data.dataset_cache_dir)) for name in data.dataset
    ]
    sources = [replace(source, sample_by=data.sample_by) for source in datasets]
    packs = bool(data.packing) and not units  # which units are in a micro-batch does not depend on how they lie there
    seed = data_seed(data, train)
    options = StreamOptions(data.max_length, data.truncation_strategy, packs, data.shuffle, seed)
    contents: StreamRowProcessor
    if processor is not None:
        # whether a video will come is not known
        both = geometry.divided_weights and processor.reads_videos()
        images = StreamedRowImages(frozenset({IMAGE, VIDEO} if both else {IMAGE}))
        towers = VisionCollator(images, processor)
        contents = StreamRowEncoderAndPacker(VisionRowTokenEncoder(spec), options, shape, towers, images)
    elif spec.task in CLASSIFIERS:
        encoder = LabeledWordsEncoder(spec) if spec.task == "token_cls" else LabeledTextEncoder(spec)
        contents = LabeledStreamProcessor(encoder, options, shape, width=label_width(spec))
    elif not units:
        contents = StreamRowEncoderAndPacker(RowEncoder(spec), options, shape)
    else:
        layout = PreferenceCollator(2 if spec.task in PAIRS else 1, data.packing is not False, False, prompt_labels)
        contents = PreferenceStreamProcessor(PreferenceEncoder(spec), options, layout, shape)
    check_renamed_columns_exist(data, spec.task)
    mixing = interleaving_of(data, seed)
    contents.check(sources, mixing)
    return StreamBatchSource(sources, contents, options, geometry, mixing)
