"""Rules of Megatron-LM's indexed data."""

from __future__ import annotations

import pytest

from megaswift.config import load_config
from megaswift.data.options.indexed import INDEXED_DATA_CLASHES
from megaswift.errors import ConfigError
from tests.config.refusals import assert_contradiction, assert_idle

BLEND = "--dataset 1 a"
IDLE = [
    (f"--columns a=text {BLEND}", "--columns a=text"),
    (f"--sample_by document {BLEND}", "--sample_by document"),
    (f"--strict false {BLEND}", "--strict false"),
    (f"--dataset_num_proc 2 {BLEND}", "--dataset_num_proc 2"),
    (f"--group_by_length {BLEND}", "--group_by_length"),
    (f"--use_dataset_cache false {BLEND}", "--use_dataset_cache false"),
    (f"--packing false {BLEND}", "--packing false"),
    (f"--truncation_strategy left {BLEND}", "--truncation_strategy left"),
    (f"--padding_free true --truncation_strategy raise {BLEND}", "--truncation_strategy raise"),
    ("--data_split 9,1", f"--data_split 9,1 {BLEND}"),
    ("--reset_attention_mask true", f"--reset_attention_mask true {BLEND}"),
    ("--reset_position_ids true", f"--reset_position_ids true --reset_attention_mask true {BLEND}"),
]
CLASHING = [
    ("tp_comm_overlap", f"--tp_comm_overlap --tp 2 --sp --reset_attention_mask true {BLEND}"),
    ("dataset", "sft --dataset 1 a"),
    ("dataset", "--dataset 1 a 2 3"),
    ("streaming", f"--streaming --max_steps 1 {BLEND}"),
    ("shuffle", f"--shuffle false {BLEND}"),
    ("split_dataset_ratio", f"--split_dataset_ratio 0.1 {BLEND}"),
    ("data_split", f"--data_split 0,1 {BLEND}"),
    ("data_split", f"--data_split 9,1 --val_dataset 1 b {BLEND}"),
    ("val_dataset", f"--val_dataset data.jsonl {BLEND}"),
    ("val_dataset", f"--val_dataset 1 2 {BLEND}"),
    ("reset_position_ids", f"--reset_position_ids true {BLEND}"),
    ("reset_position_ids", "--reset_position_ids false"),
    ("reset_attention_mask", "--reset_attention_mask false"),
    ("eod_mask_loss", "--eod_mask_loss true"),
]


@pytest.mark.parametrize("idle, used", [row for row in IDLE if "padding_free" not in row[0]])
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used, "pt")


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words, "pt")


def test_every_row_is_tried() -> None:
    assert sorted(name for name, _ in CLASHING) == sorted(r.options[0] for r in INDEXED_DATA_CLASHES)


def test_megatron_s_spellings() -> None:
    words = "--data-path 0.3 a 0.7 b --split 969,30,1 --reset-position-ids --reset-attention-mask --eod-mask-loss"
    c = load_config("pt", words.split(), environ={})
    assert c.data.dataset == ("0.3", "a", "0.7", "b") and c.data.evaluation_share == pytest.approx(0.03)
    assert c.data.reset_position_ids and c.data.reset_attention_mask and c.data.eod_mask_loss
    words = "--train-data-path 1 a --valid-data-path 1 b --packing true --truncation_strategy split"
    c = load_config("pt", words.split(), environ={})
    assert (c.data.dataset, c.data.val_dataset) == (("1", "a"), ("1", "b"))


def test_documents_apart_share_rows() -> None:
    """So that attention kernels and checks of packed rows apply, and CUDA graphs do not."""
    words = ["--reset_attention_mask", "true", *BLEND.split()]
    assert load_config("pt", words, environ={}).data.shares_rows
    assert not load_config("pt", words[2:], environ={}).data.shares_rows
    assert not load_config("pt", words[:2], environ={}).data.shares_rows
    with pytest.raises(ConfigError, match="needs tensors of one shape"):
        load_config("pt", ["--cuda_graph_impl", "local", *words], environ={})


@pytest.mark.parametrize(
    "split", ["a", ".", "1..2", "1.2.3,4", "0,1", "nan", "inf", "1e3", "-1,2", "1,,2", "9" * 400, "1,2,3,4"]
)
@pytest.mark.parametrize("blend", ["1 a", "data.jsonl"])
def test_a_split_that_names_no_shares(split: str, blend: str) -> None:
    with pytest.raises(ConfigError, match="is not one to three shares"):
        load_config("pt", ["--dataset", *blend.split(), "--data_split", split], environ={})
