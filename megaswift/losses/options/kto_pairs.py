"""Where KTO takes the completions of its mismatched pairs from, and the global batch that it needs."""

from __future__ import annotations

from typing import Any

from megaswift.errors import Problem
from megaswift.losses.options.loss_table import KL_PAIRS, losses_needing
from megaswift.losses.options.preference import loss_types_of
from megaswift.trainers.options.batch_sizes import batch_plan, batch_problems


def kto_pairs_over_global_batch(c: Any, training: bool = True) -> bool:
    """Whether KTO takes mismatched completions from the whole global batch: a micro-batch of one row has no other."""
    train = c.train
    kinds = losses_needing("kto", KL_PAIRS)
    rows = train.per_device_train_batch_size
    rows = rows if training else train.per_device_eval_batch_size or rows
    return c.task == "kto" and loss_types_of(c)[0] in kinds and rows == 1


def kto_batch_problems(c: Any, dp: int | None) -> list[Problem]:
    """A global batch of one row on `dp` data-parallel ranks; nothing where the batch sizes are wrong otherwise."""
    if dp is None or not kto_pairs_over_global_batch(c) or list(batch_problems(c.train, dp, {})):
        return []
    if batch_plan(c.train, dp).global_batch_size > 1:
        return []
    rule = "leaves kto without mismatched pairs: it pairs each prompt with the completion of another row"
    return [Problem("a global batch of 1 row", rule, "--gradient_accumulation_steps 8, or --global_batch_size 8")]
