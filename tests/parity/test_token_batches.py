"""`--max_tokens_per_batch` on several layouts and engines: loss and gradient of a step are those of Hugging Face on the
joined batch, and those of fixed micro-batches.

Covers: megaswift/data/batches/step_packing.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import Case, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, LOSS, number, tensors
from tests.parity.measure import Task, full
from tests.parity.models import VOCAB, by_disk_name
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
SAMPLES = 16
SAME = 1e-6
"""Between ways of making micro-batches: the norm of the difference over that of the gradient."""
LIMIT = 48
"""Tokens of a micro-batch."""


class Texts:
    """Documents of 2 to 40 tokens in memory; every fifth has no labels but its last."""

    def __init__(self) -> None:
        draw = np.random.default_rng(3)
        self.length = (2 + 38 * draw.random(SAMPLES) ** 2).astype(np.int64)
        self.sample = np.arange(SAMPLES)
        self.fingerprint = "texts"
        self.texts = [draw.integers(0, VOCAB, n, dtype=np.int32) for n in self.length.tolist()]

    def __len__(self) -> int:
        return SAMPLES

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss weights."""
        weights = np.ones(int(self.length[i]), np.uint8)
        if i % 5 == 0:
            weights[:-1] = 0
        return self.texts[i], weights


def microbatches(case: Case, rank: int, way: str) -> list[Batch]:
    """The micro-batches of a data-parallel rank: `fixed`, `padded` or `packed`."""
    from megaswift.data.batches.collate import PaddingShape
    from megaswift.data.batches.epoch_order import EpochOrder
    from megaswift.data.batches.loader import DocumentRows, TokenStoreBatchSource
    from megaswift.data.batches.numbered import LoaderGeometry
    from megaswift.data.batches.step_packing import StepPacking

    documents: Any = Texts()
    rows = DocumentRows(documents)
    if way != "fixed":
        multiple = case.pp if case.vpp > 1 else 1
        rows.step_packing = StepPacking(LIMIT, case.pp, multiple, limited=True, padded=way == "padded")
    geometry = LoaderGeometry(rank, case.dp, 2, SAMPLES // case.dp // 2, uniform=case.pp > 1)
    shape = PaddingShape(2 * case.cp if case.cp > 1 else 1, case.tp * case.cp * 2)
    source = TokenStoreBatchSource(rows, geometry, shape, EpochOrder(SAMPLES, True, 5))
    return source.next()


def measure(rank: int, world: int, task: Task) -> dict[str, tuple[float, dict[str, Tensor], list[int]]]:
    """(loss, gradients, tokens of each micro-batch) on the ranks, by the way of making micro-batches."""
    from megaswift.config import SwiftConfig
    from megaswift.families import load_spec
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    cfg = SwiftConfig(task="sft", model=str(task.folder), seed=1, **task.case.config(**task.options))
    context = start_context(cfg.replace(ddp_timeout=600), Layout.from_config(cfg.parallel, world))
    engine: Any = make_engine(cfg, load_spec(task.folder), task.folder, context)
    engine.load_hf(task.folder)
    found = {}
    for way in ("fixed", "padded", "packed"):
        mine = microbatches(task.case, context.layout.coordinates(rank).dp, way)
        result = engine.accumulate(mine, CrossEntropy())
        found[way] = result.loss, full(engine.hf_gradients()), [batch.input_ids.numel() for batch in mine]
    torch.distributed.barrier()
    context.close()
    return found


def expected(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by transformers: each text by itself, all divided by the labels of the step."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = Texts()
    labels = sum(int(texts.read(i)[1][1:].sum()) for i in range(SAMPLES))
    loss = 0.0
    for i in range(SAMPLES):
        ids, weights = (torch.from_numpy(x.astype(np.int64)) for x in texts.read(i))
        each = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        share = (each * weights[1:]).sum() / labels
        share.backward()
        loss += float(share.detach())
    return loss, dict(by_disk_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad))


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    assert got.keys() == want.keys()
    gap = sum(float((got[name].double() - want[name].double()).square().sum()) for name in want)
    return (gap / sum(float(t.double().square().sum()) for t in want.values())) ** 0.5


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dense dp2", {}),
        ("dense tp2 sp pp2", {}),
        ("dense dp2", {"engine": "ddp"}),
        *(
            pytest.param(text, options, marks=SLOW)
            for text, options in (
                ("dense tp2", {}),
                ("dense tp2 sp dp2", {}),
                ("dense pp2", {}),
                ("dense pp2 dp2", {}),
                ("dense pp2 vpp2", {}),
                ("dense cp2 dp2", {}),
                ("moe dp2 ep2", {"moe_aux_loss_coeff": 0.0}),
                ("dense dp4 do", {}),
                ("dense dp2", {"engine": "zero3"}),
                ("dense dp2", {"engine": "zero2"}),
                ("dense dp2", {"engine": "fsdp2"}),
            )
        ),
    ],
    ids=str,
)
def test_the_step_is_the_same(text: str, options: dict[str, Any], pool: Pool, references: References) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    ranks = pool.run(
        "tests.parity.test_token_batches:measure", Task(case, folder, Recipe(), options=options), case.world
    )
    loss, gradients = expected(folder)
    differences = []
    for way in ("fixed", "padded", "packed"):
        got_loss, got, _ = ranks[0][way]
        differences += [number(f"{way} loss", got_loss, loss, LOSS), *tensors(way, got, gradients, GRADIENT)]
        first_loss, first, _ = ranks[0]["fixed"]
        differences.append(number(f"{way}, fixed: loss", got_loss, first_loss, LOSS))
        differences.append(number(f"{way}, fixed: gradient", apart(got, first), 0.0, SAME))
        counts = {len(found[way][2]) for found in ranks}
        assert len(counts) == 1, f"{way}: ranks have {counts} micro-batches"
    assert_within_limits(differences, case, pool, folder, options)
    for found in ranks:
        assert len(found["padded"][2]) > 1 and max(found["padded"][2]) <= LIMIT
        assert max(found["packed"][2]) <= LIMIT
    if case.pp == 1:
        assert len(set(ranks[0]["padded"][2])) > 1, "micro-batches differ in size"
