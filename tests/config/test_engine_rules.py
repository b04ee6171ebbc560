"""Options of one engine with another, and the spellings that mean an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.config.engine_rules import ENGINE_CLASHES, ENGINE_IGNORED, FSDP_ONLY, NATIVE_ONLY, engine_of
from megaswift.config.sections import OPTIONS
from megaswift.errors import ConfigError
from megaswift.families import FAMILIES
from megaswift.families.unlisted import unlisted_spec
from megaswift.trainers.engine_choice import choose, parameters, settle
from tests.config.test_rules import problems
from tests.config.test_sections import NEEDS, other_value
from tests.parity.models import VARIANTS, config
from tests.sources import ROOT
from tests.trainers.inputs import write_model


@pytest.mark.parametrize("name", NATIVE_ONLY)
def test_options_of_the_native_engine(name: str) -> None:
    value = other_value(name)
    with pytest.raises(ConfigError) as error:
        SwiftConfig(engine="ddp", **{name: value})
    assert any(name in p.what and "belongs to the native engine" in p.rule for p in error.value.problems)
    assert not [p for p in _told(name, value) if "belongs to the native engine" in p]


def _told(name: str, value: object) -> list[str]:
    try:
        SwiftConfig(engine="auto", **{name: value}, **NEEDS.get(name, {}))
    except ConfigError as error:
        return [str(p) for p in error.problems]
    return []


@pytest.mark.parametrize("name", FSDP_ONLY)
def test_options_of_fsdp(name: str) -> None:
    value = other_value(name)
    assert SwiftConfig(engine="fsdp2", **{name: value}).value(name) == tuple(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="belongs to the engine fsdp2"):
        SwiftConfig(engine="ddp", **{name: value})


CLASHING = [
    "--deepspeed zero3 --engine ddp", "--use_fsdp true --engine ddp", "--fsdp full_shard,shard_grad_op",
    "--engine ddp --recompute_granularity selective", "--engine ddp --train_type qlora", "--engine zero1 --optimizer sgd"]


def test_contradictions() -> None:
    assert len(CLASHING) == len(ENGINE_CLASHES)
    for words, clash in zip(CLASHING, ENGINE_CLASHES, strict=True):
        found = problems(words)
        assert len(found) == 1 and clash.options[0] in found[0], found
    assert all({r.option, *r.reads} <= set(OPTIONS) for r in ENGINE_IGNORED)


@pytest.mark.parametrize(("options", "kind"), [
    ({}, "megatron"), ({"use_fsdp": True}, "fsdp2"), ({"fsdp": "full_shard auto_wrap"}, "fsdp2"), ({"engine": "fsdp"}, "fsdp2"),
    ({"training": {"distributed_strategy": "ddp"}}, "ddp"),
    ({"training": {"distributed_strategy": "deepspeed"}}, "zero2"), ({"deepspeed": "zero3"}, "zero3"),
    ({"deepspeed": str(ROOT / "configs/deepspeed/zero3_offload.json")}, "zero3_offload"),
    ({"engine": "native"}, "megatron")])
def test_spellings(options: dict[str, object], kind: str) -> None:
    cfg = SwiftConfig(**options)
    assert engine_of(cfg) == kind
    assert settle(cfg, 2).engine.engine == kind


def test_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    assert settle(SwiftConfig(model=model, engine="auto"), 2).engine.engine == "ddp"
    assert "engine ddp: 2.13e-05 B parameters" in capsys.readouterr().err
    assert settle(SwiftConfig(model=model, engine="auto", tp=2), 2).engine.engine == "megatron"


def size(**fields: int) -> dict[str, object]:
    """A config.json of no family."""
    return {"model_type": "new", "vocab_size": 128_000, "num_attention_heads": 32, **fields}


def test_auto_by_size() -> None:
    seven = unlisted_spec(size(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_key_value_heads=8, head_dim=128))
    assert 50e9 < parameters(seven) < 80e9
    assert choose(seven, False, 8)[0] == "fsdp2" and choose(seven, False, 1)[0] == "ddp" and choose(seven, True, 8)[0] == "megatron"


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_are_near(variant: str) -> None:
    """The estimate from sizes alone, beside the exact count of the family's table."""
    from megaswift.bridge.plan import WeightPlan
    from megaswift.families import family_of

    raw = json.loads(config(variant).to_json_string(use_diff=False))
    assert raw["model_type"] in FAMILIES
    spec = family_of(raw).spec(raw)
    assert parameters(spec) == pytest.approx(WeightPlan(family_of(raw), spec).parameters, rel=0.35)
