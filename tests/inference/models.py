"""A tiny model folder, adapters for it, and what plain transformers answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megaswift.inference.generator import Generator
from megaswift.inference.model import (
    ModelConfigAndTokenizer,
    load_config_tokenizer_and_processor,
    load_model_and_prompt_device,
)
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from tests.trainers.inputs import write_model

PROMPTS = ("ab", "1+2?", "what is 3+4? say it", "x", "0123456789 abc", "z+z")


def folder(path: Path, **sizes: int) -> Path:
    """A model whose greedy answers vary: random weights, larger than the usual start."""
    write_model(path, layers=3, **sizes)
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    save_file(
        {n: t * 8 if t.dim() > 1 else t for n, t in weights.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def adapters(path: Path, model: Path, seed: int = 5) -> Path:
    """LoRA on every linear layer, with weights that change the answers."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(path)
    return path


def opened(
    model: Path, adapter: Path | None = None, merge: bool = False, **placement: Any
) -> tuple[ModelConfigAndTokenizer, Generator]:
    """As `infer` opens a model."""
    options = ModelLoadingOptions(
        model=str(model), adapters=() if adapter is None else (str(adapter),), merge_adapters=merge
    )
    prepared = load_config_tokenizer_and_processor(options, None)
    loaded, device = load_model_and_prompt_device(prepared, PlacementOptions(**placement))
    return prepared, Generator(loaded, prepared.tokenizer, device)


def plain(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new: int, **how: Any) -> list[str]:
    """Each prompt alone, without padding, by transformers' own generate."""
    texts = []
    for prompt in prompts:
        out = model.generate(input_ids=torch.tensor([list(prompt)]), max_new_tokens=new, **how)
        texts.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
    return texts
