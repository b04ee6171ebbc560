"""vLLM in the training process on one GPU: it sleeps while the model trains, and wakes with the new weights."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

from tests.rollout.real_servers import assert_on_policy, grpo, write_wide_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
GAP = 1e-2
"""Between log-probabilities in float32 of two programs whose products may use TF32."""


@pytest.mark.parametrize("train_type", ["full", "lora"])
@pytest.mark.parametrize("offload", [(), ("--offload_model", "true", "--offload_optimizer", "true")], ids=str)
def test_it_sleeps_and_wakes(train_type: str, offload: tuple[object, ...], tmp_path: Path) -> None:
    write_wide_model(tmp_path / "model")
    words = ("--rollout_backend", "vllm", "--train_type", train_type, "--vllm_gpu_memory_utilization", "0.3")
    assert_on_policy(grpo(tmp_path / "model", tmp_path, *words, "--rollout_sleep", "true", *offload), GAP)
