"""What the model with a vocabulary's head asks of it.

Covers: megaswift/engine/megatron/model.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.engine.megatron import model
from megaswift.losses.contract import RequestedModelOutputs
from megaswift.models.spec import ArchitectureExtras


def test_fields_that_are_metrics_only_have_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers would be the same, at the price of another pass over the vocabulary."""
    asked: list[Any] = []
    monkeypatch.setattr(
        model, "compute_vocabulary_fields", lambda picked, weight, labels, shard, head: asked.append(shard)
    )
    needs = RequestedModelOutputs(
        frozenset({"logprobs", "entropy", "mean_logit"}), frozenset({"entropy", "mean_logit"}), temperature=0.7
    )
    engine: Any = SimpleNamespace(
        pg_collection=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 1)),
        _head_weight=lambda: torch.zeros(6, 4),
        config=SimpleNamespace(features=ArchitectureExtras(), head="head"),
        real_vocabulary=11,
    )
    model.SwiftGPT._vocabulary(engine, torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), needs)
    [shard] = asked
    assert shard.fields == needs.names and set(shard.fields) == needs.fields
    assert shard.differentiable == ("logprobs",) and shard.temperature == 0.7
