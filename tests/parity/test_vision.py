"""Vision-language models on the torch engine against transformers alone: loss, every gradient, and which weights
move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaswift.engine.options.engine import ZERO
from megaswift.engine.torch.logit_fields import image_grid_positions
from megaswift.losses.contract import Batch
from tests.parity import vision
from tests.parity.check import assert_vision_within_limits
from tests.parity.compare import number, tensors
from tests.parity.pool import Pool

pytestmark = pytest.mark.process

TRAINS_ALL = {"freeze_vit": False, "freeze_aligner": False}
ROWS = 8
CASES = [
    ("qwen2_vl", "ddp", 2),
    ("gemma3", "fsdp2", 2),
    *(
        pytest.param(kind, engine, 2, marks=pytest.mark.slow)
        for kind in vision.KINDS
        for engine in ("ddp", "fsdp2")
        if (kind, engine) not in (("qwen2_vl", "ddp"), ("gemma3", "fsdp2"))
    ),
    *(pytest.param(kind, "ddp", 1, marks=pytest.mark.slow) for kind in vision.KINDS),
    *(
        pytest.param(kind, engine, 2, marks=pytest.mark.slow)
        for kind in ("qwen2_vl", "llava", "qwen3_vl_moe")
        for engine in ZERO
    ),
]
Made = dict[str, tuple[Path, Path, vision.Reference]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By kind: model, data, what transformers makes of them; made when they are asked for."""
    root = tmp_path_factory.mktemp("vision")

    class Models(Made):
        def __missing__(self, kind: str) -> tuple[Path, Path, vision.Reference]:
            folder = vision.write_model(kind, root / kind)
            data = vision.write_rows(root / "data.jsonl")
            self[kind] = folder, data, vision.reference(folder, data, ROWS)
            return self[kind]

    return Models()


def run(pool: Pool, made: Made, kind: str, engine: str, ranks: int, **options: object) -> vision.Reference:
    folder, data, _ = made[kind]
    steps = int(options.pop("steps", 0))
    extra = {"gradient_accumulation_steps": 4 // ranks} | options
    return pool.run("tests.parity.vision:train", vision.Task(folder, data, engine, extra, steps), ranks)[0]


@pytest.mark.parametrize(("kind", "engine", "ranks"), CASES)
def test_equals_transformers(kind: str, engine: str, ranks: int, pool: Pool, made: Made) -> None:
    """With a micro-batch on one rank that has no image, and one that has a row without."""
    check_all_gradients(run(pool, made, kind, engine, ranks, **TRAINS_ALL), made[kind][2], kind, pool, engine, ranks)


def check_all_gradients(
    got: vision.Reference, want: vision.Reference, name: str, pool: Pool, engine: str, ranks: int
) -> None:
    """Those of the tower and of what joins it to the language model among them."""
    seen = [
        # a softmax does not see what is added to all keys: rounding alone is left
        {n: g for n, g in one.gradients.items() if not (n.endswith("k_proj.bias") and "vision" in n)}
        for one in (got, want)
    ]
    for one, kept in zip((got, want), seen, strict=True):
        assert all(float(g.abs().max()) < 1e-6 for n, g in one.gradients.items() if n not in kept)
    differences = [number("loss", got.loss, want.loss, 1e-6), *tensors("gradient", *seen, 5e-6)]
    assert_vision_within_limits(differences, f"{name}, {engine} on {ranks}", pool, engine, ranks)
    assert any(float(g.abs().max()) for n, g in got.gradients.items() if "vis" in n), "no gradient reaches the tower"


PACKED = {"packing": True, "max_length": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    "kind",
    ["qwen2_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in vision.KINDS if k not in ("qwen2_vl", "gemma3"))],
)
def test_packed_documents_equal_transformers(kind: str, pool: Pool, made: Made) -> None:
    """All documents in one row; the reference reads each alone."""
    got = run(pool, made, kind, "ddp", 1, **PACKED, **TRAINS_ALL)
    check_all_gradients(got, made[kind][2], f"{kind}, packed", pool, "ddp", 1)


ROW_LENGTHS = {"internvl": 99, "llava": 82, "llava_next": 110, "idefics3": 61}
"""Four rows of one to three documents, most of which have images; else 64."""


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("qwen2_vl", "fsdp2"),
        *(pytest.param("qwen2_vl", engine, marks=pytest.mark.slow) for engine in ("ddp", *ZERO)),
        *(
            pytest.param(kind, engine, marks=pytest.mark.slow)
            for kind in vision.KINDS
            for engine in ("fsdp2", "zero3")
            if kind not in ("qwen2_vl", "gemma3")
        ),
    ],
)
def test_towers_learn_from_packed_documents(kind: str, engine: str, pool: Pool, made: Made) -> None:
    """The gradients of the tower and of what joins it to the language model, with two rows on each of two ranks."""
    options = {**PACKED, **TRAINS_ALL, "max_length": ROW_LENGTHS.get(kind, 64), "gradient_accumulation_steps": 2}
    check_all_gradients(run(pool, made, kind, engine, 2, **options), made[kind][2], f"{kind}, packed", pool, engine, 2)


def test_positions_of_packed_documents_are_their_own(made: Made) -> None:
    """Those that the model gives each document alone, behind the positions that tell documents apart."""
    from transformers import AutoModelForImageTextToText

    folder, data, _ = made["qwen2_vl"]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = vision.Processor(vision.processor_folder_and_files_digest(folder, False)).inner
    lines = data.read_text(encoding="utf-8").splitlines()
    rows = [vision.inputs_of(processor, lines[i], data.parent) for i in (0, 2, 6)]
    names = ("mm_token_type_ids", "image_grid_thw")
    own = [model.model.get_rope_index(r["input_ids"], **{n: r[n] for n in names})[0] for r in rows]
    plain = torch.cat([torch.arange(r["input_ids"].shape[1]) for r in rows])[None]
    extra = {"mm_token_type_ids": torch.cat([r["mm_token_type_ids"] for r in rows], 1)}
    extra["image_grid_thw"] = torch.cat([r["image_grid_thw"] for r in rows])
    ids = torch.cat([r["input_ids"] for r in rows], 1)
    bounds = torch.tensor([0, *(r["input_ids"].shape[1] for r in rows)]).cumsum(0).int()
    batch = Batch(ids, ids, torch.ones(ids.shape), plain, torch.ones(ids.shape, dtype=torch.bool), bounds, extra=extra)
    found = image_grid_positions(model, batch)
    assert found is not None and torch.equal(found, torch.cat([plain[None], torch.cat(own, 2)]))


def test_streamed_rows_equal_transformers(pool: Pool, made: Made) -> None:
    """Each rank tokenizes half of the rows and opens the images of its own micro-batches."""
    want = made["qwen2_vl"][2]
    got = run(pool, made, "qwen2_vl", "ddp", 2, streaming=True, max_steps=1)
    trained = {n: g for n, g in want.gradients.items() if n in got.gradients}
    differences = [number("loss", got.loss, want.loss, 1e-6), *tensors("gradient", got.gradients, trained, 5e-6)]
    assert_vision_within_limits(differences, "streamed", pool, "ddp", 2)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("qwen2_vl", "ddp"),
        *(pytest.param(k, e, marks=pytest.mark.slow) for k in vision.KINDS for e in ("ddp", "fsdp2", "zero2", "zero3")),
    ],
)
def test_only_what_is_not_frozen_moves(kind: str, engine: str, pool: Pool, made: Made) -> None:
    """By default the language model trains; the tower and what joins the two stay bit for bit."""
    folder = made[kind][0]
    from transformers import AutoModelForImageTextToText

    before = dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters())
    got = run(pool, made, kind, engine, 2, steps=2)
    text = {n for n in before if "language_model" in n or "text_model" in n or n.startswith("lm_head")}
    assert got.gradients.keys() == text
    moved = {n for n, p in before.items() if not torch.equal(p, got.weights[n])}
    assert moved == text


def part_of(name: str) -> str:
    """By hand, for the two kinds below."""
    if "merger" in name or "multi_modal_projector" in name:
        return "aligner"
    return "vit" if "visual" in name or "vision_tower" in name else "llm"


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("qwen2_vl", "ddp"),
        ("gemma3", "fsdp2"),
        *(pytest.param("qwen2_vl", engine, marks=pytest.mark.slow) for engine in ("zero2", "zero3")),
    ],
)
def test_parts_have_learning_rates_of_their_own(kind: str, engine: str, pool: Pool, made: Made) -> None:
    """One step is torch's AdamW in groups by hand, from the engine's gradients, which are transformers'."""
    from transformers import AutoModelForImageTextToText

    rates = {"vit": 3e-2, "aligner": 2e-3, "llm": 1e-2}
    options = {"vit_lr": rates["vit"], "aligner_lr": rates["aligner"], "learning_rate": rates["llm"]}
    got = run(pool, made, kind, engine, 2, steps=1, weight_decay=0.1, max_grad_norm=0.5, **options, **TRAINS_ALL)
    model = AutoModelForImageTextToText.from_pretrained(made[kind][0], dtype=torch.float32)
    groups = []
    for name, parameter in model.named_parameters():
        parameter.grad = got.gradients[name]
        decay = 0.1 if parameter.dim() > 1 and not name.endswith("bias") else 0.0
        groups.append({"params": [parameter], "lr": rates[part_of(name)], "weight_decay": decay})
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6).step()
    differences = tensors("weight", got.weights, dict(model.named_parameters()), 5e-6)
    assert_vision_within_limits(differences, f"{kind}, {engine}", pool, engine, 2)
