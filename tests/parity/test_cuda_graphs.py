"""CUDA graphs of layers (Megatron-Core's `local`) against Hugging Face: graphs are recorded operations
(tests/te/recorded_cuda_graph.py).

Covers: megaswift/engine/megatron/cuda_graphs.py.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, parse
from tests.parity.check import check
from tests.parity.measure import Task, build, train
from tests.parity.pool import shared
from tests.parity.references import References
from tests.te.sources import RELEASES

NEWER = importlib.metadata.version("megatron-core") >= "0.18"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(NEWER, reason="what stands for CUDA graphs follows Megatron-Core 0.16"),
]
GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local"}


def stand_in() -> Any:
    """Graphs of this rank are recorded; returns their class (on the ranks)."""
    import megaswift.engine.megatron.engine  # noqa: F401 - Megatron-Core comes after its substitutions
    from tests.te import recorded_cuda_graph

    recorded_cuda_graph.install()
    return recorded_cuda_graph.RecordedGraph


def replayed(rank: int, world: int, task: Task) -> Any:
    """The case's numbers, and (graphs captured, replays)."""
    graph = stand_in()
    numbers = train(rank, world, task)
    return numbers, (graph.captured, graph.replays)


def with_megatrons_pool(rank: int, world: int, task: Task) -> Any:
    """The same with Megatron-Core's own reuse of buffers."""
    from megaswift.engine.megatron import cuda_graphs

    cuda_graphs.install_cuda_graph_patches = lambda: None
    return replayed(rank, world, task)


def counted(
    text: str, references: References, options: Mapping[str, Any] = GRAPHS, job: str = "replayed"
) -> tuple[int, int]:
    """(graphs captured, replays) of a case that equals Hugging Face's."""
    found: list[Any] = []

    class Counting:
        def run(self, target: str, task: Task, ranks: int) -> list[Any]:
            results = shared(RELEASES[0]).run(f"tests.parity.test_cuda_graphs:{job}", task, ranks)
            found.extend(counts for _, counts in results)
            return [numbers for numbers, _ in results]

    check(parse(text), Counting(), references, options)  # type: ignore[arg-type]
    return found[0]


def test_replayed_layers_are_hugging_faces(references: References) -> None:
    """The first batch is recorded; three steps after it are replays, forward and backward, of four layers and two
    micro-batches."""
    assert counted("dense te", references) == (8, 3 * 2 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dense te tp2 sp", "dense te dp2 do overlap", "dense te pp2", "dense-tied te"])
def test_layouts(text: str, references: References) -> None:
    captured, replays = counted(text, references)
    assert captured and replays > captured


@pytest.mark.slow
def test_without_fused_gradients(references: References) -> None:
    assert counted("dense te", references, GRAPHS | {"gradient_accumulation_fusion": False}) == (8, 48)


@pytest.mark.slow
def test_megatrons_reuse_of_buffers_is_still_wrong(references: References) -> None:
    """The first layer's input goes to another graph before its backward pass has read it."""
    with pytest.raises(AssertionError, match=r"layers\.0\.input_layernorm"):
        counted("dense te", references, job="with_megatrons_pool")


def other_passes(rank: int, world: int, task: Task) -> Any:
    """(losses of evaluations before and after the capture, replays of these, states that were saved and set)."""
    from megaswift.engine.megatron import cuda_graphs

    graph = stand_in()
    engine, context = build(task.case, task.folder, world, **task.options)
    batches = global_batch(task.case, 0)
    short = [replace(b, **{n: getattr(b, n)[:1, :16] for n in NAMES}) for b in batches]
    losses = [engine.evaluate(b, CrossEntropy()).loss for b in (batches, short)]
    engine.accumulate(batches, CrossEntropy())
    before = graph.replays
    losses += [engine.evaluate(b, CrossEntropy()).loss for b in (batches, short)]
    scored = engine.score(short, CrossEntropy().needs)[0].logprobs.shape
    replays = graph.replays - before
    states = cuda_graphs.tracked_rng_states()
    held = cuda_graphs.tensor_parallel.get_cuda_rng_tracker().get_states()
    another = torch.Generator().manual_seed(7).get_state()
    cuda_graphs.set_tracked_rng_states(dict.fromkeys(states, another))
    same = cuda_graphs.tensor_parallel.get_cuda_rng_tracker().get_states()
    moved = [not torch.equal(states[n], s) for n, s in cuda_graphs.tracked_rng_states().items()]
    kept = [same[n] is g and isinstance(g, torch.Generator) for n, g in held.items()]
    text = engine.kernels
    context.close()
    return losses, (graph.captured, replays, tuple(scored)), (all(moved), all(kept), len(kept)), text


NAMES = ("input_ids", "labels", "loss_weights", "positions", "valid")


def test_other_passes_run_the_layers(references: References) -> None:
    """Evaluations and scores, of other shapes too; random states are saved as tensors and set in the generators that
    graphs have registered; the first screen names the graphs."""
    case = parse("dense te")
    task = Task(case, references.model(case.variant), references.recipe, options=GRAPHS)
    (found,) = shared(RELEASES[0]).run("tests.parity.test_cuda_graphs:other_passes", task, 1)
    losses, counts, states, text = found
    assert losses[:2] == losses[2:] and counts == (8, 0, (1, 16)) and states == (True, True, 3)
    assert ", layers captured in CUDA graphs after 3 passes" in text
