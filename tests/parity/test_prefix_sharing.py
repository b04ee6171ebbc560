"""Prompts that are computed once for all of their completions, against Hugging Face on each completion by itself.

Loss, every gradient and two steps, on layouts, families and both attention cores. Groups are uneven: prompts with one
completion, of one token, longer than a window, twice in a micro-batch but apart, completions with text of a tool in
them.

Covers: megaswift/data/batches/prefix_sharing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.prompts.collate import RolloutCollator, RolloutTokens
from megaswift.engine.document_attention import AttentionRule
from megaswift.losses.contract import Batch, RequestedModelOutputs
from tests.parity.cases import Case, own, parse
from tests.parity.check import assert_within_limits, bisect_if_it_fails
from tests.parity.compare import GRADIENT, LOSS, NORM, WEIGHT, Difference, number, table, tensors
from tests.parity.measure import MIX, TEMPERATURE, MixedLoss, Task, build, full, recipe_options
from tests.parity.models import VOCAB
from tests.parity.oracle import Oracle, Recipe, Reference, fields
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
STEPS = 2
GROUPS = (
    ((9, (5, 7, 1)), (1, (4, 6)), (12, (3,))),
    ((17, (6, 2, 8, 4)),),
    ((5, (9, 3)), (2, (4, 4)), (5, (6, 5))),
    ((21, (1, 1)), (3, (10, 2, 7))),
)
"""Of each micro-batch, in turn: (tokens of a prompt, tokens of each of its completions)."""


def rollouts(total: int, step: int) -> list[list[RolloutTokens]]:
    """The completions of each of `total` micro-batches of a step, with ids that are the same on every layout."""
    rng, number = np.random.default_rng([step, total]), 0
    micros = []
    for m in range(total):
        micro = []
        for prompt_length, lengths in GROUPS[m % len(GROUPS)]:
            prompt = rng.integers(3, VOCAB, prompt_length).tolist()
            for length in lengths:
                written, owned = rng.integers(3, VOCAB, length).tolist(), rng.random(length) < 0.8
                owned[0] |= not owned.any()
                micro.append(RolloutTokens(number, prompt, written, owned.tolist()))
                number += 1
        micros.append(micro)
    return micros


def collated(micros: list[list[RolloutTokens]], case: Case, shared: bool) -> list[Batch]:
    """As a run of the case has them."""
    unit = 2 * case.cp if case.cp > 1 else 1
    shape = PaddingShape(unit, case.tp * unit)
    return RolloutCollator(shape, shared, case.pp > 1, shares_prefixes=shared).batches(micros)


def train(rank: int, world: int, task: Task) -> tuple[Reference, list[np.ndarray]] | None:
    """The engine's numbers on shared prompts, and the log-probabilities of the first step's own tokens (on the
    ranks)."""
    with planted(task.fault):
        return _train(rank, world, task)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """`prefixes`: documents do not see theirs. `windows`: layers have none."""
    target = "megaswift.engine.document_attention"
    if fault == "prefixes":
        with patch(f"{target}.prefixes_of_documents", lambda prefixes, *_: [(-1, 0)] * len(prefixes)):
            yield
    elif fault == "windows":
        with patch("megaswift.engine.torch.document_attention.AttentionRule", _without_window):
            yield
    else:
        yield


def _without_window(scale: float, window: int | None, *rest: Any) -> AttentionRule:
    return AttentionRule(scale, None, *rest)


def _train(rank: int, world: int, task: Task) -> tuple[Reference, list[np.ndarray]] | None:
    case = task.case
    engine, context = build(case, task.folder, world, **recipe_options(task.recipe, case.moe), **task.options)
    dp = context.layout.coordinates(rank).dp
    mine = [collated(own(rollouts(case.total, k), case.dp, dp), case, True) for k in range(STEPS)]
    assert any(batch.prefixes is not None for batch in mine[0])
    scored = engine.score(mine[0], RequestedModelOutputs())
    found = [s.logprobs.cpu()[b.loss_weights != 0].numpy() for s, b in zip(scored, mine[0], strict=True)]
    out = Reference(loss=engine.accumulate(mine[0], MixedLoss()).loss, gradients=full(engine.hf_gradients()))
    for batches in mine:
        result = engine.train_batch(engine.prepare_ahead(batches), MixedLoss(), task.recipe.lr)
        out.losses.append(result.loss)
        out.norms.append(result.grad_norm)
    out.weights = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return (out, found) if rank == 0 else None


def mixed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`MixedLoss` of the oracle."""
    return sum(w * fields(logits, labels, TEMPERATURE)[name] for name, w in MIX.items())


def expected(case: Case, oracle: Oracle) -> tuple[Reference, list[np.ndarray]]:
    """The same of Hugging Face, each completion with its own prompt."""
    plain, out = replace(case, tp=1, cp=1, pp=1), Reference()
    for k in range(STEPS):
        batches = collated(rollouts(case.total, k), plain, False)
        if k == 0:
            found = [oracle.logprobs(b)[b.loss_weights != 0].numpy() for b in own(batches, case.dp, 0)]
        loss, _, _ = oracle.accumulate(batches, mixed)
        out.losses.append(loss)
        if k == 0:
            out.loss, out.gradients = loss, oracle.gradients()
        out.norms.append(oracle.step())
    out.weights = oracle.weights()
    return out, found


def cases() -> Iterator[Any]:
    """Layouts of a dense model, then what families do with keys."""
    quick = ("dense single", "gemma2 single", "dense tp2 sp cp2", "deepseek_v3 single", "gpt_oss single")
    more = ("dense pp2 vpp2", "dense dp2 do", "dense cp2 recompute=selective", "moe dp2 ep2", "gemma3_text cp2")
    more += ("mistral-window single", "mistral-window tp2", "deepseek_v3 tp2 sp pp2", "dense tp2 sp pp2 recompute=full")
    for text in (*quick, *more):
        marks = () if text in quick else (pytest.mark.slow,)
        yield pytest.param(replace(parse(text), packed=True), marks=marks, id=text)


@pytest.mark.parametrize("case", list(cases()))
def test_shared_prompts_train_as_separate_ones(case: Case, pool: Pool, references: References) -> None:
    """With torch's attention."""
    check(case, pool, references)


@pytest.mark.parametrize(
    "text",
    [
        "dense single attn=fused",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("dense tp2 sp", "dense pp2 recompute=selective", "moe dp2 ep2", "mistral-window single")
        ),
    ],
)
def test_shared_prompts_on_transformer_engine(text: str, te_pool: Pool, references: References) -> None:
    """With its attention, whose queries and keys then have bounds of their own."""
    check(replace(parse(text), packed=True, te=True), te_pool, references)


ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
AGAIN = {"recompute_granularity": "full"}


def torch_engine_cases() -> Iterator[Any]:
    """Strategies, numbers of ranks and recomputation of a dense model, then what families do with keys."""
    quick = (("ddp", "dense single", {}), ("fsdp2", "gemma3_text dp2", AGAIN), ("ddp", "gpt_oss single", {}))
    more = [(engine, "dense dp2", options) for engine in ENGINES for options in ({}, AGAIN)]
    more += [(engine, "mistral-window dp2", AGAIN) for engine in ("fsdp2", "zero3")]
    families = ("moe", "mistral-window", "qwen2_moe", "gemma2", "gemma3_text", "deepseek_v3", "phi3", "gpt_oss")
    more += [("ddp", f"{family} single", AGAIN) for family in families]
    for engine, text, options in (*quick, *more):
        marks = () if (engine, text, options) in quick else (pytest.mark.slow,)
        name = f"{engine} {text}{' again' if options else ''}"
        yield pytest.param(engine, replace(parse(text), packed=True), options, marks=marks, id=name)


@pytest.mark.parametrize(("engine", "case", "options"), list(torch_engine_cases()))
def test_shared_prompts_on_torch_engines(
    engine: str, case: Case, options: dict[str, Any], pool: Pool, references: References
) -> None:
    """With transformers' own layers, which attend document by document."""
    check(case, pool, references, {"engine": engine, **options})


@pytest.mark.parametrize(
    ("text", "fault"),
    [("dense single", "prefixes"), pytest.param("mistral-window single", "windows", marks=pytest.mark.slow)],
)
def test_sees_faults(text: str, fault: str, pool: Pool, references: References) -> None:
    """The comparison is no formality."""
    found, *_ = compared(replace(parse(text), packed=True), pool, references, {"engine": "ddp"}, fault)
    assert any(d.bad for d in found)


def adapter_gradients(rank: int, world: int, task: Task) -> tuple[float, dict[str, torch.Tensor]] | None:
    """Loss and gradients of adapters of which neither half is 0, on shared prompts (on the ranks)."""
    from megaswift.engine.torch.strategies.strategy import GRADIENT, WEIGHT, whole_tensor

    case = task.case
    engine, context = build(case, task.folder, world, **recipe_options(task.recipe, case.moe), **task.options)
    for name, tensor in drawn_adapters({n: tuple(engine.shapes[n]) for n in engine.strategy.trained()}).items():
        engine.strategy.put(name, WEIGHT, tensor)
    dp = context.layout.coordinates(rank).dp
    loss = engine.accumulate(collated(own(rollouts(case.total, 0), case.dp, dp), case, True), MixedLoss()).loss
    found = {
        n.removeprefix("model."): whole_tensor(engine.strategy, n, GRADIENT).clone() for n in engine.strategy.trained()
    }
    torch.distributed.barrier()
    context.close()
    return (loss, found) if rank == 0 else None


def drawn_adapters(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The same values for the same names in order."""
    generator = torch.Generator().manual_seed(5)
    return {name: 0.2 * torch.randn(shapes[name], generator=generator) for name in sorted(shapes)}


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("ddp", "dense single"),
        *(pytest.param(e, "gemma3_text dp2", marks=pytest.mark.slow) for e in ("ddp", "fsdp2", "zero3")),
    ],
)
def test_adapters_on_shared_prompts(engine: str, text: str, pool: Pool, references: References) -> None:
    """Against PEFT on each completion by itself; layers are computed again in the backward pass."""
    import peft

    case, recipe = replace(parse(text), packed=True), Recipe()
    folder = references.model(case.variant)
    oracle = Oracle(folder, recipe)
    shape = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    oracle.model = peft.get_peft_model(oracle.model, shape).train()
    trained = {n: p for n, p in oracle.model.named_parameters() if p.requires_grad}
    for name, tensor in drawn_adapters({n: tuple(p.shape) for n, p in trained.items()}).items():
        trained[name].data.copy_(tensor)
    plain = replace(case, tp=1, cp=1, pp=1)
    loss, _, _ = oracle.accumulate(collated(rollouts(case.total, 0), plain, False), mixed)
    of_engine = {"engine": engine, **AGAIN}
    options = {**of_engine, "train_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
    options["target_modules"] = ("q_proj", "v_proj", "down_proj")
    task = Task(case, folder, recipe, options=options)
    got, gradients = pool.run("tests.parity.test_prefix_sharing:adapter_gradients", task, case.world)[0]
    want = {n: p.grad for n, p in trained.items() if p.grad is not None}
    assert gradients.keys() == want.keys() == trained.keys()
    found = [number("loss", got, loss, LOSS), *tensors("gradient", gradients, want, GRADIENT)]
    # bisect records no adapters on torch engines: its step trains the whole model
    assert_within_limits(found, case, pool, folder, of_engine, without="adapters and shared prompts")


def check(case: Case, pool: Pool, references: References, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """A case against the oracle."""
    found, scored, logprobs = compared(case, pool, references, options)
    folder = references.model(case.variant)
    with bisect_if_it_fails(case, pool, folder, options, "shared prompts"):
        assert not any(d.bad for d in found), "\n" + table(str(case), found)
        for one, other in zip(scored, logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


def compared(
    case: Case, pool: Pool, references: References, options: Mapping[str, Any], fault: str = ""
) -> tuple[list[Difference], list[np.ndarray], list[np.ndarray]]:
    """All numbers beside the oracle's; the log-probabilities of the engine and of the oracle."""
    recipe, folder = Recipe(), references.model(case.variant)
    want, logprobs = expected(case, Oracle(folder, recipe))
    task = Task(case, folder, recipe, fault=fault, options=dict(options))
    got, scored = pool.run("tests.parity.test_prefix_sharing:train", task, case.world)[0]
    found = [number("loss of accumulate", got.loss, want.loss, LOSS)]
    # buffers have none on torch engines, zero there
    trained = {n: g for n, g in want.gradients.items() if n in got.gradients or bool(g.any())}
    found += tensors("gradient", got.gradients, trained, GRADIENT)
    for k in range(STEPS):
        found.append(number(f"loss of step {k}", got.losses[k], want.losses[k], LOSS if k == 0 else NORM))
        found.append(number(f"grad norm of step {k}", got.norms[k], want.norms[k], NORM))
    found += tensors("weight", got.weights, want.weights, WEIGHT)
    return found, scored, logprobs
