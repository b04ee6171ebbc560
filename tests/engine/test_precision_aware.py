"""The precision-aware optimizer's checkpoints, with a stand-in for Transformer Engine's FusedAdam: they resume, other
optimizers read them, and no state is read as one of another kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megaswift.bridge.checkpoint.chunk_files import RankTensorChunk, dcp_save_rank_tensor_chunks, plan_chunk_reads
from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.megatron.optim.bf16_remainders import join_bf16_remainder, split_bf16_remainder
from tests.engine.checkpoint_worker import Result, Run
from tests.engine.fused_adam import kernels_main, kernels_parts
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.pool import Pool

AWARE, PLAIN = "tests.engine.fused_adam:job", "tests.engine.fused_adam:plain_job"
BF16 = {"torch_dtype": "bfloat16"}


def drawn(count: int) -> Tensor:
    """Float32 of all bit patterns but infinities and NaN, ties and edges of the remainder among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    bits[:4096] = (bits[:4096] & 0xFFFF0000) | np.resize([0x8000, 0x7FFF, 0x8001, 0, 0xFFFF, 1], 4096)
    found = torch.from_numpy(bits.view(np.float32).copy())
    return found[found.isfinite() & (found.abs() < 1e38)]


def test_the_two_parts_are_the_kernels() -> None:
    main = drawn(200_000)
    weight, remainder = kernels_parts(main)
    assert torch.equal(join_bf16_remainder(weight, remainder).view(torch.int32), main.view(torch.int32))
    for half in (weight, torch.zeros_like(weight)):  # weights that are no rounding of the main weights are replaced
        ours = split_bf16_remainder(main, half)
        assert torch.equal(kernels_main(*ours).view(torch.int32), main.view(torch.int32))
    assert torch.equal(split_bf16_remainder(main, weight)[0], weight) and torch.equal(
        split_bf16_remainder(main, weight)[1], remainder
    )


def test_weights_that_torch_rounded_stay_and_ties_move_by_one_unit() -> None:
    main = drawn(200_000)
    weight, remainder = split_bf16_remainder(main, main.bfloat16())
    assert torch.equal(weight, main.bfloat16())
    apart = (kernels_main(weight, remainder).view(torch.int32).long() - main.view(torch.int32).long()).abs()
    ties = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert apart.max() == 1 and not apart[~ties].any() and 0 < int(apart.sum()) < int(ties.sum())


def runs(pool: Pool, words: str, folder: Path) -> object:
    """A function that gives rank 0's result of a `Run` with these changes."""
    case = parse(words)
    base = Run(case, folder, options=dict(BF16))

    def go(job: str, **changes: object) -> Result:
        options = BF16 | ({"precision_aware_optimizer": True} if job == AWARE else {})
        return pool.run(job, replace(base, options=options, **changes), case.world)[0]

    return go


def same(a: Result, b: Result) -> None:
    for name in a.weights:
        assert torch.equal(a.weights[name], b.weights[name]), name
        for kind in a.moments:
            assert torch.equal(a.moments[kind][name], b.moments[kind][name]), (kind, name)


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    ["dense single do", *(pytest.param(w, marks=pytest.mark.slow) for w in ("dense dp2 do", "moe ep2 tp2 sp do"))],
)
def test_save_and_load(words: str, pool: Pool, tmp_path: Path) -> None:
    case = parse(words)
    folder, step = build_model(case.variant, tmp_path / "model"), tmp_path / "engine"
    go = runs(pool, words, folder)
    saved = go(AWARE, last=2, save=step, extra=2)
    source = TorchDistSource(step)
    assert {source.dtype(key) for key in source.keys() if key.startswith("optimizer.")} == {torch.float32}  # noqa: SIM118
    assert any(not torch.equal(t.bfloat16().float(), t) for t in saved.moments["main"].values())
    resumed = go(AWARE, load=step, first=2, last=4)
    assert (resumed.losses, resumed.norms, resumed.step) == (saved.losses[2:], saved.norms[2:], 4)
    same(go(AWARE, load=step), saved)
    plain = go(PLAIN, load=step)
    same(plain, saved)
    go(PLAIN, load=step, save=tmp_path / "plain")
    same(go(AWARE, load=tmp_path / "plain"), saved)


@pytest.mark.parametrize(
    ("key", "saved", "wanted", "fits"),
    [
        ("optimizer.state.param.w", torch.int16, torch.float32, False),
        ("optimizer.state.exp_avg.w", torch.bfloat16, torch.float32, True),
        ("optimizer.state.exp_avg.w", torch.float32, torch.bfloat16, False),
        ("optimizer.state.exp_avg.w", torch.uint8, torch.float32, False),
        ("w", torch.float32, torch.bfloat16, True),
        ("w", torch.bfloat16, torch.float32, True),
        ("w", torch.int16, torch.bfloat16, False),
    ],
)
def test_a_state_of_another_kind_is_refused(
    key: str, saved: torch.dtype, wanted: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    dcp_save_rank_tensor_chunks(tmp_path, [RankTensorChunk(key, (4,), (0,), torch.zeros(4, dtype=saved))])
    items, problems = plan_chunk_reads(
        read_torch_dist_metadata(tmp_path), [RankTensorChunk(key, (4,), (0,), torch.zeros(4, dtype=wanted))]
    )
    assert bool(items) == (not problems) == fits
    if not fits:
        names = [str(t).removeprefix("torch.") for t in (saved, wanted)]
        assert problems[0].rule.startswith(f"has dtype {names[0]} in the checkpoint and {names[1]} in this run")


@pytest.mark.process
def test_remainders_are_not_read_as_main_weights(pool: Pool, tmp_path: Path) -> None:
    """A folder as Megatron-Core's own saving, or an earlier version, wrote it."""
    folder, step = build_model("dense", tmp_path / "hf"), tmp_path / "engine"
    go = runs(pool, "dense dp2 do", folder)
    saved = go(PLAIN, last=1, save=step)
    from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
    from tests.bridge.folders import plan_of

    plan = plan_of(folder)
    write_checkpoint_hf_metadata(
        tmp_path / "model", plan.spec.hf_config, dict.fromkeys(plan.hf_shapes, torch.bfloat16), folder
    )
    key = "optimizer.state.param.decoder.final_layernorm.weight"
    index = read_torch_dist_metadata(step)
    table = index.state_dict_metadata[key]
    object.__setattr__(table.properties, "dtype", torch.int16)
    import pickle

    (step / ".metadata").write_bytes(pickle.dumps(index))
    assert "has dtype int16 in the checkpoint and float32" in go(PLAIN, load=step).error
    source = open_weights(tmp_path, torch.float32)
    assert torch.equal(source.slice("model.norm.weight"), saved.weights["model.norm.weight"].float())
    assert json.loads((step / "engine.json").read_text())["dtype"] == "bfloat16"
