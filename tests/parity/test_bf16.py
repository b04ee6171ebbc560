"""bfloat16 with float32 gradients: as far from the float32 truth as Hugging Face's own bfloat16 run is, no further."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift.losses.contract import Batch, RequestedModelOutputs
from megaswift.losses.sft import CrossEntropy
from tests.bisection.ranks import explained
from tests.parity import models
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.oracle import Oracle, Recipe, Reference
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
CASES = (
    "single",
    "tp2 sp pp2",
    "packed cp2 do",
    "moe dp2 ep2",
    "gemma2 tp2 sp",
    "gemma3_text packed cp2",
    "qwen3_5 tp2 sp packed",
)
SPREAD = 1.5
"""Our distance over Hugging Face's: both are rounding noise of the same size, not the same noise."""


def half(rank: int, world: int, task: Task) -> Reference | None:
    """Loss and gradients in bfloat16 (on the ranks)."""
    engine, context = build(
        task.case, task.folder, world, torch_dtype="bfloat16", moe_aux_loss_coeff=0.0 if task.case.moe else None
    )
    out = Reference()
    result = engine.accumulate(
        own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp), CrossEntropy()
    )
    out.loss, out.gradients = result.loss, full(engine.hf_gradients())
    torch.distributed.barrier()
    context.close()
    return out if rank == 0 else None


def distance(gradients: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """||g - truth|| / ||truth|| over all tensors together."""
    wrong = sum(float((gradients[n].float() - g).square().sum()) for n, g in truth.items())
    return (wrong / sum(float(g.square().sum()) for g in truth.values())) ** 0.5


@pytest.mark.parametrize("text", CASES)
def test_bf16_within_the_spread_of_hugging_face(text: str, pool: Pool, references: References) -> None:
    """Loss and all gradients, against float32, beside transformers in bfloat16."""
    case = parse(text, model="dense") if "moe" not in text else parse(text)
    folder = references.model(case.variant)
    batches = global_batch(replace(case, packed=False), 2)
    exact, rough = Oracle(folder, Recipe()), Oracle(folder, Recipe())
    rough.model = rough.model.to(torch.bfloat16)
    losses = [o.accumulate(batches)[0] for o in (exact, rough)]
    truth = exact.gradients()
    got = pool.run("tests.parity.test_bf16:half", Task(case, folder, Recipe()), case.world)[0]
    ours, theirs = distance(got.gradients, truth), distance(rough.gradients(), truth)
    assert theirs > 1e-3, "the bfloat16 oracle did not run in bfloat16"
    assert ours <= SPREAD * theirs, (
        f"{case}: gradients off by {ours:.2e}, Hugging Face in bfloat16 by {theirs:.2e}\n"
        f"{explained(case, pool, folder, {'torch_dtype': 'bfloat16'})}"
    )
    assert abs(got.loss - losses[0]) <= SPREAD * max(abs(losses[1] - losses[0]), 2e-3 * losses[0])


def scores(rank: int, world: int, task: Task) -> torch.Tensor:
    """Log-probabilities of a micro-batch in bfloat16 under the task's options."""
    engine, context = build(task.case, task.folder, world, torch_dtype="bfloat16", **task.options)
    (outputs,) = engine.score(task.batches or global_batch(task.case, 2)[:1], RequestedModelOutputs())
    context.close()
    return outputs.logprobs


def test_float32_products_of_the_head(pool: Pool, references: References) -> None:
    """`--fp32_lm_head` changes log-probabilities by the rounding of logits alone."""
    case = parse("single", model="dense")
    rounded, exact = (
        pool.run(
            "tests.parity.test_bf16:scores",
            Task(case, references.model("dense"), Recipe(), options={"fp32_lm_head": option}),
            1,
        )[0]
        for option in (False, True)
    )
    difference = (rounded - exact).abs().max()
    assert 1e-4 < difference < 0.03, difference


WIDE = (".A_log", ".linear_attn.norm.weight")
"""Ends of the names of weights that published files of Qwen3.5 have in float32."""


def as_published(folder: Path, bf16: Path) -> Path:
    """The folder's model in bfloat16 but for the weights that are published in float32."""
    bf16.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            save_file({n: t if n.endswith(WIDE) else t.bfloat16() for n, t in tensors.items()}, bf16 / file.name)
        else:
            (bf16 / file.name).write_bytes(file.read_bytes())
    return bf16


def kept(rank: int, world: int, task: Task) -> dict[str, torch.dtype]:
    """Dtypes on the rank; a step, and an export beside the model's folder (on the ranks)."""
    engine, context = build(task.case, task.folder, world, torch_dtype="bfloat16", **task.options)
    dtypes = {n: p.dtype for n, p in engine.plain[0].named_parameters()}
    mine = own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp)
    engine.train_batch(mine, CrossEntropy(), 1e-3)
    engine.export(task.folder.parent / "exported", task.folder)
    torch.distributed.barrier()
    context.close()
    return dtypes


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("qwen3_5 tp2 sp", {}),
        ("qwen3_5 dp2 do", {}),
        ("qwen3_5 tp2", {"train_type": "lora", "target_modules": ("in_proj_qkv",)}),
        pytest.param("qwen3_5 te dp2 do packed", {}, marks=pytest.mark.slow),
    ],
)
def test_rates_of_decay_stay_in_float32(
    text: str,
    options: dict[str, Any],
    pool: Pool,
    references: References,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Gated delta nets' rates and output norms are loaded, trained and written without rounding to bfloat16."""
    case = parse(text)
    pool = request.getfixturevalue("te_pool") if case.te else pool
    folder = as_published(references.model(case.variant), tmp_path / "model")
    dtypes = pool.run("tests.parity.test_bf16:kept", Task(case, folder, Recipe(), options=options), case.world)[0]
    base = {n.rpartition(".")[2] for n, t in dtypes.items() if t == torch.float32 and ".lora." not in n}
    assert base == {"A_log", "out_norm_weight"}
    before, after = models.disk_tensors(folder), models.disk_tensors(tmp_path / "exported")
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    frozen = before if options.get("train_type") == "lora" else ()
    for name in (n for n in before if n.endswith(WIDE)):
        assert torch.equal(before[name], after[name]) == (name in frozen)
        assert not torch.equal(after[name], after[name].bfloat16().float())


SCALE = 4.0
"""Of an LM head whose logits are as large as those of trained models."""


def model_with_large_logits(folder: Path) -> Path:
    """A dense model in bfloat16 whose LM head is `SCALE` times the usual one."""
    models.build("dense", folder, torch.bfloat16)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t * SCALE if n == "lm_head.weight" else t for n, t in tensors.items()}, file, {"format": "pt"})
    return folder


@torch.no_grad()
def decoded(folder: Path, batch: Batch) -> list[torch.Tensor]:
    """Log-probabilities [b, s] of the labels by Hugging Face in bfloat16, one token at a time with a KV cache as in a
    sampler: with products of the LM head in bfloat16, and in float32."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    kept = {name: DynamicCache(config=model.config)}
    steps = [model.model(ids, use_cache=True, **kept).last_hidden_state for ids in batch.input_ids.split(1, dim=1)]
    hidden, head = torch.cat(steps, 1), model.lm_head.weight
    logits = [hidden @ head.T, hidden.float() @ head.float().T]
    assert hidden.dtype == torch.bfloat16 and 20 < logits[1].max() < 40
    return [x.float().log_softmax(-1).gather(-1, batch.labels[..., None]).squeeze(-1) for x in logits]


def test_float32_products_narrow_the_difference_to_a_sampler(pool: Pool, tmp_path: Path) -> None:
    """Mean difference of log-probabilities between decoding by Hugging Face and a batch of the engine."""
    folder = model_with_large_logits(tmp_path / "model")
    drawn = torch.randint(3, models.VOCAB, (64, 65), generator=torch.Generator().manual_seed(1))
    ids, ones = drawn[:, :-1], torch.ones(64, 64)
    batch = Batch(ids, drawn[:, 1:], ones, torch.arange(64).expand(64, 64), ones.bool())
    of_sampler = decoded(folder, batch)
    case = parse("single", model="dense")
    of_trainer = [
        pool.run(
            "tests.parity.test_bf16:scores",
            Task(case, folder, Recipe(), options={"fp32_lm_head": option}, batches=(batch,)),
            1,
        )[0]
        for option in (False, True)
    ]
    rounded, trainer_exact, exact = (
        float((of_sampler[s] - of_trainer[t]).abs().mean()) for s, t in ((0, 0), (0, 1), (1, 1))
    )
    assert 0.03 < rounded < 0.05
    assert exact < 0.94 * rounded, "float32 products on both sides"
    assert exact < trainer_exact < 0.98 * rounded, "in the trainer only"
