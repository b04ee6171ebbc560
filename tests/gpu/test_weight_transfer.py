"""Weights from the memory of one GPU into that of other processes, over CUDA IPC and NCCL: bit for bit, and into vLLM.

On a CPU the same runs over memory shared by processes and over gloo.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

from megaswift.rollout.weight_transfer.buckets import tensor_checksum
from megaswift.rollout.weight_transfer.sender import TransferSettings, WeightSender
from megaswift.rollout.weight_transfer.transports import CUDA_IPC, GLOO, NCCL, SHARED_MEMORY, SLOTS, CudaIpcSender
from megaswift.rollout.weight_transfer.vllm_servers import EXTENSION
from tests.rollout.real_servers import assert_on_policy, free_port, grpo, running, write_wide_model
from tests.rollout.test_weight_transfer import model_weights
from tests.rollout.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.process]
FOUND = torch.cuda.device_count()
ON_CPU = [pytest.mark.slow]
ON_ONE = [pytest.mark.gpu, pytest.mark.skipif(FOUND < 1, reason="no CUDA device")]
ON_TWO = [pytest.mark.gpu, pytest.mark.skipif(FOUND < 2, reason="needs two CUDA devices")]
GAP = 1e-2
"""Between log-probabilities in float32 of two programs whose products may use TF32."""


@pytest.mark.parametrize(
    ("transport", "ours", "theirs"),
    [
        pytest.param(SHARED_MEMORY, "cpu", ("cpu", "cpu"), marks=ON_CPU),
        pytest.param(GLOO, "cpu", ("cpu", "cpu"), marks=ON_CPU),
        pytest.param(CUDA_IPC, "cuda:0", ("cuda:0", "cuda:0"), marks=ON_ONE),
        pytest.param(NCCL, "cuda:0", ("cuda:1",), marks=ON_TWO),
    ],
)
def test_bits_arrive_in_other_processes(transport: str, ours: str, theirs: tuple[str, ...], tmp_path: Path) -> None:
    """Ten syncs of more buckets than slots, the sixth with a tensor for which the slots have to grow."""
    workers = WorkerProcesses(theirs)
    asked = TransferSettings(transport, len(theirs), 60.0, device=ours, bucket_bytes=400)
    sender = WeightSender(asked, tmp_path / "buckets", workers.connect, workers.receive, workers.held)
    for seed in range(10):
        sent = [(name, tensor.to(ours)) for name, tensor in model_weights(seed)]
        if seed >= 5:
            sent.append(("lm_head.weight", torch.full((300, 7), float(seed), device=ours)))
        sender.send(iter(sent))
        assert workers.arrived == [{name: tensor_checksum(tensor.cpu()) for name, tensor in sent}] * len(theirs)
        assert sender.statistics.buckets > SLOTS
    assert sender._sides is not None
    side = sender._sides[1]
    if isinstance(side, CudaIpcSender):
        assert {slot: len(handles) for slot, handles in side.handles.items()} == dict.fromkeys(
            range(SLOTS), len(theirs)
        )
    sender.close()
    workers.close()


@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("transport", "visible"),
    [
        pytest.param(SHARED_MEMORY, "", marks=ON_CPU),
        pytest.param(CUDA_IPC, "0", marks=ON_ONE),
        pytest.param(NCCL, "1", marks=ON_TWO),
    ],
)
def test_a_run_is_sampled_by_a_server_of_vllm(transport: str, visible: str, tmp_path: Path) -> None:
    """Each step's completions have the log-probabilities of the trainer's weights."""
    model = tmp_path / "model"
    write_wide_model(model)
    port = free_port()
    words = ("vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32", "--enforce-eager")
    words = (*words, "--max-model-len", "96", "--logprobs-mode", "processed_logprobs", "--load-format", "dummy")
    words = (*words, "--worker-extension-cls", EXTENSION, "--gpu-memory-utilization", "0.3")
    environ = {"CUDA_VISIBLE_DEVICES": visible} if visible else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(words, port, tmp_path / "log", VLLM_SERVER_DEV_MODE="1", **environ) as url:
        server = ("--rollout_backend", "vllm_server", "--rollout_server_url", url)
        lines = grpo(model, tmp_path, *server, "--rollout_weight_transport", transport)
    assert_on_policy(lines, GAP)
