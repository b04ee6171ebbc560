"""Bytes of preference learning, reward models and classifiers against those of real steps.

Covers: megaswift/memory/objective.py, megaswift/memory/state_bytes.py, megaswift/memory/activation_bytes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.memory.activation_bytes import BATCH, kept_by_chunk, last_stage_head, passes_in_flight
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels, MicrobatchSetup
from megaswift.memory.state_bytes import HeldBytes
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes
from megaswift.run.checks.fit import step_options
from megaswift.run.tasks import TASKS
from tests.memory.counted_ranks import CONFIG, MOE, Held, model_folder
from tests.memory.counted_tasks import CountedTask, TaskRun
from tests.memory.of_config import estimate_of, parameters_of
from tests.memory.test_head_bytes import CHUNKS, MODEL, WHOLE
from tests.parity.cases import parse
from tests.parity.pool import Pool

KEPT = 0.01
"""Tolerance of what a step keeps."""
PEAK = 0.05
ROWS: dict[str, Any] = {"torch_dtype": "bfloat16", "max_length": 64, "per_device_train_batch_size": 2}
LORA: dict[str, Any] = {"train_type": "lora", "lora_rank": 4}
MODELS = {"dense": CONFIG, "moe": MOE}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory-models")


def computed(run: TaskRun) -> list[tuple[HeldBytes, int]]:
    """(held, kept when the first backward pass begins) of each pipeline stage."""
    cfg, spec, layout = run.setup()
    kernels = ComputeKernels(TORCH, TORCH, cfg.model.torch_dtype, False)
    parameters = parameters_of(cfg, spec, layout, kernels)
    options = step_options(cfg, layout.dp)
    setup = MicrobatchSetup(options, spec, layout, kernels, parameters.parts)
    case = parse(run.text)
    found = []
    for stage, chunks in enumerate(parameters.stages):
        sizes = sorted((kept_by_chunk(setup, chunk).total for chunk in chunks), reverse=True)
        passes = passes_in_flight(setup, stage, case.total // case.dp)
        kept = sum(sizes[i % len(sizes)] for i in range(passes))
        kept += last_stage_head(setup).kept if any(chunk.loss for chunk in chunks) else 0
        found.append((parameters._held_by(stage, options), kept + BATCH * setup.tokens))
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("task", "model", "text", "options"),
    [
        ("dpo", "dense", "pp2 packed", {}),
        pytest.param("dpo", "dense", "dp2 do packed", {}, marks=SLOW),
        pytest.param("dpo", "dense", "tp2 sp packed", {}, marks=SLOW),
        pytest.param("dpo", "dense", "cp2 packed", {}, marks=SLOW),
        pytest.param("dpo", "dense", "single", {}, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", {"offload_reference": True}, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", {"precompute_ref_log_probs": True}, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", {"reference_free": True}, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", LORA, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", {"train_type": "qlora", "lora_rank": 4}, marks=SLOW),
        pytest.param("dpo", "dense", "single packed", {"recompute_granularity": "full"}, marks=SLOW),
        pytest.param("dpo", "dense", "tp2 sp pp2 tied packed", {}, marks=SLOW),
        pytest.param("dpo", "moe", "dp2 ep2 do packed", {}, marks=SLOW),
        pytest.param("kto", "dense", "single packed", {}, marks=SLOW),
        pytest.param("kto", "dense", "tp2 sp packed", {"loss_type": ("bco",)}, marks=SLOW),
        pytest.param("orpo", "dense", "single packed", {}, marks=SLOW),
        pytest.param("cpo", "dense", "tp2 sp packed", {}, marks=SLOW),
        pytest.param("simpo", "moe", "single packed", {}, marks=SLOW),
        ("rm", "dense", "tp2 sp packed", {}),
        pytest.param("rm", "dense", "pp2 packed", {}, marks=SLOW),
        pytest.param("rm", "dense", "single packed", LORA, marks=SLOW),
        pytest.param("seq_cls", "dense", "single", {"num_labels": 3}, marks=SLOW),
        pytest.param("seq_cls", "dense", "tp2 sp", {"num_labels": 3}, marks=SLOW),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_step(
    task: str, model: str, text: str, options: dict[str, Any], pool: Pool, folders: Path
) -> None:
    """Weights, gradients, optimizer and reference exactly; what autograd keeps within a hundredth."""
    run = TaskRun(text, model_folder(folders / model, MODELS[model]), ROWS | options, task)
    ranks: list[CountedTask] = pool.run("tests.memory.counted_tasks:count_task", run, run.world)
    stages = computed(run)
    per_stage = run.world // len(stages)
    for i, (held, kept) in enumerate(stages):
        own = ranks[i * per_stage : (i + 1) * per_stage]
        for rank in own:
            assert rank.held == Held(held.weights, held.gradients, held.optimizer)
            assert rank.reference == held.reference + held.host
        # of expert-parallel ranks, which have unequal numbers of tokens, on average
        assert sum(rank.forward for rank in own) / per_stage == pytest.approx(kept, rel=KEPT)


@SLOW
@pytest.mark.process
@pytest.mark.parametrize(
    ("task", "options", "chunk"),
    [
        ("dpo", {}, CHUNKS),
        ("dpo", {}, WHOLE),
        ("dpo", {"recompute_granularity": "full"}, CHUNKS),
        ("dpo", LORA, CHUNKS),
        ("simpo", {}, CHUNKS),
        ("rm", {}, CHUNKS),
        ("rm", {"recompute_granularity": "full"}, CHUNKS),
        ("kto", {"recompute_granularity": "selective"}, WHOLE),
    ],
    ids=str,
)
def test_peaks(
    task: str, options: dict[str, Any], chunk: int, pool: Pool, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of a micro-batch, and that a reference's pass needs no more than these."""
    sizes = {"torch_dtype": "bfloat16", "max_length": 256, "per_device_train_batch_size": 2}
    run = TaskRun("dense single packed", model_folder(folders / "wide", MODEL), sizes | options, task)
    (counted,) = pool.run("tests.memory.counted_tasks:count_task_peaks", (run, chunk), 1)
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", HeadChunkSizes(chunk, chunk, 1))
    cfg, spec, layout = run.setup()
    estimate = estimate_of(cfg, spec, layout, ComputeKernels(TORCH, TORCH, "bfloat16", False))
    assert estimate.activations.total == pytest.approx(counted.training_peak, rel=PEAK)
    assert counted.scoring_peak <= counted.training_peak


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "orpo", "cpo", "simpo"])
def test_outputs_are_those_of_the_loss(task: str) -> None:
    from megaswift.config import SwiftConfig
    from megaswift.memory.objective import objective_of

    cfg = SwiftConfig(task=task, model="m")
    assert objective_of(cfg).fields == TASKS.get(task).loss(cfg).needs.names
    if task == "dpo":
        weighted = cfg.replace(use_weighting=True)
        assert objective_of(weighted).fields == TASKS.get(task).loss(weighted).needs.names
