"""A tiny Qwen3 with the loss's head inside, its data, and the same training in plain torch on one process: what ZeRO
must equal."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, VOCAB, LENGTH = 48, 67, 11
"""Sizes that no number of ranks divides evenly: every shard but one ends in padding or in the middle of a tensor."""


@dataclass(frozen=True)
class Row:
    """One micro-batch of one rank: `[b, s]` each."""

    ids: Tensor
    labels: Tensor
    weights: Tensor


class Fields(nn.Module):
    """Log-probabilities `[b, s]` of the labels. `extra` is a parameter that a batch may leave out."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 70,
        }
        torch.manual_seed(5)
        self.model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=VOCAB, num_hidden_layers=2, tie_word_embeddings=False, **sizes)
        )
        self.extra = nn.Parameter(torch.randn(7, HIDDEN))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.add_(0.05 * torch.randn_like(p))
                p.requires_grad_(not any(f in name for f in frozen))

    def forward(self, ids: Tensor, labels: Tensor, extra: bool = True) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        if extra:
            logits = logits + 0.01 * self.extra.float().square().mean() * torch.arange(VOCAB, device=ids.device)
        return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def adam(module: nn.Module, **more: Any) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, 1-D parameters do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.ndim > 1) == matrix], "wd_mult": float(matrix)} for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, **more)


def rows(step: int, ranks: int, micro: int) -> list[list[Row]]:
    """Micro-batches of every rank: labels unevenly spread, and the last rank without a single one."""
    made = []
    for rank in range(ranks):
        own = []
        for m in range(micro):
            draw = torch.Generator().manual_seed(1000 * step + 10 * rank + m)
            weights = (torch.rand(2, LENGTH, generator=draw) < 0.9 - 0.6 * m).float() * (rank < ranks - 1)
            own.append(Row(*(torch.randint(0, VOCAB, (2, LENGTH), generator=draw) for _ in range(2)), weights))
        made.append(own)
    return made


def count(batches: list[list[Row]]) -> float:
    """Labels of the global batch."""
    return float(sum(r.weights.sum() for own in batches for r in own))


@dataclass(frozen=True)
class Plain:
    """Training on one process. `uses[step * micro + m]`: does that micro-batch use `extra`? `broken`: steps that are
    skipped."""

    steps: int
    ranks: int
    micro: int
    clip: float
    uses: tuple[bool, ...] = ()
    broken: tuple[int, ...] = ()
    precision: str = "float32"
    """float32, bfloat16 or float16 (weights and gradients in it, float32 masters and sums), or autocast to bfloat16 or
    float16."""
    scale: float = 1.0
    """By which a loss is multiplied, and its gradient divided in float32."""

    def run(self) -> tuple[list[float], list[dict[str, Tensor]], Fields]:
        """(norm, gradients by name) of each step that is taken, and the trained module."""
        module = Fields()
        optimizer = adam(module)
        norms, gradients = [], []
        for step in set(range(self.steps)) - set(self.broken):
            for p, g in zip(module.parameters(), self._gradients(module, step), strict=True):
                p.grad = g
            gradients.append({n: p.grad.clone() for n, p in module.named_parameters()})
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), self.clip)))
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1 * group["wd_mult"]
            optimizer.step()
        return norms, gradients, module

    @property
    def half(self) -> torch.dtype:
        return getattr(torch, self.precision.removeprefix("autocast "))

    def _gradients(self, module: Fields, step: int) -> list[Tensor]:
        """Sums over all rows, zero for what takes no part."""
        working = copy.deepcopy(module)
        for p in working.parameters():  # not the buffers: rotary frequencies stay float32
            p.data = p.data.to(torch.float32 if self.precision.startswith("autocast") else self.half)
        sums = [torch.zeros_like(p) for p in module.parameters()]
        batches = rows(step, self.ranks, self.micro)
        for own in batches:
            for m, r in enumerate(own):
                extra = self.uses[step * self.micro + m] if self.uses else True
                with torch.autocast("cpu", self.half, enabled=self.precision.startswith("autocast")):
                    fields = working(r.ids, r.labels, extra)
                working.zero_grad()
                (-(fields * r.weights).sum() / count(batches) * self.scale).backward()
                for total, p in zip(sums, working.parameters(), strict=True):
                    total += 0 if p.grad is None else p.grad.float() / self.scale
        return sums
