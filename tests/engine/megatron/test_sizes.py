"""The parameters of both engines' FLOP rule against Hugging Face's models and torch's own counter of operations.

Covers: megaswift/engine/torch/engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.plan import WeightPlan
from megaswift.engine.megatron.lora.adapters import adapter_plan_from_lora_config
from megaswift.engine.megatron.sizes import active_adapter_parameter_count, flop_parameter_count
from megaswift.engine.torch.engine import flop_parameter_counts
from megaswift.families import family_of
from megaswift.models.flops import StepFlopFormula

BASE = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[]
)
DEEPSEEK = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    head_dim=6,
)


@dataclass(frozen=True)
class Model:
    kind: str
    extra: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    """Layers with experts, of which two of four are idle for a token."""
    expert_ffn: int = 0


MODELS = [
    Model("Llama"),
    Model("Llama", {"tie_word_embeddings": True}),
    Model("Qwen2"),
    Model("Qwen3"),
    Model("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 4, 48),
    Model("Qwen3Moe", EXPERTS, 4, 24),
    Model("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0, 3]}, 2, 24),
    Model("Glm4Moe", DEEPSEEK, 3, 24),
    Model("DeepseekV3", {**DEEPSEEK, **LATENT}, 3, 24),
    Model("DeepseekV2", {**DEEPSEEK, **LATENT, "q_lora_rank": None}, 3, 24),
]


def hf_model(model: Model, device: str = "meta") -> Any:
    config = getattr(transformers, model.kind + "Config")(**{**BASE, **model.extra})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def plan_of(hf: Any) -> WeightPlan:
    config = {**hf.config.to_dict(), "architectures": [type(hf).__name__]}
    family = family_of(config)
    return WeightPlan(family, family.spec(config))


def ours(hf: Any) -> int:
    plan = plan_of(hf)
    return flop_parameter_count(plan, plan.spec)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join([m.kind, *m.extra][:3]))
def test_parameters_active_for_a_token_without_the_input_embedding(model: Model) -> None:
    hf = hf_model(model)
    idle = model.experts * 2 * 3 * model.expert_ffn * 32
    embedding = 0 if hf.config.tie_word_embeddings else hf.get_input_embeddings().weight.numel()
    active = sum(p.numel() for p in hf.parameters()) - idle - embedding
    assert ours(hf) == active
    assert flop_parameter_counts(hf, plan_of(hf).spec) == (active, active)


@pytest.mark.parametrize("model", [MODELS[0], MODELS[1], MODELS[5]], ids=lambda m: "-".join([m.kind, *m.extra][:3]))
def test_adapters_count_whole_and_frozen_weights_by_two_thirds(model: Model) -> None:
    """Rank 4 on q_proj and down_proj, by hand: two of four experts are idle for a token, and so are their adapters."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    hf, experts = hf_model(model), model.experts > 0
    plan, frozen = plan_of(hf), ours(hf)
    on_experts = 4 * 2 * 4 * (24 + 32)  # layers, active experts, rank, widths
    adapters = 4 * 4 * (32 + 32) + (on_experts if experts else 4 * 4 * (48 + 32))
    native = adapter_plan_from_lora_config(LoraConfig(lora_rank=4, target_modules=("q_proj", "down_proj")), plan)
    assert active_adapter_parameter_count(native, plan.spec) == adapters
    targets = {"target_parameters": ["experts.down_proj"]} if experts else {}
    peft = get_peft_model(hf, PeftConfig(r=4, target_modules=["q_proj"] + ["down_proj"] * (not experts), **targets))
    step, forward = flop_parameter_counts(peft.get_base_model(), plan.spec)
    assert step == pytest.approx(frozen * 2 / 3 + adapters, abs=1)
    assert forward == frozen + adapters


@pytest.mark.parametrize("tied", [False, True])
def test_the_flop_rule_is_what_torch_counts(tied: bool) -> None:
    hf = hf_model(Model("Llama", {"tie_word_embeddings": tied}), "cpu")
    with FlopCounterMode(display=False) as counter:
        hf(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits.sum().backward()
    rule = StepFlopFormula(ours(hf), 4 * 4 * 8)
    norms = (2 * 4 + 1) * 32  # the rule counts them as if they were matrices, the counter not at all
    masked = rule.step(0, 2 * 16**2)  # eager attention also computes the half that is masked
    assert counter.get_total_flops() == pytest.approx(rule.step(32, 2 * 16**2) + masked - 6 * norms * 32, rel=1e-4)


def test_the_flop_rule_covers_latent_attention() -> None:
    """Scores have another width than values."""
    hf = hf_model(Model("DeepseekV3", {**DEEPSEEK, **LATENT, "first_k_dense_replace": 4}), "cpu")
    with FlopCounterMode(display=False) as counter:
        hf(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits.sum().backward()
    config = {**hf.config.to_dict(), "architectures": [type(hf).__name__]}
    rule = StepFlopFormula(ours(hf), 4 * family_of(config).spec(config).product_width)
    norms = (2 * 4 + 1) * 32 + 4 * (20 + 12)
    masked = rule.step(0, 2 * 16**2)
    assert counter.get_total_flops() == pytest.approx(rule.step(32, 2 * 16**2) + masked - 6 * norms * 32, rel=1e-4)
