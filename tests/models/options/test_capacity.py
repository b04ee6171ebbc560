"""Where inputs of experts cannot be padded to their capacity, and where they can.

Covers: megaswift/models/options/capacity.py.
"""

from __future__ import annotations

import pytest

from megaswift.config import SwiftConfig
from megaswift.models.options.capacity import expert_capacity_problems
from tests.config.refusals import assert_contradiction, problems

PAD = "--moe_pad_expert_input_to_capacity"
CAPACITY = f"{PAD} --moe_expert_capacity_factor 1"


@pytest.mark.parametrize(
    "words", [PAD, f"{CAPACITY} --tp 2", f"{CAPACITY} --cp 2", f"{CAPACITY} --padding_free --ep 2"]
)
def test_refused(words: str) -> None:
    assert_contradiction(PAD[2:], words)


def test_the_flex_dispatcher_does_not_pad() -> None:
    found = problems(f"{CAPACITY} --moe_token_dispatcher_type flex")
    assert [text for text in found if text.startswith(PAD)] == [f"{PAD}: is supported with alltoall only"]


@pytest.mark.parametrize("words", ["--ep 2 --pp 2 --packing", "--padding_free", "--train_type lora --ep 4"])
def test_taken(words: str) -> None:
    assert problems(f"{CAPACITY} {words}") == []
    assert problems(f"--moe_expert_capacity_factor 1 {words} --tp 2") == []


def test_pretraining_and_sft_only() -> None:
    """Rows of other tasks have no one length."""
    assert problems(f"pt {CAPACITY} --ep 2") == []
    (refused,) = problems(f"dpo {CAPACITY}")
    assert refused.startswith(PAD)


@pytest.mark.parametrize(("experts", "topk", "most"), [(60, 4, 15), (8, 2, 4), (128, 8, 16), (20, 3, 6.66)])
def test_no_more_than_all_tokens(experts: int, topk: int, most: float) -> None:
    def rules(factor: float, pad: bool = True, among: int = experts) -> list[str]:
        cfg = SwiftConfig(moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=pad)
        return [str(p) for p in expert_capacity_problems(cfg, among, topk)]

    (text,) = rules(most + 0.5)
    assert f"of {experts} experts a token goes to {topk}" in text and text.endswith(
        f"--moe_expert_capacity_factor {most} or less"
    )
    assert rules(most) == rules(most + 0.5, pad=False) == rules(most + 0.5, among=0) == []
