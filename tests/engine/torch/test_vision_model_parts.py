"""The parts of vision-language models that transformers has: names on random models of the smallest size."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from megaswift.config.model import ModelConfig
from megaswift.engine.torch import vision_model_parts
from tests.parity.vision import KINDS, tokenizer

ALIGNERS = {
    "qwen2_vl": ("model.visual.merger",),
    "qwen3_vl": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    "llava": ("model.multi_modal_projector",),
    "llava_next": ("model.multi_modal_projector", "model.image_newline"),
    "gemma3": ("model.multi_modal_projector",),
    "idefics3": ("model.connector",),
    "internvl": ("model.multi_modal_projector",),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_weight_has_one_part(kind: str) -> None:
    model = KINDS[kind](tokenizer(kind))[0]
    parts = vision_model_parts.VisionModelPartNames(model)
    of = {name: parts.of(name) for name, _ in model.named_parameters()}
    assert Counter(of.values()).keys() == {"vit", "aligner", "llm"}
    assert {n for n, p in of.items() if p == "aligner"} == {n for n in of if n.startswith(ALIGNERS[kind])}
    assert {n for n, p in of.items() if p == "llm"} == {
        n for n in of if re.search(r"language_model|text_model|^lm_head", n)
    }


@pytest.mark.parametrize(
    ("flags", "trains"),
    [
        ({}, {"llm"}),
        ({"freeze_vit": False}, {"llm", "vit"}),
        ({"freeze_llm": True, "freeze_aligner": False}, {"aligner"}),
        ({"freeze_vit": False, "freeze_aligner": False}, {"llm", "vit", "aligner"}),
    ],
)
def test_flags(flags: dict[str, bool], trains: set[str]) -> None:
    model = KINDS["llava"](tokenizer("llava"))[0]
    vision_model_parts.freeze_vision_model_parts(model, ModelConfig(**flags))
    parts = vision_model_parts.VisionModelPartNames(model)
    assert {parts.of(n) for n, p in model.named_parameters() if p.requires_grad} == trains
    assert all(p.requires_grad == (parts.of(n) in trains) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
def test_adapters_follow_the_flags(kind: str) -> None:
    """PEFT's own `all-linear`, and a name that tower and language model share."""
    import peft

    aligner = {"freeze_llm": True, "freeze_aligner": False}
    for flags, wanted in (({}, {"llm"}), ({"freeze_vit": False}, {"llm", "vit"}), (aligner, {"aligner"})):
        model = KINDS[kind](tokenizer(kind))[0]
        parts, cfg = vision_model_parts.VisionModelPartNames(model), ModelConfig(**flags)
        options = peft.LoraConfig(
            r=2, target_modules="all-linear", exclude_modules=vision_model_parts.frozen_modules_pattern(model, cfg)
        )
        made = peft.get_peft_model(model, options)
        adapted = [
            n.removeprefix("base_model.model.").split(".lora_A")[0] for n, p in made.named_parameters() if "lora_A" in n
        ]
        assert {parts.of(n) for n in adapted} == wanted, flags


def test_a_text_model_has_no_parts() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    vision_model_parts.freeze_vision_model_parts(model, ModelConfig())
    assert (
        all(p.requires_grad for p in model.parameters())
        and vision_model_parts.frozen_modules_pattern(model, ModelConfig()) is None
    )
    assert isinstance(model, torch.nn.Module)
