"""Embedding models and rerankers on every layout and engine: loss and gradients as sentence-transformers' losses have
them on one process, on the joined batch of all data-parallel ranks.

Covers: megaswift/engine/objective.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaswift.losses.contract import HIDDEN, TOKENS, Batch, RequestedModelOutputs
from megaswift.losses.retrieval.embedding import EmbeddingLoss
from megaswift.losses.retrieval.groups import POOLING
from megaswift.losses.retrieval.infonce import InfonceSettings
from megaswift.losses.retrieval.reranking import RerankerLoss
from megaswift.models.heads import with_head
from megaswift.models.spec import NO_HEAD
from tests.parity.cases import Case, own, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, LOSS, number, tensors
from tests.parity.measure import Task, full
from tests.parity.models import VOCAB, by_disk_name
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
GROUPS = 2
"""Groups of a micro-batch."""
WIDTH = 3
YES_NO = (7, 129)
"""On different tensor-parallel ranks."""


@dataclass(frozen=True)
class Kind:
    """A loss, and how a document is pooled."""

    loss: Any
    pooling: str = "last"


KINDS = {
    "infonce": Kind(EmbeddingLoss(infonce=InfonceSettings(0.05))),
    "mean": Kind(EmbeddingLoss(infonce=InfonceSettings(0.05), matryoshka_dims=(16, 64)), "mean"),
    "online": Kind(EmbeddingLoss("online_contrastive"), "mean"),
    "cosent": Kind(EmbeddingLoss("cosent")),
    "yes-no": Kind(RerankerLoss(needs=RequestedModelOutputs(fields=frozenset(), head=TOKENS, tokens=YES_NO))),
}


def texts(case: Case) -> list[list[np.ndarray]]:
    """The documents of each micro-batch, all ranks' in order: groups of three, of uneven lengths."""
    generator = np.random.default_rng(case.total)
    return [
        [generator.integers(0, VOCAB, int(n), dtype=np.int32) for n in generator.integers(2, 12, GROUPS * WIDTH)]
        for _ in range(case.total)
    ]


def labels(case: Case) -> np.ndarray:
    """[micro-batches, groups, documents]: 0 or 1."""
    return np.random.default_rng(7).integers(0, 2, (case.total, GROUPS, WIDTH)).astype(np.float32)


def batches(case: Case, pooling: str) -> list[Batch]:
    """All ranks' micro-batches, as the data layer makes them."""
    from megaswift.data.batches.collate import PaddingShape
    from megaswift.data.groups.documents import GroupDataset

    shape = PaddingShape(2 * case.cp if case.cp > 1 else 1, case.tp * case.cp * 2, 0)
    rows: Any = []
    for micro, values in zip(texts(case), labels(case), strict=True):
        documents = [(ids, np.ones(len(ids), np.uint8), 0) for ids in micro]
        rows.append([(documents[i * WIDTH : (i + 1) * WIDTH], values[i]) for i in range(GROUPS)])
    dataset: Any = GroupDataset(None, case.packed, WIDTH)  # type: ignore[arg-type]
    return [POOLING[pooling](batch) for batch in dataset.batches(rows, shape, True)]


def measure(rank: int, world: int, task: Task) -> tuple[float, dict[str, Tensor]] | None:
    """(loss, gradients) on the ranks."""
    from megaswift.config import SwiftConfig
    from megaswift.families import load_spec
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    options = dict(task.options)
    kind = KINDS[options.pop("kind")]
    cfg = SwiftConfig(task="sft", model=str(task.folder), seed=1, **task.case.config(**options))
    context = start_context(cfg.replace(ddp_timeout=600), Layout.from_config(cfg.parallel, world))
    spec = load_spec(task.folder)
    if kind.loss.needs.head == HIDDEN:
        spec = with_head(spec, NO_HEAD)
    engine: Any = make_engine(cfg, spec, task.folder, context)
    engine.load_hf(task.folder)
    mine = own(batches(task.case, kind.pooling), task.case.dp, context.layout.coordinates(rank).dp)
    result = engine.accumulate(mine, kind.loss)
    evaluated = engine.evaluate(mine, kind.loss)
    assert evaluated.loss == pytest.approx(result.loss, rel=1e-6)
    gradients = full(engine.hf_gradients())
    torch.distributed.barrier()
    context.close()
    return (result.loss, gradients) if rank == 0 else None


def expected(folder: Path, case: Case, name: str) -> tuple[float, dict[str, Tensor]]:
    """The same by transformers and sentence-transformers on one process."""
    import transformers
    from sentence_transformers.sentence_transformer import losses

    scores = name == "yes-no"
    auto: Any = transformers.AutoModelForCausalLM if scores else transformers.AutoModel
    model = auto.from_pretrained(folder, dtype=torch.float32)
    infonce = losses.MultipleNegativesRankingLoss(None, scale=20.0)
    per_rank = case.total // case.dp
    documents = texts(case)
    values = torch.from_numpy(labels(case))
    total = torch.zeros(())
    for m in range(per_rank):
        which = [rank * per_rank + m for rank in range(case.dp)]
        pooled = []
        for ids in (ids for micro in which for ids in documents[micro]):
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            if scores:
                logits = model(tokens).logits[0, -1]
                pooled.append(logits[YES_NO[0]] - logits[YES_NO[1]])
            else:
                hidden = model(tokens).last_hidden_state[0]
                pooled.append(hidden.mean(0) if KINDS[name].pooling == "mean" else hidden[-1])
        vectors = torch.stack(pooled)
        columns = [vectors[i::WIDTH] for i in range(WIDTH)]
        label = values[which][:, :, 1].flatten()
        if scores:
            value = F.binary_cross_entropy_with_logits(vectors, values[which].flatten())
        elif name == "online":
            value = losses.OnlineContrastiveLoss(None).compute_loss_from_embeddings(columns[:2], label)
        elif name == "cosent":
            value = losses.CoSENTLoss(None).compute_loss_from_embeddings(columns[:2], label)
        else:
            widths = (16, 64) if name == "mean" else (None,)
            value = sum(infonce.compute_loss_from_embeddings([c[:, :w] for c in columns], None) for w in widths)
        total = total + value / per_rank
    total.backward()
    gradients = by_disk_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    return float(total.detach()), {("" if scores else "model.") + n: t for n, t in gradients}


CASES: list[Any] = [
    ("dense tp2 sp pp2", "infonce", {}),
    ("dense cp2 dp2 packed", "mean", {}),
    ("dense dp2", "infonce", {"engine": "fsdp2"}),
    ("dense tp2 sp tied", "yes-no", {}),
    *(
        pytest.param(text, kind, options, marks=SLOW)
        for text, kind, options in (
            ("dense single", "infonce", {}),
            ("dense tp2 dp2", "infonce", {}),
            ("dense pp2 dp2 packed", "infonce", {}),
            ("dense pp2 vpp2 dp2", "infonce", {}),
            ("dense cp2 packed", "infonce", {}),
            ("dense cp2 dp2", "infonce", {}),
            ("dense dp4 do packed", "cosent", {}),
            ("dense dp2 overlap", "online", {}),
            ("dense dp2 packed", "online", {"engine": "ddp"}),
            ("dense dp2", "cosent", {"engine": "zero3"}),
            ("dense dp2", "infonce", {"engine": "zero3"}),
            ("dense dp2", "infonce", {"engine": "ddp"}),
            ("dense dp2", "mean", {"engine": "fsdp2"}),
            ("moe dp2 ep2", "infonce", {"moe_aux_loss_coeff": 0.0}),
            ("gemma2 tp2 sp", "infonce", {}),
            ("dense tp2 pp2", "yes-no", {}),
            ("dense cp2 dp2 packed tied", "yes-no", {}),
            ("gemma2 tp2", "yes-no", {}),
            ("dense dp2", "yes-no", {"engine": "zero3"}),
            ("dense dp2 tied", "yes-no", {"engine": "fsdp2"}),
        )
    ),
]


@pytest.mark.parametrize(("text", "kind", "options"), CASES)
def test_gradients_of_the_joined_batch(
    text: str, kind: str, options: dict[str, Any], pool: Pool, references: References
) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    got_loss, got = pool.run(
        "tests.parity.test_retrieval:measure",
        Task(case, folder, Recipe(), options={**options, "kind": kind}),
        case.world,
    )[0]
    loss, gradients = expected(folder, case, kind)
    if "engine" in options and kind != "yes-no":  # the torch engine has transformers' names
        gradients = {name.removeprefix("model."): t for name, t in gradients.items()}
    differences = [number("loss", got_loss, loss, LOSS), *tensors("gradient", got, gradients, GRADIENT)]
    assert_within_limits(differences, case, pool, folder, options, without="the loss of groups of documents")
