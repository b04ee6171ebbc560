"""SGD with momentum and weight decay against torch's own, on gradients that the parity tests hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
RATES = (1e-2, 2e-2, 5e-3)
MOMENTUM, DECAY = 0.8, 0.1


def trained(rank: int, world: int, task: Task) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]] | None:
    """Weights and gradients before each step, and weights after the last (on the ranks)."""
    engine, context = build(
        task.case, task.folder, world, optimizer="sgd", sgd_momentum=MOMENTUM, weight_decay=DECAY, max_grad_norm=0.0
    )
    found = []
    for k, rate in enumerate(RATES):
        mine = own(global_batch(task.case, k), task.case.dp, context.layout.coordinates(rank).dp)
        engine.accumulate(mine, CrossEntropy())
        found.append((full(engine.hf_weights()), full(engine.hf_gradients())))
        engine.train_batch(mine, CrossEntropy(), rate)
    found.append((full(engine.hf_weights()), {}))
    torch.distributed.barrier()
    context.close()
    return found if rank == 0 else None


def test_sgd_is_torchs_own(pool: Pool, references: References) -> None:
    case = parse("dense tp2 dp2")
    steps = pool.run("tests.parity.test_sgd:trained", Task(case, references.model(case.variant), Recipe()), case.world)[
        0
    ]
    weights = {name: torch.nn.Parameter(t.clone()) for name, t in steps[0][0].items()}
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM)
    for (_, gradients), (after, _), rate in zip(steps[:-1], steps[1:], RATES, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, w in weights.items():
            w.grad = gradients[name]
        optimizer.step()
        assert (
            max(float((after[n] - w.detach()).abs().max() / w.detach().abs().max()) for n, w in weights.items()) < 1e-6
        )
    assert not torch.equal(steps[0][0]["model.norm.weight"], steps[-1][0]["model.norm.weight"])
