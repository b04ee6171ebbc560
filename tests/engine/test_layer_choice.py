"""Which layers a run takes where a model has what Transformer Engine's layers compute only in some versions and layouts."""

from __future__ import annotations

import importlib.metadata

import pytest

from megaswift.engine.megatron.layer_spec import lacking_sinks, only_torch, pick
from megaswift.errors import ConfigError
from megaswift.families import family_of
from tests.families.published_moe import GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B

GPT_OSS, OLMOE, QWEN = (family_of(c).spec(c) for c in (GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B))


@pytest.mark.parametrize(("version", "comm", "lacking"), [
    ("2.7.0", "", "attention sinks before version 2.8"),
    ("2.8.0", "", ""),
    ("2.10.0+abc", "a2a", ""),
    ("2.10.0+abc", "p2p", "attention sinks with --cp_comm_type p2p"),
])
def test_sinks(version: str, comm: str, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = lacking_sinks(GPT_OSS, comm)
    assert found.startswith(lacking) and bool(found) == bool(lacking)
    assert lacking_sinks(QWEN, comm) == "" == lacking_sinks(OLMOE, comm)
    if lacking:
        assert pick("auto", lacking=found) == ("torch", f"Transformer Engine's layers have no {found}, which this model needs")
        with pytest.raises(ConfigError, match="attention sinks"):
            pick("transformer_engine", lacking=found)


def test_without_transformer_engine_nothing_is_said_of_its_version() -> None:
    assert lacking_sinks(GPT_OSS) == ""


def test_norms_over_all_heads_take_the_torch_layers() -> None:
    assert only_torch(OLMOE.features) == "qk_norm_width" and only_torch(GPT_OSS.features) == "" == only_torch(QWEN.features)
