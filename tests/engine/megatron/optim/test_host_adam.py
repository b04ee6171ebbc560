"""Adam on the host: torch's numbers bit by bit, states on the CPU under parameters of a GPU, and what a GPU-less
machine is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from megaswift.engine.megatron.optim import host_adam
from megaswift.engine.megatron.optim.host_adam import HostAdam, materialize_host_adam_state

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def groups_of(*sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Two groups of parameters, the second with its own rate, without decay."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    return [{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 3e-3, "weight_decay": 0.0}]


def pair(oracle: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.optim.Optimizer, HostAdam]:
    """torch's optimizer and ours over equal parameters."""
    groups = groups_of((5, 7), (130,), (3,), (40,))
    return oracle(copy.deepcopy(groups), **SETTINGS, **options), HostAdam.instead_of(
        torch.optim.AdamW(groups, **SETTINGS)
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def take(*optimizers: torch.optim.Optimizer, steps: int = 6) -> None:
    """The same gradients to all; the third parameter is without one at first; the rate moves as a schedule's would."""
    torch.manual_seed(1)
    for k in range(steps):
        drawn = [torch.randn_like(p) for p in parameters_of(optimizers[0])]
        for optimizer in optimizers:
            for i, (p, g) in enumerate(zip(parameters_of(optimizer), drawn, strict=True)):
                p.grad = None if i == 2 and k < 2 else g.clone()
            optimizer.param_groups[0]["lr"] = 1e-2 / (k + 1)
            optimizer.step()


def test_torch_s_adamw_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments, counters; tensors are updated in chunks of which none ends with the tensor."""
    monkeypatch.setattr(host_adam, "CHUNK", 32)
    torchs, ours = pair(torch.optim.AdamW, fused=True)
    take(torchs, ours)
    for p, q in zip(parameters_of(torchs), parameters_of(ours), strict=True):
        assert torch.equal(p, q)
        assert torchs.state[p].keys() == ours.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(torchs.state[p][name], ours.state[q][name]) for name in ours.state[q])
    assert [int(s["step"]) for s in ours.state.values()] == [6, 6, 6, 4]


@pytest.mark.parametrize(("fraction", "offloaded"), [(0.0, []), (0.5, [35, 3, 40]), (0.9, [35, 130, 3]), (1.0, None)])
def test_a_fraction_of_the_elements_is_offloaded(fraction: float, offloaded: list[int] | None) -> None:
    """Whole parameters in their order, at most that fraction of 208 elements; the same bits."""
    torchs, _ = pair(torch.optim.AdamW, fused=True)
    ours = HostAdam.instead_of(torch.optim.AdamW(groups_of((5, 7), (130,), (3,), (40,)), **SETTINGS), fraction)
    take(torchs, ours)
    for p, q in zip(parameters_of(torchs), parameters_of(ours), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(torchs.state[p][name], ours.state[q][name]) for name in ours.state[q])
    sizes = [p.numel() for p in parameters_of(ours) if ours.offloads(p)]
    assert sizes == ([35, 130, 3, 40] if offloaded is None else offloaded)
    assert ours.host_bytes() == 8 * (sum(sizes) + 2 * max(sizes, default=0))


class LateStream(TorchFunctionMode):
    """A GPU that begins no asynchronous copy before the host waits for it: parameters are on it, its copies run in
    order, and an event has all of those before it done."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.left: list[int] = []
        """Copies that are still to come after each wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and kwargs.get("non_blocking"):
            self.copies.append(args[:2])
            return args[0]
        if getattr(func, "__self__", None) is Tensor.is_cuda:
            return True
        return func(*args, **kwargs)

    @torch.no_grad()
    def run(self, count: int) -> None:
        """The first copies."""
        for target, source in self.copies[:count]:
            target.copy_(source)
        del self.copies[:count]

    def event(self) -> Any:
        """As `torch.cuda.Event`."""
        stream = self

        class Event:
            def record(self) -> None:
                self.last = stream.copies[-1]

            def synchronize(self) -> None:
                stream.run(next((i + 1 for i, c in enumerate(stream.copies) if c is self.last), 0))
                stream.left.append(len(stream.copies))

        return Event()


def test_copies_overlap_with_updates_and_none_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit as torch's, though every copy runs as late as it may; while a chunk is updated, the one before is on
    its way back and the next one's two copies are under way."""
    monkeypatch.setattr(host_adam, "CHUNK", 32)
    torchs, ours = pair(torch.optim.AdamW, fused=True)
    stream = LateStream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    torch.manual_seed(1)
    for _ in range(3):
        for p, q in zip(parameters_of(torchs), parameters_of(ours), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        torchs.step()
        with stream:
            ours.step()
        stream.run(len(stream.copies))
        chunks = 2 + 5 + 1 + 2
        assert stream.left == [2, *[3] * (chunks - 2), 1]
        stream.left.clear()
    for p, q in zip(parameters_of(torchs), parameters_of(ours), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(torchs.state[p][name], ours.state[q][name]) for name in ours.state[q])


def test_a_parameter_without_elements() -> None:
    """As a rank's share of a small parameter can be."""
    ours = HostAdam.instead_of(torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))], **SETTINGS))
    (p,) = parameters_of(ours)
    p.grad = torch.empty(0)
    ours.step()
    assert int(ours.state[p]["step"]) == 1


def test_torch_s_plain_loop() -> None:
    """The unfused formula rounds between its operations; nothing else differs."""
    torchs, ours = pair(torch.optim.AdamW, fused=False, foreach=False)
    take(torchs, ours)
    for p, q in zip(parameters_of(torchs), parameters_of(ours), strict=True):
        torch.testing.assert_close(q, p, rtol=3e-7, atol=3e-7)


def test_views_that_torch_s_constructor_refuses() -> None:
    """The distributed optimizer's shards of float32 weights."""
    weight = torch.nn.Parameter(torch.ones(10))
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **SETTINGS)
    inner.param_groups[0]["params"] = [weight.view(-1)[4:]]
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.AdamW(inner.param_groups)
    ours = HostAdam.instead_of(inner)
    ours.param_groups[0]["params"][0].grad = torch.ones(6)
    ours.step()
    assert torch.equal(weight[:4], torch.ones(4)) and bool((weight[4:] < 1).all())


def test_two_devices_without_a_gpu() -> None:
    """Fake tensors refuse an operation across devices: parameters on one ("meta" stands for it), all of the state on
    the CPU."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in ((5, 7), (40,))]
        with pytest.raises(RuntimeError, match="at least two devices, meta and cpu"):
            parameters[0] + torch.empty(5, 7)
        ours = HostAdam.instead_of(torch.optim.AdamW(parameters, **SETTINGS))
        for p in parameters:
            p.grad = torch.ones_like(p)
        ours.step()
        assert {p.device.type for p in parameters} == {"meta"}
        for _ in range(2):
            materialize_host_adam_state(ours)
            found = {(name, t.device.type) for state in ours.state.values() for name, t in state.items()}
            assert found == {("step", "cpu"), ("exp_avg", "cpu"), ("exp_avg_sq", "cpu")}
            ours.load_state_dict(ours.state_dict())
            ours.step()


def test_states_that_stay_are_beside_their_parameters() -> None:
    """Before and after a checkpoint is read; "meta" stands for the device."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in ((5, 7), (40,))]
        ours = HostAdam.instead_of(torch.optim.AdamW(parameters, **SETTINGS), 0.5)
        for p in parameters:
            p.grad = torch.ones_like(p)
        ours.step()
        for _ in range(2):
            assert [{t.device.type for t in ours.state[p].values()} for p in parameters] == [{"cpu"}, {"meta"}]
            ours.load_state_dict(ours.state_dict())


def test_bytes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the states really take, and four buffers of a chunk or of the largest parameter."""
    _, ours = pair(torch.optim.AdamW)
    before = ours.host_bytes()
    materialize_host_adam_state(ours)
    moments = sum(t.nbytes for s in ours.state.values() for name, t in s.items() if name != "step")
    assert (
        before
        == ours.host_bytes()
        == moments + sum(b.nbytes for pair in ours._buffers() for b in pair)
        == 8 * (35 + 130 + 3 + 40) + 2 * 8 * 130
    )
    monkeypatch.setattr(host_adam, "CHUNK", 32)
    assert ours.host_bytes() == moments + 2 * 8 * 32
