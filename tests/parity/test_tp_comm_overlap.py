"""Overlapped tensor-parallel communication against Hugging Face: the exchanges of Transformer Engine's user buffers are
emulated (tests/te/kernels_overlap.py).

Covers: megaswift/engine/megatron/tp_comm_overlap.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, parse
from tests.parity.check import TRAIN, check
from tests.parity.measure import Task, build, train
from tests.parity.pool import RankError, shared
from tests.parity.references import References
from tests.te.sources import RELEASES

NEW, OLD = RELEASES[-1], RELEASES[0]
RING = """
qkv_dgrad: {method: ring_exchange}
fc1_dgrad: {method: ring_exchange}
proj_fprop: {method: ring_exchange, num_sm: 2}
"""
"""Input gradients that are scattered beside their own product: Transformer Engine wants another method for them."""


def recorded(rank: int, world: int, task: Task) -> Any:
    """The case's numbers, and the buffers' exchanges: their products and settings (on the ranks)."""
    from transformer_engine.pytorch.module import base

    made: dict[str, Any] = {}
    initialize = base.initialize_ub

    def initialize_ub(**arguments: Any) -> None:
        initialize(**arguments)
        made.update(arguments=arguments, buffers=dict(base._ub_communicators))

    base.initialize_ub = initialize_ub
    numbers = train(rank, world, task)
    assert base._ub_communicators is None, "the buffers outlive the process groups"
    used = {name for (name, _), buffer in made["buffers"].items() if buffer.exchanges}
    modes = [mode.name for mode in made["arguments"].pop("quantization_modes")]
    return numbers, used, made["arguments"] | {"modes": modes}


def silent(rank: int, world: int, task: Task) -> Any:
    """The case's numbers where gathers bring nothing (on the ranks)."""
    from tests.te.kernels_overlap import CommOverlap

    CommOverlap.gather = lambda self: None  # type: ignore[method-assign]
    return train(rank, world, task)


def another_shape(rank: int, world: int, task: Task) -> None:
    """A training micro-batch of another shape, after one without gradients (on the ranks)."""
    engine, _ = build(task.case, task.folder, world, **task.options)
    names = ("input_ids", "labels", "loss_weights", "positions", "valid")
    mine = [Batch(*(getattr(b, name)[:2] for name in names)) for b in global_batch(task.case, 0)]
    engine.evaluate(mine, CrossEntropy())
    engine.train_batch(mine, CrossEntropy(), 1e-3)


@pytest.fixture
def ring(tmp_path: Path) -> str:
    path = tmp_path / "ring.yaml"
    path.write_text(RING)
    return str(path)


FPROP = {"qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop"}
BULK = {"qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"}
ROW_DGRAD = {"proj_dgrad", "fc2_dgrad"}


def overlapped(
    text: str, references: References, release: str = OLD, **options: Any
) -> tuple[set[str], dict[str, Any]]:
    """(products whose exchange went through the buffers, arguments of `initialize_ub`) of a case that equals Hugging
    Face's."""
    found: list[Any] = []

    class Recording:
        def run(self, target: str, task: Task, ranks: int) -> list[Any]:
            results = shared(release).run("tests.parity.test_tp_comm_overlap:recorded", task, ranks)
            found.extend(results)
            return [numbers for numbers, *_ in results]

    check(parse(text), Recording(), references, options)  # type: ignore[arg-type]
    return found[0][1:]


@pytest.mark.process
def test_every_product_overlaps(references: References) -> None:
    """Packed rows, defaults: the numbers are Hugging Face's, and each product of a layer has its exchange."""
    used, arguments = overlapped("dense tp2 sp te ub packed", references)
    assert used == FPROP | BULK | ROW_DGRAD
    assert arguments["dtype"] == torch.float32 and arguments["tp_size"] == 2
    assert arguments["modes"] == ["NONE"] and arguments["ub_cfgs"] == {}
    assert arguments["shape"] == [66, 64] and arguments["bootstrap_backend"] == "gloo"


@pytest.mark.process
def test_options_choose_what_overlaps(references: References, ring: str) -> None:
    rows = "dense tp2 sp te ub"
    assert overlapped(rows, references, tp_comm_bulk_dgrad=False, tp_comm_bulk_wgrad=False)[0] == FPROP | ROW_DGRAD
    scattered = {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_cfg": ring}
    used, arguments = overlapped("moe tp2 sp te ub", references, NEW, tp_comm_overlap_rs=False, **scattered)
    assert used == {"qkv_fprop", "qkv_dgrad", "proj_dgrad"}, "experts' products do not overlap"
    assert arguments["ub_cfgs"]["proj_fprop"] == {"method": "ring_exchange", "num_sm": 2}


SLOW: list[tuple[str, str, Mapping[str, Any]]] = [
    (OLD, "dense tp2 sp te ub", {"tp_comm_overlap_ag": False}),
    (OLD, "dense tp2 sp te ub recompute=full", {}),
    (OLD, "dense tp2 sp te ub pp2 packed", {}),
    (OLD, "dense tp4 sp te ub", {}),
    (OLD, "dense tp2 sp te ub dp2 do", {}),
    (OLD, "dense tp2 sp te ub cp2 packed", {}),
    (NEW, "dense tp2 sp te ub packed", {}),
    (NEW, "dense tp2 sp te ub pp2 vpp2", {}),
]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("release", "text", "options"), SLOW)
def test_layouts(release: str, text: str, options: Mapping[str, Any], references: References) -> None:
    assert FPROP - {"qkv_fprop", "fc1_fprop"} <= overlapped(text, references, release, **options)[0]


FP8 = {"torch_dtype": "bfloat16", "fp8_format": "hybrid"}
SAME: list[tuple[str, dict[str, Any]]] = [
    ("dense tp2 sp te packed", {"train_type": "lora", "lora_rank": 4}),
    ("dense tp2 sp te", {**FP8, "fp8_recipe": "tensorwise"}),
]
SAME_SLOW: list[tuple[str, dict[str, Any]]] = [
    ("dense tp2 sp te", {"freeze_parameters": ("mlp",)}),
    ("dense tp2 sp te", {**FP8, "fp8_recipe": "delayed"}),
]
"""Of the lines of Transformer Engine's layers, of its buffers and of ours, they run 9 that no case of `SAME` runs: the
first look at frozen weights, and delayed scaling's state, which other tests have."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "options"),
    [*SAME, *(pytest.param(*case, marks=pytest.mark.slow) for case in SAME_SLOW)],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)),
)
def test_no_bit_differs_with_overlap(text: str, options: dict[str, Any], references: References) -> None:
    """Frozen weights, whose products have no gradient to overlap with, and quantized buffers."""
    numbers = []
    for case in (parse(text), parse(f"{text} ub")):
        folder, recipe, _ = references.of(case)
        numbers.append(shared(OLD).run(TRAIN, Task(case, folder, recipe, 2, options=options), case.world)[0])
    one, other = numbers
    assert one.losses == other.losses and one.losses[0] != one.losses[1]
    assert all(torch.equal(g, other.gradients[name]) for name, g in one.gradients.items())


@pytest.mark.process
def test_the_numbers_need_the_exchanges(references: References) -> None:
    case = parse("dense tp2 sp te ub")
    with pytest.raises(AssertionError):
        check(case, shared(OLD), references, target="tests.parity.test_tp_comm_overlap:silent")


@pytest.mark.process
def test_micro_batches_of_another_shape(references: References) -> None:
    """Evaluated, but not trained on."""
    case = parse("dense tp2 sp te ub")
    folder, recipe, _ = references.of(case)
    with pytest.raises(RankError, match="buffers are for 96 tokens, the micro-batch has 64"):
        shared(OLD).run("tests.parity.test_tp_comm_overlap:another_shape", Task(case, folder, recipe), 2)
