"""A reference for DeepSeekMoE 16B, which transformers does not have: its Llama with the experts of its DeepSeek-V2 in
the layers after the dense ones (arXiv:2401.06066, section 3). And Kimi K2, which is its DeepSeek-V3 by another name."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def register() -> None:
    """Makes the models known to transformers' Auto classes as `deepseek` and `kimi_k2`, and Mistral 4, which
    transformers has under images to text only, to AutoModelForCausalLM."""
    from torch import nn
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaModel,
        Mistral4Config,
        Mistral4ForCausalLM,
        conversion_mapping,
    )
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Experts,
        DeepseekV2Moe,
        DeepseekV2TopkRouter,
    )

    class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
        model_type = "deepseek"
        n_routed_experts: int = 8
        n_shared_experts: int = 2
        num_experts_per_tok: int = 2
        moe_intermediate_size: int = 48
        first_k_dense_replace: int = 1
        norm_topk_prob: bool = False

        @property
        def num_experts(self) -> int:
            """As transformers' experts call it."""
            return self.n_routed_experts

        n_group, topk_group, topk_method, routed_scaling_factor = 1, 1, "greedy", 1.0

    class DeepseekModel(LlamaModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.layers[config.first_k_dense_replace :]:
                layer.mlp = DeepseekV2Moe(config)
            self.post_init()

    class DeepseekForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        config_class = DeepseekConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = DeepseekModel(config)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            if not isinstance(module, DeepseekV2Experts | DeepseekV2TopkRouter):
                super()._init_weights(module)

    class KimiConfig(DeepseekV3Config):  # type: ignore[misc]
        model_type = "kimi_k2"

    class KimiForCausalLM(DeepseekV3ForCausalLM):  # type: ignore[misc]
        config_class = KimiConfig

    KimiForCausalLM.__name__ = DeepseekV3ForCausalLM.__name__  # as the published folders call it
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    AutoConfig.register("kimi_k2", KimiConfig)
    AutoModelForCausalLM.register(KimiConfig, KimiForCausalLM)
    kimi_mapping = conversion_mapping.get_checkpoint_conversion_mapping("deepseek_v3")
    conversion_mapping.register_checkpoint_conversion_mapping("kimi_k2", kimi_mapping)
    AutoConfig.register("deepseek", DeepseekConfig)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
    mapping = conversion_mapping.get_checkpoint_conversion_mapping("deepseek_v2")
    conversion_mapping.register_checkpoint_conversion_mapping("deepseek", mapping)
