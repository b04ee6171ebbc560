"""`--deterministic true`: what is set before a library reads it, what is refused, and two runs bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig, load_config
from megaswift.engine import determinism
from megaswift.errors import ConfigError
from megaswift.parallel.layout import Layout
from megaswift.run.engines import native_engine_settings
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

ON = SwiftConfig(task="sft", model="m", deterministic=True)
OFF = SwiftConfig(task="sft", model="m")


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's switches as they were, afterwards."""
    for name in determinism.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


@pytest.mark.usefixtures("switches")
def test_what_is_set() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": "1"}
    determinism.enable_determinism(False, environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": "1"}
    assert not torch.are_deterministic_algorithms_enabled()
    determinism.enable_determinism(True, environ)
    assert environ == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",  # from docs.nvidia.com/cuda/cublas: this or :4096:8
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "^NVLS",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
        "OTHER": "1",
    }
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


def test_variables_that_prevent_it_are_refused() -> None:
    environ = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "NCCL_ALGO": "NVLS", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert determinism.determinism_environment_problems(False, environ) == []
    with pytest.raises(ConfigError) as error:
        determinism.enable_determinism(True, environ)
    assert [p.what for p in error.value.problems] == ["NVTE_ALLOW_NONDETERMINISTIC_ALGO=1", "NCCL_ALGO=NVLS"]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("grpo", ["--rollout_backend", "vllm", "--reward_funcs", "x.py:f"]),
        ("sft", ["--torch_compile", "true", "--engine", "ddp"]),
    ],
)
def test_what_cannot_be_deterministic_is_refused(task: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--deterministic true: (is not supported|conflicts) with"):
        load_config(task, ["--model", "m", "--dataset", "d", "--deterministic", "true", *words])


@pytest.mark.usefixtures("switches")
def test_a_run_sets_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaswift.run import training as module

    class Stop(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    monkeypatch.setattr("megaswift.run.build.locate_model", stop)
    for cfg, on in ((OFF, False), (ON, True)):
        with pytest.raises(Stop):
            module.run_training(cfg)
        assert torch.are_deterministic_algorithms_enabled() is on


def test_megatron_gets_the_deterministic_mode(tmp_path: Path) -> None:
    from megaswift.engine.megatron.layers.implementation import LayerImplementationChoice
    from megaswift.engine.megatron.transformer_config import _kernels

    dense, choice = (
        SimpleNamespace(experts=0, moe_layers=(False,)),
        LayerImplementationChoice("torch", "torch", "asked for"),
    )
    for cfg, on in ((ON, True), (OFF, False)):
        deterministic = native_engine_settings(cfg, Layout(1)).deterministic
        fields = _kernels(dense, cfg.model, deterministic, choice, False)  # type: ignore[arg-type]
        assert fields["deterministic_mode"] is on


@pytest.mark.usefixtures("switches")
def test_an_operation_without_a_deterministic_form_is_named() -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as error:
        torch._C._nn.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), [2, 2])
    found = determinism.nondeterministic_op_error(True, error.value)
    assert found is not None and "max_unpooling2d_forward_out has no deterministic" in found.message()
    assert (
        determinism.nondeterministic_op_error(False, error.value) is None
        and determinism.nondeterministic_op_error(True, ValueError("x")) is None
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron --tp 2", "fsdp2", "ddp"])
def test_two_runs_are_equal_bit_by_bit(engine: str, tmp_path: Path) -> None:
    words = [*write_inputs(tmp_path), "--engine", *engine.split(), "--deterministic", "true", "--max_steps", "5"]
    words += ["--dataloader_num_workers", "2", "--packing", "true", "--max_length", "32"]
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        run(words, out)
    weights = [(out / "hf" / "model.safetensors").read_bytes() for out in (first, second)]
    assert weights[0] == weights[1]
    state = [sorted(p for p in (out / "checkpoints" / "step-5" / "engine").rglob("*")) for out in (first, second)]
    assert [p.name for p in state[0]] == [p.name for p in state[1]] and os.path.getsize(state[0][0]) > 0
