"""Section `data`: data sets, truncation, packing, order of rows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megaswift.data.options.agent_templates import AGENT_TEMPLATES
from megaswift.losses.options.classification import PROBLEM_TYPES
from megaswift.options.option import LARGEST_SEED, but_not, is_set, one_of, option
from megaswift.options.tasks import (
    CHATS,
    CLASSIFIERS,
    DATASETS,
    DISTILLATION,
    EVERY_TASK,
    LANGUAGE,
    LIKELIHOODS,
    PREFERENCES,
    PROMPTED,
    SFT,
    SUPERVISED,
    VISION_TASKS,
)

SHARE = re.compile(r"\s*(?:[0-9]+\.?[0-9]*|\.[0-9]+)\s*", re.ASCII)
"""A number without sign or exponent."""


def split_shares(split: str) -> tuple[float, float, float] | None:
    """The shares of training, evaluation and tests that `969,30,1` names, adding up to 1; missing ones are 0. None for
    a text that names no such shares, or none for training."""
    texts = split.split(",")
    if len(texts) > 3 or not all(SHARE.fullmatch(text) for text in texts):
        return None
    shares = [*map(float, texts), 0.0, 0.0][:3]
    total = sum(shares)
    if shares[0] == 0 or not math.isfinite(total):
        return None
    return shares[0] / total, shares[1] / total, shares[2] / total


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    dataset: tuple[str, ...] = option(
        (),
        "Files, folders, hub IDs, or PREFIX of .bin/.idx; path#500: 500 random rows",
        aliases=("datasets", "data_path", "train_data_path", "cached_dataset"),
        metavar="PATH...",
        common=EVERY_TASK,
    )
    val_dataset: tuple[str, ...] = option(
        (),
        "Evaluation data, in the same form",
        aliases=("val_datasets", "valid_data_path", "cached_val_dataset"),
        metavar="PATH...",
        common=DATASETS,
    )
    interleave_prob: tuple[float, ...] = option(
        (), "Mix data sets: a weight for each entry of dataset; default: concatenate", metavar="WEIGHT..."
    )
    stopping_strategy: str = option(
        "first_exhausted",
        "End of an epoch of mixed data: when the first data set ends, or when all have",
        choices=("first_exhausted", "all_exhausted", "all_exhausted_without_replacement"),
        only_with={"interleave_prob": is_set(notice=True)},
    )
    split_dataset_ratio: float = option(
        0.0, "Fraction of rows held out for evaluation", minimum=0, below=1, common=LANGUAGE
    )
    data_split: str | None = option(
        None,
        "Shares of indexed data for training, evaluation, tests; default: only training",
        aliases=("split",),
        tasks=("pt",),
        metavar="SHARES",
        only_with={"indexed_data": True},
    )
    max_length: int = option(
        2048,
        "Maximum sequence length",
        aliases=("seq_length", "max_seq_length", "cutoff_len"),
        minimum=1,
        unit="tokens",
        common=EVERY_TASK,
    )
    truncation_strategy: str = option(
        "delete",
        "What to do with samples longer than max_length (split: pt only)",
        choices=("raise", "delete", "left", "right", "split"),
        only_with={"rows_of_text": True},
        neutral=("delete", "split"),
    )
    packing: bool | None = option(
        None,
        "Pack short samples; attention stays within a sample; default: in rlhf",
        only_with={"rows_of_text": True},
        neutral=(None, True),
        common=LANGUAGE,
    )
    prefix_sharing: bool | None = option(
        None, "Compute a prompt once for all its answers in a micro-batch; default: if exact", tasks=PROMPTED
    )
    padding_free: bool | None = option(
        None,
        "Pack the samples of each step; batch sizes count samples; default: if short",
        only_with={"rows_of_text": True},
    )
    max_tokens_per_batch: int | None = option(
        None,
        "Maximum tokens of a micro-batch, in place of a number of samples",
        minimum=1,
        unit="tokens",
        tasks=SUPERVISED,
        only_with={"rows_of_text": True},
    )
    system: str | None = option(
        None, "System message for rows without one: text or a file", tasks=CHATS, metavar="TEXT|FILE", free_text=True
    )
    model_name: tuple[str, ...] = option(
        (),
        "Text for {{NAME}} in rows; two values: for rows tagged zh, then for other rows",
        tasks=CHATS,
        metavar="NAME...",
        free_text=True,
    )
    model_author: tuple[str, ...] = option(
        (),
        "Text for {{AUTHOR}} in rows; two values: for rows tagged zh, then for others",
        tasks=CHATS,
        metavar="NAME...",
        free_text=True,
    )
    loss_scale: str = option(
        "default",
        "Trained text and its weights: default, last_round or all, then +TABLE",
        tasks=SFT + LIKELIHOODS + DISTILLATION,
        metavar="TURNS+TABLE",
    )
    columns: dict[str, str] = option(
        {},
        "Column renaming: instr=query out=response, or JSON",
        metavar="FROM=TO...",
        example="question=query",
        only_with={"rows_of_text": True},
    )
    sample_by: str = option(
        "line",
        "Unit of a document in .txt and .md files",
        choices=("line", "document"),
        tasks=("pt",),
        only_with={"rows_of_text": True},
    )
    reset_attention_mask: bool | None = option(
        None,
        "Indexed data: attention stays within a document; default: it crosses them",
        tasks=("pt",),
        metavar="BOOL",
        only_with={"indexed_data": one_of(True, notice=True)},
        neutral=(None, False),
    )
    reset_position_ids: bool | None = option(
        None,
        "Indexed data: positions restart with each document",
        tasks=("pt",),
        metavar="BOOL",
        only_with={"indexed_data": one_of(True, notice=True)},
        neutral=(None, False),
    )
    eod_mask_loss: bool = option(False, "Indexed data: no loss on a document's first token", tasks=("pt",))
    streaming: bool = option(
        False, "Read rows on demand instead of preparing the whole data set; needs max_steps", common=("pt",)
    )
    shuffle: bool = option(True, "Shuffle rows in each epoch", aliases=("dataset_shuffle", "train_dataloader_shuffle"))
    group_by_length: bool = option(
        False,
        "Group rows of similar length into a global batch, for less padding",
        tasks=DATASETS,
        only_with={"packing": but_not(True, notice=True), "rows_of_text": True},
    )
    data_seed: int | None = option(
        None,
        "Seed for shuffling, random subsets and the evaluation split; default: seed",
        minimum=0,
        maximum=LARGEST_SEED,
        metavar="SEED",
    )
    dataset_num_proc: int = option(
        1,
        "Processes for tokenization",
        aliases=("preprocessing_num_workers",),
        minimum=1,
        unit="processes",
        only_with={"rows_of_text": True},
    )
    dataloader_num_workers: int = option(
        2,
        "Threads that prepare batches in advance; 0: none",
        minimum=0,
        unit="threads",
        only_with={"streaming": but_not(True, notice=True)},
    )
    chat_template: str | None = option(
        None,
        "Jinja file or text, or a name (qwen3), in place of the tokenizer's template",
        aliases=("template", "template_type"),
        tasks=CHATS,
        metavar="FILE",
        free_text=True,
        only_with={"use_chat_template": True},
    )
    use_chat_template: bool = option(
        True, "Read conversations by the chat template; false: their texts alone (seq_cls)", tasks=CHATS
    )
    agent_template: str | None = option(
        None,
        "Format of tool calls: the chat template's (checked), or text (react_en)",
        choices=AGENT_TEMPLATES,
        tasks=CHATS,
    )
    add_non_thinking_prefix: bool = option(
        True,
        "Keep the empty reasoning that a template writes; false: leave it out",
        tasks=("sft", "seq_cls", *DISTILLATION, *PREFERENCES),
    )
    enable_thinking: bool | None = option(
        None,
        "Variable enable_thinking of the chat template; default: the template's own",
        tasks=CHATS,
        metavar="BOOL",
    )
    num_labels: int | None = option(
        None,
        "Number of classes; default: those of class_names, the model or names in rows",
        minimum=1,
        unit="classes",
        tasks=CLASSIFIERS,
        common=CLASSIFIERS,
        metavar="N",
    )
    class_names: tuple[str, ...] = option(
        (),
        "Names of the classes in order; default: the model's, or the names in rows",
        tasks=CLASSIFIERS,
        common=CLASSIFIERS,
        metavar="NAME...",
    )
    problem_type: str | None = option(
        None,
        "Rows have one class, several, or numbers; default: one; num_labels 1: numbers",
        choices=PROBLEM_TYPES,
        tasks=("seq_cls",),
        common=("seq_cls",),
        metavar="TYPE",
    )
    max_pixels: int | None = option(
        None,
        "Scale images with more pixels (width x height) down to this many",
        minimum=1,
        unit="pixels",
        tasks=VISION_TASKS,
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    video_fps: float | None = option(
        None,
        "Frames to read per second of video; default: that of the model's processor",
        aliases=("fps",),
        minimum=1e-3,
        unit="frames/s",
        tasks=VISION_TASKS,
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    video_min_frames: int | None = option(
        None,
        "Fewest frames to read of a video",
        aliases=("fps_min_frames",),
        minimum=1,
        tasks=VISION_TASKS,
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    video_max_frames: int | None = option(
        None,
        "Most frames to read of a video",
        aliases=("fps_max_frames",),
        minimum=1,
        tasks=VISION_TASKS,
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    video_max_pixels: int | None = option(
        None,
        "Scale frames of videos with more pixels down to this many",
        minimum=1,
        unit="pixels",
        tasks=VISION_TASKS,
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    strict: bool = option(
        True, "Stop at a malformed row; false: skip and count it", only_with={"rows_of_text": True}, neutral=(True,)
    )
    use_dataset_cache: bool = option(
        True,
        "Use cached tokens of the same rows; false: tokenize again",
        aliases=("load_from_cache_file",),
        only_with={"rows_of_text": True},
        neutral=(True,),
    )
    dataset_cache_dir: str | None = option(None, "Folder for tokenized data; default: below ~/.cache", metavar="DIR")

    @property
    def named_labels(self) -> int | None:
        """The number of classes that the options name; None where they name none."""
        return len(self.class_names) or self.num_labels

    @property
    def evaluation_share(self) -> float:
        """The part of indexed data that `data_split` names for evaluation."""
        shares = split_shares(self.data_split or "1")
        return 0.0 if shares is None else shares[1]

    @property
    def shares_rows(self) -> bool:
        """Return whether a row of a batch holds several documents, each with attention of its own."""
        return bool(self.packing or self.padding_free or self.reset_attention_mask)
