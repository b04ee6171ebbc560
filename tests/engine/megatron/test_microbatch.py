"""What a loader thread computes of a micro-batch ahead, against what the engine computes without it.

Covers: megaswift/engine/megatron/microbatch.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megaswift.engine.megatron  # noqa: F401 (before megatron.core)
from megaswift.engine.document_attention import RowDocuments
from megaswift.losses.contract import Batch
from tests.parity.pool import shared
from tests.trainers.inputs import write_inputs

CPU = torch.device("cpu")


def batch(packed: bool) -> Batch:
    """Two documents of 12 and 20 tokens, the last ones without a label."""
    lengths = (12, 20)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(3, 35)[None]
    weights = torch.ones(1, 32)
    weights[0, [5, 11, 31]] = 0
    valid = torch.ones(1, 32, dtype=torch.bool)
    if packed:
        return Batch(ids, ids + 1, weights, positions, valid, torch.tensor([0, 12, 32]))
    two = torch.arange(16).repeat(2, 1)
    return Batch(ids.view(2, 16), ids.view(2, 16) + 1, weights.view(2, 16), two, valid.view(2, 16))


def tensors(value: Any) -> dict[str, Any]:
    """All that `MicrobatchInputs` holds, by name; the objects of packed rows by their attributes."""
    found: dict[str, Any] = {}
    for f in fields(value):
        own = getattr(value, f.name)
        if f.name == "rows" and own is not None:
            found |= {f"rows.{name}": v for name, v in vars(own).items()}
            if isinstance(documents := found.pop("rows.documents", None), RowDocuments):
                found |= {f"rows.documents.{name}": v for name, v in vars(documents).items()}
        elif isinstance(own, Batch):
            found |= {f"batch.{g.name}": getattr(own, g.name) for g in fields(own)}
        else:
            found[f.name] = own
    return found


@pytest.mark.parametrize("attention", ["torch", "transformer_engine"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_inputs_are_the_same(cp: int, packed: bool, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaswift.engine.megatron import microbatch as inputs

    plain = batch(packed)
    want = tensors(inputs.microbatch_inputs(plain, cp, cp - 1, CPU, attention))
    ahead = inputs.prepare_batch_ahead(plain, cp, cp - 1, CPU)
    with monkeypatch.context() as patched:
        patched.setattr(inputs.MicrobatchHostIndices, "compute", None)
        got = tensors(inputs.microbatch_inputs(ahead, cp, cp - 1, CPU, attention))
    assert got.keys() == want.keys() and got["labels"].shape[1] == plain.labels.shape[1] // cp
    for name, value in want.items():
        same = torch.equal(value, got[name]) if isinstance(value, Tensor) else value == got[name]
        assert same, name


@pytest.mark.parametrize("packed", [False, True])
def test_layers_without_attention_find_the_same_on_the_rows_of_both_kinds(packed: bool) -> None:
    """The documents of the whole row, and how ranks' slices become it."""
    from megaswift.engine.megatron.microbatch import microbatch_inputs

    for cp in (1, 2):
        torchs, te = (microbatch_inputs(batch(packed), cp, 0, CPU, a).rows for a in ("torch", "transformer_engine"))
        if not packed:
            assert te is None
            continue
        assert te.qkv_format == "thd"
        assert te.documents.bounds == torchs.documents.bounds == [0, 12, 32]
        assert (te.order is None) == (torchs.order is None) == (cp == 1)
        assert cp == 1 or torch.equal(te.order, torchs.order)


def test_indices_of_other_tensors_are_not_used() -> None:
    """A task may exchange weights after the loader, and a batch may be split."""
    from megaswift.engine.megatron.microbatch import microbatch_inputs, prepare_batch_ahead

    ahead = prepare_batch_ahead(batch(False), 1, 0, CPU)
    weights = torch.zeros(2, 16)
    weights[1, 3] = 1.0
    changed = replace(ahead, loss_weights=weights)
    assert microbatch_inputs(changed, 1, 0, CPU, "torch").labeled_rows.tolist() == [3 * 2 + 1]
    kept = replace(ahead, fields={"advantages": weights})
    assert torch.equal(
        microbatch_inputs(kept, 1, 0, CPU, "torch").labeled_rows,
        microbatch_inputs(batch(False), 1, 0, CPU, "torch").labeled_rows,
    )
    other = microbatch_inputs(ahead, 2, 1, CPU, "torch")
    assert other.labels.shape == (2, 8) and other.index is not None


def seen_by_steps(rank: int, world: int, words: list[str]) -> tuple[list[str], list[bool]]:
    """(threads that prepared micro-batches, whether each that was trained on had been prepared) of a run."""
    from megaswift.commands.training import main
    from megaswift.engine.megatron.engine import MegatronEngine

    threads: list[str] = []
    prepared: list[bool] = []
    prepare, train = MegatronEngine.prepare_ahead, MegatronEngine.train_batch

    def noted(self: Any, microbatches: list[Batch]) -> list[Batch]:
        threads.append(threading.current_thread().name)
        return prepare(self, microbatches)

    def trained(self: Any, microbatches: list[Batch], *more: Any) -> Any:
        prepared.extend(batch.ahead is not None for batch in microbatches)
        return train(self, microbatches, *more)

    MegatronEngine.prepare_ahead, MegatronEngine.train_batch = noted, trained  # type: ignore[method-assign]
    assert main("sft", words) == 0
    return threads, prepared


@pytest.mark.process
def test_a_run_prepares_in_its_loader_threads(tmp_path: Path) -> None:
    """By default: all that a step trains on."""
    words = [*write_inputs(tmp_path), "--max_steps", "3", "--report_to", "none", "--save_strategy", "no"]
    words += ["--output_dir", str(tmp_path / "out")]
    job = "tests.engine.megatron.test_microbatch:seen_by_steps"
    ((threads, prepared),) = shared("").run(job, words, 1)
    assert threads and all(name.startswith("megaswift-data") for name in threads)
    assert prepared == [True] * 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_for_a_gpu_every_tensor_is_pinned_once_ahead(cp: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that GPU current; what the step copies is what was pinned, and is not pinned again."""
    from megaswift import device_copy
    from megaswift.engine.megatron.microbatch import prepare_batch_ahead

    pinned: list[Tensor] = []
    current: list[torch.device] = []

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    def pin(tensor: Tensor) -> Tensor:
        assert current == [torch.device("cuda", 3)]
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    plain = batch(packed)
    ahead = prepare_batch_ahead(plain, cp, cp - 1, torch.device("cuda", 3))
    host = ahead.ahead
    own = [*(getattr(ahead, f.name) for f in fields(ahead)), *ahead.fields.values()]
    own += [host.labeled_rows, host.index, host.order]
    found = [t for t in own if isinstance(t, Tensor)]
    assert {id(t) for t in found} == {id(t) for t in pinned} and len(found) == len(pinned) >= 5
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *target, **how: (id(tensor), target, how))
    for tensor in found:
        sent = device_copy.copy_to_device_async(tensor, torch.device("cuda", 3))
        assert sent == (id(tensor), (torch.device("cuda", 3),), {"non_blocking": True})
    assert len(pinned) == len(found)
