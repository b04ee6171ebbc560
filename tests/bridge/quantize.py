"""Folders as quantizing toolkits write them: FP8 with block scales, MXFP4. Written in plain torch, by the formats'
descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bridge.folders import rewrite, set_config, tensors_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """W [..., n, m] as float8, and the scale of each block [..., ceil(n / rows), ceil(m / columns)]: |block| / 448."""
    *lead, n, m = weight.shape
    rows, columns = block
    grid = (-(-n // rows), -(-m // columns))
    padded = torch.zeros(*lead, grid[0] * rows, grid[1] * columns)
    padded[..., :n, :m] = weight.float()
    tiles = padded.reshape(*lead, grid[0], rows, grid[1], columns)
    scale = tiles.abs().amax(dim=(-3, -1)).clamp(min=1e-9) / LARGEST
    values = (tiles / scale[..., :, None, :, None]).reshape(padded.shape)[..., :n, :m].clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def is_linear(name: str, tensor: Tensor) -> bool:
    """What such checkpoints quantize: projections, not embeddings, routers and norms."""
    return tensor.dim() == 2 and name.endswith("_proj.weight")


def quantize_fp8(folder: Path, block: tuple[int, int]) -> Path:
    """The folder in place, its projections in FP8; the rest in bfloat16."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors_of(folder).items():
        if is_linear(name, tensor):
            out[name], out[f"{name}_scale_inv"] = fp8(tensor, block)
        else:
            out[name] = tensor.to(torch.bfloat16)
    rewrite(folder, out)
    set_config(folder, dtype="bfloat16", quantization_config=fp8_config(block))
    return folder


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    """The field as DeepSeek-V3 has it."""
    size = None if block is None else list(block)
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": size}


def folder_of(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any], dtype: str = "bfloat16") -> Path:
    """A folder with just these tensors and a config.json that says how they are quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "quantization_config": quantization}))
    rewrite(folder, tensors)
    return folder


def gpt_oss(folder: Path) -> Path:
    """A tiny gpt_oss with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 130,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 100,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes)).save_pretrained(folder)
    return folder


def quantize_mxfp4(folder: Path) -> Path:
    """A gpt_oss folder in place, its experts [E, in, out] in MXFP4 with random values."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors_of(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, rows, columns = tensor.shape
            out[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            out[f"{name}_scales"] = torch.randint(110, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        else:
            out[name] = tensor.to(torch.bfloat16)
    rewrite(folder, out)
    set_config(
        folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return folder
