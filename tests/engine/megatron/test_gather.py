"""Streams of weights from every layout: the bits of the files, few messages, and nothing between replicas.

Covers: megaswift/engine/megatron/gather.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.engine.protocol import Receivers
from megaswift.parallel.layout import Layout
from tests.engine.megatron.streaming_ranks import Streamed, Streams, receivers
from tests.engine.streaming import ALL
from tests.parity.cases import Case, parse
from tests.parity.models import build
from tests.parity.pool import shared

LIMIT = 100_000
"""Bytes of a bucket: the tiny models fill several in each stage."""
LORA = {"train_type": "lora", "lora_rank": 3, "target_modules": ("all-linear",)}
SLOW = pytest.mark.slow


def streamed(case: Case, tmp_path: Path, limit: int = LIMIT, to: tuple[Receivers, ...] = ALL, **options: Any) -> Any:
    """(Each rank's streams, the model's folder)."""
    folder = build(case.variant, tmp_path / "model")
    job = Streams(case, folder, tmp_path / f"store-{case.world}", limit, to, options)
    return shared("").run("tests.engine.megatron.streaming_ranks:stream", job, case.world), folder


def layout_of(case: Case) -> Layout:
    """The case's layout."""
    return Layout(case.world, case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names in the same order, and the same bits."""
    assert list(found) == list(wanted)
    assert [n for n, t in found.items() if t.dtype != wanted[n].dtype or not torch.equal(t, wanted[n])] == []


def assert_only_receivers_have(ranks: list[Streamed], case: Case, wanted: dict[str, torch.Tensor]) -> None:
    """Every kind of receivers, on every rank."""
    for to in ALL:
        getting = receivers(layout_of(case), to)
        for rank, streams in enumerate(ranks):
            assert_same(streams.weights[to], wanted if rank in getting else {})


def bucket_count(streams: Streamed, limit: int) -> int:
    """Return how many buckets the groups of tensors fill, in order and stage by stage."""
    count = 0
    held = limit
    stage = -1
    for size, where in zip(streams.sizes, streams.stages, strict=True):
        if where != stage or held + size > limit:
            count += 1
            held = 0
        held += size
        stage = where
    return count


AGREEMENT = 6
"""Messages of a stream besides the tensors: the stages and dtypes of all ranks at first, a connection."""


def assert_few_messages(ranks: list[Streamed], case: Case) -> None:
    """For each bucket a rank takes part in one exchange between stages, one of tensor-parallel ranks and one for each
    expert-parallel rank, or in one message for each rank that sends. All stay within the replica, or within an
    expert-parallel group."""
    layout = layout_of(case)
    count = bucket_count(ranks[0], LIMIT)
    largest = max(LIMIT, *ranks[0].sizes)
    assert max(streams.most_held for streams in ranks) <= 2.1 * largest, "a bucket, and this rank's shards of it"
    assert 2 * count <= len(ranks[0].sizes)
    for rank, streams in enumerate(ranks):
        replica = [r for r in range(case.world) if layout.coordinates(r).dp == layout.coordinates(rank).dp]
        experts = {r for stage in layout.group("pp", rank) for r in layout.group("etp-ep", stage)}
        for to, senders in {"all": 2 + case.ep * case.etp, "replicas": case.tp + case.ep * case.etp}.items():
            calls = streams.calls[to]
            # of several receivers, each gets its own message
            most = max(1, len(receivers(layout, "replicas") & experts)) if to == "replicas" else 1
            assert len(calls) <= count * senders * most + AGREEMENT, to
            named = [call for call in calls if call.name in ("send", "recv")]
            assert {call.peer for call in named} <= {*replica, *experts}
        assert len(streams.calls["rank0"]) <= count * (case.tp + case.ep * case.etp) + AGREEMENT
        groups = {call.group.ranks for call in streams.calls["all"] if call.name != "all_reduce"}
        assert groups <= {tuple(layout.group(axes, rank)) for axes in ("pp", "tp", "etp-ep")}


LAYOUTS = [
    "moe tp2 pp2 ep2",
    *(
        pytest.param(words, marks=SLOW)
        for words in (
            "dense tp2",
            "dense pp2",
            "dense dp2",
            "dense cp2",
            "dense tied tp2 pp2 vpp2",
            "dense tp2 dp2",
            "moe ep2 dp2",
            "moe ep4 dp4",
            "moe tp2 ep4 dp2",
            "moe tp2 etp2",
            "moe tp2 ep2 etp2 dp2",
            "moe pp2 ep2 dp2",
            "gpt_oss tp2 ep2 dp2 sp",
            "deepseek_v3 tp2 pp2 ep2",
            "qwen3_next tp2 pp2",
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize("words", LAYOUTS)
def test_receivers_get_the_bits_of_the_files(words: str, tmp_path: Path) -> None:
    """In the order of the weight plan, whoever receives, in few messages; other ranks get nothing."""
    case = parse(words)
    ranks, folder = streamed(case, tmp_path)
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(ranks[0].order) <= set(stored)
    assert set(stored) - set(ranks[0].order) <= ({"lm_head.weight"} if case.tied else set())
    assert_only_receivers_have(ranks, case, {name: stored[name] for name in ranks[0].order})
    assert_few_messages(ranks, case)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "options"),
    [
        pytest.param("moe tp2 pp2 ep2", LORA, marks=SLOW),
        pytest.param("moe tp2 ep2 etp2 dp2", LORA, marks=SLOW),
        pytest.param("dense tp2 dp2", {**LORA, "use_dora": True}, marks=SLOW),
        pytest.param("glm4_moe-mtp tp2 sp pp2 ep2", {"mtp_num_layers": 1}, marks=SLOW),
        pytest.param("moe-nf4 tp2 pp2 ep2", {**LORA, "train_type": "qlora"}, marks=SLOW),
    ],
    ids=["lora", "lora-etp", "dora", "mtp", "qlora"],
)
def test_every_layout_streams_what_one_rank_does(words: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Adapters merged in, layers for multi-token prediction, weights in four bits."""
    case = parse(words)
    alone, _ = streamed(parse(f"{case.variant} single"), tmp_path, **options)
    ranks, _ = streamed(case, tmp_path, **options)
    assert_only_receivers_have(ranks, case, alone[0].weights["rank0"])
