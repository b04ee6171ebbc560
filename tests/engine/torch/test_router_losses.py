"""The balancing loss of a vision-language model's routers, beside the function of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from megaswift.engine.torch.router_losses import RouterLosses
from megaswift.models.any_model import spec_from_size_fields

EXPERTS, CHOSEN, LAYERS = 4, 2, 2
TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}


def test_it_is_transformers_own_layer_by_layer() -> None:
    """transformers adds up the experts that a token chooses, and mixes layers; here they are averaged."""
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config={**VISION, "deepstack_visual_indexes": [0]})
    model = Qwen3VLMoeForConditionalGeneration(config).train()
    ours = RouterLosses(model, spec_from_size_fields(config.to_dict()), 0.5, None)
    valid = torch.ones(2, 9, dtype=torch.long)
    valid[1, 6:] = 0
    ours.begin(train=True)
    out = model(input_ids=torch.randint(50, (2, 9)), attention_mask=valid, output_router_logits=True, use_cache=False)
    added = ours.take(valid, microbatches=2)
    theirs = [load_balancing_loss_func((logits,), EXPERTS, CHOSEN, valid) for logits in out.router_logits]
    assert len(theirs) == LAYERS
    assert float(added) == pytest.approx(0.5 / 2 / CHOSEN * sum(map(float, theirs)), rel=1e-6)
    assert added.requires_grad
