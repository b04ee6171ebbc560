"""Whole commands with `torch.cuda.is_available()` true: the branches for CUDA run, no tensor is on the wrong device,
and the host waits in a step only where the table says.

An H200 answers (h200.py), tensors are marked as the device's (tests/placement), NCCL's groups are gloo's, and
Transformer Engine's kernels are torch functions (tests/te). Not here, because the stand-in lacks it: Triton kernels and
torch.compile, --profile (CUPTI), FSDP2 and DeepSpeed (compiled code asks a tensor for its device), Transformer Engine's
grouped products, several ranks, vLLM, speed and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.fake_cuda.faults import FAULTS
from tests.parity.pool import PRELOAD, Pool, RankError
from tests.trainers import inputs

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("fake_cuda")]
RELEASE = "2.20.2"
USUAL = "--max_steps 3 --logging_steps 1 --report_to none --max_length 32"
TASKS = {
    "grpo": "--num_generations 2 --max_completion_length 4 --beta 0.1 --reward_funcs format "
    "--rollout_backend transformers"
}
STEP = {"sync megaswift.device_copy:HostCopy.wait": 1}
"""Losses and norms, in one read."""
NORM = {"copy megatron.core.utils:local_multi_tensor_l2_norm": 1}
"""Without Transformer Engine, Megatron-Core's norm of the gradients sends a number to the device."""
SAMPLER = {
    "read megaswift.data.prompts.collate:gather_completion_values": 1,
    "read megaswift.rollout.decoding:_completions": 3,
    "read megaswift.rollout.decoding:_completions.<locals>.<genexpr>": 2,
    "read megaswift.rollout.decoding:decode_batch": 4,
}
COMMANDS: dict[str, dict[str, int]] = {
    "sft": STEP,
    "dpo": STEP,
    "sft --fit true": STEP,
}
"""Command -> waits of its last step, on Transformer Engine's layers."""
SLOW: dict[str, dict[str, int] | None] = {
    "sft --torch_dtype bfloat16 --fp8_format e4m3 --fp8_recipe tensorwise": None,
    "sft --train_type qlora": STEP,
    "dpo --offload_reference true": None,
    "sft --precision_aware_optimizer true": STEP,
    "sft --optimizer_cpu_offload true": None,
    "sft --torch_dtype float16": STEP,
    "sft --async_save true --save_steps 1": None,
    "grpo": STEP | SAMPLER,
    "grpo --offload_model true --offload_optimizer true --rollout_sleep true": None,
}
"""The same; None: looked at for tensors on the wrong device only."""
TORCH_LAYERS: dict[str, dict[str, int] | None] = {
    "sft": STEP | NORM,
    "sft --engine ddp": STEP,
    "sft --optimizer_cpu_offload true": None,
    "sft --torch_dtype float16": STEP | NORM,
    "sft --async_save true --save_steps 1": None,
    "grpo": STEP | NORM | SAMPLER,
}
"""The same without Transformer Engine."""


def pool_of(release: str) -> Pool:
    """Ranks with one H200, and a release of Transformer Engine unless it is empty."""
    return Pool(("tests.fake_cuda.preload", *PRELOAD), {"MEGASWIFT_TE_RELEASE": release})


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pool_of(RELEASE) as made:
        yield made


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[Pool]:
    with pool_of("") as made:
        yield made


def run(pool: Pool, command: str, folder: Path, fault: str = "") -> dict[str, int]:
    """The waits of the last step; the run has ended well, with metrics and an export."""
    task, *more = command.split()
    if task == "dpo":
        inputs.write_preferences(folder, 16)
        words = inputs.preference_inputs(folder, task)
    else:
        words = inputs.write_inputs(folder, hidden_size=128, intermediate_size=128, head_dim=32)
    out = folder / "out"
    words += [*USUAL.split(), *TASKS.get(task, "").split(), "--output_dir", str(out), *more]
    [waits] = pool.run("tests.fake_cuda.commands:work", (task, words, fault), 1)
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")][:3] == [1, 2, 3]
    return waits


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_gpu(command: str, pool: Pool, tmp_path: Path) -> None:
    assert run(pool, command, tmp_path) == COMMANDS[command]
    assert (tmp_path / "out/hf/model.safetensors").is_file()


def test_adapters_are_trained_and_merged_on_a_gpu(pool: Pool, tmp_path: Path) -> None:
    """`sft --train_type lora`, then `export`."""
    assert run(pool, "sft --train_type lora", tmp_path) == STEP
    [adapter] = (path.parent for path in (tmp_path / "out").glob("*/adapter_config.json"))
    words = ["--adapters", str(adapter), "--merge_lora", "true", "--output_dir", str(tmp_path / "merged")]
    pool.run("tests.fake_cuda.commands:work", ("export", words, ""), 1)
    merged, base = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "model"))
    assert merged.keys() == base.keys()
    assert any(not merged[name].equal(base[name]) for name in base)


SEEN: dict[str, Any] = {
    "read_in_step": {"read megaswift.engine.objective:GlobalBatchLossCallback.__call__": 1},
    "tensor_in_host_memory": "WrongDevice: aten.mul.Tensor of device",
    "pinned_device_tensor": "WrongDevice: pin_memory of a tensor of the device",
    "wrong_name_where_batches_are_pinned": "'Tensor' object has no attribute 'pin_memorys'",
    "wrong_name_in_the_report": "has no attribute 'get_device_names'",
    "wrong_name_in_random_states": "has no attribute 'get_rng_states'",
}
"""Planted fault -> the waits more than usual, or the error."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, pool: Pool, tmp_path: Path) -> None:
    seen = SEEN[fault]
    if isinstance(seen, dict):
        assert run(pool, "sft", tmp_path, fault) == STEP | seen
        return
    with pytest.raises(RankError) as caught:
        run(pool, "sft", tmp_path, fault)
    assert seen in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", SLOW)
def test_more_commands_on_a_gpu(command: str, pool: Pool, tmp_path: Path) -> None:
    waits = run(pool, command, tmp_path)
    assert SLOW[command] in (None, waits), waits


@pytest.mark.slow
@pytest.mark.parametrize("command", TORCH_LAYERS)
def test_commands_without_transformer_engine(command: str, torch_pool: Pool, tmp_path: Path) -> None:
    waits = run(torch_pool, command, tmp_path)
    assert TORCH_LAYERS[command] in (None, waits), waits
