"""Faults of gated delta nets and of output-gated attention on ranks fail the comparison with Hugging Face.

Covers: megaswift/engine/megatron/layers/delta_net.py, megaswift/engine/gated_delta.py.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from tests.engine.megatron.layers.delta_net_faults import plant
from tests.parity.cases import parse
from tests.parity.compare import GRADIENT, compare
from tests.parity.measure import Task, train
from tests.parity.oracle import Reference
from tests.parity.pool import Pool, RankError
from tests.parity.references import References

pytestmark = pytest.mark.process
own_gates = pytest.mark.skipif(
    Version(version("megatron-core")) >= Version("0.19"), reason="Megatron-Core narrows the gates"
)


def faulty(rank: int, world: int, task: Task) -> Reference | None:
    """`train` with a fault (on the ranks)."""
    plant(task.fault)
    return train(rank, world, task)


def run(fault: str, text: str, pool: Pool, references: References) -> list[Any]:
    """The differences of a case with a fault, after one step."""
    case = parse(text)
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, steps=1, fault=fault)
    got = pool.run("tests.parity.test_gated_delta_nets:faulty", task, case.world)[0]
    got.weights = want.weights
    return [d for d in compare(got, want, recipe) if d.bad]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("norm_not_summed", "qwen3_5 tp2"),
        ("norm_not_summed", "qwen3_5_moe tp2 sp"),
        ("heads_off_by_one", "qwen3_5 cp2"),
        ("slices_not_sorted", "qwen3_5 cp2 packed"),
        ("cut_across_components", "qwen3_5 tp2"),
        ("state_goes_on", "qwen3_5 packed"),
        ("convolution_goes_on", "qwen3_5 packed"),
        ("rates_in_bfloat16", "qwen3_5 single"),
        ("values_for_gates", "qwen3_5 single"),
        pytest.param("gates_of_first_heads", "qwen3_5 tp4", marks=own_gates),
    ],
)
def test_a_fault_is_found(fault: str, text: str, pool: Pool, references: References) -> None:
    failed = {d.name for d in run(fault, text, pool, references)}
    if fault == "norm_not_summed":
        norms = {f"gradient model.layers.{layer}.linear_attn.norm.weight" for layer in (0, 1, 3)}
        assert norms == {name for name in failed if name.startswith("gradient")}
    else:
        assert "loss of accumulate" in failed and len(failed) > 50


@own_gates
def test_gates_of_all_heads_do_not_fit(pool: Pool, references: References) -> None:
    with pytest.raises(RankError, match="shape"):
        run("gates_of_all_heads", "qwen3_5 tp4", pool, references)


@pytest.mark.parametrize(
    "text",
    [
        "qwen3_5 single",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("qwen3_5_moe single", "qwen3_5_moe dp4", "qwen3_next single")
        ),
    ],
)
def test_limits_of_decays_alone_are_much_wider(text: str, references: References) -> None:
    """Hugging Face's rounding errors, which may widen the limits of these models, do not double them elsewhere."""
    _, _, want = references.of(parse(text))
    assert want.noise.keys() == want.gradients.keys()
    wider = {name: 2 * noise for name, noise in want.noise.items() if 2 * noise > 2 * GRADIENT}
    assert all(name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_ba.weight")) for name in wider), wider
    assert all(limit < 1e-4 for limit in wider.values())
