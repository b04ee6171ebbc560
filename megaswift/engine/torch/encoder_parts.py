"""The parts of transformers' encoders that a run treats apart: heads, a pooler that nothing reads, and the mask of
padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaswift.bridge.new_head import POOLER
from megaswift.folders.adapter import TASK_TYPES
from megaswift.models.spec import SCORE


def head_module_names(model: Any, head: str) -> list[str]:
    """Return the names of the modules that a task puts on an encoder: those outside of its base model, and before a
    classifier's head the pooler."""
    base = model.base_model
    outside = []
    if base is not model:
        outside = [name for name, part in model.named_children() if part is not base and list(part.parameters())]
    return [*outside, *([POOLER] if head == SCORE and isinstance(getattr(base, POOLER, None), nn.Module) else [])]


def freeze_pooler(model: Any, head: str) -> None:
    """Freeze the pooler of a model that has no head of texts: it has no gradient."""
    pooler = getattr(model.base_model, POOLER, None)
    if head != SCORE and isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)


def adapt_around_head(options: Any, model: Any) -> None:
    """Change PEFT's configuration of new adapters: the modules of the head train whole, and neither they nor a pooler
    that nothing reads get adapters."""
    names = head_module_names(model, next(head for head, task in TASK_TYPES.items() if task == options.task_type))
    has_pooler = isinstance(getattr(model.base_model, POOLER, None), nn.Module)
    if apart := "|".join({*names, *([POOLER] if has_pooler else [])}):
        options.exclude_modules = rf"(.*\.)?({apart})(\..*)?"
    if names:
        options.modules_to_save = [*dict.fromkeys([*(options.modules_to_save or []), *names])]


def padding_mask(valid: Tensor) -> Tensor:
    """Return transformers' attention mask, int64 [b, s]: 1 for tokens and, so that softmax has something to sum, for
    the first place of a row without any."""
    mask = valid.long()
    mask[:, 0] = 1
    return mask


def label_scores(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the numbers [b, columns, n] of a classifier's output: [b, s, n] of tokens, or [b, n] of texts, which stand
    at each column."""
    if logits.dim() == 3:
        return logits[:, columns]
    return logits[:, None].expand(-1, len(columns), -1)
