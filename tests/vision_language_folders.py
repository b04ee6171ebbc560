"""Tiny vision-language folders as Qwen3.5 and 3.6 are published: a language model with gated delta nets, a vision
tower, and tensors of multi-token prediction, which transformers' models do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.hybrid_folders import EXPERTS, HYBRID
from tests.parity.models import randomize
from tests.trainers.inputs import write_model

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": HYBRID["hidden_size"],
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}


def write_vision_language(
    folder: Path, kind: str = "qwen3_5", stacked: bool = False, dtype: torch.dtype = torch.float32, **more: Any
) -> Path:
    """The model, with a character tokenizer; `stacked`: all experts of a layer in one tensor, as published, not one by
    one, as transformers saves them."""
    write_model(folder)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    torch.manual_seed(5)
    experts = EXPERTS if kind.endswith("moe") else {"intermediate_size": 48}
    tied = more.get("tie_word_embeddings", False)
    text = {**HYBRID, **experts, **more, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model, 7)
    model.to(dtype).save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    if stacked:
        tensors = with_stacked_experts(tensors)
    tensors |= {
        "mtp.fc.weight": torch.randn(4, 6, dtype=dtype),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, 4, dtype=dtype),
        "mtp.norm.weight": torch.randn(4),
    }
    save_file(tensors, path, {"format": "pt"})
    return folder


def with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """[E, 2 f, h] and [E, h, f] of every layer, in place of the experts' own matrices."""
    own = {name: t for name, t in tensors.items() if ".mlp.experts." in name}
    found = {name: t for name, t in tensors.items() if name not in own}
    for home in {name.partition(".experts.")[0] + ".experts." for name in own}:
        every = range(EXPERTS["num_experts"])
        parts = {p: [own[f"{home}{e}.{p}_proj.weight"] for e in every] for p in ("gate", "up", "down")}
        pairs = zip(parts["gate"], parts["up"], strict=True)
        found[f"{home}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{home}down_proj"] = torch.stack(parts["down"])
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
