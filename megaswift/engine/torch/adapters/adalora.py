"""AdaLoRA between steps: the term that keeps A and B orthogonal, and the allocation of ranks after each step
(arXiv:2303.10512).

PEFT adds the term to the loss that a transformers model computes by itself, which this engine never asks for; so it is
computed here, once a global batch. Who gets which rank is PEFT's `RankAllocator`'s; its running sums are kept in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megaswift.base.atomic_writes import fsync_path, safetensors_errors_as_oserror

FILE = "ranks.safetensors"
AVERAGES = ("exp_avg_ipt", "exp_avg_unc")
"""The allocator's smoothed importance of every element, and its uncertainty."""
_MASK = "rank_pattern"
ADAPTER = "default"


class AdaLoraRankAllocator:
    """The allocator of one model's adapters. All ranks hold the same whole parameters and gradients, so they agree
    without a word."""

    def __init__(self, model: Any) -> None:
        self.tuner = model.base_model
        self.settings = self.tuner.peft_config[ADAPTER]

    def _factors(self) -> Iterator[tuple[bool, nn.Parameter]]:
        """(is it A, the parameter) of every A [r, in] and B [out, r]."""
        for name, parameter in self.tuner.model.named_parameters():
            if f".lora_A.{ADAPTER}" in name or f".lora_B.{ADAPTER}" in name:
                yield f".lora_A.{ADAPTER}" in name, parameter

    def penalty(self) -> Tensor:
        """orth_reg_weight times the mean over all A and B of |A A' - I| and |B' B - I| (Frobenius)."""
        terms = []
        for is_a, p in self._factors():
            product = p @ p.T if is_a else p.T @ p
            terms.append(torch.norm(product - torch.eye(len(product), device=p.device, dtype=p.dtype)))
        return self.settings.orth_reg_weight * torch.stack(terms).mean()

    def stepped(self, step: int) -> None:
        """After optimizer step `step` (from 1), while the gradients are there."""
        self.tuner.update_and_allocate(step)

    def write(self, directory: Path) -> None:
        """The allocator's state. On one rank."""
        allocator = self.tuner.rankallocator
        tensors = {
            f"{kind}.{name}": t.contiguous().cpu() for kind in AVERAGES for name, t in getattr(allocator, kind).items()
        }
        pattern = {self._full(name): mask for name, mask in (self.settings.rank_pattern or {}).items()}
        tensors |= {f"{_MASK}.{name}": torch.tensor(mask, dtype=torch.bool) for name, mask in pattern.items()}
        with safetensors_errors_as_oserror(directory / FILE):
            save_file(tensors, directory / FILE)
        fsync_path(directory / FILE)

    def _full(self, name: str) -> str:
        """PEFT drops the adapter's name from the pattern when it saves."""
        return name if name.endswith(f".{ADAPTER}") else f"{name}.{ADAPTER}"

    def read(self, directory: Path) -> None:
        """The inverse of `write`."""
        allocator = self.tuner.rankallocator
        pattern = {}
        allocator.reset_ipt()
        with safe_open(directory / FILE, "pt", device=str(next(self.tuner.parameters()).device)) as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                kind, name = key.split(".", 1)
                if kind == _MASK:
                    pattern[name] = file.get_tensor(key).tolist()
                else:
                    getattr(allocator, kind)[name] = file.get_tensor(key)
                    allocator.ipt[name] = torch.zeros_like(getattr(allocator, kind)[name])
        self.settings.rank_pattern = pattern or None


def find_adalora_rank_allocator(model: nn.Module) -> AdaLoraRankAllocator | None:
    """Returns the allocator of a model with AdaLoRA's adapters; None for others."""
    settings = getattr(model, "peft_config", {}).get(ADAPTER)
    return AdaLoraRankAllocator(model) if settings is not None and settings.peft_type == "ADALORA" else None
