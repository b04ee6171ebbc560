"""Vision-language models on rows with videos against transformers alone: loss and every gradient.

Covers: megaswift/data/vision/media.py, megaswift/data/vision/files.py, megaswift/data/vision/processor.py,
megaswift/data/vision/batches.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity import videos, vision
from tests.parity.check import assert_vision_within_limits
from tests.parity.compare import number, tensors
from tests.parity.pool import ROOT, Pool
from tests.parity.vision_preferences import PairTask

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
    compare(got, want, (1e-6, 5e-6), f"{kind}, {options}", ranks, engine, count)


def compare(
    got: vision.Reference,
    want: vision.Reference,
    limits: tuple[float, float],
    label: str,
    ranks: Pool,
    engine: str,
    count: int,
) -> None:
    """Loss and gradients, in limits."""
    for gradients in (got.gradients, want.gradients):  # a softmax does not see what is added to all keys
        for name in [n for n in gradients if n.endswith("k_proj.bias") and "vision" in n]:
            assert float(gradients.pop(name).abs().max()) < 1e-6
    differences = [number("loss", got.loss, want.loss, limits[0])]
    differences += tensors("gradient", got.gradients, want.gradients, limits[1])
    assert_vision_within_limits(differences, f"{label}, {engine} on {count}", ranks, engine, count)
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


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in videos.KINDS if k != "qwen2_5_vl")]
)
def test_packed_documents_equal_transformers(kind: str, ranks: Pool, made: Made) -> None:
    """All documents in one row; the reference reads each alone."""
    check(ranks, made, kind, "ddp", 1, **PACKED)


def test_streamed_rows_equal_transformers(ranks: Pool, made: Made) -> None:
    """A stream does not know whether a video will come: every micro-batch has one."""
    check(ranks, made, "qwen2_5_vl", "fsdp2", 2, streaming=True, max_steps=1)


@pytest.mark.parametrize(
    ("kind", "engine", "count"),
    [
        ("qwen3_vl", "ddp", 1),
        *(pytest.param(kind, "fsdp2", 2, marks=pytest.mark.slow) for kind in ("qwen2_vl", "qwen2_5_vl", "internvl")),
    ],
)
def test_preferences_equal_the_formula(kind: str, engine: str, count: int, ranks: Pool, tmp_path: Path) -> None:
    folder = videos.write_pairs(tmp_path, kind)
    options = {"ref_model": str(folder / "reference"), "video_fps": 2.0}
    got = ranks.run("tests.parity.vision_preferences:train", PairTask(folder, "pairs", engine, "dpo", options), count)[
        0
    ]
    want = ranks.run("tests.parity.videos:dpo_reference", (folder, 4), 1)[0]
    compare(got, want, (2e-6, 1e-5), f"{kind}, dpo", ranks, engine, count)


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in videos.KINDS if k != "qwen2_5_vl")]
)
def test_completions_have_the_logprobs_of_transformers(kind: str, ranks: Pool, tmp_path: Path) -> None:
    folder = videos.write_pairs(tmp_path, kind)
    found = ranks.run("tests.parity.videos:sampled", folder, 1)[0]
    assert len(found) == 2 * ROWS and len({len(own) for own, _ in found}) > 1
    for own, wanted in found:
        assert own == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen2_vl", "internvl"))]
)
def test_answers_are_those_of_generate(kind: str, ranks: Pool, tmp_path: Path) -> None:
    """Of rows in batches, with frames, files, images and without any."""
    found = ranks.run("tests.parity.videos:answered", videos.write_pairs(tmp_path, kind), 1)[0]
    assert len(found) == ROWS and len({own for own, _ in found}) > 1
    assert all(own == wanted for own, wanted in found), found


def test_a_row_may_say_how_its_video_is_read(ranks: Pool, tmp_path: Path) -> None:
    """Frames a second, frames in all, at most, and their size, before the options of the run."""
    found = ranks.run("tests.parity.videos:own_settings", tmp_path, 1)[0]
    assert len(found) == len(videos.OWN_SETTINGS)
    for own, want in found:
        assert own.keys() == want.keys()
        assert all(torch.equal(own[name], want[name]) for name in want)
    assert len({own["pixel_values_videos"].shape for own, _ in found}) == len(found)


@pytest.mark.parametrize("divided", [True, False])
def test_streams_bring_blank_videos_where_weights_are_divided(divided: bool, ranks: Pool, tmp_path: Path) -> None:
    """Elsewhere they would be computed for nothing."""
    folder, data = videos.write_model("qwen2_vl", tmp_path / "model"), vision.write_rows(tmp_path / "rows.jsonl", 2)
    found = ranks.run("tests.parity.videos:streamed_media", (folder, data, divided), 1)[0]
    assert found == [{"pixel_values", "pixel_values_videos"} if divided else {"pixel_values"}] * 2


LOAD = """
import sys
from pathlib import Path
from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
processor = Processor(processor_folder_and_files_digest(Path(sys.argv[1]), False))
print(processor.video_problem)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision fits this torch")
@pytest.mark.parametrize(
    ("folders", "told"),
    [
        pytest.param([], r"are read by torchvision, which is not installed", marks=pytest.mark.slow),
        ([videos.torchvision_folder()], r"with the installed torchvision \(operator torchvision::nms does not exist\)"),
    ],
)
def test_torchvision_that_is_missing_or_does_not_fit(folders: list[Path], told: str, tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, [*folders, ROOT]))
    command = [sys.executable, "-c", LOAD, str(videos.write_model("qwen2_vl", tmp_path))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert re.search(f"WeightsError: .*{told}", done.stderr, re.S), done.stderr
