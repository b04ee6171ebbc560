"""Adapters of grouped experts against the formula, expert by expert; how many operations and parameters they are; their
checkpoints.

Covers: megaswift/engine/megatron/lora/experts.py,
megaswift/engine/megatron/lora/checkpoint.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaswift.bridge.adapters.plan import AdapterHyperparameters, AdapterPlan
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of
from megaswift.losses.sft import CrossEntropy
from megaswift.models.targets import select_projections
from tests.engine.megatron.layers.empty_groups import leave_empty_groups_unwritten
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.models import build as build_model
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.placement.device import DEVICE, HOST, StandIn

HIDDEN, WIDTH = 32, 16
GATE_UP, DOWN = "linear_fc1", "linear_fc2"
pytestmark = pytest.mark.usefixtures("megatron")


def plan_of(experts: int, settings: AdapterHyperparameters, targets: Sequence[str] = ("all-linear",)) -> AdapterPlan:
    """Of a Qwen3-MoE of one layer: adapters on its experts."""
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.02,
    }
    family = family_of(config)
    spec = family.spec(config)
    chosen = [p for p in select_projections(family, spec, targets) if ".experts." in p.module]
    return AdapterPlan(WeightPlan(family, spec), chosen, settings)


def adapters_of(plan: AdapterPlan, experts: int, layer: str, dtype: torch.dtype, device: torch.device = HOST) -> Any:
    """Those of one grouped layer on a single rank, with random numbers."""
    from megaswift.engine.megatron.lora.experts import GroupedAdapters

    context: Any = SimpleNamespace(
        layout=SimpleNamespace(tp=1, etp=1, sequence_parallel=False),
        coordinates=SimpleNamespace(tp=0, etp=0),
        groups=SimpleNamespace(tp=None, expt_tp=None),
        device=device,
    )
    by_expert = [plan.by_layer.get(f"decoder.layers.0.mlp.experts.{i}.{layer}", []) for i in range(experts)]
    adapters = GroupedAdapters(by_expert, context, dtype, 0.0)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapters.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator).to(device) * 0.3)
    return adapters


def one_by_one(adapters: Any, x: Tensor, counts: Sequence[int], outputs: int) -> tuple[Tensor, list[Tensor]]:
    """(what the formula adds [t, out], A and B of each adapter), in float64."""
    halves = [
        adapters.part(n, half, adapters.parameter(n, half).data).double().requires_grad_()
        for n in range(len(adapters.adapters))
        for half in ("A", "B")
    ]
    parts = list(x.split(list(counts)))
    added = [part.new_zeros(len(part), outputs) for part in parts]
    for n, adapter in enumerate(adapters.adapters):
        expert = adapter.entry.expert
        a, b = halves[2 * n : 2 * n + 2]
        first = WIDTH if adapter.module.endswith("up_proj") else 0
        product = adapter.scale * parts[expert] @ a.t() @ b.t()
        added[expert] = added[expert] + torch.nn.functional.pad(product, (first, outputs - first - len(b)))
    return torch.cat(added), halves


def check(adapters: Any, counts: Sequence[int], inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Output, gradient of the input and of each adapter."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(sum(counts), inputs, generator=generator).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out = torch.randn(sum(counts), outputs, generator=generator).to(dtype)
    grad = torch.randn(sum(counts), outputs, generator=generator).to(dtype)
    got = adapters(x, out, torch.tensor(counts))
    got.backward(grad)
    added, halves = one_by_one(adapters, wide, counts, outputs)
    (out.double() + added).backward(grad.double())
    wanted = [out.double() + added, wide.grad, *(h.grad if h.grad is not None else torch.zeros_like(h) for h in halves)]
    found = [got, x.grad]
    for n in range(len(adapters.adapters)):
        found += [adapters.part(n, half, adapters.parameter(n, half).grad) for half in ("A", "B")]
    for ours, theirs in zip(found, wanted, strict=True):
        rounding = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
        torch.testing.assert_close(ours.double(), theirs, **rounding)


EVEN = AdapterHyperparameters(8, 16.0)
MODULE = "model.layers.0.mlp.experts"
UNEVEN = AdapterHyperparameters(
    8,
    16.0,
    ranks={f"{MODULE}.1.gate_proj": 4, f"{MODULE}.3.up_proj": 16},
    alphas={"experts.2.up_proj": 5.0, "experts.0.down_proj": 3.0},
)
CASES = {
    "all": (EVEN, ("all-linear",)),
    "rank 3": (AdapterHyperparameters(3, 4.5), ("all-linear",)),
    "uneven": (UNEVEN, ("all-linear",)),
    "up alone": (EVEN, ("up_proj", "down_proj")),
    "gate alone": (EVEN, ("gate_proj", "down_proj")),
    "some experts": (
        EVEN,
        tuple(f"{MODULE}.{name}" for name in ("1.gate_proj", "3.gate_proj", "2.up_proj", "2.down_proj")),
    ),
}


@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 5, 0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_formula(case: str, dtype: torch.dtype, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of experts without tokens, where grouped products leave their gradients unwritten, and of ranks without
    any."""
    leave_empty_groups_unwritten(monkeypatch)
    settings, targets = CASES[case]
    plan = plan_of(4, settings, targets)
    check(adapters_of(plan, 4, GATE_UP, dtype), counts, HIDDEN, 2 * WIDTH, dtype)
    check(adapters_of(plan, 4, DOWN, dtype), counts, WIDTH, HIDDEN, dtype)


@pytest.mark.parametrize("case", CASES)
def test_parameters_hold_what_trains_and_no_more(case: str) -> None:
    """One A and one B for each projection whose adapters are alike."""
    settings, targets = CASES[case]
    plan = plan_of(4, settings, targets)
    both = [adapters_of(plan, 4, layer, torch.float32) for layer in (GATE_UP, DOWN)]
    assert sum(p.numel() for adapters in both for p in adapters.parameters()) == plan.added
    projections = {name.rpartition(".")[2] for name in plan.by_module}
    number = sum(len(list(adapters.parameters())) for adapters in both)
    assert number == 14 if case == "uneven" else number == 2 * len(projections)


VIEWS = {"transpose", "t", "split", "split_with_sizes", "narrow", "slice", "select", "view", "unsqueeze", "detach"}


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS and not name.startswith("new_empty"):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


def test_a_dozen_kernels_for_128_experts() -> None:
    """Forward, of both layers; backward 31, of which 5 set gradients of experts without tokens to zero and 5 find
    them. (Stacks made of 768 parameters in each pass: 1,550 and 1,160.)"""
    from megaswift.engine.megatron.layers.moe.products import ExpertRows

    plan = plan_of(128, AdapterHyperparameters(16, 32.0))
    counts = torch.randint(0, 5, (128,), generator=torch.Generator().manual_seed(3))
    rows, tokens = ExpertRows.of(counts), int(counts.sum())
    made = []
    for layer, inputs, outputs in ((GATE_UP, HIDDEN, 2 * WIDTH), (DOWN, WIDTH, HIDDEN)):
        adapters = adapters_of(plan, 128, layer, torch.bfloat16)
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
        made.append((adapters, x, torch.randn(tokens, outputs, dtype=torch.bfloat16)))
    assert sum(len(list(adapters.parameters())) for adapters, *_ in made) == 6
    with Launches() as forward:
        found = [adapters(x, out, rows) for adapters, x, out in made]
    assert forward.names == {"_grouped_mm": 5, "cat": 2, "mul": 3, "add": 2}
    grads = [torch.ones_like(out) for out in found]
    with Launches() as backward:
        torch.autograd.backward(found, grads)
    assert backward.names == {"_grouped_mm": 10, "mul": 6, "cat": 3, "eq": 5, "masked_fill_": 5, "copy_": 2}


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the test device, with numbers of tokens there: neither in a forward nor in a backward pass, although some
    experts have no token."""
    from megaswift.engine.megatron.layers.moe.products import ExpertRows

    leave_empty_groups_unwritten(monkeypatch)
    stand_in = StandIn()
    with stand_in.running():
        adapters = adapters_of(plan_of(4, UNEVEN), 4, GATE_UP, torch.bfloat16, DEVICE)
        x = torch.ones(13, HIDDEN, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        out = torch.zeros(13, 2 * WIDTH, dtype=torch.bfloat16, device=DEVICE)
        counts = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        counts[1], counts[3] = 4, 9
        stand_in.counted()
        adapters(x, out, ExpertRows.of(counts)).sum().backward()
        assert stand_in.counted() == {}
        assert all(bool(p.grad.isfinite().all()) for p in adapters.parameters())
        empty = [n for n, a in enumerate(adapters.adapters) if a.entry.expert in (0, 2)]
        assert empty
        for number in empty:
            for half in ("A", "B"):
                assert not adapters.part(number, half, adapters.parameter(number, half).grad).any()


def steps(rank: int, world: int, task: Task) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """Losses and gradient norms of the steps that `fault` numbers, adapters after them, parameters that adapters of
    experts are; a checkpoint is written after step 1, read before step 2."""
    engine, context = build(task.case, task.folder, world, **task.options)
    dp = context.layout.coordinates(rank).dp
    if "0" not in task.fault:
        engine.load(task.folder / "saved")
    numbers = []
    for k in map(int, task.fault):
        result = engine.train_batch(own(global_batch(task.case, k), task.case.dp, dp), CrossEntropy(), 1e-2)
        numbers.append((result.loss, result.grad_norm))
        if k == 1:
            engine.save(task.folder / "saved")
    adapters = full(engine.adapter_weights())
    parameters = {id(p.parameter) for p in engine.lora.placed if p.adapter.entry.expert is not None}
    torch.distributed.barrier()
    context.close()
    return numbers, adapters, len(parameters)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "grouped", "again"),
    [
        ("moe tp2 sp dp2 ep2 etp2 do", True, "moe dp2 ep2"),
        ("moe dp2 ep2 do", False, "moe tp2 sp dp2 etp2"),
    ],
)
def test_checkpoints_are_those_of_experts_one_by_one(
    text: str, grouped: bool, again: str, pool: Pool, tmp_path: Path
) -> None:
    """A run with grouped experts goes on where one without them stopped, on another layout, and the other way round:
    its numbers, adapters and moments are under the same names."""
    folder, case = build_model("moe", tmp_path / "moe"), parse(text)
    options = {"train_type": "lora", "lora_rank": 4, "moe_grouped_gemm": grouped, "moe_aux_loss_coeff": 0.0}
    job = "tests.engine.megatron.lora.test_experts:steps"
    task = Task(case, folder, Recipe(), options=options, fault="012")
    numbers, adapters, parameters = pool.run(job, task, case.world)[0]
    other = replace(task, case=parse(again), options={**options, "moe_grouped_gemm": not grouped}, fault="2")
    [resumed], same, others = pool.run(job, other, other.case.world)[0]
    assert resumed == pytest.approx(numbers[2], rel=1e-5)
    assert adapters.keys() == same.keys() and any(".experts." in name for name in same)
    for name, tensor in adapters.items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-3, atol=1e-3 * float(tensor.abs().max()))
    assert parameters == of_layers(case, grouped) and others == of_layers(other.case, not grouped)


def of_layers(case: Case, grouped: bool) -> int:
    """Parameters that the adapters of a rank's experts are: four layers of four experts, three projections."""
    return 4 * 3 * 2 * (1 if grouped else 4 // case.ep)
