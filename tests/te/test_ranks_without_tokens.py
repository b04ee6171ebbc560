"""A rank whose experts get no token, under the allgather dispatcher, against Hugging Face.

Covers: megaswift/engine/megatron/transformer_config.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import Document, parse, rows
from tests.parity.models import VOCAB
from tests.parity.models import build as build_model
from tests.parity.pool import Pool

ROWS = 12
CASE = "moe tp2 ep2 sp allgather te"


def short_document(number: int) -> Document:
    """Two tokens, of which the first has a label: few choices of experts."""
    ids = torch.randint(3, VOCAB, (2,), generator=torch.Generator().manual_seed(number))
    return Document(ids, ids.flip(0), torch.tensor([1.0, 0.0]))


def job(rank: int, world: int, folder: Path) -> list[float]:
    """The loss of each document alone, on the ranks."""
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.measure import build

    engine, context = build(parse(CASE), folder, world)
    losses = [engine.evaluate([rows([short_document(n)], 2)], CrossEntropy()).loss for n in range(ROWS)]
    context.close()
    return losses


@pytest.mark.process
def test_losses_are_hugging_faces(te_pool: Pool, tmp_path: Path) -> None:
    """Two experts a rank; in some layer of some document all four choices fall to one rank."""
    from transformers import AutoModelForCausalLM

    folder = build_model("moe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses, ranks_without_tokens = [], 0
    for number in range(ROWS):
        ids = short_document(number).ids[None]
        with torch.no_grad():
            out = model(input_ids=ids, output_router_logits=True)
        losses.append(torch.nn.functional.cross_entropy(out.logits[0, :1], ids[0, 1:]).item())
        owners = [layer.topk(2).indices // 2 for layer in out.router_logits]
        ranks_without_tokens += sum(owner.unique().numel() == 1 for owner in owners)
    assert ranks_without_tokens > 0
    for found in te_pool.run("tests.te.test_ranks_without_tokens:job", folder, 2):
        assert found == pytest.approx(losses, rel=1e-5)
