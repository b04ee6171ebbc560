"""Checkpoints on real gloo ranks: bit-exact continuation, every change of layout, Megatron's own loader, unfit
checkpoints.

Covers: megaswift/engine/megatron/checkpoint/optimizer_states.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.checkpoint_worker import Result, Run
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.mtp import MTP
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
JOB = "tests.engine.checkpoint_worker:job"
BF16 = {"torch_dtype": "bfloat16"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model folders are made."""
    return tmp_path_factory.mktemp("models")


def make(words: str, models: Path, **fields: Any) -> Run:
    """A run of a parity case on its model."""
    case = parse(words)
    if case.variant in MTP:
        fields["options"] = {**fields.get("options", {}), "mtp_num_layers": MTP[case.variant]}
    return Run(case, build_model(case.variant, models / case.variant), **fields)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, and not trivially so."""
    assert a.keys() == b.keys() and a
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different[:5]
    assert any(t.abs().sum() > 0 for t in a.values())


def go(pool: Pool, run: Run) -> list[Result]:
    """All ranks' results."""
    return pool.run(JOB, run, run.case.world)


CONTINUED = [
    ("dense dp2 do", BF16),
    ("qwen3_5-mtp pp2 tied dp2 do", {}),
    ("dense dp2 do", OVERLAP),
    *(
        pytest.param(words, {}, marks=pytest.mark.slow)
        for words in (
            "qwen3_5_moe tp2 sp ep2 do",
            "moe tp2 sp ep2",
            "dense tp2 pp2",
            "dense pp2 tied dp2 do",
            "dense tp2 sp dp2 do",
            "dense pp2 vpp2",
            "moe ep2 dp2 do",
            "glm4_moe-mtp tp2 sp pp2 do",
        )
    ),
    *(pytest.param("dense dp2", options, marks=pytest.mark.slow) for options in (BF16, {"optimizer": "sgd"})),
    pytest.param("qwen3_5 dp2 do", BF16, marks=pytest.mark.slow),
    pytest.param("dense dp2 do", {**BF16, "optimizer_cpu_offload": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("words", "options"), CONTINUED, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_goes_on_bit_for_bit(words: str, options: dict[str, Any], pool: Pool, models: Path, tmp_path: Path) -> None:
    """5 steps = 2 steps, a save, new processes, 3 steps; with dropout, so that the random states matter."""
    start = make(words, models, dropout=0.2, options=options)
    whole = go(pool, replace(start, last=5))
    first = go(pool, replace(start, last=2, save=tmp_path / "c"))
    rest = go(pool, replace(start, load=tmp_path / "c", first=2, last=5))
    for rank, result in enumerate(whole):
        assert first[rank].losses + rest[rank].losses == result.losses
        assert first[rank].norms + rest[rank].norms == result.norms
        assert rest[rank].step == result.step == (0 if options.get("optimizer") == "sgd" else 5)
    assert_same(rest[0].weights, whole[0].weights)
    for name, moments in whole[0].moments.items():
        assert_same(rest[0].moments[name], moments)


def test_overlapped_gather_misses_no_step(pool: Pool, models: Path, tmp_path: Path) -> None:
    """Weights that would arrive with the next forward pass are exported and saved with the step that made them."""
    want = go(pool, make("dense dp2 do", models, last=2))[0].weights
    overlap = make("dense dp2 do", models, last=2, save=tmp_path / "c", options=OVERLAP)
    exported = [go(pool, run)[0].weights for run in (replace(overlap, save=None), overlap)]
    exported.append(go(pool, make("dense single", models, load=tmp_path / "c"))[0].weights)
    for weights in exported:
        assert_same(weights, want)


OFFLOADED = [
    ("dense dp2 do", {**BF16, "optimizer_offload_fraction": 0.4}),
    *(
        pytest.param(words, options, marks=pytest.mark.slow)
        for words, options in (
            ("dense dp2 do", BF16),
            ("dense dp2 do", {}),
            ("dense dp2", BF16),
            ("moe tp2 sp ep2 dp2 do", BF16),
            ("dense pp2 vpp2", {}),
            ("dense dp2 do", OVERLAP),
        )
    ),
]


@pytest.mark.parametrize(("words", "options"), OFFLOADED)
def test_moments_on_the_host(words: str, options: dict[str, Any], pool: Pool, models: Path, tmp_path: Path) -> None:
    """The ordinary optimizer's losses, weights and moments bit by bit; each goes on from the other's checkpoint."""
    ordinary = {name: value for name, value in options.items() if name != "optimizer_offload_fraction"}
    here = make(words, models, last=2, save=tmp_path / "device", extra=2, options=ordinary)
    there = replace(here, save=tmp_path / "host", options={**options, "optimizer_cpu_offload": True})
    want, got = (go(pool, run)[0] for run in (here, there))
    assert got.host_bytes > 0 == want.host_bytes
    if options != ordinary:  # 8 bytes an element of which a rank has half; buffers are as large as a parameter
        assert got.host_bytes < 4 * sum(moment.numel() for moment in want.moments["exp_avg"].values())
    assert got.losses == want.losses and got.norms == want.norms
    rests = [
        go(pool, replace(run, load=tmp_path / folder, first=2, last=4, save=None, extra=0))[0]
        for run, folder in ((here, "host"), (there, "device"))
    ]
    assert all(rest.losses == want.losses[2:] and rest.step == 4 for rest in rests)
    for a, b in ((want, got), rests):
        assert_same(b.weights, a.weights)
        for name, moments in a.moments.items():
            assert_same(b.moments[name], moments)


CHANGED = [
    ("dense pp2 vpp2", "dense tp2 dp2 do"),
    ("moe tp2 sp ep2 etp2 dp2 do", "moe pp2 dp2"),
    ("qwen3_5_moe tp2 sp do", "qwen3_5_moe pp2 dp2 ep2 do"),
    ("deepseek_v3-mtp pp2 dp2 do", "deepseek_v3-mtp tp2 sp ep2"),
    *(
        pytest.param(before, after, marks=pytest.mark.slow)
        for before, after in (
            ("dense tp2 tied", "dense pp2 tied do"),
            ("dense single", "dense dp4 do"),
            ("qwen3_5-mtp tp2 tied", "qwen3_5-mtp pp2 tied do dp2"),
            ("glm4_moe-mtp single", "glm4_moe-mtp pp2 vpp2 dp2 do"),
            ("dense tp2", "dense pp2"),
            ("moe ep2 dp2 do", "moe single"),
            ("gpt_oss tp2 sp ep2 do", "gpt_oss dp2 do"),
            ("dense dp2 do", "dense tp2"),
            ("olmo2 tp2 sp dp2 do", "olmo2 pp2"),
            ("dense cp2 do", "dense tp2 sp cp2 do"),
            ("moe pp2", "moe tp2 sp ep2 dp2 do"),
            ("moe-mixed ep2 dp2", "moe-mixed tp2 sp do"),
            ("dense pp2 first1", "dense pp2 last1 do"),
            ("qwen2_moe tp2 sp", "qwen2_moe ep2 dp2 do"),
            ("gpt_oss pp2", "gpt_oss tp2 sp dp2 ep4 do"),
        )
    ),
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_another_layout(before: str, after: str, pool: Pool, models: Path, tmp_path: Path) -> None:
    """Weights and moments bit-equal as full tensors, the next steps' losses within 1e-5; back again: still the same
    bits."""
    saved = go(pool, make(before, models, last=2, save=tmp_path / "a", extra=2))[0]
    loaded = go(pool, make(after, models, load=tmp_path / "a", first=2, last=2, save=tmp_path / "b", extra=2))[0]
    back = go(pool, make(before, models, load=tmp_path / "b", first=2, last=2))[0]
    assert loaded.step == back.step == 2
    for result in (loaded, back):
        assert_same(result.weights, saved.weights)
        assert result.moments.keys() == saved.moments.keys()
        for name, moments in saved.moments.items():
            assert_same(result.moments[name], moments)
    assert loaded.losses == pytest.approx(saved.losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dense dp2 do", "dense tp2"),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before, after in (
                ("dense tp2", "dense pp2 dp2 do"),
                ("qwen3_5 dp2 do", "qwen3_5 tp2 sp"),
                ("qwen3_5 pp2 vpp2", "qwen3_5 tp2 dp2 do"),
            )
        ),
    ],
)
def test_another_layout_in_half_precision(before: str, after: str, pool: Pool, models: Path, tmp_path: Path) -> None:
    """The float32 main weights move too: a float32 run that loads the checkpoint gets them, and hands them back
    unrounded."""
    saved = go(pool, make(before, models, last=2, save=tmp_path / "a", options=BF16))[0]
    loaded = go(pool, make(after, models, load=tmp_path / "a", first=2, last=2, save=tmp_path / "b", options=BF16))[0]
    assert_same(loaded.weights, saved.weights)
    for name, moments in saved.moments.items():
        assert_same(loaded.moments[name], moments)
    single, stages = (f"{before.split()[0]} {layout}" for layout in ("single", "pp2"))
    mains = go(pool, make(single, models, load=tmp_path / "a", save=tmp_path / "c"))[0].weights
    assert_same(mains, go(pool, make(stages, models, load=tmp_path / "b"))[0].weights)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in mains.values())
    assert_same({n: t.to(saved.weights[n].dtype) for n, t in mains.items()}, saved.weights)
    again = go(pool, make(after, models, load=tmp_path / "c", save=tmp_path / "d", options=BF16))[0]
    assert_same(again.weights, saved.weights)
    assert_same(go(pool, make(single, models, load=tmp_path / "d"))[0].weights, mains)


def test_before_the_first_step(pool: Pool, models: Path, tmp_path: Path) -> None:
    """A checkpoint of a fresh engine is a fresh engine."""
    whole = go(pool, make("dense dp2 do", models, last=2))[0]
    go(pool, make("dense dp2 do", models, save=tmp_path / "c"))
    assert go(pool, make("dense dp2 do", models, load=tmp_path / "c", last=2))[0].losses == whole.losses


def plain(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by Megatron-Core's own loader."""
    from megatron.core import dist_checkpointing

    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.parallel.layout import Layout

    context = ParallelContext(Layout(1))
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    context.close()
    return {k: v for k, v in loaded.items() if isinstance(v, Tensor)}


LAYER = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
)
DENSE = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
MOE = (
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
)


@pytest.mark.parametrize(("words", "mlp"), [("dense tp2 pp2 do", DENSE), ("moe pp2 ep2 dp2 do", MOE)])
def test_the_format_is_megatrons(words: str, mlp: tuple[str, ...], pool: Pool, models: Path, tmp_path: Path) -> None:
    """Megatron-Core's loader reads it; the names are the canonical ones, each tensor is Hugging Face's in Megatron's
    arrangement."""
    result = go(pool, make(words, models, last=1, save=tmp_path / "c"))[0]
    tensors = pool.run(f"{__name__}:plain", tmp_path / "c", 1)[0]
    names = {f"decoder.layers.{i}.{part}" for i in range(4) for part in (*LAYER, *mlp)}
    names |= {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    assert set(tensors) == names | {f"optimizer.state.{s}.{n}" for s in ("exp_avg", "exp_avg_sq") for n in names}
    for prefix, want in (("", result.weights), *((f"optimizer.state.{s}.", m) for s, m in result.moments.items())):
        for i in range(4):
            here, there = f"{prefix}decoder.layers.{i}.", f"model.layers.{i}."
            assert torch.equal(tensors[here + LAYER[0]], want[there + "input_layernorm.weight"])
            assert torch.equal(tensors[here + LAYER[2]], want[there + "self_attn.o_proj.weight"])
            assert torch.equal(
                tensors[here + LAYER[1]], grouped(*(want[f"{there}self_attn.{x}_proj.weight"] for x in "qkv"))
            )
            owner = [there + "mlp."] if mlp is DENSE else [f"{there}mlp.experts.{e}." for e in range(4)]
            up = torch.stack([torch.cat([want[f"{o}{x}_proj.weight"] for x in ("gate", "up")]) for o in owner])
            down = torch.stack([want[o + "down_proj.weight"] for o in owner])
            fc1, fc2 = mlp[-2:]
            assert torch.equal(tensors[here + fc1], up[0] if mlp is DENSE else up)
            assert torch.equal(tensors[here + fc2], down[0] if mlp is DENSE else down)
        rows = want["model.embed_tokens.weight"].shape[0]
        assert torch.equal(
            tensors[prefix + "embedding.word_embeddings.weight"][:rows], want["model.embed_tokens.weight"]
        )
        assert torch.equal(tensors[prefix + "output_layer.weight"][:rows], want["lm_head.weight"])


def grouped(q: Tensor, k: Tensor, v: Tensor, groups: int = 4, width: int = 16) -> Tensor:
    """Megatron's QKV: for each KV group its queries, then its key, then its value."""
    q, k, v = (t.view(groups, -1, width, t.shape[-1]) for t in (q, k, v))
    return torch.cat([q, k, v], dim=1).reshape(-1, q.shape[-1])


def damage(folder: Path, what: str) -> None:
    """Breaks a checkpoint on purpose."""
    if what == "files":
        (folder / "__1_0.distcp").unlink()
        cut = (folder / "__0_0.distcp").read_bytes()
        (folder / "__0_0.distcp").write_bytes(cut[: len(cut) // 2])
    elif what == "tables":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-20])
        (folder / "engine.json").unlink()
    elif what == "random":
        (folder / "rng-00001.safetensors").write_bytes(b"\0" * 8)


@pytest.mark.parametrize(
    ("what", "words", "told"),
    [
        ("files", "dense dp2 do", ("__1_0.distcp: is missing", "__0_0.distcp: is truncated")),
        ("tables", "dense dp2 do", (".metadata: cannot be read", "engine.json: is missing")),
        ("random", "dense dp2 do", ("rng-00001.safetensors: cannot be read",)),
        ("", "moe dp2", ("model family: is qwen3 in the checkpoint", "model experts: is 0")),
        (
            "",
            "qwen3-tiny-heads tp2",
            (
                "linear_qkv.weight: has shape [256, 64] in the checkpoint and [384, 64] in this model",
                "q_layernorm.weight: has shape [16]",
                "more: ",
            ),
        ),
        ("", "dense-tied pp2", ("output_layer.weight: is in the checkpoint but not in this model",)),
    ],
)
def test_unfit_checkpoints(
    what: str, words: str, told: tuple[str, ...], pool: Pool, models: Path, tmp_path: Path
) -> None:
    """Every rank gets one CheckpointError with all that is wrong, before anything is loaded."""
    go(pool, make("dense dp2 do", models, last=1, save=tmp_path / "c"))
    damage(tmp_path / "c", what)
    results = go(pool, make(words, models, load=tmp_path / "c"))
    assert len({r.error for r in results}) == 1
    for text in told:
        assert text in results[0].error, results[0].error


def test_other_optimizer(pool: Pool, models: Path, tmp_path: Path) -> None:
    """Adam's moments are no momentum."""
    go(pool, make("dense single", models, last=1, save=tmp_path / "c"))
    sgd = {"optimizer": "sgd", "distributed_optimizer": False}
    error = go(pool, make("dense single", models, load=tmp_path / "c", options=sgd))[0].error
    assert "--optimizer sgd: the checkpoint has the states of adam" in error
