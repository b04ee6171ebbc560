"""What a run of a model of 8 billion parameters needs on one card, and the settings that are then chosen.

Covers: megaswift/planner/settings.py, megaswift/memory/estimate.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.memory.estimate import uncovered_features, usable_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels
from megaswift.models.published.deepseek import DEEPSEEK_V3
from megaswift.models.published.dense import GEMMA_2_2B
from megaswift.models.published.sizes import MODELS
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.planner.settings import FitChoice, NoFit
from megaswift.run.checks.fit import choose_settings_for_run, fit_text
from tests.memory.of_config import parameters_of

GIB, GB = 2**30, 10**9
QWEN3_8B = MODELS["qwen3-8b"][0]
PARAMETERS = 8_190_735_360
"""By the model card 8.2 B; counted by hand: 2 x 151,936 x 4,096 for embedding and head, 36 layers of 4,096 x (4,096 +
2 x 1,024) + 4,096 x 4,096 + 3 x 4,096 x 12,288 + 2 x 4,096 + 2 x 128, and the last norm."""
GPU = ComputeKernels(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, "bfloat16", True)
ON_TORCH = ComputeKernels(TORCH, TORCH, "bfloat16", True)
QLORA = ComputeKernels(TORCH, TRANSFORMER_ENGINE, "bfloat16", True)
FULL = {"recompute_granularity": "full", "recompute_modules": ()}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return family_of(config).spec(config)


def choose(
    memory: float, kernels: ComputeKernels = GPU, config: dict[str, Any] = QWEN3_8B, ranks: int = 1, **options: Any
) -> FitChoice | NoFit:
    cfg = SwiftConfig(task="sft", **options)
    parameters = parameters_of(cfg, spec_of(config), Layout.from_config(cfg.parallel, ranks), kernels)
    return choose_settings_for_run(cfg, parameters, usable_bytes(int(memory), kernels.cuda))


def chosen(memory: float, kernels: ComputeKernels = GPU, **options: Any) -> FitChoice:
    found = choose(memory, kernels, **options)
    assert isinstance(found, FitChoice), found
    return found


def test_the_parameters_are_those_of_the_model_card() -> None:
    layers = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
    assert 2 * 151936 * 4096 + layers + 4096 == PARAMETERS
    assert choose(139 * GIB).before.held.gradients == pytest.approx(4 * PARAMETERS, rel=1e-6)


def test_full_fine_tuning_on_one_card_of_139_gib() -> None:
    """18 bytes a parameter are 137.3 GiB alone: 16, with main weights as remainders, are 122, too many with 20 GiB of
    activations; 14, with a bfloat16 first moment, cost no time, while recomputed MLPs would cost a seventh of a
    step."""
    found = chosen(139 * GIB, max_length=4096)
    assert found.settings == {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    assert found.before.held.device == pytest.approx(18 * PARAMETERS, rel=1e-6)
    assert found.before.held.device > usable_bytes(139 * GIB, True)
    assert found.after.held.device == pytest.approx(14 * PARAMETERS, rel=1e-6)
    assert found.after.total == pytest.approx(126.9 * GIB, rel=1e-3) and found.seconds < found.seconds_before
    assert "by roofline a step takes" in fit_text(found, 139 * GIB, usable_bytes(139 * GIB, True))
    # without recomputation a token keeps of a layer: 4 x 4,096 for norms and residuals, 2 x 4,096 + 3 x 1,024 and
    # 4,096 + 1,024 again before their norms for attention, 3 x 12,288 for the MLP, in 2 bytes each
    per_token = 2 * (4 * 4096 + 2 * (4096 + 1024) + 1024 + 4096 + 3 * 12288)
    assert found.before.activations.kept == pytest.approx(36 * 4096 * per_token, rel=0.01)
    kept = chosen(139 * GIB, max_length=4096, exp_avg_dtype="fp32", main_grads_dtype="fp32")
    assert kept.settings == {"precision_aware_optimizer": True, **selective()}, "what the user has set stays"
    assert kept.seconds > 1.1 * kept.seconds_before
    assert re.search(r"by roofline a step takes 1\d% longer", fit_text(kept, 139 * GIB, usable_bytes(139 * GIB, True)))


def test_bf16_main_gradients_come_after_a_bf16_moment() -> None:
    """12 bytes a parameter are tried once 14 do not fit, and come before recomputation and host memory."""
    found = chosen(139 * GIB, max_length=4096, exp_avg_dtype="fp32")
    assert found.settings == {"precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
    text = fit_text(found, 139 * GIB, usable_bytes(139 * GIB, True))
    assert "chosen: --precision_aware_optimizer true --main_grads_dtype bf16" in text and "in bfloat16" in text
    both = chosen(120 * GIB, max_length=4096)
    assert both.settings == {**found.settings, "exp_avg_dtype": "bf16"}
    assert both.after.held.device == pytest.approx(12 * PARAMETERS, rel=1e-6)
    states = ("precision_aware_optimizer", "exp_avg_dtype", "main_grads_dtype")
    kept = chosen(139 * GIB, max_length=4096, recompute_granularity="none", **dict.fromkeys(states[1:], "fp32"))
    assert kept.settings == {"optimizer_cpu_offload": True}


def test_moments_in_bfloat16() -> None:
    """12 bytes a parameter; the update makes no float32 copies of them."""
    aware = {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    before = choose(139 * GIB, max_length=4096, **aware).before
    assert before.held.device == pytest.approx(12 * PARAMETERS, rel=1e-6)
    assert before.total == before.held.device + before.activations.total


@pytest.mark.parametrize("length", [4096, 8192])
def test_fp8_on_the_same_card(length: int) -> None:
    """2 bytes more for each of the 6.95 B weights of linear layers, 12.9 GiB: 14 bytes a parameter no longer fit."""
    found = chosen(139 * GIB, max_length=length, fp8_format="hybrid", fp8_recipe="tensorwise")
    assert found.settings["main_grads_dtype"] == found.settings["exp_avg_dtype"] == "bf16"
    linear = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert found.after.held.device == pytest.approx(12 * PARAMETERS + 2 * linear, rel=1e-6)
    assert found.after.total <= usable_bytes(139 * GIB, True) < found.before.held.device
    assert "+ FP8 copies of weights 12.9 GiB +" in fit_text(found, 139 * GIB, usable_bytes(139 * GIB, True))


def test_lora_with_sequences_of_8192_on_the_same_card() -> None:
    """Nothing has to be changed: weights 15.3 GiB, activations 38 GiB."""
    found = chosen(139 * GIB, train_type="lora", max_length=8192)
    assert found.settings == {}
    assert found.after.held.weights == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert 45 * GIB < found.after.total < 60 * GIB


@pytest.mark.parametrize("length", [2048, 4096])
def test_qlora_in_12_gb(length: int) -> None:
    """Layers of 6.95 B weights in NF4 at 4.5 bits, embedding and head in bfloat16: 6.4 GB; with full recomputation."""
    found = chosen(12 * GB, QLORA, train_type="qlora", max_length=length)
    assert found.settings == FULL
    quantized = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert found.after.held.weights == pytest.approx(
        quantized * 4.5 / 8 + 2 * (PARAMETERS - quantized) + 2 * found.after.held.gradients / 4, rel=1e-3
    )
    assert found.before.total > 12 * GB > found.after.total


def test_later_settings_only_where_earlier_ones_do_not_do() -> None:
    """In the order of docs/memory.md."""
    small = {"max_length": 4096, "train_type": "lora"}
    assert chosen(60 * GIB, **small).settings == {}
    assert chosen(30 * GIB, **small).settings["recompute_granularity"] == "selective"
    assert chosen(22 * GIB, **small).settings == FULL
    assert chosen(100 * GIB, max_length=4096).settings == {"optimizer_cpu_offload": True, **selective()}
    cfg = SwiftConfig(task="sft", max_length=4096)
    object.__setattr__(cfg.parallel, "distributed_optimizer", False)  # by a file of accelerate, say
    parameters = parameters_of(cfg, spec_of(QWEN3_8B), Layout(8), GPU)
    found = choose_settings_for_run(cfg, parameters, usable_bytes(100 * GIB, True))
    assert isinstance(found, FitChoice) and found.settings == {"distributed_optimizer": True}


def selective() -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}


def test_what_the_user_has_set_stays() -> None:
    """Also where it is the default."""
    found = chosen(139 * GIB, max_length=4096, precision_aware_optimizer=False)
    assert "precision_aware_optimizer" not in found.settings and found.settings["optimizer_cpu_offload"]
    none = choose(22 * GIB, max_length=4096, train_type="lora", recompute_granularity="none")
    assert isinstance(none, NoFit) and none.given_up == FULL and none.then is not None
    assert none.then.total < usable_bytes(22 * GIB, True) < none.least.total


def test_smaller_micro_batches_of_the_same_global_batch() -> None:
    """Where the user has set the global batch, and a file of accelerate, say, the micro-batch."""
    cfg = SwiftConfig(task="sft", train_type="lora", max_length=4096, global_batch_size=32)
    object.__setattr__(cfg.train, "per_device_train_batch_size", 8)  # not among what is given
    parameters = parameters_of(cfg, spec_of(QWEN3_8B), Layout(2), GPU)
    found = choose_settings_for_run(cfg, parameters, usable_bytes(24 * GIB, True))
    assert isinstance(found, FitChoice)
    assert found.settings["recompute_granularity"] == "full"
    rows = found.settings["per_device_train_batch_size"]
    assert rows < 8 and rows * found.settings["gradient_accumulation_steps"] * 2 == 32


def test_smaller_micro_batches_come_before_recomputation_where_they_cost_less() -> None:
    """Products of 4 rows of 4,096 tokens are as fast as those of 8."""
    cfg = SwiftConfig(task="sft", train_type="lora", max_length=4096, global_batch_size=32)
    object.__setattr__(cfg.train, "per_device_train_batch_size", 8)  # not among what is given
    parameters = parameters_of(cfg, spec_of(QWEN3_8B), Layout(2), GPU)
    found = choose_settings_for_run(cfg, parameters, usable_bytes(120 * GIB, True))
    assert isinstance(found, FitChoice) and found.before.total > usable_bytes(120 * GIB, True)
    assert found.settings == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert found.seconds < 1.01 * found.seconds_before


def test_nothing_fits() -> None:
    none = choose(24 * GIB, max_length=4096)
    assert isinstance(none, NoFit) and none.then is None
    assert none.nearest == {"optimizer_cpu_offload": True, **FULL}
    assert none.least.total == min(none.least.total, none.before.total)


def test_a_stage_and_a_shard_need_less() -> None:
    """The distributed optimizer over 8 ranks holds 6 + 12 / 8 bytes a parameter; of two stages the first, which has two
    micro-batches in flight, keeps as much as one stage of all layers."""
    (one, eight) = (choose(10**13, ranks=n, max_length=4096).before for n in (1, 8))
    assert one.held.device / PARAMETERS == pytest.approx(18, rel=1e-6)
    assert eight.held.device / PARAMETERS == pytest.approx(7.5, rel=1e-6)
    two = choose(10**13, ranks=2, pp=2, max_length=4096, gradient_accumulation_steps=4).before
    assert two.activations.kept == pytest.approx(one.activations.kept, rel=0.01)


def test_what_the_formulas_do_not_cover_is_named() -> None:
    model = SwiftConfig(task="sft").model
    assert list(uncovered_features(model, "folder", False)) == [], "no adapter trains"
    assert list(uncovered_features(model, None, True)) == ["--tp_comm_overlap"]
    lora = SwiftConfig(task="sft", train_type="lora").model
    assert list(uncovered_features(lora, "folder", False)) == ["--adapters"]


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GEMMA_2_2B], ids=lambda config: config["model_type"])
def test_estimates_of_latent_attention_and_of_soft_caps(config: dict[str, Any]) -> None:
    """On torch's layers a token keeps more than on Transformer Engine's."""
    few = {**config, "num_hidden_layers": 4}
    on_te, on_torch = (choose(10**15, kernels, few, max_length=4096).before for kernels in (GPU, ON_TORCH))
    assert on_te.held == on_torch.held
    assert on_te.activations.kept < on_torch.activations.kept
