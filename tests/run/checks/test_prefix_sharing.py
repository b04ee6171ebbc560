"""When a prompt is computed once for its completions: what stands in the way is named, and asking for it all the same
is a mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from megaswift.config import SwiftConfig
from megaswift.engine.torch.document_attention import attends_per_document, set_per_document_attention
from megaswift.errors import UserError
from megaswift.families import load_spec
from megaswift.models.any_model import spec_from_size_fields
from megaswift.models.published.moe import OLMOE_1B_7B
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.run.checks.prefix_sharing import (
    CUDNN,
    prefix_sharing_problems,
    prefix_sharing_rows,
    reason_against_prefix_sharing,
    shares_prefixes,
)
from megaswift.run.checks.preflight import preflight
from tests.test_cli import model_folder
from tests.trainers.rl.makers import config, source

ONE = Layout(1)


def model(folder: Path, raw: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


@pytest.fixture
def dense(tmp_path: Path) -> ModelSpec:
    return load_spec(model_folder(tmp_path))


def test_it_is_on_where_the_numbers_are_the_same(dense: ModelSpec) -> None:
    assert shares_prefixes(config(), dense, ONE)
    assert prefix_sharing_rows(config(), dense, ONE) == (
        ("prompts", "computed once for their answers in a micro-batch"),
    )
    assert prefix_sharing_rows(SwiftConfig(task="orpo", model="m", dataset="d"), dense, ONE) == ()
    assert shares_prefixes(SwiftConfig(task="dpo", model="m", dataset="d"), dense, ONE), "a pair is two answers"
    assert shares_prefixes(config(task="ppo", num_generations=2), dense, ONE)
    assert not shares_prefixes(config(prefix_sharing=False), dense, ONE)


def test_one_completion_shares_with_none(dense: ModelSpec) -> None:
    alone = config(per_device_train_batch_size=1)
    assert not shares_prefixes(alone, dense, ONE) and not reason_against_prefix_sharing(alone, dense, 1)
    ((_, text),) = prefix_sharing_rows(alone, dense, ONE)
    assert "micro-batches have one completion" in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": False}, "packed rows"),
        ({"train_type": "lora", "lora_dropout": 0.1}, "dropout"),
        ({"engine": "ddp", "attn_impl": "unfused"}, "with --attn_impl sdpa"),
        ({"engine": "fsdp2", "torch_compile": True}, "without --torch_compile"),
        ({"engine": "ddp", "neftune_noise_alpha": 5.0}, "the same noise"),
    ],
)
def test_what_stands_in_the_way_is_named(dense: ModelSpec, options: dict[str, Any], why: str) -> None:
    cfg = config(**options)
    assert why in reason_against_prefix_sharing(cfg, dense, 1) and not shares_prefixes(cfg, dense, ONE)
    asked = cfg.replace(prefix_sharing=True)
    (problem,) = prefix_sharing_problems(asked, dense, 1)
    assert problem.what == "--prefix_sharing true" and why in problem.rule


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_engines_of_transformers_models(engine: str, dense: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On by default for families that tests hold to Hugging Face; asked for, any model is checked when it is loaded."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 90000)  # too old, and not used
    assert shares_prefixes(config(engine=engine), dense, ONE)
    other = spec_from_size_fields({"model_type": "gpt_neox", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 9})
    for cfg, spec in (
        (config(engine=engine), other),
        (config(engine=engine), replace(dense, hf_config={**dense.hf_config, "auto_map": {}})),
        (config(engine=engine, task="ppo", critic_model="other"), dense),
    ):
        ((_, text),) = prefix_sharing_rows(cfg, spec, ONE)
        assert not shares_prefixes(cfg, spec, ONE) and "true checks it" in text
        assert shares_prefixes(cfg.replace(prefix_sharing=True), spec, ONE)
        assert not list(prefix_sharing_problems(cfg.replace(prefix_sharing=True), spec, 1))
    dropping = replace(other, hf_config={**other.hf_config, "embd_pdrop": 0.1, "classifier_dropout": 0.1})
    assert "dropout" in reason_against_prefix_sharing(config(engine=engine), dropping, 1)
    kept = replace(other, hf_config={**other.hf_config, "embd_pdrop": 0.0, "classifier_dropout": 0.1})
    assert not reason_against_prefix_sharing(config(engine=engine), kept, 1)


@pytest.mark.parametrize(("chosen", "shares"), [(None, True), ("sdpa", True), ("eager", False)])
def test_attention_that_config_json_names(tmp_path: Path, chosen: str | None, shares: bool) -> None:
    """transformers takes it where `--attn_impl` says nothing: a run by default would fail in its first step."""
    folder = model_folder(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    cfg, spec = config(engine="ddp"), model(folder, {**raw, "attn_implementation": chosen})
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    set_per_document_attention(made, cfg.model, True)
    assert attends_per_document(made) == shares == shares_prefixes(cfg, spec, ONE)
    assert shares_prefixes(cfg.replace(attn_impl="sdpa"), spec, ONE)
    assert shares_prefixes(config(), spec, ONE), "the native engine has its own"


def test_dropout_of_the_model_counts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    assert "dropout" in reason_against_prefix_sharing(config(), model(folder, {**raw, "attention_dropout": 0.1}), 1)


def test_routers_count_tokens(tmp_path: Path) -> None:
    """OLMoE's balancing loss is in its configuration; without it a prompt may be there once."""
    experts = model(tmp_path, {**OLMOE_1B_7B, "router_aux_loss_coef": 0.01})
    assert "router losses" in reason_against_prefix_sharing(config(), experts, 1)
    off = {"moe_aux_loss_coeff": 0.0}
    assert not reason_against_prefix_sharing(config(**off), experts, 1)
    assert "router losses" in reason_against_prefix_sharing(config(**off, moe_z_loss_coeff=0.1), experts, 1)
    assert "router losses" in reason_against_prefix_sharing(config(**off, moe_expert_capacity_factor=1.0), experts, 1)
    for field in ({"moe_input_jitter_eps": "0.1"}, {"moe_router_enable_expert_bias": "true"}):
        assert "router losses" in reason_against_prefix_sharing(config(**off, megatron_extra_kwargs=field), experts, 1)


def test_context_parallelism_needs_attention_of_torch(dense: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reason_against_prefix_sharing(config(), dense, 2), "without a GPU attention is torch's"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: CUDNN)
    assert "--attn_impl sdpa" in reason_against_prefix_sharing(config(), dense, 2)
    assert not reason_against_prefix_sharing(config(attn_impl="sdpa"), dense, 2)
    assert not reason_against_prefix_sharing(config(), dense, 1)


@pytest.mark.parametrize(
    ("cudnn", "flash", "supported"), [(90600, False, False), (90700, False, True), (None, True, True)]
)
def test_transformer_engine_needs_a_kernel(
    dense: ModelSpec, monkeypatch: pytest.MonkeyPatch, cudnn: int | None, flash: bool, supported: bool
) -> None:
    """On a GPU; torch's attention needs none."""
    found = {"flash_attn": object() if flash else None}
    module = "megaswift.run.checks.prefix_sharing"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)
    monkeypatch.setattr(f"{module}.importlib.util.find_spec", found.__getitem__)
    assert ("cuDNN 9.7" in reason_against_prefix_sharing(config(), dense, 1)) != supported
    assert not reason_against_prefix_sharing(config(attn_impl="sdpa"), dense, 1)


def test_preflight_refuses_what_would_not_be_exact(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    asked = config(model=str(folder), prefix_sharing=True, packing=False, output_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match="--prefix_sharing true: needs packed rows"):
        preflight(asked, 1)


def test_completions_of_a_prompt_come_together() -> None:
    """In a step's micro-batches, four completions of a prompt each; the same completions make up the step."""
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "global_batch_size": 16}
    apart, together = source(**options), source(shares=True, **options)
    for made in (apart, together):
        made.generate()
    before, after = apart.own_microbatches(0), together.own_microbatches(0)
    groups = [[tuple(c.prompt) for c in micro if c is not None] for micro in after]
    assert all(len(set(group)) == 1 for group in groups)
    assert any(len({tuple(c.prompt) for c in micro if c is not None}) > 1 for micro in before)
    flat = [[c.number for micro in micros for c in micro if c is not None] for micros in (before, after)]
    assert sorted(flat[0]) == sorted(flat[1]) == [*range(16)]
    assert [*dict.fromkeys(tuple(c.prompt) for m in before for c in m if c)] == [g[0] for g in groups]
