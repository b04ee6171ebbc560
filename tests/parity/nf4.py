"""QLoRA's reference numbers: a Hugging Face folder whose linear layers went through bitsandbytes's NF4, and PEFT on its
4-bit layers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity import lora
from tests.parity.oracle import Oracle, Recipe

EXPERTS = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj")
"""gpt_oss: [experts, in, out]."""
LINEAR = re.compile(r".*\.layers\.\d+\..*proj(_with_mqa)?\.weight")
BLOCK = 64


def through(weight: Tensor) -> Tensor:
    """What is left of a weight [out, in] after NF4, no double quantization; float32."""
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK, quant_type="nf4"
    )
    return bitsandbytes.functional.dequantize_4bit(packed, state)


def round_trip(model: Path, folder: Path) -> Path:
    """A copy of a model folder with NF4's values as its linear weights."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: rounded(name, t) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def rounded(name: str, tensor: Tensor) -> Tensor:
    """What NF4 leaves of a model's tensor: blocks run along a linear layer's inputs."""
    if EXPERTS.fullmatch(name):
        return torch.stack([through(w.t()).t() for w in tensor]).contiguous()
    return through(tensor) if LINEAR.fullmatch(name) else tensor


class PeftOracle(Oracle):
    """The oracle on PEFT's adapters over bitsandbytes's 4-bit layers, computing in float32."""

    def __init__(self, folder: Path, recipe: Recipe, adapter: Path) -> None:
        from peft import PeftModel

        super().__init__(folder, recipe)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, torch.nn.Linear) and LINEAR.fullmatch(name + ".weight"):
                four = bitsandbytes.nn.Linear4bit(
                    module.in_features,
                    module.out_features,
                    bias=module.bias is not None,
                    compute_dtype=torch.float32,
                    compress_statistics=False,
                    quant_type="nf4",
                )
                four.weight = bitsandbytes.nn.Params4bit(
                    module.weight.data,
                    requires_grad=False,
                    blocksize=BLOCK,
                    compress_statistics=False,
                    quant_type="nf4",
                )
                four.bias = module.bias
                self.model.set_submodule(name, four.to("cpu"))
        self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        self.quantized = sum(isinstance(m, bitsandbytes.nn.Linear4bit) for m in self.model.modules())

    def gradients(self) -> dict[str, Tensor]:
        """By name in the adapter's folder."""
        named: Any = self.model.named_parameters()
        return {
            n.removeprefix(lora.PREFIX).replace(".default", ""): p.grad.clone() for n, p in named if p.grad is not None
        }
