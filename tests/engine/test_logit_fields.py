"""Fields and gradients of logits that lie on several ranks, the second of which may have padding alone: the same as of
one rank, against plain torch in float64. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.logit_fields import (
    gradient_coefficients,
    join_shards,
    row_statistics,
    write_gradient,
)
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import FIELDS
from megaswift.parallel import head_memory
from tests.engine.megatron.layers.test_head import reference

ROWS, VOCABULARY, WIDTH = 7, 40, 24


class Meeting:
    """Reductions of `ranks` threads, counted."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.parts, self.reductions = threading.Barrier(ranks, timeout=300), [None] * ranks, 0

    def reduce(self, rank: int, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        stacked = torch.stack(self.parts)
        total = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
        self.reductions += rank == 0
        self.barrier.wait()
        return x.copy_(total)


def on_shards(real: list[int], work: Callable[[int, VocabularyHeadShardSpec], Any], **spec: Any) -> tuple[list, int]:
    """What `work` gives on each shard of `WIDTH` columns, of which `real` are no padding; and the reductions."""
    meeting, found = Meeting(len(real)), [None] * len(real)

    def live(rank: int) -> None:
        class Shard(VocabularyHeadShardSpec):
            def reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
                return meeting.reduce(rank, x, op)

        found[rank] = work(rank, Shard(rank * WIDTH, VOCABULARY - rank * WIDTH, None, **spec))

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(real))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, meeting.reductions


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_shards_give_what_one_rank_gives(ranks: int, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: the last has padding alone. Large logits, so that the shards' maxima differ much."""
    monkeypatch.setattr(head_memory, "TILE_ELEMENTS", 2 * WIDTH)
    torch.manual_seed(0)
    products = torch.full((ROWS, ranks * WIDTH), float("nan"))  # padding is never read
    spread = 20 if cap is None else 3  # a cap makes larger ones equal
    products[:, :VOCABULARY] = spread * torch.randn(ROWS, VOCABULARY)
    labels, mix = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(len(FIELDS), ROWS)
    gradients = tuple(f for f in FIELDS if f != "correct")

    def work(rank: int, shard: VocabularyHeadShardSpec) -> tuple[Tensor, Tensor]:
        own = products[:, rank * WIDTH : (rank + 1) * WIDTH].clone()
        rows = join_shards(row_statistics(own, labels, shard), labels, WIDTH, shard)
        write_gradient(own, labels, gradient_coefficients(mix, rows, WIDTH, shard), shard, own)
        return rows.fields, own

    spec = {"temperature": 0.7, "fields": FIELDS, "differentiable": gradients, "scale": 0.5, "softcap": cap}
    found, reductions = on_shards([1] * ranks, work, **spec)
    assert reductions == 3  # largest, sums, and the size of the vocabulary for the gradient of the mean logit
    exact = products[:, :VOCABULARY].double().requires_grad_()
    want = reference(
        exact,
        torch.eye(VOCABULARY, dtype=torch.float64),
        labels,
        VOCABULARY,
        0.7,
        lambda x: x * 0.5 if cap is None else cap * torch.tanh(x * 0.5 / cap),
    )
    for fields, _ in found:
        assert torch.equal(fields, found[0][0])
        for i, name in enumerate(FIELDS):
            torch.testing.assert_close(fields[i].double(), want[name], rtol=5e-6, atol=1e-5)
    sum((want[n] * mix[i]).sum() for i, n in enumerate(FIELDS) if n in gradients).backward()
    together = torch.cat([gradient for _, gradient in found], dim=1)
    torch.testing.assert_close(together[:, :VOCABULARY].double(), exact.grad, rtol=1e-4, atol=2e-5)
    assert not together[:, VOCABULARY:].any()


def test_log_probabilities_need_two_reductions() -> None:
    products, labels = torch.randn(ROWS, 2 * WIDTH), torch.zeros(ROWS, dtype=torch.long)

    def work(rank: int, shard: VocabularyHeadShardSpec) -> None:
        own = products[:, rank * WIDTH : (rank + 1) * WIDTH]
        rows = join_shards(row_statistics(own, labels, shard), labels, WIDTH, shard)
        gradient_coefficients(torch.ones(1, ROWS), rows, WIDTH, shard)

    assert on_shards([1, 1], work, temperature=1.0, fields=("logprobs",), differentiable=("logprobs",))[1] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_of_torch(dtype: torch.dtype) -> None:
    """Every row's loss and the gradient of 16-bit logits against torch's cross-entropy in float64."""
    torch.manual_seed(0)
    products, labels = (3 * torch.randn(ROWS, 1000)).to(dtype), torch.randint(0, 1000, (ROWS,))
    exact = products.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    loss.sum().backward()
    shard = VocabularyHeadShardSpec(0, 1000, None, 1.0, ("logprobs",), ("logprobs",))
    rows = join_shards(row_statistics(products, labels, shard), labels, 1000, shard)
    torch.testing.assert_close(-rows.fields[0].double(), loss, rtol=1e-6, atol=1e-6)
    write_gradient(products, labels, gradient_coefficients(-torch.ones(1, ROWS), rows, 1000, shard), shard, products)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(products.double(), exact.grad, rtol=max(unit, 2e-6), atol=1e-7)
