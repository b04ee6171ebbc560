"""Training on a stand-in for a GPU: no tensor is on the wrong device, and the host waits only where the tables say.

Covers: megaswift/device_copy.py, megaswift/engine/megatron/model.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift import device_copy
from megaswift.bridge.checkpoint.chunk_files import RankTensorChunk, copy_chunks_to_host
from megaswift.device_copy import HostCopy, copy_to_device_async
from megaswift.engine.megatron.optim import host_adam
from megaswift.engine.reference_weights import ReferenceWeights
from megaswift.rollout.weight_transfer.buckets import BucketPacker, unpack_bucket
from tests.parity.models import build
from tests.parity.pool import shared
from tests.placement.collectives import event_class
from tests.placement.device import DEVICE, ReadTooEarly, StandIn, WrongDevice
from tests.placement.steps import case_and_options, prepare_run
from tests.placement.waits import FAULTS, SHARDED_FAULTS, SLOW, WAITS

OFTEN = [(impl, ranks) for impl, ranks in WAITS if ranks == 1]
"""Of the default run: Transformer Engine on one rank, torch's modules on one and two."""


@pytest.fixture(scope="module")
def pools() -> None:
    """All of them begin to import while the models are made and the first one's ranks run."""
    for impl, _ in WAITS:
        shared(impl)


def waited(impl: str, ranks: int, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """What scenarios of steps.py waited for, on each rank."""
    for name in names:
        kind, _, text = name.partition(":")
        if kind == "run":
            prepare_run(text, folder)
        else:
            model = case_and_options(text)[0].model
            build(model, folder / model)
    jobs = [names] if ranks == 1 else [[name] for name in names]  # a second group needs another store
    results: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for job in jobs:
        for result, waits in zip(
            results, shared(impl).run("tests.placement.steps:measure", (folder, job), ranks), strict=True
        ):
            result |= waits
    return results


TABLES_OF = "0.16"
"""Version of Megatron-Core whose own waits are in the tables."""
TABLES_OF_TRANSFORMERS = "5.24"


def comparable(scenarios: dict[str, Any]) -> dict[str, Any]:
    """All waits; with another Megatron-Core than the tables', those of steps under functions of megaswift; with another
    transformers, none under its functions."""
    import megatron.core
    import transformers

    if not transformers.__version__.startswith(TABLES_OF_TRANSFORMERS):
        scenarios = {
            scenario: {name: count for name, count in waits.items() if " transformers." not in name}
            for scenario, waits in scenarios.items()
        }
    if megatron.core.__version__.startswith(TABLES_OF):
        return scenarios
    return {
        scenario: {name: count for name, count in waits.items() if " megaswift." in name}
        for scenario, waits in scenarios.items()
        if scenario.startswith("step:")
    }


def expected(table: dict[str, Any], rank: int) -> dict[str, Any]:
    """The table of one rank: a list has an entry for each."""
    return {name: waits[rank] if isinstance(waits, list) else waits for name, waits in table.items()}


@pytest.mark.process
@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize(
    ("impl", "ranks", "table"),
    [
        *(
            pytest.param(
                *key, table, id=f"{key[0] or 'torch'}-{key[1]}", marks=() if key in OFTEN else pytest.mark.slow
            )
            for key, table in WAITS.items()
        ),
        *(
            pytest.param(*key, table, id=f"slow-{key[0] or 'torch'}-{key[1]}", marks=pytest.mark.slow)
            for key, table in SLOW.items()
        ),
    ],
)
def test_the_host_waits_only_where_the_table_says(impl: str, ranks: int, table: dict[str, Any], tmp_path: Path) -> None:
    """Steps of dense and expert models, layouts of two ranks, whole runs with sampling, checkpoint and export: each
    also fails where an operation meets tensors of both memories, or a collective tensors of the wrong one."""
    found = waited(impl, ranks, tmp_path, list(table))
    assert len(found) == ranks
    for rank, waits in enumerate(map(comparable, found)):
        told = comparable(expected(table, rank))
        assert waits.keys() == told.keys()
        different = {name: {"seen": waits[name], "table": told[name]} for name in told if waits[name] != told[name]}
        assert not different, f"rank {rank}: {different}"


@pytest.mark.process
@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize(
    ("impl", "text", "others"),
    [
        ("", "dense packed", 2),
        ("", "dense packed --engine ddp", 4),
        ("2.12.0", "dense te packed", 2),
    ],
)
def test_each_tensor_of_a_batch_is_copied_once(impl: str, text: str, others: int, tmp_path: Path) -> None:
    """From pinned memory, as the waits say. `others`: of the places of labels, and on ddp of labeled columns, one for
    each micro-batch. A fault, the first micro-batch's labels sent again by the loss, is seen."""
    for again in (False, True):
        [(found, more)] = shared(impl).run("tests.placement.copies:measure", (tmp_path, text, again), 1)
        assert {n for name, n in found.items() if name != "0 labels"} == {1} and more == others
        assert (found["0 labels"] > 1) == again and {"0 cu_seqlens", "1 input_ids"} <= found.keys()


@pytest.mark.process
def test_planted_faults_are_seen(tmp_path: Path) -> None:
    """A wait in a loss, one in a layer, a mask and a sum from host memory, under tensor parallelism."""
    name = "faults:dense tp2 sp packed"
    for found in waited("", 2, tmp_path, [name]):
        assert found == {name: FAULTS}


@pytest.mark.process
def test_planted_faults_are_seen_with_fsdp2(tmp_path: Path) -> None:
    """Parts of gradients and gathered weights are known to be on the device, a mask and a sum not to be."""
    name = "sharded_faults:dense dp2 --engine fsdp2"
    for found in waited("", 2, tmp_path, [name]):
        assert found == {name: SHARDED_FAULTS}


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


def test_a_host_tensor_in_an_operation_of_the_device_is_found(stand_in: StandIn) -> None:
    with stand_in.running():
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        assert there.device == DEVICE and here.device.type == "cpu" and (there + 1).device == DEVICE
        with pytest.raises(WrongDevice, match="aten.add.Tensor of device"):
            there + here
        assert (there * torch.tensor(2.0)).device == DEVICE, "a number may come from host memory"


def test_a_host_tensor_in_a_backward_pass_is_found(stand_in: StandIn) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.full(grad.shape, 2.0)

    with stand_in.running():
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        y = Wrong.apply(x).sum()
        with pytest.raises(WrongDevice, match="mul"):
            y.backward()


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (lambda x: x.sum().item(), ["read"]),
        (lambda x: float(x[0]), ["read"]),
        (lambda x: bool((x > 0).all()), ["read"]),
        (lambda x: x.tolist(), ["read"]),
        (lambda x: x.cpu(), ["read"]),
        (lambda x: x.to("cpu", non_blocking=True), []),
        (lambda x: torch.bincount(x.long()), ["read"]),
        (lambda x: torch.allclose(x, x + 1), ["read"]),
        (lambda x: torch.equal(x, x + 1), ["read"]),
        (lambda x: torch.multinomial(x, 1), ["read"]),
        (lambda x: torch.repeat_interleave(x, x.long()), ["read"]),
        (lambda x: torch.repeat_interleave(x, x.long(), output_size=3) + x, []),
        (lambda x: copy.deepcopy(x) + x, []),
        (lambda x: copy.deepcopy(torch.nn.Parameter(x)) + x, []),
        (lambda x: torch.nn.functional.one_hot(x.long(), 4).sum(1) + x, []),
        (lambda x: x.new_tensor([1.0, 2.0, 3.0]) + x, ["copy"]),
        (lambda x: torch.ones(3).type_as(x) + x, ["copy"]),
        (lambda x: torch.tensor(2.0, device=x.device), ["copy"]),
        (lambda x: torch.full((), 2.0, device=x.device) * x, []),
        (lambda x: x.__setitem__(0, 2.0), ["copy"]),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), []),
        (lambda x: torch.empty(3).copy_(x, non_blocking=True), ["read"]),
        (lambda x: x[x > 0], ["read"]),
        (lambda x: (x > 0).nonzero(), ["read"]),
        (lambda x: torch.empty(3).copy_(x), ["read"]),
        (lambda x: x.copy_(torch.zeros(3)), ["copy"]),
        (lambda x: x[torch.tensor([0, 2])], ["copy"]),
        (lambda x: torch.zeros(3).to(x.device), ["copy"]),
        (lambda x: torch.zeros(3).to(x.device, non_blocking=True), ["copy"]),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), ["copy"]),
        (lambda x: torch.zeros(3).pin_memory().to(x.device, non_blocking=True), []),
        (lambda x: copy_to_device_async(torch.zeros(3), x.device), []),
        (lambda x: torch.zeros(3, device=x.device) + x.new_ones(3), []),
        (lambda x: torch.where(x > 0, x, 0.0).sum() / x.numel(), []),
    ],
)
def test_waits_are_counted(stand_in: StandIn, work: Any, kinds: list[str]) -> None:
    with stand_in.running():
        x = torch.ones(3, device=DEVICE)
        work(x)
        assert [key.split()[0] for key in stand_in.counted()] == kinds


def test_weights_on_the_device_fill_a_bucket_there(stand_in: StandIn) -> None:
    """Packed and unpacked without a wait of the host: of two dtypes, one that is no contiguous tensor."""
    with stand_in.running():
        sent = {"a": torch.arange(6.0, device=DEVICE).view(2, 3).t(), "b": torch.ones(5, device=DEVICE).bfloat16()}
        packer = BucketPacker(lambda size: torch.empty(size, dtype=torch.uint8, device=DEVICE))
        [(entries, payload)] = packer.pack((name, tensor, None) for name, tensor in sent.items())
        got = dict(unpack_bucket(entries, payload))
        assert not stand_in.counted() and {t.device for t in (payload, *got.values())} == {DEVICE}
        assert {name: tensor.tolist() for name, tensor in got.items()} == {n: t.tolist() for n, t in sent.items()}


def test_a_copy_is_the_tensor(stand_in: StandIn) -> None:
    """Both ways, and neither changes with the other."""
    with stand_in.running():
        host = torch.arange(3.0)
        there = copy_to_device_async(host, DEVICE)
        there += 1
        back = there.cpu()
        assert host.tolist() == [0, 1, 2] and back.tolist() == [1, 2, 3] and back.device.type == "cpu"
    assert copy_to_device_async(host, "cpu") is host


def test_a_copy_is_waited_for_before_it_is_read(stand_in: StandIn) -> None:
    with stand_in.running():
        back = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)
        with pytest.raises(ReadTooEarly):
            back + 1
        with pytest.raises(ReadTooEarly):
            back.tolist()
        stand_in.synchronized()
        assert back.tolist() == [1, 1, 1]
        assert [key.split()[0] for key in stand_in.counted()] == ["sync"]


def test_numbers_that_have_arrived_with_later_ones_are_not_waited_for(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device runs in order: of two copies, the first has arrived with the second, and not the other way round."""
    monkeypatch.setattr(torch.cuda, "Event", event_class(stand_in))
    with stand_in.running():
        for order, waits in (((1, 0), 1), ((0, 1), 2)):
            copies = [HostCopy(torch.full((2,), float(n), device=DEVICE)) for n in range(2)]
            assert [copies[i].wait() for i in order] == [[float(i)] * 2 for i in order]
            assert stand_in.counted() == {"sync megaswift.device_copy:HostCopy.wait": waits}


def test_the_host_s_adam_waits_once_a_chunk(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its arrival: copies are asynchronous, both ways, from and to pinned memory."""
    monkeypatch.setattr(host_adam, "CHUNK", 32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    event = SimpleNamespace(record=lambda: None, synchronize=stand_in.synchronized)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    with stand_in.running():
        weight = torch.nn.Parameter(torch.ones(100, device=DEVICE))
        adam = host_adam.HostAdam.instead_of(torch.optim.AdamW([weight], lr=0.1))
        weight.grad = torch.ones(100, device=DEVICE)
        adam.step()
        assert stand_in.counted() == {"sync megaswift.engine.megatron.optim.host_adam:HostAdam._update": 4}
    assert weight.max() < 1


def test_a_background_checkpoint_is_copied_to_chunks(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to pinned memory of its own for each tensor, which CUDA's allocator rounds up to a power of two: copied aside
    with one wait for all, and whole, whatever training does to the tensors meanwhile."""
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    monkeypatch.setattr(device_copy, "CHUNK", 512)
    monkeypatch.setattr(device_copy, "allocate_host_memory", allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", stand_in.synchronized)
    with stand_in.running():
        there = [torch.arange(300.0, device=DEVICE).view(3, 100).t(), torch.full((5,), 2, device=DEVICE).bfloat16()]
        there += [torch.ones((), device=DEVICE), torch.arange(33, device=DEVICE).to(torch.uint8)]
        host = torch.arange(6.0).view(2, 3).t()
        values = [t.clone() for t in (*there, host)]
        boxes = [RankTensorChunk(f"w{i}", (9,), (0,), t) for i, t in enumerate((*there, host))]
        copies = copy_chunks_to_host(boxes)
        assert [key.split()[0] for key in stand_in.counted()] == ["sync"]
        for tensor in (*there, host):
            tensor.zero_()
        for copied, value in zip(copies, values, strict=True):
            found = copied.data if copied.read is None else copied.read()
            assert found.device.type == "cpu" and (found.dtype, found.shape) == (value.dtype, value.shape)
            assert (copied.data.dtype, copied.data.shape) == (value.dtype, value.shape)
            assert found.tolist() == value.tolist()
    assert sizes == [512] * 3, "1,200 + 10 + 4 + 33 bytes"


def test_a_reference_on_the_host_lies_in_chunks(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint's copies do; exchanged with the model and back bit by bit, and blended with it."""
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    monkeypatch.setattr(device_copy, "CHUNK", 512)
    monkeypatch.setattr(device_copy, "allocate_host_memory", allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", stand_in.synchronized)
    with stand_in.running():
        live = [torch.nn.Parameter(torch.randn(3, 100, device=DEVICE)), torch.randn(5, device=DEVICE).bfloat16()]
        live += [torch.arange(33, device=DEVICE).to(torch.uint8), torch.randn(4, 2, device=DEVICE).t()]
        first = [t.detach().clone() for t in live]
        reference = ReferenceWeights(lambda: live, on_host=True)
        assert reference.bytes == sum(t.nbytes for t in live) and sizes == [512] * 3
        with torch.no_grad():
            for tensor in live:
                tensor.add_(1)
        trained = [t.detach().clone() for t in live]
        with reference.exchanged():
            assert [t.tolist() for t in live] == [t.tolist() for t in first]
        assert [t.tolist() for t in live] == [t.tolist() for t in trained]
        reference.blend(0.5)
        with reference.exchanged():
            assert live[0].tolist() == (first[0].lerp(trained[0], 0.5)).tolist()
            assert live[2].tolist() == trained[2].tolist()
