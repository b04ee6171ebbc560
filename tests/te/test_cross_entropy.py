"""Transformer Engine's cross entropy on the test device, over vocabulary shards, against torch's of whole rows.

Covers: tests/te/kernels_cross_entropy.py.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.parity.pool import shared
from tests.te.kernels_cross_entropy import OLD
from tests.te.sources import RELEASES

LENGTH, ROWS, VOCAB, IGNORED = 7, 3, 24, -100
CASES = list(product((torch.float32, torch.bfloat16), (0.0, 0.1), (False, True)))
"""dtype of the logits, label smoothing, one mean or a loss for each label."""
MEGATRON = "Megatron-Core"


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, v], labels [s, b] with ignored ones, gradients of the losses [s, b]."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(LENGTH, ROWS, VOCAB, generator=generator) * 4).to(dtype)
    labels = torch.randint(0, VOCAB, (LENGTH, ROWS), generator=generator)
    labels[torch.rand(LENGTH, ROWS, generator=generator) < 0.3] = IGNORED
    return logits, labels, torch.randn(LENGTH, ROWS, generator=generator)


def fused_loss(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Megatron-Core's, with `cross_entropy_fusion_impl="te"`; [s, b]."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    config = SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", cuda_graph_scope=[])
    module: Any = SimpleNamespace(config=config, pg_collection=SimpleNamespace(tp=group))
    return LanguageModule.compute_language_model_loss(module, labels.t(), logits).t()


def sharded(rank: int, world: int, _: None) -> list[tuple[Tensor, Tensor]]:
    """(loss, gradient of this rank's shard) of each case, and of Megatron-Core's call (on the ranks)."""
    import torch.distributed as dist
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = []
    for dtype, smoothing, mean in [*CASES, (torch.float32, MEGATRON, False)]:
        logits, labels, grad = inputs(dtype)
        leaf = logits.chunk(world, -1)[rank].clone().requires_grad_()
        shard = leaf * 1  # a release writes gradients over the logits
        group = dist.group.WORLD if world > 1 or smoothing == MEGATRON else None
        if smoothing == MEGATRON:
            loss = fused_loss(shard, labels, group)
        else:
            loss = parallel_cross_entropy(shard, labels, smoothing, mean, group, IGNORED)
        loss.backward(torch.full_like(loss, 0.5) if mean else grad)
        found.append((loss.detach().squeeze(), leaf.grad))
    dist.destroy_process_group()
    return found


def whole(dtype: torch.dtype, smoothing: float, mean: bool) -> tuple[Tensor, Tensor]:
    """torch's, in float64."""
    logits, labels, grad = inputs(dtype)
    logits = logits.double().requires_grad_()
    kind = "mean" if mean else "none"
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction=kind
    )
    loss = loss if mean else loss.view_as(labels)
    loss.backward(torch.tensor(0.5) if mean else grad.double())
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.process
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradient(release: str, ranks: int) -> None:
    """Label smoothing, ignored labels, 16-bit logits; the mean and single losses."""
    found = shared(release).run("tests.te.test_cross_entropy:sharded", None, ranks)
    for place, (dtype, smoothing, mean) in enumerate([*CASES, (torch.float32, 0.0, False)]):
        loss, gradient = whole(dtype, smoothing, mean)
        losses = [each[place][0] for each in found]
        shards = torch.cat([each[place][1] for each in found], -1)
        assert losses[0].dtype == torch.float32 and shards.dtype == dtype
        precision = 1e-6 if dtype == torch.float32 else 2**-7
        assert float((shards.double() - gradient).abs().max()) < precision * float(gradient.abs().max())
        if release == OLD and ranks > 1 and smoothing:
            # 2.12 adds up a shard's own logits: its losses are of no use there, and differ by rank
            assert not torch.allclose(losses[0], losses[1])
            continue
        for each in losses:
            torch.testing.assert_close(each.double(), loss, rtol=1e-6, atol=1e-5)
