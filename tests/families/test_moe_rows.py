"""What the configurations of mixtures of experts mean, against transformers' own reading of the same fields."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.errors import WeightsError
from megaswift.families import ModelSpec, family_of
from tests.families.published_moe import QWEN1_5_MOE_A2_7B


def spec(base: dict[str, Any], **changes: Any) -> ModelSpec:
    """The spec of a published configuration with changes; `...` removes a field."""
    given = {k: v for k, v in {**base, **changes}.items() if v is not ...}
    return family_of(given).spec(given)


def layer_types(base: dict[str, Any], **changes: Any) -> list[str]:
    """What transformers makes of it."""
    from transformers import AutoConfig

    fields = {**base, **changes}
    return list(AutoConfig.for_model(fields.pop("model_type"), **fields).layer_types)


def test_the_shared_expert() -> None:
    qwen = spec(QWEN1_5_MOE_A2_7B)
    assert (qwen.shared_ffn, qwen.expert_ffn, qwen.experts, qwen.topk, qwen.qkv_bias) == (5632, 1408, 60, 4, True)
    assert qwen.transformer["moe_shared_expert_gate"] is True and qwen.transformer["moe_router_pre_softmax"] is True
    assert not spec(QWEN1_5_MOE_A2_7B, qkv_bias=False).qkv_bias
    dense = spec(QWEN1_5_MOE_A2_7B, mlp_only_layers=list(range(24)))
    assert dense.experts == 0 and dense.shared_ffn == 0


@pytest.mark.parametrize("first", [0, 5, 21, 30])
def test_windows_of_qwen2_moe_take_turns_up_to_a_layer(first: int) -> None:
    switched: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": first}
    ours = spec(QWEN1_5_MOE_A2_7B, **switched).transformer
    theirs = [int(kind == "sliding_attention") for kind in layer_types(QWEN1_5_MOE_A2_7B, **switched)]
    assert ours.get("window_attn_skip_freq", [0] * 24) == theirs
    assert ours.get("window_size") == ((511, 0) if first else None)
    assert "window_size" not in spec(QWEN1_5_MOE_A2_7B, sliding_window=512).transformer


def test_windows_without_a_width() -> None:
    with pytest.raises(WeightsError, match="sliding_window is not given"):
        spec(QWEN1_5_MOE_A2_7B, use_sliding_window=True, sliding_window=None)
    with pytest.raises(WeightsError, match="use_sliding_window is off"):
        spec(QWEN1_5_MOE_A2_7B, layer_types=["sliding_attention"] * 24)
    with pytest.raises(WeightsError, match="24 times"):
        spec(QWEN1_5_MOE_A2_7B, layer_types=["full_attention"])
