"""Vision-language models on rows with videos against transformers alone: loss and every gradient.

Covers: megaswift/data/row_media.py, megaswift/data/open_media_files.py, megaswift/data/vision_processor.py,
megaswift/data/vision_batches.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity import videos, vision
from tests.parity.compare import number, table, tensors
from tests.parity.pool import Pool

pytestmark = pytest.mark.process

ROWS = 8
TRAINS_ALL = {"freeze_vit": False, "freeze_aligner": False, "video_fps": 2.0}
PACKED = {"packing": True, "max_length": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
Made = dict[str, tuple[Path, Path, vision.Reference]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """With torchvision."""
    with videos.video_pool() as started:
        yield started


@pytest.fixture(scope="module")
def made(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By kind: model, data, what transformers makes of them; made when they are asked for."""
    root = tmp_path_factory.mktemp("videos")

    class Models(Made):
        def __missing__(self, kind: str) -> tuple[Path, Path, vision.Reference]:
            folder, data = (
                videos.write_model(kind, root / kind),
                videos.write_rows(root / f"{kind}-data" / "rows.jsonl", kind),
            )
            want = ranks.run("tests.parity.videos:reference", (folder, data, ROWS), 1)[0]
            self[kind] = folder, data, want
            return self[kind]

    return Models()


def check(ranks: Pool, made: Made, kind: str, engine: str, count: int, **options: object) -> None:
    """The engine's numbers are transformers'."""
    folder, data, want = made[kind]
    extra = {"gradient_accumulation_steps": 4 // count} | TRAINS_ALL | options
    got = ranks.run("tests.parity.vision:train", vision.Task(folder, data, engine, extra), count)[0]
    for gradients in (got.gradients, want.gradients):  # a softmax does not see what is added to all keys
        for name in [n for n in gradients if n.endswith("k_proj.bias") and "vision" in n]:
            assert float(gradients.pop(name).abs().max()) < 1e-6
    differences = [number("loss", got.loss, want.loss, 1e-6), *tensors("gradient", got.gradients, want.gradients, 5e-6)]
    assert not any(d.bad for d in differences), table(f"{kind}, {engine} on {count}, {options}", differences)
    assert any(float(g.abs().max()) for n, g in got.gradients.items() if "vis" in n), "no gradient reaches the tower"


@pytest.mark.parametrize(
    ("kind", "engine", "count"),
    [
        ("qwen2_5_vl", "ddp", 1),
        ("qwen3_vl", "fsdp2", 2),
        *(
            pytest.param(kind, engine, count, marks=pytest.mark.slow)
            for kind in videos.KINDS
            for engine, count in (("ddp", 1), ("ddp", 2), ("fsdp2", 2))
            if (kind, engine, count) not in (("qwen2_5_vl", "ddp", 1), ("qwen3_vl", "fsdp2", 2))
        ),
        pytest.param("qwen2_vl", "zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_equals_transformers(kind: str, engine: str, count: int, ranks: Pool, made: Made) -> None:
    """Of micro-batches on two ranks, one has a video and the other an image, or neither."""
    check(ranks, made, kind, engine, count)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in videos.KINDS)])
def test_packed_documents_equal_transformers(kind: str, ranks: Pool, made: Made) -> None:
    """All documents in one row; the reference reads each alone."""
    check(ranks, made, kind, "ddp", 1, **PACKED)


def test_streamed_rows_equal_transformers(ranks: Pool, made: Made) -> None:
    """A stream does not know whether a video will come: every micro-batch has one."""
    check(ranks, made, "qwen2_5_vl", "fsdp2", 2, streaming=True, max_steps=1)
