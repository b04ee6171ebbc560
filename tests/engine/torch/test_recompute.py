"""Recomputation keeps less for the backward pass, and the same gradients come out; compiled layers keep their names.

Covers: megaswift/engine/torch/model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.engine.torch.document_attention import rows_of
from megaswift.engine.torch.logit_fields import labeled_columns
from megaswift.engine.torch.model import build_model_for_wrapping
from megaswift.engine.torch.model_check import single_row_batch_of_documents
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.run.engines import model_build
from tests.trainers.inputs import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), layers=4)


def run(folder: Path, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """(bytes that the forward pass keeps besides parameters, gradients)."""
    cfg = SwiftConfig(model=str(folder), engine="ddp", **options)
    fields = build_model_for_wrapping(
        folder, model_build(cfg), weights=True, spec=spec_from_family_or_size_fields(folder), further={}
    ).train()
    row = single_row_batch_of_documents(*torch.arange(4, 40)[None].repeat(4, 1))
    parameters = {p.data_ptr() for p in fields.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    labeled = row.loss_weights != 0
    with rows_of(row, fields.model):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            found = fields(row.input_ids, row.positions, row.labels, labeled, labeled_columns(labeled), {})
        found.sum().backward()
    return sum(kept.values()), {n: p.grad for n, p in fields.named_parameters() if p.grad is not None}


def test_it_keeps_less_and_changes_nothing(folder: Path) -> None:
    plain, gradients = run(folder)
    less, again = run(folder, gradient_checkpointing=True)
    assert less < 0.5 * plain, f"{less} bytes are kept, {plain} without"
    assert all(torch.equal(again[n], t) for n, t in gradients.items()) and gradients.keys() == again.keys()


@pytest.mark.parametrize("lora", [False, True])
def test_compiled_layers_keep_their_names(folder: Path, lora: bool) -> None:
    """Nothing is compiled here: it would be when a layer first runs."""
    options: dict[str, Any] = {"train_type": "lora", "target_modules": ["q_proj"]} if lora else {}
    configs = [SwiftConfig(model=str(folder), engine="ddp", torch_compile=on, **options) for on in (False, True)]
    plain, compiled = (
        build_model_for_wrapping(
            folder, model_build(cfg), weights=True, spec=spec_from_family_or_size_fields(folder), further={}
        )
        for cfg in configs
    )
    assert list(plain.state_dict()) == list(compiled.state_dict())
    changed = [n for n, m in compiled.named_modules() if "forward" in vars(m)]
    assert len(changed) == 4 and all(n.rpartition(".")[0].endswith("layers") for n in changed)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_compiled_and_recomputed(folder: Path, checkpointing: bool) -> None:
    """A layer that falls back in silence, compiled or recomputed, would show in torch's counts and in what is kept."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, gradients = run(folder)
    kept, again = run(
        folder, torch_compile=True, torch_compile_backend="aot_eager", gradient_checkpointing=checkpointing
    )
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert (kept < 0.5 * plain) == checkpointing
    for n, t in gradients.items():
        torch.testing.assert_close(again[n], t, rtol=1e-5, atol=1e-6)
