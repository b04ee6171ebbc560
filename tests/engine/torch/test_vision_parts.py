"""The parts of vision-language models that transformers has: names on random models of the smallest size."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from megaswift.config import load_config
from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from megaswift.engine.torch import vision_parts
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.torch.optim.table import make_torch_optimizer
from megaswift.engine.torch.strategies.strategy import set_param_groups_lr_and_weight_decay
from megaswift.errors import ConfigError
from megaswift.models.options.model import ModelConfig
from tests.parity.vision import KINDS, image, inputs_of, part, tokenizer, write_images, write_model

ALIGNERS = {
    "qwen2_vl": ("model.visual.merger",),
    "qwen2_5_vl": ("model.visual.merger",),
    "qwen3_vl": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    "qwen3_vl_moe": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    "llava": ("model.multi_modal_projector",),
    "llava_next": ("model.multi_modal_projector", "model.image_newline"),
    "gemma3": ("model.multi_modal_projector",),
    "idefics3": ("model.connector",),
    "internvl": ("model.multi_modal_projector",),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_weight_has_one_part(kind: str) -> None:
    model = KINDS[kind](tokenizer(kind))[0]
    parts = vision_parts.VisionModelPartNames(model)
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
    vision_parts.freeze_vision_model_parts(model, ModelConfig(**flags))
    parts = vision_parts.VisionModelPartNames(model)
    assert {parts.of(n) for n, p in model.named_parameters() if p.requires_grad} == trains
    assert all(p.requires_grad == (parts.of(n) in trains) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
def test_adapters_follow_the_flags(kind: str) -> None:
    """PEFT's own `all-linear`, and a name that tower and language model share."""
    import peft

    aligner = {"freeze_llm": True, "freeze_aligner": False}
    for flags, wanted in (({}, {"llm"}), ({"freeze_vit": False}, {"llm", "vit"}), (aligner, {"aligner"})):
        model = KINDS[kind](tokenizer(kind))[0]
        parts, cfg = vision_parts.VisionModelPartNames(model), ModelConfig(**flags)
        options = peft.LoraConfig(
            r=2, target_modules="all-linear", exclude_modules=vision_parts.frozen_modules_pattern(model, cfg)
        )
        made = peft.get_peft_model(model, options)
        adapted = [
            n.removeprefix("base_model.model.").split(".lora_A")[0] for n, p in made.named_parameters() if "lora_A" in n
        ]
        assert {parts.of(n) for n in adapted} == wanted, flags


@pytest.mark.wide
@pytest.mark.parametrize(
    ("granularity", "encoder", "again"),
    [
        ("none", None, set()),
        ("full", None, {"vit", "llm"}),
        ("full", False, {"llm"}),
        ("full", True, {"vit", "llm"}),
        ("none", True, {"vit"}),
        ("none", False, set()),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
def test_layers_are_computed_again(
    kind: str, granularity: str, encoder: bool | None, again: set[str], tmp_path: Path
) -> None:
    """By the forward calls of a linear of each layer in a step; the gradients stay the same."""
    folder = write_model(kind, tmp_path / "model")
    write_images(tmp_path / "images")
    reader = Processor(processor_folder_and_files_digest(folder, False))
    row = json.dumps({"messages": [{"role": "user", "content": [image("0.png"), part("what?")]},
                                   {"role": "assistant", "content": [part("a cat.")]}]})  # fmt: skip
    given = inputs_of(reader.inner, row, tmp_path)
    given.pop("assistant_masks")

    def step(cfg: ModelConfig) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
        model = KINDS[kind](tokenizer(kind))[0].train()
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        vision_parts.recompute_layers(model, cfg)
        parts, calls = vision_parts.VisionModelPartNames(model), Counter[str]()
        for name, module in model.named_modules():
            if hasattr(module, "gradient_checkpointing") and re.search(r"\.\d+$", name):
                first = next(inner for inner in module.modules() if isinstance(inner, torch.nn.Linear))
                first.register_forward_pre_hook(lambda *_, of=name: calls.update([parts.of(of)]))
        model(**given, labels=given["input_ids"]).loss.backward()
        return calls, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    once, plain = step(ModelConfig())
    calls, gradients = step(ModelConfig(recompute_granularity=granularity, vit_gradient_checkpointing=encoder))
    assert once.keys() == {"vit", "llm"} and {n for n, count in calls.items() if count > once[n]} == again
    assert gradients.keys() == plain.keys()
    assert all(torch.allclose(g, plain[n], rtol=1e-5, atol=1e-7) for n, g in gradients.items())


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
def test_learning_rates_of_parts(kind: str, adapts: bool) -> None:
    """A step is that of AdamW over three groups by hand, in a wrapped model and with adapters."""
    import peft

    options = ["--vit_lr", "1e-3", "--freeze_vit", "false", "--aligner_lr", "3e-2", "--freeze_aligner", "false"]
    optim = load_config("sft", [*options, "--lr", "1e-2", "--engine", "ddp"], environ={}).optim
    model = KINDS[kind](tokenizer(kind))[0]
    parts = vision_parts.VisionModelPartNames(model)
    if adapts:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    wrapped = LossFieldsModel(model)
    rates = {"vit": 1e-3, "aligner": 3e-2, "llm": 1e-2}
    torch.manual_seed(0)
    named = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    part_of = {n: parts.of(n.removeprefix("model.").removeprefix("base_model.model.")) for n in named}
    assert {*part_of.values()} == {*rates}
    theirs = {n: p.detach().clone().requires_grad_() for n, p in named.items()}
    for n, p in named.items():
        p.grad = torch.randn_like(p)
        theirs[n].grad = p.grad.clone()
    groups = [{"params": [t for n, t in theirs.items() if part_of[n] == part], "lr": r} for part, r in rates.items()]
    torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    ours = make_torch_optimizer(wrapped, optim).inner
    set_param_groups_lr_and_weight_decay(ours, 1e-2, 0.0)
    ours.step()
    for n, p in named.items():
        torch.testing.assert_close(p, theirs[n], rtol=1e-6, atol=1e-9)
    set_param_groups_lr_and_weight_decay(ours, 5e-3, 0.0)  # a schedule halves all of them
    halves = sorted({group["lr"] for group in ours.param_groups})
    assert halves == pytest.approx(sorted(r / 2 for r in rates.values()))


def test_a_text_model_has_no_learning_rate_of_parts() -> None:
    optim = load_config("sft", ["--vit_lr", "1e-3", "--freeze_vit", "false", "--engine", "ddp"], environ={}).optim
    with pytest.raises(ConfigError, match="--vit_lr: this model has no vision encoder"):
        make_torch_optimizer(torch.nn.Linear(2, 2), optim)


def test_a_text_model_has_no_parts() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    vision_parts.freeze_vision_model_parts(model, ModelConfig())
    assert (
        all(p.requires_grad for p in model.parameters())
        and vision_parts.frozen_modules_pattern(model, ModelConfig()) is None
    )
    assert isinstance(model, torch.nn.Module)
