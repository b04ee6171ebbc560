"""A gated delta net alone, in float64 on tensor- and context-parallel ranks, against transformers' layer: output and
every gradient to 1e-9; and faults that this must find.

Covers: megaswift/engine/megatron/layers/delta_net.py, megaswift/engine/megatron/context_parallel.py,
megaswift/engine/gated_delta.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.bisection.precision import Widened
from megaswift.losses.contract import Batch
from tests.engine.megatron.layers.delta_net_faults import plant
from tests.parity.cases import Case, parse
from tests.parity.measure import build as build_engine
from tests.parity.models import build
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
TOLERANCE = 1e-9
LENGTH = 192
"""Three chunks."""
BOUNDS = (0, 1, 3, 6, 64, 65, 120, LENGTH)
"""Documents shorter than the convolution, one that ends with a chunk, some that cross its end."""
CUT_BOUNDS = (0, 8, 48, 64, 72, 136, LENGTH)
"""The same where context parallelism cuts each document into as many as eight pieces."""
LAYER = "model.layers.0."


@dataclass(frozen=True)
class Task:
    """What the ranks get: hidden states and the output's gradient, float64 [b, s, h], and a fault to put in."""

    case: Case
    folder: Path
    hidden: Tensor
    weight: Tensor
    bounds: tuple[int, ...]
    fault: str = ""

    @property
    def batch(self) -> Batch:
        """Rows as the engine cuts them; tokens are of no account."""
        shape = self.hidden.shape[:2]
        ids = torch.zeros(shape, dtype=torch.long)
        positions = torch.cat([torch.arange(end - start) for start, end in pairwise(self.bounds)]).expand(shape)
        cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32) if self.case.packed else None
        return Batch(ids, ids, torch.ones(shape), positions, torch.ones(shape, dtype=torch.bool), cu_seqlens=cu_seqlens)


@dataclass(frozen=True)
class Slice:
    """What one rank computed: for the tokens `places` the output and the gradient of the input; on rank 0 gradients of
    the weights by disk name."""

    places: Tensor
    out: Tensor
    hidden: Tensor
    gradients: dict[str, Tensor]


def block(rank: int, world: int, task: Task) -> Slice:
    """The first layer's gated delta net with its norm, forward and backward, and the sums that training adds (on the
    ranks)."""
    from megaswift.engine.megatron.microbatch import microbatch_inputs

    plant(task.fault)
    engine, context = build_engine(task.case, task.folder, world)
    module = engine.plain[0].decoder.layers[0].self_attention
    groups = context.groups
    inputs = microbatch_inputs(task.batch, groups.cp.size(), groups.cp.rank(), torch.device("cpu"), "torch")
    places = torch.arange(LENGTH) if inputs.index is None else inputs.index
    held = places.chunk(groups.tp.size())[groups.tp.rank()] if task.case.sp else places
    hidden, weight = (t[:, held].transpose(0, 1).contiguous() for t in (task.hidden, task.weight))
    hidden.requires_grad_()
    names = dict(module.named_parameters())
    wide = {name: p.detach().double().requires_grad_() for name, p in names.items()}
    with Widened():
        out, _ = torch.func.functional_call(module, wide, (hidden,), {"packed_seq_params": inputs.rows})
        (out * weight).sum().backward()
    for name, p in names.items():
        dist.all_reduce(wide[name].grad, group=groups.cp)
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(wide[name].grad, group=groups.tp)
    # tensors travel in float32: first what that holds, then the rest
    own = {id(p): wide[name].grad for name, p in names.items()}
    high = dict(engine.weights.stream(lambda p: own.get(id(p)), dtype=torch.float32))
    low = dict(engine.weights.stream(lambda p: _rest(own[id(p)]) if id(p) in own else None, dtype=torch.float32))
    gradients = {name: high[name].double() + low[name].double() for name in high}
    dist.barrier()
    context.close()
    return Slice(held, out.detach().transpose(0, 1), hidden.grad.transpose(0, 1), gradients)


def _rest(x: Tensor) -> Tensor:
    return (x - x.float().double()).float()


def wanted(task: Task) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and gradients of the weights that transformers' layer gives, document by
    document."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32).double()
    layer = model.model.layers[0]
    hidden = task.hidden.clone().requires_grad_()
    with Widened():
        runs = [layer.input_layernorm(hidden[:, start:end]) for start, end in pairwise(task.bounds)]
        out = torch.cat([layer.linear_attn(run) for run in runs], dim=1)
        (out * task.weight).sum().backward()
    named = {f"{LAYER}{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), hidden.grad, named


def worst(task: Task, pool: Pool) -> dict[str, float]:
    """The largest difference of each tensor over ranks, in units of the wanted one's largest value."""
    out, hidden, gradients = wanted(task)
    slices: list[Slice] = pool.run("tests.engine.megatron.layers.test_delta_net:block", task, task.case.world)
    found = {
        "output": max(float((s.out - out[:, s.places]).abs().max()) for s in slices) / float(out.abs().max()),
        "input": max(float((s.hidden - hidden[:, s.places]).abs().max()) for s in slices) / float(hidden.abs().max()),
    }
    assert set().union(*(s.places.tolist() for s in slices)) == set(range(LENGTH))
    assert len(gradients) >= 7
    for name, want in gradients.items():
        found[name] = float((slices[0].gradients[name] - want).abs().max() / want.abs().max())
    return found


def task_of(text: str, folder: Path, fault: str = "") -> Task:
    """Random hidden states for a case, packed ones in documents."""
    case = parse(text)
    generator = torch.Generator().manual_seed(5)
    shape = (1 if case.packed else 2, LENGTH, 64)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    bounds = (0, LENGTH) if not case.packed else CUT_BOUNDS if case.cp > 1 else BOUNDS
    return Task(case, build(case.variant, folder / case.variant), hidden, weight, bounds, fault)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are made."""
    return tmp_path_factory.mktemp("blocks")


LAYOUTS = ("single", "tp2", "tp2 sp", "tp4", "tp4 sp", "cp2", "cp4", "tp2 cp2", "tp2 sp cp2")
CASES = [f"qwen3_5 {layout} packed" for layout in LAYOUTS if layout != "tp4"]
CASES += [f"qwen3_5 {layout}" for layout in ("single", "tp2", "tp2 sp", "cp2")]
LATER = [f"qwen3_5 {layout}{packed}" for layout in LAYOUTS for packed in ("", " packed")]
CASES += ["qwen3_5 tp2 sp packed recompute=selective", "qwen3_5 cp2 recompute=selective"]
CASES += ["qwen3_next single packed", "qwen3_next tp2 sp", "qwen3_next cp2", "qwen3_next tp2 sp cp2 packed"]


@pytest.mark.parametrize(
    "text", [*CASES, *(pytest.param(text, marks=pytest.mark.slow) for text in LATER if text not in CASES)]
)
def test_block(text: str, folder: Path, pool: Pool) -> None:
    differences = worst(task_of(text, folder), pool)
    assert {name: d for name, d in differences.items() if not d <= TOLERANCE} == {}


def kept_bytes(rank: int, world: int, task: Task) -> int:
    """What the first layer keeps for its backward pass, its parameters left out (on the rank)."""
    engine, context = build_engine(task.case, task.folder, world)
    module = engine.plain[0].decoder.layers[0].self_attention
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # holds the memory, so that no other tensor gets its address
        return tensor

    projected: list[Tensor] = []  # the input of what is recomputed: no product's, so nothing packs it then
    module.in_proj.register_forward_hook(lambda _module, _inputs, outs: projected.append(pack(outs[0])))
    hidden = task.hidden.float().transpose(0, 1).contiguous().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(hidden, None)
    context.close()
    return sum(len(storage) for at, storage in kept.items() if at not in parameters)


def test_selective_recomputation_keeps_projected_inputs_alone(folder: Path, pool: Pool) -> None:
    """7.3 MB of two rows of 192 tokens become 1.3 MB."""
    job = "tests.engine.megatron.layers.test_delta_net:kept_bytes"
    [plain], [selective] = (
        pool.run(job, task_of(f"qwen3_5 {words}", folder), 1) for words in ("single", "recompute=selective")
    )
    assert selective < plain / 5, (plain, selective)


NORM = f"{LAYER}linear_attn.norm.weight"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("norm_not_summed", "tp2"),
        ("norm_not_summed", "tp2 sp"),
        ("norm_not_summed", "tp2 sp cp2 packed"),
        ("heads_off_by_one", "cp2"),
        ("heads_off_by_one", "cp4 packed"),
        ("slices_not_sorted", "cp2"),
        ("cut_across_components", "tp2"),
        ("state_goes_on", "packed"),
        ("state_goes_on", "tp2 sp cp2 packed"),
        ("convolution_goes_on", "packed"),
        ("convolution_goes_on", "cp2 packed"),
        ("rates_in_bfloat16", "single"),
        ("values_for_gates", "tp2"),
    ],
)
def test_a_fault_is_found(fault: str, text: str, folder: Path, pool: Pool) -> None:
    differences = worst(task_of(f"qwen3_5 {text}", folder, fault), pool)
    found = {name for name, d in differences.items() if not d <= 1e3 * TOLERANCE}
    assert found == ({NORM} if fault == "norm_not_summed" else found | {"output"})
