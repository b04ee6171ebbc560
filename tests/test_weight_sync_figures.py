"""The table of messages of a weight sync: simulated ranks are counted as real ones are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import weight_sync_figures as figures
from tests.engine.megatron.streaming_ranks import Streams
from tests.parity.cases import parse
from tests.parity.models import build
from tests.parity.pool import shared

LIMIT = 100_000
MEASURED = json.dumps(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }
)
"""The model whose messages were counted on four gloo ranks."""
RUN = figures.Run("", "--tp 2 --pp 2 --ep 2 --torch_dtype float32", 4)


def simulated(_: int, __: int, job: tuple[figures.Run, int]) -> dict[str, figures.Count]:
    """Count a rank's syncs without the other ranks (in a process of its own)."""
    from megaswift.engine import buckets
    from megaswift.simulator.groups import register, use_torch_collectives
    from megaswift.simulator.meta import compute_on_meta

    compute_on_meta()
    use_torch_collectives()
    buckets.DEVICE_BUCKET = LIMIT
    recorder = figures.Recorder()
    register(recorder, ())
    return {str(to): count for to, count in figures.streamed(*job, recorder, ("all", "replicas")).items()}


def written(_: int, __: int, runs: tuple[figures.Run, ...]) -> str:
    """The table (in a process of its own)."""
    return figures.table(runs)


@pytest.mark.slow
@pytest.mark.process
def test_simulated_ranks_are_counted_as_real_ones_are(tmp_path: Path) -> None:
    """Messages and bytes of each of four ranks."""
    folder = build("moe", tmp_path / "model")
    job = Streams(parse("moe tp2 pp2 ep2"), folder, tmp_path / "store", LIMIT)
    real = shared("").run("tests.engine.megatron.streaming_ranks:stream", job, 4)
    run = replace(RUN, model=str(folder))
    for rank, streams in enumerate(real):
        [found] = shared("").run("tests.test_weight_sync_figures:simulated", (run, rank), 1)
        for to, count in found.items():
            wanted = figures.Count()
            for call in streams.calls[to]:
                wanted.messages += 1
                wanted.received += max(0, call.received_bytes - call.sent_bytes)
            assert (count.messages, count.received) == (wanted.messages, wanted.received) and count.waits == 0


def test_tensors_alone_are_counted_as_they_were_measured(tmp_path: Path) -> None:
    """On four gloo ranks, tensor by tensor: 828 receptions and 1,985 broadcasts on rank 0 of a model of 843 tensors; a
    rank of another replica takes part in the broadcasts."""
    (tmp_path / "config.json").write_text(MEASURED)
    first, last = figures.tensor_by_tensor(figures.Run(str(tmp_path / "config.json"), "--pp 2 --ep 2", 4))
    assert (first.messages, first.waits) == (828 + 1985, 828 // 2 + 1985 - 843)
    assert (last.messages, last.waits) == (1985, 1985 - 843)


def test_the_page_has_the_table() -> None:
    page = figures.PAGE.read_text(encoding="utf-8")
    assert figures.HEAD in page and all(f"{run.world} ranks" in page for run in figures.RUNS)


@pytest.mark.slow
@pytest.mark.process
def test_the_row_of_eight_ranks_is_that_of_the_page() -> None:
    """Every cell, of the first rank and of the last."""
    [found] = shared("").run("tests.test_weight_sync_figures:written", figures.RUNS[:1], 1)
    first, last = found.removeprefix(figures.HEAD).splitlines()[1:]
    assert "8 ranks | 0 |" in first and f"{first}\n{last}\n" in figures.PAGE.read_text(encoding="utf-8")
