"""When adapters go to samplers alone: what stands in the way is named, and asking for it all the same is a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megaswift.errors import UserError
from megaswift.families import load_spec
from megaswift.models.published.moe import GPT_OSS_20B, OLMOE_1B_7B
from megaswift.models.spec import ModelSpec
from megaswift.run.checks import adapter_sync as weight_sync
from megaswift.run.checks.adapter_sync import (
    adapter_rank,
    adapter_sync_problems,
    merged_sync_reason,
    syncs_adapters_only,
)
from megaswift.run.checks.preflight import preflight
from tests.test_cli import model_folder
from tests.trainers.rl.makers import config

ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
Options = dict[str, Any]


def model(folder: Path, raw: Options) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_spec(folder)


@pytest.fixture
def dense(tmp_path: Path) -> ModelSpec:
    return load_spec(model_folder(tmp_path))


def why(options: Options, spec: ModelSpec, folder: Path) -> str:
    return merged_sync_reason(config(train_type="lora", **options), spec, folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["linear_qkv"]},
        {"rollout_backend": "sglang", "lora_rank": 1000},
        {"rollout_backend": "vllm", "lora_rank": 512},
    ],
)
def test_plain_adapters_go_alone(options: Options, dense: ModelSpec, tmp_path: Path) -> None:
    cfg = config(train_type="lora", **options)
    assert merged_sync_reason(cfg, dense, tmp_path) == "" and syncs_adapters_only(cfg, dense, tmp_path)
    assert not syncs_adapters_only(config(train_type="lora", **options, rollout_lora=False), dense, tmp_path)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"rollout_backend": "vllm", "lora_rank": 513}, "vLLM supports adapters up to rank 512"),
        ({"rollout_backend": "vllm_server", "lora_rank": 513}, "vLLM supports adapters up to rank 512"),
    ],
)
def test_others_are_merged(options: Options, told: str, dense: ModelSpec, tmp_path: Path) -> None:
    assert told in why(options, dense, tmp_path)
    cfg = config(train_type="lora", **options, rollout_lora=True)
    [problem] = adapter_sync_problems(cfg, dense, tmp_path)
    assert problem.what == "--rollout_lora true" and told in problem.rule
    assert not list(adapter_sync_problems(config(train_type="lora", **options), dense, tmp_path))


def test_weights_in_few_bits_are_merged(dense: ModelSpec, tmp_path: Path) -> None:
    assert "quantized" in merged_sync_reason(config(train_type="qlora"), dense, tmp_path)
    stored = model(
        tmp_path, {**dense.hf_config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    assert "stored quantized" in why({}, stored, tmp_path)


@pytest.mark.parametrize(
    "options, alone", [({}, False), (ATTENTION, True), ({"target_modules": ["linear_fc1"]}, False)]
)
def test_adapters_on_experts_are_merged(options: Options, alone: bool, tmp_path: Path) -> None:
    found = why(options, model(tmp_path, OLMOE_1B_7B), tmp_path)
    assert found == "" if alone else "experts have adapters" in found


def test_experts_that_share_a_parameter_carry_none_unless_it_is_named(tmp_path: Path) -> None:
    raw = {name: value for name, value in GPT_OSS_20B.items() if name != "quantization_config"}
    spec = model(tmp_path, raw)
    assert why({}, spec, tmp_path) == ""
    assert "experts have adapters" in why({"target_parameters": ["mlp.experts.down_proj"]}, spec, tmp_path)


@pytest.mark.parametrize(
    "config_of, told",
    [
        ({"r": 3}, ""),
        ({"r": 3, "use_dora": True}, "DoRA"),
        ({"r": 3, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 3, "rank_pattern": {"q_proj": 5}}, "differ from module to module"),
        ({"r": 3, "bias": "all"}, "biases"),
    ],
)
def test_a_folder_to_go_on_from_says_it_itself(config_of: Options, told: str, dense: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config_of}))
    found = why({"adapters": str(tmp_path)}, dense, tmp_path)
    assert told in found and bool(told) == bool(found)
    assert adapter_rank(config(train_type="lora", adapters=str(tmp_path)).lora) == 3


@pytest.mark.parametrize("module, alone", [("self_attn.q_proj", True), ("mlp.experts.5.up_proj", False)])
def test_a_folder_with_experts(module: str, alone: bool, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    save_file(
        {f"base_model.model.model.layers.0.{module}.lora_A.weight": torch.ones(2, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    assert (why({"adapters": str(tmp_path)}, model(tmp_path, OLMOE_1B_7B), tmp_path) == "") == alone


def test_without_peft_the_sampler_in_the_process_gets_merged_weights(
    dense: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync.util, "find_spec", lambda name: None)
    assert why({}, dense, tmp_path) == "PEFT is not installed"
    assert why({"rollout_backend": "sglang"}, dense, tmp_path) == ""


def test_it_is_told_with_what_else_is_wrong_before_a_process_group_exists(tmp_path: Path) -> None:
    cfg = config(
        train_type="lora",
        use_dora=True,
        rollout_lora=True,
        model=str(model_folder(tmp_path)),
        output_dir=str(tmp_path / "out"),
        reward_funcs=["formt"],
    )
    with pytest.raises(UserError) as error:
        preflight(cfg, 1)
    assert {"--rollout_lora true", "reward function 'formt'"} <= {p.what for p in error.value.problems}
