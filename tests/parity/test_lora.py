"""LoRA under every kind of layout against Hugging Face: loss, each adapter's gradient, gradient norm, three steps, the
adapters after.

Covers: megaswift/engine/megatron/lora/adapters.py, megaswift/engine/megatron/lora/layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaswift.bisection.precision import ReorderedSums
from tests.parity import lora
from tests.parity.cases import Case, global_batch, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, compare, distances, tensors
from tests.parity.measure import STEPS, Task
from tests.parity.models import disk_tensors, model_type
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool
from tests.parity.references import NOISY, ORDERS, References

ALL = (
    *lora.ATTENTION,
    *lora.MLP,
    "qkv_proj",
    "gate_up_proj",
    "w1",
    "w2",
    "w3",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
)
LAYOUTS = [
    "dense single",
    "dense pp2 vpp2",
    "dense cp2 packed",
    "dense tp2 sp pp2 recompute=full do",
    "moe tp2 sp dp2 ep2 etp2 do",
    "moe tp2 sp etp2 recompute=moe",
]
LATER = [
    "hunyuan_v1_dense tp2",
    "qwen3_next single",
    "dense tp2 sp",
    "dense pp2",
    "dense dp2 do",
    "dense tp4",
    "dense tp2 sp recompute=full",
    "moe dp2 ep2",
    "gemma2 tp2 sp",
    "olmo2 pp2",
    "dense tp2",
    "dense cp2",
    "qwen3-tiny-heads tp4 sp",
    "dense tied pp2",
    "moe single",
    "moe tp2 sp",
    "mixtral tp2 ep2 sp",
    "moe tp2 sp dp2 ep2",
    "phi3 tp2",
    "granite pp2",
    "granite tp2",
    "glm4_moe dp2 ep2",
    "deepseek_v2 tp2 sp",
    "glm4_moe_lite dp2 ep2",
    "dots1 tp2 sp",
    "solar_open dp2 ep2",
    "exaone_moe tp2 sp",
    "ernie4_5_moe dp2 ep2",
    "hunyuan_v1_moe tp2 sp",
    "qwen3_5 single",
    "qwen3_5 cp2 packed",
    "qwen3_next tp2 sp",
    "qwen3_5_moe tp2 sp dp2 ep2 do",
]
FAMILIES = [
    "qwen2_moe tp2 sp",
    "deepseek_v3-dense tp2",
    "qwen3_5 tp2 sp",
    "arcee tp2 sp",
    "ministral3 pp2",
]
"""Shared experts, latent attention, gated delta nets, an MLP without a gate, norms after the rotation. (Fused tensors
on disk: `test_fused_projections`.)"""
SEEDS = {
    "deepseek_v2 tp2 sp": 6,
    "glm4_moe_lite dp2 ep2": 8,
    "dots1 tp2 sp": 6,
    "moe te tp2 sp etp2": 8,
    "mixtral te tp2 ep2 sp": 6,
}
"""Seeds of adapters, 5 elsewhere. With 5 Hugging Face's float32 is itself 4.7e-6 to 5.1e-6 away from its float64 here,
for an expert's adapter sees few tokens, and the limit is 5e-6; with these it is 3.3e-6 to 3.9e-6 (`Adapters.noise`)."""
SETTLED, SETTLED_NOISY = 1e-5, 1e-4
"""What Hugging Face's float32 may be away from its float64 with an adapter that is far from ties; of NOISY models."""


class Adapters:
    """Adapter folders and the oracle's numbers, once a session."""

    def __init__(self, references: References, folder: Path) -> None:
        self.references, self.folder = references, folder
        self._known: dict[tuple[Path, int], Reference] = {}
        self._noise: dict[tuple[Path, int], dict[str, float]] = {}

    def of(
        self, case: Case, leaves: tuple[str, ...] = ALL, saved: tuple[str, ...] = (), seed: int = 5
    ) -> tuple[Task, Reference]:
        """(what the ranks get, what they have to find)."""
        recipe = self.recipe(case)
        model = self.references.model(case.variant)
        adapter = self.folder / "-".join([case.variant, *leaves, *saved, str(seed)])
        if not adapter.exists():
            lora.make_adapter(model, adapter, leaves, saved, seed)
        key = (adapter, case.total)
        if key not in self._known:
            steps = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
            noisy = model_type(case.variant) in NOISY
            self._known[key] = lora.reference(model, recipe, adapter, steps, wide=noisy)
            if noisy:
                self._known[key].noise = self.noise(case, adapter, self._known[key])
        return Task(case, model, recipe, options={"train_type": "lora", "adapters": str(adapter)}), self._known[key]

    def settled(self, case: Case, seeds: Sequence[int]) -> tuple[Task, Reference]:
        """With the first seed of an adapter that leaves every choice of a router far from a tie: there Hugging Face's
        float32 is 1e-2 away from its float64. The limits follow from the noise of each tensor."""
        most = SETTLED_NOISY if model_type(case.variant) in NOISY else SETTLED
        for seed in seeds:
            task, want = self.of(case, seed=seed)
            noise = self.noise(case, Path(str(task.options["adapters"])), want)
            if max(noise.values()) < most:
                return task, replace(want, noise=noise)
        raise AssertionError(f"{case}: no seed of {seeds} is settled")

    def noise(self, case: Case, adapter: Path, want: Reference) -> dict[str, float]:
        """By gradient, how far the oracle in float32 is from itself in float64: the largest of several orders of
        summation."""
        key = (adapter, case.total)
        if key not in self._noise:
            far = [distances(gradients, want.gradients) for gradients in self.rounded(case, adapter)]
            self._noise[key] = {name: max(each[name] for each in far) for name in far[0]}
        return self._noise[key]

    def rounded(self, case: Case, adapter: Path) -> list[dict[str, torch.Tensor]]:
        """The oracle's gradients in float32, in several orders of summation: what one of them is off may be small by
        chance (3e-6 for an expert's adapter with which another is 1.1e-5 off)."""
        rows = [global_batch(replace(case, packed=False), 0)]
        model = self.references.model(case.variant)
        kinds: list[type[lora.LoraOracle]] = [lora.Float32LoraOracle, lora.AddedLoraOracle]
        found = [lora.reference(model, self.recipe(case), adapter, rows, kind) for kind in kinds]
        for seed in range(ORDERS):
            with ReorderedSums(seed):
                found.append(lora.reference(model, self.recipe(case), adapter, rows, lora.AddedLoraOracle))
        return [each.gradients for each in found]

    def recipe(self, case: Case) -> Recipe:
        """Without routers' losses for a dense model."""
        return self.references.recipe if case.moe else replace(self.references.recipe, aux_coeff=0.0, z_coeff=0.0)


@pytest.fixture(scope="session")
def adapters(references: References, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(references, tmp_path_factory.mktemp("adapters"))


def check(task: Task, want: Reference, pool: Pool) -> None:
    """Measures and fails with a table and what bisect says of the first step."""
    got = pool.run("tests.parity.measure:train", task, task.case.world)[0]
    assert_within_limits(compare(got, want, task.recipe), task.case, pool, task.folder, task.options)


@pytest.mark.process
@pytest.mark.parametrize("text", [*LAYOUTS, *FAMILIES, *(pytest.param(text, marks=pytest.mark.slow) for text in LATER)])
def test_layout(text: str, pool: Pool, adapters: Adapters) -> None:
    """Adapters on every projection."""
    check(*adapters.of(parse(text), seed=SEEDS.get(text, 5)), pool)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "saved"),
    [("dense dp2 do", ("lm_head.weight",)), pytest.param("moe dp2 ep2 do", (), marks=pytest.mark.slow)],
)
def test_updated_adapters_are_gathered_before_they_are_used(
    text: str, saved: tuple[str, ...], pool: Pool, adapters: Adapters
) -> None:
    """Megatron's overlap of that with the forward pass, which is what a run on GPUs takes unless told otherwise."""
    task, want = adapters.of(parse(text), saved=saved)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    task = replace(task, options={**task.options, **overlap})
    got, _ = pool.run("tests.parity.deferred:train", task, task.case.world)[0]
    differences = compare(got, want, task.recipe)
    assert_within_limits(differences, task.case, pool, task.folder, task.options, "tests.parity.deferred:record")


@pytest.mark.process
def test_fused_projections(pool: Pool, adapters: Adapters) -> None:
    """One adapter for query, key and value where Hugging Face has one module for them; its rows are in another order
    here."""
    check(*adapters.of(parse("phi3 tp2 sp"), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")), pool)


@pytest.mark.process
@pytest.mark.parametrize(
    "text, leaves, saved",
    [
        pytest.param("dense pp2 do recompute=full", ("layers.3.self_attn.k_proj",), (), marks=pytest.mark.slow),
        ("dense pp2 vpp2", ("layers.2.mlp.down_proj",), ()),
        pytest.param(
            "dense tp2 sp",
            ("v_proj", "up_proj"),
            ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
            marks=pytest.mark.slow,
        ),
        ("dense tp2 pp2 do", ("q_proj",), ("lm_head.weight", "model.layers.1.self_attn.q_norm.weight")),
        ("moe tp2 sp dp2 ep2", ("experts.1.gate_proj", "experts.2.down_proj"), ("model.layers.0.mlp.gate.weight",)),
        pytest.param(
            "qwen3_5 tp2 sp",
            ("in_proj_qkv", "layers.1.linear_attn.in_proj_a"),
            ("model.layers.0.linear_attn.conv1d.weight",),
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_5 tp2 sp", ("in_proj_z", "out_proj"), (), marks=pytest.mark.slow),
        pytest.param("qwen3_next tp2 sp", ("in_proj_ba",), (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_part_of_the_model(
    text: str, leaves: tuple[str, ...], saved: tuple[str, ...], pool: Pool, adapters: Adapters
) -> None:
    """Stages and layers without an adapter, some of the modules that Megatron joins, single experts, modules that train
    fully."""
    check(*adapters.of(parse(text), leaves, saved), pool)


@pytest.mark.process
@pytest.mark.parametrize("text", ["dense tp2 sp do", "moe dp2 ep2 do"])
def test_only_adapters_cost_gradients_and_moments(text: str, pool: Pool, adapters: Adapters) -> None:
    """Bytes from the engine's own buffers; the base model is what `reference` gives back, and the adapters come back
    after it."""
    task, _ = adapters.of(parse(text))
    plain = pool.run("tests.parity.lora_ranks:plain", replace(task, options={}), task.case.world)
    found = pool.run("tests.parity.lora_ranks:adapted", task, task.case.world)
    for facts, (full, base) in zip(found, plain, strict=True):
        assert facts.trained == facts.expected
        assert (
            facts.report.gradient_bytes < full.gradient_bytes / 4
            and facts.report.optimizer_bytes < full.optimizer_bytes / 4
        )
        assert facts.report.parameters_trained == facts.whole < facts.report.parameters_total / 4
        assert facts.reference == base != facts.adapted == facts.again
    want = merged(task)
    assert found[0].merged.keys() == want.keys()
    assert all(torch.allclose(found[0].merged[name], tensor, atol=1e-6) for name, tensor in want.items())


def merged(task: Task) -> dict[str, torch.Tensor]:
    """Every weight on disk with its adapter, in plain torch."""
    values, scale = lora.read_adapter(Path(task.options["adapters"])), lora.ALPHA / lora.RANK
    found = disk_tensors(task.folder)
    for name in found:
        a, b = (values.get(f"{name.removesuffix('.weight')}.lora_{half}.weight") for half in "AB")
        if a is not None and b is not None:
            found[name] = found[name] + scale * b @ a
    return found


@pytest.mark.wide
def test_the_oracle_is_peft(references: References, adapters: Adapters) -> None:
    """Loss and gradients of the oracle's changed weights are those of PEFT's own layers."""
    import peft
    from transformers import AutoModelForCausalLM

    task, _ = adapters.of(parse("dense single"), saved=("lm_head.weight",))
    batches = global_batch(task.case, 2)
    ours = lora.LoraOracle(task.folder, task.recipe, Path(task.options["adapters"]))
    loss = ours.accumulate(batches)[0]
    theirs = lora.Oracle(task.folder, task.recipe)
    base = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
    theirs.model = peft.PeftModel.from_pretrained(base, task.options["adapters"], is_trainable=True).train()
    assert loss == pytest.approx(theirs.accumulate(batches)[0], rel=1e-6)
    gradients = {
        n.removeprefix(lora.PREFIX).replace(".default", "").replace(".modules_to_save", ""): p.grad
        for n, p in theirs.model.named_parameters()
        if p.requires_grad
    }
    assert not any(d.bad for d in tensors("gradient", ours.gradients(), gradients, GRADIENT))


@pytest.mark.wide
@pytest.mark.parametrize("text", ["dense single", pytest.param("qwen3_next single", marks=pytest.mark.slow)])
def test_added_outputs_are_those_of_changed_weights(text: str, adapters: Adapters) -> None:
    """The two forms of the oracle, in float64, with experts and without."""

    class Wide(lora.AddedLoraOracle):
        dtype = torch.float64

    task, want = adapters.of(parse(text))
    rows = [global_batch(task.case, 0)]
    wide = model_type(task.case.variant) in NOISY
    got = lora.reference(task.folder, task.recipe, Path(str(task.options["adapters"])), rows, Wide, wide)
    assert not any(d.bad for d in tensors("gradient", got.gradients, want.gradients, 2e-7))


DROPPED = ["dense single", "dense tp2", "dense tp2 sp", "moe tp2 sp dp2 ep2 etp2"]


@pytest.mark.process
@pytest.mark.parametrize("text", DROPPED)
def test_dropout_is_drawn_alike_where_ranks_share_an_input(text: str, pool: Pool, adapters: Adapters) -> None:
    """Evaluation drops nothing; in training the loss moves a little, and what tensor-parallel ranks both hold stays the
    same on both."""
    task, want = adapters.of(parse(text))
    quiet, loss, alike = pool.run(
        "tests.parity.lora_ranks:dropped", replace(task, options={**task.options, "lora_dropout": 0.2}), task.case.world
    )[0]
    assert quiet == pytest.approx(want.loss, rel=1e-6)
    assert 1e-5 < abs(loss - want.loss) / want.loss < 0.1 and alike


class LoraPlusOracle(lora.LoraOracle):
    """B, and vectors, at RATIO times the learning rate: the groups of PEFT's `create_loraplus_optimizer`."""

    def __init__(self, folder: Path, recipe: Recipe, adapter: Path) -> None:
        super().__init__(folder, recipe, adapter)
        named = self.model.tensors.items()
        fast = {n for n, t in named if "lora_B" in n or t.dim() == 1}
        groups = []
        for quick in (False, True):
            for decay in (recipe.weight_decay, 0.0):
                group = [t for n, t in named if (n in fast) == quick and (t.dim() > 1) == bool(decay)]
                groups.append({"params": group, "weight_decay": decay, "lr": recipe.lr * (RATIO if quick else 1)})
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=recipe.betas, eps=recipe.eps)


RATIO = 8.0


@pytest.mark.process
@pytest.mark.parametrize("text", ["dense tp2 sp do", pytest.param("moe pp2 dp2 ep2 do", marks=pytest.mark.slow)])
def test_lora_plus(text: str, pool: Pool, adapters: Adapters) -> None:
    """Matrices and vectors that train fully beside them."""
    saved = ("lm_head.weight", "model.norm.weight")
    task, plain = adapters.of(parse(text), saved=saved)
    steps = [global_batch(replace(task.case, packed=False), k) for k in range(STEPS)]
    want = lora.reference(task.folder, task.recipe, Path(task.options["adapters"]), steps, LoraPlusOracle)
    assert want.losses[0] == plain.losses[0] and want.losses[-1] != plain.losses[-1]
    check(replace(task, options={**task.options, "lorap_lr_ratio": RATIO}), want, pool)
