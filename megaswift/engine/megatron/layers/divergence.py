"""The divergence from a teacher by the vocabulary-parallel head: hidden states of both to a number for each row.

The model's products pass as those of `layers/head.py` do, in chunks of rows; the teacher's exist for a chunk at a time
and are made again in the backward pass. What is computed from them is `engine/divergence.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaswift.engine.divergence import TeacherOutputs, TeacherRows
from megaswift.engine.megatron.layers.head import (
    HeadPlan,
    VocabularyHeadOptions,
    gradients_by_chunks,
    head_plan,
    head_product,
    main_grad_of,
)
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import Divergence


def compute_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: tuple[TeacherOutputs, TeacherHead | None],
    divergence: Divergence,
    shard: VocabularyHeadShardSpec,
    options: VocabularyHeadOptions,
) -> Tensor:
    """(hidden [t, h], weight [v, h], the teacher's outputs [t, n] and head) to the divergence, float32 [t]."""
    outputs, head = teacher
    rows = outputs.rows(head, divergence, shard, lambda given, matrix: head_product(given, matrix, options))
    return DivergenceFunction.apply(hidden, weight, rows, head_plan(hidden, weight, shard, options))


class DivergenceFunction(torch.autograd.Function):
    """`compute_divergence`, differentiable for the model alone.

    The gradient of `hidden` is this shard's part, as that of `VocabularyHeadFunction` is.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: TeacherRows, plan: HeadPlan) -> Tensor:
        """The divergence; keeps the model's products of the first chunks."""
        parts = []
        ctx.kept = []
        ctx.plan = plan
        ctx.teacher = teacher
        ctx.done = False
        for c in plan.chunks:
            some = slice(c.start, c.stop)
            products = head_product(hidden[some], weight, plan.options)
            parts.append(teacher.divergence(products, some))
            if c.kept:
                ctx.kept.append(products)
            del products  # before the next chunk's are made
        ctx.main_grad = main_grad_of(weight, plan.options)
        ctx.save_for_backward(hidden, weight, torch.cat([numbers for _, numbers in parts], dim=1))
        return torch.cat([values for values, _ in parts])

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `hidden` and `weight`, chunk by chunk; overwrites what was kept, so it runs once."""
        assert not ctx.done, "the divergence's backward pass has run already, and its products are gone"
        ctx.done = True
        hidden, weight, numbers = ctx.saved_tensors

        def write(products: Tensor, some: slice, d_logits: Tensor) -> None:
            ctx.teacher.write_gradient(products, some, numbers[:, some], grads[some], d_logits)

        return (*gradients_by_chunks(ctx, hidden, weight, ctx.plan, write), None, None)
