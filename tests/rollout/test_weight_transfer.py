"""Weights in buckets from one sender to several workers: bit for bit over each transport that a CPU has, several syncs,
only what has changed, and failures on either side.

Covers: megaswift/rollout/weight_transfer.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.rollout.weight_transfer import transports
from megaswift.rollout.weight_transfer.buckets import (
    BucketPacker,
    ChangedWeights,
    module_of_weight,
    state_digest,
    tensor_checksum,
    unpack_bucket,
)
from megaswift.rollout.weight_transfer.receiver import WeightReceiver
from megaswift.rollout.weight_transfer.sender import TransferSettings, WeightSender
from megaswift.rollout.weight_transfer.transports import GLOO, SHARED_MEMORY, CudaIpcReceiver, CudaIpcSender

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8)
Weights = list[tuple[str, Tensor]]


def model_weights(seed: int) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    names = [
        f"model.layers.{i}.{m}.weight" for i in range(2) for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up")
    ]
    shapes = [(5, 7), (3, 7), (64, 9)] * 2
    drawn = [(n, torch.randn(s, generator=draw)) for n, s in zip(names, shapes, strict=True)]
    return [("model.embed_tokens.weight", torch.randn(11, 7, generator=draw).bfloat16()), *drawn]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_every_tensor_bit_for_bit(seed: int) -> None:
    """Any dtypes and shapes, also none and empty ones; views that are not contiguous."""
    draw = random.Random(seed)
    sent: list[tuple[str, Tensor, int | None]] = []
    for i in range(draw.randrange(9)):
        shape = [draw.randrange(6) for _ in range(draw.randrange(4))]
        data = torch.randint(0, 100, shape).to(draw.choice(DTYPES))
        sent.append((f"w{i}", data.T if data.dim() == 2 else data, None))
    got, capacity = [], draw.randrange(1, 200)
    for entries, payload in BucketPacker(lambda n: torch.empty(n + 3, dtype=torch.uint8), capacity).pack(sent):
        assert len(entries) == 1 or sum(entry.nbytes for entry in entries) <= capacity
        got += unpack_bucket(entries, payload.clone())
    assert [name for name, _ in got] == [name for name, *_ in sent]
    for (_, left), (_, right, _) in zip(got, sent, strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.reshape(-1).view(torch.uint8).equal(right.contiguous().reshape(-1).view(torch.uint8))


def test_a_slot_is_shared_and_mapped_once_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA IPC with host memory for the device's: many syncs make and open one handle a slot and worker, a slot that
    grows another one, and the bytes are the sender's at every time."""
    shared: dict[bytes, Any] = {}
    opened: list[bytes] = []

    def share(self: Any) -> tuple[Any, ...]:
        handle = f"handle {len(shared)}".encode()
        shared[handle] = self
        return (0, handle, self.nbytes(), 0, b"counter", 0, b"event", False)

    def attach(device: int, handle: bytes, *_: Any) -> Any:
        opened.append(handle)
        return shared[handle]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", attach)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    monkeypatch.setattr(transports, "gpu_uuids", lambda: ["GPU-a"])
    cpu = torch.device("cpu")
    sender, workers = CudaIpcSender(cpu, 3), [CudaIpcReceiver(cpu, rank) for rank in (1, 2, 3)]

    def send(number: int, size: int) -> None:
        slot = number % transports.SLOTS
        sender.buffer(slot, size)[:size] = number
        location = json.loads(json.dumps(sender.location(slot)))
        for worker in workers:
            assert worker.take(location, size).tolist() == [number] * size

    for number in range(20):
        send(number, 64 - number // 2)
    assert len(shared) == len(opened) == 2 * 3
    send(20, 100)
    for number in range(21, 40):
        send(number, 64)
    assert len(shared) == len(opened) == 3 * 3 and {len(worker.mapped) for worker in workers} == {2}
    for side in (sender, *workers):
        side.close()
    assert not any((sender.handles, sender.slots, *(worker.mapped for worker in workers)))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 101])
def test_a_checksum_changes_with_any_bit_and_any_exchange(length: int) -> None:
    """And not with where the bytes lie in memory."""
    tensor = torch.randperm(length).to(torch.uint8)
    checksum = tensor_checksum(tensor)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor])[3:]
    assert tensor_checksum(shifted) == checksum
    found = {checksum}
    for where in range(length):
        for bit in range(8):
            flipped = tensor.clone()
            flipped[where] ^= 1 << bit
            found.add(tensor_checksum(flipped))
        for other in range(where):
            exchanged = tensor.clone()
            exchanged[[where, other]] = tensor[[other, where]]
            found.add(tensor_checksum(exchanged))
    assert len(found) == 1 + 8 * length + length * (length - 1) // 2


def test_a_checksum_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks count by their order."""
    monkeypatch.setattr("megaswift.rollout.weight_transfer.buckets._WORDS", 4)
    blocks = torch.arange(12).view(3, 4)
    assert len({tensor_checksum(blocks[list(order)]) for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1))}) == 4


def test_a_checksum_changes_with_any_exchange_of_words() -> None:
    """Numbers of 8 bytes, and so rows of a matrix."""
    numbers = torch.arange(24)
    found = {tensor_checksum(numbers)}
    for first, second in itertools.combinations(range(len(numbers)), 2):
        exchanged = numbers.clone()
        exchanged[[first, second]] = numbers[[second, first]]
        found.add(tensor_checksum(exchanged))
    assert len(found) == 1 + 24 * 23 // 2


def test_a_digest_changes_with_any_name_and_checksum() -> None:
    """And not with the order in which tensors arrive."""
    states = ({"a": 1, "b": 2}, {"a": 1, "c": 2}, {"a": 2, "b": 1}, {"a": 1}, {"a": 1, "b": 3})
    assert len({*map(state_digest, states)}) == len(states)
    assert state_digest({"b": 2, "a": 1}) == state_digest(states[0])


def test_modules_that_samplers_hold_fused() -> None:
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.experts.3.up_proj",
    )
    modules = [module_of_weight(f"model.layers.7.{name}.weight") for name in names]
    assert modules == [f"model.layers.7.{m}" for m in (*["self_attn"] * 3, *["mlp"] * 2, "mlp.experts")]


def test_modules_of_their_own() -> None:
    """Norms and embeddings, which are fused with nothing."""
    names = (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.7.input_layernorm.weight",
        "lm_head.weight",
    )
    assert [module_of_weight(name) for name in names] == [name.removesuffix(".weight") for name in names]
    shared = [module_of_weight(f"m.layers.0.mlp.shared_experts.{p}_proj.weight") for p in ("gate", "up")]
    assert shared == ["m.layers.0.mlp.shared_experts"] * 2


def test_a_module_in_two_places_is_always_sent() -> None:
    """A part of a fused module alone would be loaded over what the others were."""
    stream = [(f"l.0.{m}.weight", torch.ones(2)) for m in ("x.q", "y.q", "x.k")]
    changes = ChangedWeights()
    assert len(list(changes.select(stream))) == 3
    changes.sent = changes.current
    assert [name for name, *_ in changes.select(stream)] == ["l.0.x.q.weight", "l.0.x.k.weight"]


class Workers:
    """Receivers in threads, as the workers of a sampler."""

    def __init__(self, count: int) -> None:
        self.receivers: list[WeightReceiver | None] = [None] * count
        self.loaded: list[Weights] = [[] for _ in range(count)]
        self.pool = ThreadPoolExecutor(count)
        self.fails: Callable[[str], bool] = lambda _: False
        self.shared: dict[str, Any] = {}

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """All have ended when it returns or raises."""
        calls = [self.pool.submit(work, i) for i in range(len(self.receivers))]
        wait(calls)
        return [call.result() for call in calls]

    def connect(self, shared: dict[str, Any]) -> None:
        self.shared = shared

        def one(i: int) -> None:
            self.receivers[i] = WeightReceiver(shared, i + 1, "cpu")

        self.each(one)

    def receive(self, sync: int) -> list[str]:
        def one(i: int) -> str:
            receiver = self.receivers[i]
            assert receiver is not None
            self.loaded[i] = []
            for name, tensor in receiver.weights(sync):
                if self.fails(name):
                    raise ValueError(f"no room for {name}")
                self.loaded[i].append((name, tensor))
            return receiver.digest()

        return self.each(one)

    def digests(self) -> list[str]:
        return self.each(lambda i: self.receivers[i].digest())


@pytest.fixture
def sender_of(tmp_path: Path) -> Iterator[Callable[..., tuple[WeightSender, Workers]]]:
    made: list[WeightSender] = []

    def build(transport: str, workers: int = 2, **more: Any) -> tuple[WeightSender, Workers]:
        them = Workers(workers)
        asked = TransferSettings(transport, workers, more.pop("timeout", 30.0), bucket_bytes=400, **more)
        made.append(WeightSender(asked, tmp_path / "buckets", them.connect, them.receive, them.digests))
        return made[-1], them

    yield build
    for sender in made:
        sender.close()
    assert not [*tmp_path.rglob("bucket-*")]


def same(left: Weights, right: Weights) -> bool:
    return [n for n, _ in left] == [n for n, _ in right] and all(
        a.equal(b) for (_, a), (_, b) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_every_worker_gets_every_sync(transport: str, sender_of: Callable[..., tuple[WeightSender, Workers]]) -> None:
    """More buckets than slots, a tensor larger than a bucket; the second sync has the same keys no longer."""
    sender, workers = sender_of(transport)
    for seed in (1, 2, 3):
        sender.send(iter(model_weights(seed)))
        assert all(same(got, model_weights(seed)) for got in workers.loaded)
    assert sender.statistics.buckets > 3
    assert sender._sides is not None and sender._sides[0].num_keys() < 20


def test_only_changed_modules_are_sent(sender_of: Callable[..., tuple[WeightSender, Workers]]) -> None:
    """All at first; then the modules with a change, whole; nothing where nothing has; all after a worker's restart."""
    sender, workers = sender_of(SHARED_MEMORY, changed_only=True)
    weights = model_weights(1)
    sender.send(weights)
    assert same(workers.loaded[1], weights)
    weights[2] = (weights[2][0], weights[2][1] + 1)
    sender.send(weights)
    assert [n for n, _ in workers.loaded[0]] == [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk"]
    assert same(workers.loaded[0], weights[1:3])
    sender.send(weights)
    assert workers.loaded == [[], []]
    workers.receivers[1] = WeightReceiver(workers.shared, 2, "cpu")
    sender.send(weights)
    assert all(same(got, weights) for got in workers.loaded)


def test_a_worker_that_has_something_else_is_noticed(
    sender_of: Callable[..., tuple[WeightSender, Workers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on the way; a worker whose digest differs after everything was sent."""
    sender, workers = sender_of(SHARED_MEMORY, changed_only=True, timeout=60.0)
    buffer = BucketPacker._close

    def flipping(packer: BucketPacker) -> Any:
        entries, payload = buffer(packer)
        payload[5] ^= 1
        return entries, payload

    monkeypatch.setattr(BucketPacker, "_close", flipping)
    with pytest.raises(RuntimeError, match="embed_tokens.weight arrived with another checksum"):
        sender.send(model_weights(1))
    monkeypatch.setattr(BucketPacker, "_close", buffer)
    receive = workers.receive
    monkeypatch.setattr(sender, "receive", lambda sync: [receive(sync)[0], "other"])
    with pytest.raises(RuntimeError, match="differ from the ones"):
        sender.send(model_weights(1))
    monkeypatch.setattr(sender, "receive", receive)
    sender.send(model_weights(1))
    assert all(same(got, model_weights(1)) for got in workers.loaded)


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_a_worker_that_fails_ends_the_sync_at_once(
    transport: str, sender_of: Callable[..., tuple[WeightSender, Workers]]
) -> None:
    """Long before the timeout, with its own error."""
    sender, workers = sender_of(transport, workers=1, timeout=600.0)
    workers.fails = lambda name: name.endswith("layers.0.mlp.up.weight")
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"no room for model\.layers\.0\.mlp\.up"):
        sender.send(model_weights(1))
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_a_worker_that_cannot_connect_is_noticed_at_once(
    transport: str, sender_of: Callable[..., tuple[WeightSender, Workers]]
) -> None:
    """Before a process group waits for it."""
    sender, _ = sender_of(transport, timeout=600.0)

    def refuse(shared: dict[str, Any]) -> None:
        raise ValueError("no route")

    sender.connect = refuse
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no route"):
        sender.send(model_weights(1))
    assert time.monotonic() - begun < 300


def test_a_sender_that_fails_tells_the_workers(sender_of: Callable[..., tuple[WeightSender, Workers]]) -> None:
    """They do not wait for the timeout, and the next sync works."""
    sender, workers = sender_of(SHARED_MEMORY, timeout=600.0)

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from model_weights(1)[:4]
        raise ValueError("a rank has ended")

    errors: list[Exception] = []
    receive, done = workers.receive, threading.Event()

    def recorded(sync: int) -> list[str]:
        try:
            return receive(sync)
        except RuntimeError as error:
            errors.append(error)
            raise
        finally:
            done.set()

    sender.receive = recorded
    with pytest.raises(ValueError, match="a rank has ended"):
        sender.send(weights())
    assert done.wait(300) and "weight sync failed: a rank has ended" in str(errors[0])
    sender.receive = receive
    sender.send(model_weights(2))
    assert all(same(got, model_weights(2)) for got in workers.loaded)
