"""Simulated ranks do what the same ranks do over gloo: each call in its order, with its shapes, rows, bytes and line of
code, and the passes of the schedule.

Covers: megaswift/simulator/rank.py, megaswift/simulator/groups.py, megaswift/simulator/meta.py,
megaswift/simulator/calls.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.memory.estimate import TrainedModel
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.run.checks.fit import micro_batch_options
from megaswift.simulator.agreement import compared_calls, disagreements
from megaswift.simulator.calls import Call, Trace
from megaswift.simulator.meta import META, MetaDevice, even_counts
from megaswift.simulator.rank import representative, representatives
from megaswift.simulator.report import group_axes
from tests.memory.counted_ranks import CONFIG
from tests.simulator.recorded import EIGHT, RecordedSteps

SLOW = pytest.mark.slow
FOUR = "--gradient_accumulation_steps 4"


def case(config: dict[str, Any], words: str, world: int, *marks: Any) -> Any:
    """A run whose ranks are all simulated."""
    name = f"{'moe' if config is EIGHT else 'dense'} {words.replace('--', '')} on {world}"
    return pytest.param(config, f"{words} {FOUR}", world, marks=marks, id=name.replace("true", ""))


@pytest.mark.process
@pytest.mark.parametrize(
    ("config", "words", "world"),
    [
        case(CONFIG, "--tp 2 --pp 2", 4),
        case(CONFIG, "--tp 2", 2, SLOW),
        case(CONFIG, "--tp 2 --sequence_parallel false", 2, SLOW),
        case(CONFIG, "--pp 2", 2, SLOW),
        case(CONFIG, "--pp 2 --vpp 2", 2, SLOW),
        case(CONFIG, "--pp 4", 4, SLOW),
        case(CONFIG, "--cp 2", 2, SLOW),
        case(CONFIG, "--cp 2 --packing true", 2, SLOW),
        case(CONFIG, "", 2, SLOW),
        case(CONFIG, "--distributed_optimizer false", 2, SLOW),
        case(CONFIG, "--overlap_grad_reduce false", 2, SLOW),
        case(CONFIG, "--tp 2 --pp 2 --vpp 2", 8, SLOW),
        case(CONFIG, "--tp 2 --pp 2 --cp 2", 8, SLOW),
        case(CONFIG, "--tp 2 --recompute_granularity full", 2, SLOW),
        case(CONFIG, "--pp 2 --train_type lora", 4, SLOW),
        case(EIGHT, "--ep 2", 2, SLOW),
        case(EIGHT, "--pp 2 --ep 2", 4, SLOW),
        case(EIGHT, "--tp 2 --ep 2", 4, SLOW),
        case(EIGHT, "--tp 2 --ep 4", 4, SLOW),
        case(EIGHT, "--tp 2 --ep 2 --etp 2", 4, SLOW),
        case(EIGHT, "--tp 2 --pp 2 --ep 4", 8, SLOW),
    ],
)
def test_a_simulated_rank_does_what_a_real_one_does(
    config: dict[str, Any], words: str, world: int, tmp_path: Path
) -> None:
    """All ranks, two steps; they fit together."""
    job = RecordedSteps(config, words, world, tmp_path, tuple(range(world)))
    real, simulated = job.real(), job.simulated()
    for rank in range(world):
        own, theirs = simulated[rank], real[rank]
        for number, (call, other) in enumerate(zip(own.calls, theirs.calls, strict=True)):
            assert call == other, f"call {number} of rank {rank}"
        assert own.passes == theirs.passes and own.passes
        assert sum(call.step == 2 for call in own.calls) > 2
    assert disagreements(simulated) == [] and compared_calls(simulated)[1] == 0


def alike(trace: Trace, layout: Layout) -> list[Any]:
    """The calls of a rank without the numbers of ranks: groups by their axes, other ends by their place beside it."""
    place = layout.coordinates(trace.rank)

    def away(rank: int) -> tuple[int, ...]:
        other = layout.coordinates(rank)
        return other.tp, other.cp, (other.dp - place.dp) % layout.dp, other.pp

    def plain(call: Call) -> Any:
        assert trace.rank in call.group.ranks
        peer = None if call.peer is None else away(call.peer)
        return call._replace(group=group_axes(call.group, layout), peer=peer)  # type: ignore[arg-type]

    return list(map(plain, trace.calls))


@pytest.mark.process
@pytest.mark.parametrize(
    ("config", "words", "world"),
    [
        case(CONFIG, "--tp 2 --pp 2", 8, SLOW),
        case(CONFIG, "--tp 2 --pp 2 --cp 2", 16, SLOW),
        case(CONFIG, "--pp 2 --vpp 2", 8, SLOW),
        case(EIGHT, "--tp 2 --pp 2 --ep 4", 16, SLOW),
        case(EIGHT, "--pp 2 --ep 4 --etp 2", 16, SLOW),
    ],
)
def test_ranks_that_differ_in_their_data_alone_do_the_same(
    config: dict[str, Any], words: str, world: int, tmp_path: Path
) -> None:
    """Each rank as the representative of its class, over groups of the same axes."""
    job = RecordedSteps(config, words, world, tmp_path, tuple(range(world)))
    layout = job.run().layout
    traces = job.simulated()
    known = {rank: alike(traces[rank], layout) for rank in representatives(layout)}
    assert len(known) == world // layout.dp < world
    for rank, trace in traces.items():
        assert alike(trace, layout) == known[representative(layout, rank)], rank


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words", "world"),
    [
        case(CONFIG, "", 2),
        case(CONFIG, "--tp 2 --pp 2", 4),
        case(CONFIG, "--pp 2 --vpp 2", 2),
        case(EIGHT, "--tp 2 --ep 2", 4),
    ],
)
def test_live_memory_is_that_of_the_formulas(config: dict[str, Any], words: str, world: int, tmp_path: Path) -> None:
    """Weights, gradients and optimizer to the byte, but for the frequencies of rotary embeddings; at the peak 3% more
    at most. The formulas are compared with counted bytes in tests/memory."""
    job = RecordedSteps(config, f"{words} --max_length 512", world, tmp_path)
    run, kernels = job.run(), ComputeKernels(TORCH, TORCH, "bfloat16", cuda=True)
    split = PipelineSplit.from_config(run.cfg.parallel)
    parameters = TrainedModel.of(run.cfg.model, run.cfg.lora, run.spec, kernels).on(run.layout, split)
    estimate = parameters.estimate(micro_batch_options(run.cfg, 1, run.passes))
    first = next(r for r in representatives(run.layout) if run.layout.coordinates(r).pp == estimate.stage)
    trace = job.simulated()[first]
    held = estimate.total - estimate.activations.total
    frequencies = 4 * CONFIG["head_dim"] // 2
    assert trace.memory[0][1] == held + frequencies
    peak = max(most for _, _, most in trace.memory)
    assert estimate.total <= peak <= 1.03 * estimate.total


def test_classes_of_ranks() -> None:
    """One for each place in tensor, context and pipeline parallelism, at the first data-parallel index."""
    layout = Layout(16, tp=2, pp=2)
    assert representatives(layout) == [0, 1, 8, 9]
    assert representative(layout, 7) == 1 and representative(layout, 14) == 8


def test_the_host_reads_ones_and_live_bytes_are_counted() -> None:
    """Scalars, lists and copies; memory is counted once for each storage, until it is free."""
    with MetaDevice() as device:
        x = torch.zeros(3, 4, device=META)
        assert x.sum().item() == 1.0 and x[0].tolist() == [1.0] * 4 and bool((x > 0).any())
        assert x.cpu().eq(1).all() and torch.zeros(3, 4).copy_(x).eq(1).all()
        view = x.view(12)
        assert device.live == 48
        del x
        assert device.live == 48
        del view
        assert device.live == 0


def test_known_forms_are_those_that_torch_computes() -> None:
    """Results of operations that were met before have the shapes, strides and dtypes of the first time."""
    with MetaDevice():
        for shape in ((4, 6), (4, 6), (5, 7), (4, 6)):
            x = torch.zeros(*shape, device=META, dtype=torch.bfloat16)
            assert (x.t() + 1).stride() == (1, shape[1])
            assert (x.float() * x).dtype == torch.float32 and (x @ x.t()).shape == (shape[0], shape[0])
            values, places = x.topk(2, dim=1)
            assert values.shape == places.shape == (shape[0], 2) and places.dtype == torch.int64


def test_an_even_choice_of_experts() -> None:
    """Ten tokens choose two of eight experts each."""
    assert even_counts(torch.empty(10, 8, device=META), 2).tolist() == [3, 3, 3, 3, 2, 2, 2, 2]
