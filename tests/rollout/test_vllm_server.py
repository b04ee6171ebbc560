"""vLLM servers, by a server that speaks as vLLM does: weights in buckets where workers have the extension, seeds.

Covers: megaswift/rollout/backends/vllm_server_sampler.py, megaswift/rollout/weight_transfer/vllm_servers.py,
megaswift/rollout/weight_transfer/vllm_worker_extension.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.errors import ConfigError
from megaswift.rollout.weight_transfer import vllm_servers
from tests.rollout.sampling_server import Vllm, VllmWithExtension, serving
from tests.rollout.test_servers import SAMPLING, SEEDS, client
from tests.rollout.test_transformers import PROMPTS, filled, weights

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(("transport", "used"), [("auto", "shared_memory"), ("gloo", "gloo"), ("folder", "a folder")])
def test_two_vllm_servers_are_sent_buckets(
    transport: str, used: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers in all; of the last sync only what has changed."""
    monkeypatch.setattr(vllm_servers, "BUCKET_BYTES", 20000)
    alone = filled(model, batch_size=1)
    want = alone.generate(PROMPTS, SAMPLING, SEEDS)
    kind = Vllm if transport == "folder" else VllmWithExtension
    with serving(kind(model)) as first, serving(kind(model)) as second:
        made: Any = client(
            "vllm_server",
            model,
            first,
            second,
            sync_folder=tmp_path / "sync",
            weight_transport=transport,
            changed_weights_only=transport == "gloo",
        )
        assert made.weight_path.startswith(used)
        altered = [(n, t + 0.1 if "layers.0.mlp" in n else t) for n, t in weights(model)]
        made.update_weights(altered)
        assert made.generate(PROMPTS, SAMPLING, SEEDS) != want
        made.update_weights(weights(model))
        assert made.generate(PROMPTS, SAMPLING, SEEDS) == want
        if made.sender is not None:
            sent = sum(t.nbytes for n, t in altered if transport == "auto" or "layers.0.mlp" in n)
            assert sent <= made.sender.statistics.sent_bytes < sent + 16 * len(altered)
        made.close()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("seeded", [True, False])
def test_a_vllm_server_draws_by_itself_where_requests_have_no_seeds(seeded: bool, model: Path, tmp_path: Path) -> None:
    backend = Vllm(model)
    with serving(backend) as url:
        made = client("vllm_server", model, url, sync_folder=tmp_path / "sync", seed_requests=seeded)
        made.update_weights(weights(model))
        made.generate(PROMPTS, SAMPLING, SEEDS)
    asked = [body for path, body in backend.calls if path == "/v1/completions"]
    assert sorted(body.get("seed", -1) for body in asked) == (sorted(SEEDS) if seeded else [-1] * len(PROMPTS))


def test_servers_without_the_extension_are_told_how_to_start(model: Path, tmp_path: Path) -> None:
    """Where a transport, or only what has changed, was asked for."""
    with serving(Vllm(model)) as url:
        for asked in ({"weight_transport": "gloo"}, {"changed_weights_only": True}):
            with pytest.raises(ConfigError, match="without the worker extension") as caught:
                client("vllm_server", model, url, sync_folder=tmp_path, **asked)
            assert "--worker-extension-cls megaswift.rollout" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("device", "workers", "transport"),
    [
        ("cuda:0", [("cuda", "here", "GPU-a GPU-b"), ("cuda", "here", "GPU-b GPU-a")], "cuda_ipc"),
        ("cuda:0", [("cuda", "here", "GPU-a GPU-b"), ("cuda", "here", "GPU-b")], "nccl"),
        ("cuda:0", [("cuda", "here", "GPU-a"), ("cuda", "there", "GPU-a")], "nccl"),
        ("cuda:0", [("cuda", "here", "GPU-a"), ("cpu", "here", "")], "shared_memory"),
        ("cpu", [("cuda", "here", "GPU-a")], "shared_memory"),
        ("cpu", [("cpu", "here", ""), ("cpu", "there", "")], "gloo"),
    ],
)
def test_transport_by_what_all_workers_have(
    device: str, workers: list[tuple[str, str, str]], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA IPC on one machine where every worker sees the trainer's GPU (GPU-a), else NCCL; both need a GPU on either
    side."""
    facts = SimpleNamespace(uuid="GPU-a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(vllm_servers, "this_machine", lambda: "here")
    described = [{"device": d, "machine": m, "gpus": gpus.split()} for d, m, gpus in workers]
    assert vllm_servers.choose_transport(described, device) == transport
