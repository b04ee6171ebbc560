"""Training on a stand-in for a GPU: no tensor is on the wrong device, and the host waits only where the tables say.

Covers: megaswift/device_copy.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.device_copy import copy_to_device_async
from tests.placement.device import DEVICE, StandIn, WrongDevice
from tests.sources import ROOT

REPORT = {"read megaswift.engine.objective:Objective.on_host": 1}
"""Losses and metrics of the step, in one read."""
NORM = {"read megatron.core.optimizer.clip_grads:get_grad_norm_fp32": 1}
STEP = REPORT | NORM
ROUTERS = {"read megaswift.engine.megatron.layers.router:AuxLosses.report": 1}
EXPERT_NORM = {"read megatron.core.optimizer.clip_grads:get_grad_norm_fp32": 2}
"""Experts' gradients have a norm of their own."""
PADDED_PACKING = {"read transformers.masking_utils:find_packed_sequence_indices": 2}
"""transformers asks each micro-batch's positions whether rows are packed."""
LAYERS, MICROBATCHES = 4, 2
SEQUENTIAL_EXPERTS = {
    "read megatron.core.transformer.moe.experts:SequentialMLP.forward": LAYERS * MICROBATCHES,
    "read megatron.core.transformer.moe.moe_utils:permute": 2 * LAYERS * MICROBATCHES,
    "read megatron.core.transformer.moe.moe_utils:sort_chunks_by_idxs": 6 * LAYERS * MICROBATCHES,
}
"""Tokens of each expert, which set the shapes of the products: Megatron-Core's torch path asks in every layer."""
GROUPED_EXPERTS = {"read megatron.core.transformer.moe.experts:TEGroupedMLP.forward": LAYERS * MICROBATCHES}
SAMPLING = {
    "copy megaswift.rollout.decoding:DecodingBatch.__init__": 3,
    "copy megaswift.rollout.decoding:DecodingBatch.read": 2,
    "copy megaswift.rollout.token_sampling:RowGenerators.at": 1,
    "copy megaswift.rollout.transformers_weight_update:InPlaceWeightLoader._copy": 25,
    "read megaswift.data.rollout_batches:gather_completion_values": 2,
    "read megaswift.engine.megatron.rank_weights:RankWeights.collect": 19,
    "read megaswift.rollout.decoding:_completions": 3,
    "read megaswift.rollout.decoding:_completions.<locals>.<genexpr>": 2,
    "read megaswift.rollout.decoding:decode_batch": 8,
    "read megaswift.rollout.token_sampling:RowGenerators.keep": 1,
}
"""Of a generation: each decoded token, the reference's log-probabilities, and the weights' way to the sampler, which is
through host memory (25 tensors, 19 groups of them)."""
WAITS: dict[str, dict[str, dict[str, int]]] = {
    "torch": {
        "step:dense packed": STEP,
        "step:moe": REPORT | EXPERT_NORM | ROUTERS | SEQUENTIAL_EXPERTS,
        "save:moe": {},
        "run:dpo": STEP,
        "run:grpo": STEP | SAMPLING,
        "run:sft --engine ddp": REPORT | PADDED_PACKING | {"read megaswift.engine.torch.ddp:DdpStrategy.norm": 1},
    },
    "2.12.0": {
        "step:dense te": STEP,
        "step:moe te packed": REPORT | EXPERT_NORM | ROUTERS | GROUPED_EXPERTS,
        "save:dense te": {},
    },
}
"""Modules (torch's, or a release of Transformer Engine) -> scenario -> waits of its last step, under the function that
waits. A new one costs every user of a GPU time in every step: take it away, or say here why it stays."""


def waited(impl: str, folder: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """What scenarios of steps.py waited for, in a process of their own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.placement.steps", impl, str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return {name: result.get("waits", {}) for name, result in results.items()}


@pytest.mark.process
@pytest.mark.parametrize("impl", WAITS)
def test_the_host_waits_only_where_the_table_says(impl: str, tmp_path: Path) -> None:
    """Steps of dense and expert models, whole runs with sampling, checkpoint and export: each also fails where an
    operation meets tensors of both memories."""
    assert waited(impl, tmp_path, list(WAITS[impl])) == WAITS[impl]


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
        (lambda x: x.to("cpu", non_blocking=True), ["read"]),
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


def test_a_copy_is_the_tensor(stand_in: StandIn) -> None:
    """Both ways, and neither changes with the other."""
    with stand_in.running():
        host = torch.arange(3.0)
        there = copy_to_device_async(host, DEVICE)
        there += 1
        back = there.cpu()
        assert host.tolist() == [0, 1, 2] and back.tolist() == [1, 2, 3] and back.device.type == "cpu"
    assert copy_to_device_async(host, "cpu") is host
