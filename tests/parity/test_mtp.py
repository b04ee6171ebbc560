"""Layers for multi-token prediction on every layout against transformers' `MtpModel`: losses, all gradients of layers,
trunk, embedding and head, three optimizer steps.

Covers: megaswift/engine/megatron/layers/mtp.py, megaswift/losses/mtp.py, megaswift/models/weights/mtp.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import cover
from tests.parity.cases import Case, global_batch, parse
from tests.parity.check import check
from tests.parity.compare import compare
from tests.parity.measure import Task, train
from tests.parity.oracle import Recipe, Reference, reference
from tests.parity.pool import Pool
from tests.parity.references import AUX, References

pytestmark = pytest.mark.process
DEFAULT = [
    "deepseek_v3-mtp tp2 sp packed",
    "deepseek_v3-mtp dp2 ep2 do",
    "glm4_moe-mtp cp2 pp2 packed",
    "glm4_moe-mtp pp2 vpp2 dp2 do recompute=full",
    "glm4_moe-mtp tp2 sp pp2 ep2",
    "qwen3_5-mtp pp2 dp2 do overlap",
    "qwen3_next-mtp single",
]
MORE = [
    "qwen3_5-mtp tp2",
    "qwen3_5_moe-mtp cp2 packed",
    "qwen3_5-mtp pp2 tied",
    "deepseek_v3-mtp single",
    "glm4_moe_lite-mtp pp2 packed",
    "glm4_moe_lite-mtp tp2 sp ep2",
    "deepseek_v3-mtp pp2 recompute=block",
    "deepseek_v3-mtp recompute=selective",
    "deepseek_v3-mtp tp2 sp cp2 pp2 packed do",
    "glm4_moe-mtp dp2 filler",
    "glm4_moe-mtp tp8 sp",
    "glm4_moe-mtp pp4 first1",
    "glm4_moe-mtp tp2 sp dp2 ep2 etp2 do",
    "qwen3_5-mtp tp2 pp2 tied do overlap dp2",
    "qwen3_next-mtp tp2 sp cp2",
]
EVERY = [replace(case, model="qwen3_5_moe-mtp") for case in cover.every("qwen3_5_moe")]
TRANSFORMER_ENGINE = ["deepseek_v3-mtp pp2 packed"]
MORE_TE = [
    "glm4_moe-mtp tp2 sp",
    "qwen3_5-mtp pp2 tied do dp2 overlap",
    "glm4_moe-mtp cp2 pp2 packed comm=p2p",
    "qwen3_5_moe-mtp tp2 sp packed",
    "deepseek_v3-mtp dp2 ep2 do recompute=full",
]


@pytest.mark.parametrize("text", [*DEFAULT, *(pytest.param(text, marks=pytest.mark.slow) for text in MORE)])
def test_layout(text: str, pool: Pool, references: References) -> None:
    check(parse(text), pool, references)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_layout(case: Case, pool: Pool, references: References) -> None:
    check(case, pool, references)


@pytest.mark.parametrize(
    "text", [*TRANSFORMER_ENGINE, *(pytest.param(text, marks=pytest.mark.slow) for text in MORE_TE)]
)
def test_transformer_engine(text: str, te_pool: Pool, references: References) -> None:
    check(replace(parse(text), te=True), te_pool, references)


def with_recipe(references: References, **changes: Any) -> References:
    """References of their own whose layers train otherwise."""
    mine = References(references.folder)
    mine.recipe = replace(AUX, **changes)
    return mine


@pytest.mark.parametrize(
    "text",
    [
        "glm4_moe-mtp pp2 dp2 do overlap",
        pytest.param("glm4_moe-mtp tp2 sp recompute=full", marks=pytest.mark.slow),
        pytest.param("qwen3_5-mtp pp2 tied", marks=pytest.mark.slow),
        pytest.param("deepseek_v3-mtp cp2 packed", marks=pytest.mark.slow),
    ],
)
def test_detached(text: str, pool: Pool, references: References) -> None:
    """The layers learn, and nothing else does from them."""
    case = parse(text)
    check(case, pool, with_recipe(references, mtp_detach=True))


@pytest.mark.parametrize(
    "text",
    [
        "qwen3_5-mtp pp2 tied",
        pytest.param("glm4_moe-mtp tp2 sp ep2", marks=pytest.mark.slow),
        pytest.param("glm4_moe-mtp pp2 dp2 do", marks=pytest.mark.slow),
    ],
)
def test_a_weight_of_zero_leaves_everything_else(text: str, pool: Pool, references: References) -> None:
    """Every other gradient and weight is bit for bit that of a run without the layers; theirs is 0.

    Nothing is clipped: the distributed optimizer adds up the norm over other parts of the gradients, so it rounds
    otherwise.
    """
    case = parse(text)
    folder, recipe, _ = references.of(case)
    recipe = replace(recipe, max_grad_norm=1e6)
    without, with_zero = (
        pool.run("tests.parity.measure:train", Task(case, folder, changed), case.world)[0]
        for changed in (replace(recipe, mtp_layers=0), replace(recipe, mtp_weight=0.0))
    )
    ahead = with_zero.gradients.keys() - without.gradients.keys()
    assert ahead and all(not with_zero.gradients[name].any() for name in ahead)
    assert with_zero.losses == without.losses and with_zero.norms == pytest.approx(without.norms, rel=1e-7)
    for kind in ("gradients", "weights"):
        mine, theirs = getattr(with_zero, kind), getattr(without, kind)
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert all(0 < loss < 10 for losses in with_zero.mtp_losses for loss in losses)


def _next_document() -> None:
    """Targets cross from document to document."""
    from megaswift.engine.megatron import microbatch
    from megaswift.losses import mtp

    own = mtp.tokens_ahead

    def leaking(batch: Any, layer: int) -> Any:
        positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.positions).to(batch.positions)
        return own(replace(batch, positions=positions), layer)

    mtp.tokens_ahead = microbatch.tokens_ahead = leaking


def _same_token() -> None:
    """The first layer reads the token that the decoder has read."""
    from megaswift.engine.megatron import microbatch

    own = microbatch.tokens_ahead
    microbatch.tokens_ahead = lambda batch, layer: replace(own(batch, layer), input_ids=batch.input_ids)


def _labels_too_near() -> None:
    """Every layer predicts what the decoder predicts."""
    from megaswift.engine.megatron import microbatch

    own = microbatch.tokens_ahead
    microbatch.tokens_ahead = lambda batch, layer: replace(own(batch, layer), labels=batch.labels)


def _hidden_first() -> None:
    """The product's columns are those of the hidden state, then the embedding's."""
    from megaswift.engine.megatron.layers.mtp import MtpLayer

    forward = MtpLayer.forward

    def exchanged(layer: Any, embedded: Tensor, hidden: Tensor, *more: Any) -> Tensor:
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
        out = forward(layer, hidden, embedded, *more)
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
        return out

    MtpLayer.forward = exchanged  # type: ignore[method-assign]


def _copy_alone() -> None:
    """The last stage's copy of the embedding keeps its gradient to itself."""
    from megaswift.engine.megatron import forward_backward

    forward_backward.sum_embedding_gradients = lambda *_: None


def _lookup_dropped() -> None:
    """The gradient of the lookup in a tied output layer is dropped for the head's, which is in `main_grad`."""
    from megaswift.engine.megatron import model

    add = model.add_mtp

    def forgetful(chunk: Any, *more: Any) -> None:
        add(chunk, *more)
        if hasattr(chunk, "mtp"):
            chunk.output_layer.weight.zero_out_wgrad = False

    model.add_mtp = forgetful


def _mean_of_all_labels() -> None:
    """The layers' losses are divided by the number of the decoder's labels."""
    from megaswift.losses.mtp import MultiTokenPrediction

    counts = MultiTokenPrediction.counts

    def wrong(loss: Any, batch: Any) -> Any:
        found = counts(loss, batch)
        return {name: found["label_weight"] for name in found}

    MultiTokenPrediction.counts = wrong  # type: ignore[method-assign]


def _padding_routed() -> None:
    """Routers count tokens past the ends of documents."""
    from megaswift.engine.megatron import microbatch

    own = microbatch.tokens_ahead
    microbatch.tokens_ahead = lambda batch, layer: replace(own(batch, layer), inside=batch.valid)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "next document": (_next_document, "glm4_moe-mtp packed"),
    "same token": (_same_token, "glm4_moe-mtp single"),
    "labels too near": (_labels_too_near, "glm4_moe-mtp cp2"),
    "hidden first": (_hidden_first, "qwen3_5-mtp single"),
    "copy alone": (_copy_alone, "glm4_moe-mtp pp2"),
    "lookup dropped": (_lookup_dropped, "qwen3_5-mtp pp2 tied"),
    "mean of all labels": (_mean_of_all_labels, "glm4_moe-mtp dp2"),
    "padding routed": (_padding_routed, "glm4_moe-mtp single"),
}


def faulty(rank: int, world: int, task: Task) -> Reference | None:
    """`train` with a fault (on the ranks)."""
    FAULTS[task.fault][0]()
    return train(rank, world, task)


OFTEN = ("next document", "labels too near", "lookup dropped", "mean of all labels")
"""Of a document, of ranks, of a stage, of the loss: those of the default run."""


@pytest.mark.parametrize(
    "fault", [fault if fault in OFTEN else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_a_fault_is_found(fault: str, pool: Pool, references: References) -> None:
    case = parse(FAULTS[fault][1])
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, steps=1, fault=fault)
    got = pool.run("tests.parity.test_mtp:faulty", task, case.world)[0]
    got.weights = want.weights
    failed = {d.name for d in compare(got, want, recipe) if d.bad}
    lookups = {"gradient model.embed_tokens.weight", "grad norm of step 0"}
    assert failed == lookups if fault in ("copy alone", "lookup dropped") else len(failed) > 10, failed


def test_gradients_reach_everything(references: References) -> None:
    """The oracle's own: the layers teach the trunk, the embedding and the head, unless they are detached."""
    case = parse("glm4_moe-mtp single")
    folder, recipe, want = references.of(case)
    steps = [global_batch(case, 0)]
    without, detached = (
        reference(folder, changed, steps).gradients
        for changed in (replace(recipe, mtp_layers=0), replace(recipe, mtp_detach=True))
    )
    ahead = want.gradients.keys() - without.keys()
    assert len(ahead) > 20
    assert all(want.gradients[name].any() for name in ahead if not name.endswith("e_score_correction_bias"))
    changed = [name for name in without if not torch.equal(without[name], want.gradients[name])]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= {*changed}
    assert all(torch.equal(without[name], detached[name]) for name in without)


def test_the_recipe_is_told() -> None:
    """A weight that differs from the option's default, so that an option that does not arrive is seen."""
    assert Recipe().mtp_weight not in (0.0, 0.1)
