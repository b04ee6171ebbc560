"""Preference losses on rows with images against transformers alone and the papers' formulas by hand: loss and every
gradient of a first global batch, with a reference that is another model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import vision
from tests.parity.check import assert_vision_within_limits
from tests.parity.compare import number, tensors
from tests.parity.pool import Pool
from tests.parity.vision_preferences import GAMMA, PairTask, pairs, reference
from tests.trainers.vision_rows import write_pairs

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
ENGINES = ("ddp", "fsdp2", "zero3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision_pairs")


def inputs(root: Path, kind: str) -> Path:
    """model/, reference/ (other weights), and the pairs in one file and in two; made once."""
    folder = root / kind
    if not folder.exists():
        vision.write_model(kind, folder / "model")
        vision.write_model(kind, folder / "reference", seed=6)
        write_pairs(folder, 8)
        lines = (folder / "trl.jsonl").read_text().splitlines(keepends=True)
        (folder / "first.jsonl").write_text("".join(lines[:3]))
        (folder / "rest.jsonl").write_text("".join(lines[3:]))
    return folder


@pytest.mark.parametrize(
    ("kind", "task", "where", "rows"),
    [
        ("qwen2_vl", "dpo", ("ddp", 2), "first rest"),
        ("gemma3", "simpo", ("fsdp2", 2), "swift"),
        *(pytest.param(k, "dpo", (e, 2), "swift", marks=SLOW) for k in vision.KINDS for e in ENGINES),
        *(pytest.param(k, t, ("ddp", 1), "trl", marks=SLOW) for k in ("llava", "qwen3_vl") for t in ("cpo", "simpo")),
    ],
)
def test_equals_transformers(kind: str, task: str, where: tuple[str, int], rows: str, pool: Pool, root: Path) -> None:
    (engine, ranks), folder = where, inputs(root, kind)
    first = pairs(folder / "trl.jsonl", 4)
    options = {"dpo": {"ref_model": str(folder / "reference")}, "simpo": {"simpo_gamma": GAMMA}}.get(task, {})
    given = PairTask(folder, rows, engine, task, options)
    got = pool.run("tests.parity.vision_preferences:train", given, ranks)[0]
    want = reference(folder, first, task)
    for gradients in (got.gradients, want.gradients):  # rounding alone is left of these
        for name in [n for n in gradients if n.endswith("k_proj.bias") and "vision" in n]:
            assert float(gradients.pop(name).abs().max()) < 1e-6
    differences = [number("loss", got.loss, want.loss, 2e-6), *tensors("gradient", got.gradients, want.gradients, 1e-5)]
    assert_vision_within_limits(differences, f"{kind}, {task}, {engine} on {ranks}", pool, engine, ranks)
    assert any(float(g.abs().max()) for n, g in got.gradients.items() if "vis" in n), "no gradient reaches the tower"
    turned = [{**row, "images": other["images"]} for row, other in zip(first, [*first[1:], first[0]], strict=True)]
    assert abs(reference(folder, turned, task).loss - want.loss) > 1e-4, "the images do not matter"
