"""Rules of the section `data`: mixing, streaming, order of rows, truncation, and the rules of indexed data."""

from __future__ import annotations

import math

from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections
from megaswift.data.options.indexed import INDEXED_DATA_CLASHES, reads_indexed_data
from megaswift.losses.options.classification import SINGLE_LABEL
from megaswift.options.tasks import CLASSIFIERS, DISTILLATION, SFT, SUPERVISED


def _no_random_order(c: Sections) -> bool:
    """Return whether the data depend on no seed. `FILE#1000` draws rows of a file at random."""
    return (
        not c.data.shuffle
        and not c.data.split_dataset_ratio
        and not c.data.interleave_prob
        and not any("#" in d for d in (*c.data.dataset, *c.data.val_dataset))
    )


_STREAM = ("streaming", "val_dataset")
"""Options that decide `_only_streams`."""


def _only_streams(c: Sections) -> bool:
    """Return whether all data are streamed: a `val_dataset` is tokenized as a whole in any case."""
    return c.data.streaming and not c.data.val_dataset


def _mixes(c: Sections) -> bool:
    return bool(c.data.interleave_prob)


_ONE_SHAPE = "needs micro-batches of any shape"
_TOKENS: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("max_length",),
        lambda c: (c.data.max_tokens_per_batch or 0) < c.data.max_length,
        "is less than max_length: the longest samples would fit into no micro-batch",
        "a number of at least max_length",
    ),
    ConflictingOptions(
        ("packing",),
        lambda c: c.data.packing,
        "chooses micro-batches among the samples of a step; packed rows are made before, all of max_length tokens",
        "--packing false",
    ),
    ConflictingOptions(
        ("streaming",),
        lambda c: c.data.streaming,
        "needs the lengths of a step's samples, which are not known before a stream is read",
        "--streaming false",
    ),
    ConflictingOptions(
        ("layout", "fit"),
        lambda c: c.parallel.layout == "auto" or c.train.fit,
        "conflicts with --layout auto and --fit true, which choose the samples of a micro-batch",
        "--per_device_train_batch_size N",
    ),
    ConflictingOptions(("cuda_graph_impl",), lambda c: c.model.uses_cuda_graphs, _ONE_SHAPE, "--cuda_graph_impl none"),
    ConflictingOptions(
        ("tp_comm_overlap", "tensor_parallel_size"),
        lambda c: c.parallel.tp_comm_overlap and c.parallel.tensor_parallel_size > 1,
        _ONE_SHAPE,
        "--tp_comm_overlap false",
    ),
    ConflictingOptions(
        ("moe_pad_expert_input_to_capacity", "expert_parallel_size"),
        lambda c: c.model.moe_pad_expert_input_to_capacity and c.parallel.expert_parallel_size > 1,
        _ONE_SHAPE,
        "--moe_pad_expert_input_to_capacity false",
    ),
)


DATA_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "data_seed",
        ("shuffle", "split_dataset_ratio", "interleave_prob", "dataset", "val_dataset"),
        _no_random_order,
        "seeds shuffling, splitting and mixing, but rows are neither shuffled nor split nor mixed",
        "--shuffle true",
    ),
    IgnoredOption(
        "dataset_cache_dir", _STREAM, _only_streams, "streaming does not cache tokenized data", "--streaming false"
    ),
    IgnoredOption(
        "dataset_num_proc",
        _STREAM,
        _only_streams,
        "streaming tokenizes rows as they are read",
        "--streaming false",
        neutral=(1,),
        notice=True,
    ),
    IgnoredOption(
        "padding_free",
        ("packing",),
        lambda c: c.data.packing and c.task in (*SUPERVISED, *DISTILLATION),
        "packing true leaves no padding",
        "--packing false",
        neutral=(None, True),
        notice=True,
    ),
    IgnoredOption(
        "padding_free",
        ("packing",),
        lambda c: c.task not in (*SUPERVISED, *DISTILLATION),
        "tasks of preferences and RL do not have it: their samples are packed unless --packing false is given",
        "--packing false",
        neutral=(None, True),
        notice=True,
    ),
)
DATA_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("truncation_strategy",),
        lambda c: c.data.truncation_strategy == "split" and c.task in (*SFT, *CLASSIFIERS),
        "samples cannot be split: later parts would lack their context (split is for pt)",
        "--truncation_strategy delete",
    ),
    ConflictingOptions(
        ("split_dataset_ratio", "val_dataset"),
        lambda c: c.data.split_dataset_ratio > 0 and c.data.val_dataset,
        "conflicts with val_dataset: evaluation data is already given",
        ONE_OF,
    ),
    ConflictingOptions(
        ("split_dataset_ratio", "streaming"),
        lambda c: c.data.split_dataset_ratio > 0 and c.data.streaming,
        "a stream has no known length to take a fraction of",
        "--val_dataset FILE",
    ),
    ConflictingOptions(
        ("streaming", "max_steps"),
        lambda c: c.data.streaming and c.train.max_steps is None,
        "a stream has no known length, so max_steps is required",
        "--max_steps 1000",
    ),
    *(
        conflict.beside("max_tokens_per_batch", lambda c: c.data.max_tokens_per_batch is not None)
        for conflict in _TOKENS
    ),
    ConflictingOptions(
        ("group_by_length", "streaming", "packing"),
        lambda c: c.data.group_by_length and c.data.streaming and not c.data.packing,
        "orders rows by their lengths, which are not known before a stream is read",
        "--packing true, which fills rows without padding",
    ),
    ConflictingOptions(
        ("group_by_length", "shuffle"),
        lambda c: c.data.group_by_length and not c.data.shuffle and not c.data.packing and not c.data.streaming,
        "reorders rows in each epoch, but shuffle false keeps the order of the files",
        "--shuffle true",
    ),
    ConflictingOptions(
        ("model_name", "model_author"),
        lambda c: max(len(c.data.model_name), len(c.data.model_author)) > 2,
        "takes one text, or two: the first for rows tagged zh",
        "--model_name NAME",
    ),
    ConflictingOptions(
        ("interleave_prob", "dataset"),
        lambda c: _mixes(c) and len(c.data.interleave_prob) != len(c.data.dataset) and not reads_indexed_data(c),
        "needs one weight for each entry of dataset",
        "--dataset a.jsonl b.jsonl --interleave_prob 0.7 0.3",
    ),
    ConflictingOptions(
        ("interleave_prob",),
        lambda c: _mixes(c) and not 0 < min(c.data.interleave_prob) <= max(c.data.interleave_prob) < math.inf,
        "must be weights above 0",
        "--interleave_prob 0.7 0.3, and leave out a data set that should not be used",
    ),
    ConflictingOptions(
        ("interleave_prob", "dataset"),
        lambda c: _mixes(c) and reads_indexed_data(c),
        "mixes rows; the weights of indexed data are part of dataset",
        "--dataset 0.7 FIRST 0.3 SECOND",
    ),
    ConflictingOptions(
        ("use_chat_template",),
        lambda c: not c.data.use_chat_template and c.task != "seq_cls",
        "is not supported: conversations use the chat template",
        "rows of plain text (a column text, or prompt and completion), which are read without one",
    ),
    ConflictingOptions(
        ("num_labels", "class_names"),
        lambda c: c.data.class_names and c.data.num_labels not in (None, len(c.data.class_names)),
        "is another number than that of class_names",
        "leave it out, or give a name for each class",
    ),
    ConflictingOptions(
        ("class_names",),
        lambda c: len(set(c.data.class_names)) < len(c.data.class_names),
        "names a class twice",
        "give each name once, in the order of the classes' numbers",
    ),
    ConflictingOptions(
        ("num_labels", "class_names", "problem_type"),
        lambda c: c.data.problem_type == SINGLE_LABEL and c.data.named_labels == 1,
        "with a single class there is nothing to learn",
        "--num_labels 2, or --problem_type regression for one number",
    ),
    ConflictingOptions(
        ("num_labels", "class_names"),
        lambda c: c.task == "token_cls" and c.data.named_labels == 1,
        "with a single class there is nothing to learn",
        "--num_labels 2",
    ),
    *INDEXED_DATA_CLASHES,
)
