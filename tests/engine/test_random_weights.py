"""Weights from a seed have, tensor by tensor, the distribution that transformers initializes the same model with.

Covers: megaswift/engine/megatron/weights.py.
"""

from __future__ import annotations

import json

import pytest
import torch

from megaswift.bridge.plan import WeightPlan
from megaswift.engine.megatron.weights import RandomWeightSource
from megaswift.families import family_of
from tests.parity.models import by_disk_name, config


@pytest.mark.parametrize("variant", ["qwen2_moe", "gpt_oss", "olmoe", "minimax_m2", "qwen3_next", "qwen3_5_moe"])
def test_as_transformers_draws_them(variant: str) -> None:
    """Zeros, ones, or normal with the same deviation within 10% (of large tensors); sinks and router biases among
    them. The logarithms of decays have their range."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = dict(by_disk_name(AutoModelForCausalLM.from_config(config(variant)), lambda t: t.detach()))
    given = json.loads(config(variant).to_json_string(use_diff=False))
    spec = family_of(given).spec(given)
    plan = WeightPlan(family_of(given), spec)
    source = RandomWeightSource(plan, spec, seed=3)
    assert set(plan.hf_shapes) == set(theirs)
    for name, want in theirs.items():
        got = source.slice(name)
        assert got.shape == want.shape, name
        if float(want.std()) == 0.0:
            assert torch.equal(got, want), name
        elif name.endswith("A_log"):
            assert float(got.std()) > 0.0 and bool(((got.exp() > 0.01) & (got.exp() < 16.0)).all()), name
        else:
            assert float(got.std()) > 0.0, name
            if got.numel() >= 1000:
                assert float(got.std()) == pytest.approx(float(want.std()), rel=0.1), name
