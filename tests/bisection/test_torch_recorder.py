"""Recorded steps of torch engines against Hugging Face: the same names, tolerances and answers as for the native one.

Covers: megaswift/bisection/torch_recorder.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.bisection.trace_folder import CLIPPED, GATHERED, KINDS, RECOMPUTED, Trace
from megaswift.commands.bisection import main as bisect
from megaswift.errors import ConfigError
from tests.bisection.count_faults import Planted
from tests.bisection.faults import FC1, QKV, Fault
from tests.bisection.ranks import Task, verdict
from tests.bisection.torch_faults import DOWN
from tests.parity import models
from tests.parity.cases import parse
from tests.parity.pool import Pool
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run as sft

pytestmark = pytest.mark.process
DDP = (("engine", "ddp"),)
FSDP = (("engine", "fsdp2"),)
RECOMPUTING = (*DDP, ("recompute_granularity", "full"))
FAULTS = [
    Fault("moe dp2 packed", "torch_router_mean", answers=("layers.3.mlp.router",), options=FSDP),
    Fault("dense dp2", "torch_own_count", answers=("loss",), options=DDP),
    Fault("dense dp2 packed", "torch_joined_documents", answers=("layers.0.self_attention.core",), options=DDP),
    Fault("dense dp2", "torch_scaled_output", 2, DOWN, "dp", 1, ("layers.2.mlp.linear_fc2",), options=FSDP),
    Fault("dense dp2", "torch_scaled_gradient", 1, "mlp.gate_proj", answers=(f"layers.1.{FC1}",), options=DDP),
    Fault("dense dp2", "torch_scaled_gradient", 2, "self_attn.q_proj", answers=(f"layers.2.{QKV}",), options=FSDP),
    Fault(
        "dense dp2", "torch_recomputed_otherwise", 2, "mlp.up_proj", answers=(f"layers.2.{FC1}",), options=RECOMPUTING
    ),
    Fault("dense dp2", "torch_no_reduction", answers=("@gradient",), options=DDP),
    Fault("dense dp2", "torch_local_norm", answers=("@clipped_gradient",), options=FSDP),
    Fault("dense dp2", "torch_lost_update", 1, DOWN, answers=("layers.1.mlp.linear_fc2",), options=DDP),
    Fault("dense dp2", "torch_decayed_vectors", answers=("@weight",), options=FSDP),
]
STEPS = [
    "deepseek_v3 dp2 packed engine=fsdp2",
    "gpt_oss dp2 engine=ddp",
    "mixtral dp2 packed engine=ddp",
    "gemma3_text dp2 engine=ddp",
    "gemma2 dp2 packed engine=fsdp2",
    "qwen3_next dp2 engine=ddp",
    "olmoe dp2 engine=ddp",
    "phi3 dp2 engine=fsdp2",
    "glm4_moe dp2 engine=ddp",
    "llama-bias dp2 engine=zero2",
    "qwen2_moe dp2 engine=fsdp2",
    "hunyuan_v1_moe dp2 engine=ddp",
    "olmo2 dp2 engine=ddp",
    "granite dp2 engine=ddp",
    "dense-tied dp2 engine=zero3",
    "minimax_m2 dp2 packed engine=ddp",
    "ernie4_5_moe dp2 engine=ddp",
    "deepseek_v2 dp2 engine=ddp",
    "dense dp2 packed engine=zero1",
    "dense dp4 engine=fsdp2",
    "dense dp2 engine=ddp recompute_granularity=full",
]
"""A case, and options of the run."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Planted:
    """Plants faults in the session's ranks."""
    return Planted(pool, tmp_path_factory.mktemp("bisect"))


@pytest.mark.parametrize(
    "text", ["moe dp2 packed engine=fsdp2", *(pytest.param(t, marks=pytest.mark.slow) for t in STEPS)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_no_false_alarm(text: str, dtype: str, tmp_path: Path, pool: Pool) -> None:
    """And nearly everything is compared."""
    options = dict(word.split("=") for word in text.split() if "=" in word)
    case = parse(" ".join(word for word in text.split() if "=" not in word))
    model = models.build(case.variant, tmp_path / "model")
    task = Task(case, model, tmp_path / "trace", options={**options, "torch_dtype": dtype})
    pool.run("tests.bisection.ranks:record", task, case.world)
    found = verdict(task)
    bad = [f"{v.kind} {v.name} {v.rank}: {v.difference:.2e} > {v.expected:.2e}" for v in found.verdicts if v.bad]
    assert not bad and not found.skipped, (bad[:10], found.skipped)
    kinds = {v.kind for v in found.verdicts}
    assert kinds | {CLIPPED} == set(KINDS) - {RECOMPUTED, GATHERED} and (CLIPPED in kinds) == ("zero" not in text)
    compared = {v.name for v in found.verdicts if v.kind == "output"}
    assert {"embedding", "head", "layers.0", "layers.1", "final_layernorm"} <= compared


@pytest.mark.parametrize("fault", [FAULTS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS[1:])], ids=str)
def test_faults_are_found_at_their_place(fault: Fault, planted: Planted) -> None:
    answer = planted.answer(fault)
    assert answer.right, answer


@pytest.mark.slow
def test_the_command(tmp_path: Path, pool: Pool) -> None:
    """A run on FSDP2 in other sizes, then against a run of the native engine."""
    inputs = write_inputs(tmp_path)
    options = ["--global_batch_size", "8", "--max_steps", 1]
    sft(inputs, tmp_path / "fsdp2", "--engine", "fsdp2", *options)
    sft(inputs, tmp_path / "native", *options)
    run = tmp_path / "fsdp2" / "config.yaml"
    report = tmp_path / "report"
    words = [str(run), "--output", str(report), "--keep_trace", "--layout", "dp2"]
    command = "tests.bisection.test_steps:run_command"
    [code] = pool.run(command, words, 1)
    facts = json.loads((report / "bisect.json").read_text())
    assert (code, facts["layout"], facts["agrees"]) == (0, "DP2", True)
    assert Trace.open(report / "trace").about["layout"]["world_size"] == 2
    [code] = pool.run(command, [*words, "--engine", "auto"], 1)  # DDP, chosen by size
    assert code == 0
    [code] = pool.run(command, [*words, "--against", str(tmp_path / "native")], 1)
    facts = json.loads((report / "bisect.json").read_text())
    assert (code, facts["against"]) == (0, str(tmp_path / "native"))


def test_what_is_not_recorded(tmp_path: Path) -> None:
    """Before anything is read."""
    run = tmp_path / "run.yaml"
    run.write_text("task: sft\nmodel: nowhere\ndataset: [nothing]\nengine: zero2\n")
    with pytest.raises(ConfigError, match='(?s)is not a layout of --engine zero2.*"dp4", or --engine megatron'):
        bisect([str(run), "--layout", "tp2 dp2"])
