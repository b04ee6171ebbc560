"""Preference rows with images: their forms, tokens and pixels, what is refused, what is cut, what `data show` prints.

Covers: megaswift/data/preference/encode.py, megaswift/data/vision/batches.py,
megaswift/data/preference/documents.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.data import build
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.show import samples
from megaswift.data.vision.processor import Processor
from megaswift.errors import DataError
from tests.parity import vision

pytestmark = pytest.mark.wide

ASK, GOOD, BAD = "what is it?", "a cat.", "no idea."
FILE = {"images": ["images/0.png"]}
PARTS = [vision.image("0.png"), vision.part(ASK)]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def swift(asked: Any, good: str = GOOD, bad: str = BAD, **more: Any) -> dict[str, Any]:
    return {"messages": [user(asked), *says(good)], "rejected_response": bad, **more}


def trl(asked: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": [user(asked)], "chosen": says(GOOD), "rejected": says(BAD), **more}


FORMS: list[dict[str, Any]] = [
    swift(PARTS),
    swift("<image>" + ASK, **FILE),
    swift(ASK, **FILE),
    {"messages": [user("<image>" + ASK), *says(GOOD)], "rejected_messages": says(BAD), **FILE},
    trl(ASK, **FILE),
    trl(ASK, image="images/0.png") | {"prompt": [user("<image>" + ASK)]},
    trl([{"type": "image"}, vision.part(ASK)], **FILE),
    trl(PARTS),
    {"chosen": [user(ASK), *says(GOOD)], "rejected": [user(ASK), *says(BAD)], **FILE},
]


def write(folder: Path, rows: tuple[dict[str, Any], ...], name: str = "data") -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


def sources(processor: Processor, folder: Path, *rows: dict[str, Any], per_device: int = 1, **options: Any) -> Any:
    given = {"dataset_cache_dir": str(folder / "cache"), "shuffle": False, "engine": "ddp"} | options
    given.setdefault("dataset", [write(folder, rows)])
    cfg = SwiftConfig(task="dpo", model="unused", **given)
    geometry = LoaderGeometry(per_device=per_device)
    return build.build_train_and_eval_sources(cfg.data, cfg.train, processor, geometry, "dpo")[0]


def test_forms_are_what_transformers_makes_of_parts(processor: Processor, folder: Path) -> None:
    """Tokens and pixels of both conversations; loss on the completion with its end of turn."""
    source = sources(processor, folder, *FORMS)
    for _ in FORMS:
        (batch,) = source.next()
        for row, answer in enumerate((GOOD, BAD)):
            line = json.dumps({"messages": [user(PARTS), {"role": "assistant", "content": [vision.part(answer)]}]})
            want = vision.inputs_of(processor.inner, line, folder)
            size = want["input_ids"].shape[1]
            assert batch.input_ids[row, :size].tolist() == want["input_ids"][0].tolist()
            mask = want["assistant_masks"][0, 1:].bool().tolist()
            assert (batch.loss_weights[row, : size - 1] != 0).tolist() == mask and sum(mask) == len(answer) + 1
            assert bool((batch.extra["pixel_values"][row] == want["pixel_values"][0]).all())
        assert batch.fields["pairs"].tolist() == [[0, 1]]


def test_each_pair_has_its_own_images(processor: Processor, folder: Path) -> None:
    """Of rows of two data sets, of which one is taken in part and twice over."""
    names = ["0.png", "1.png", "2.png", "3.png"]
    rows = [swift("<image>" + ASK, images=[f"images/{name}"]) for name in names]
    files = [write(folder, tuple(rows[:3]), "a") + "#5", write(folder, (swift("none"), rows[3]), "b")]
    source = sources(processor, folder, dataset=files, per_device=7)
    (batch,) = source.next()
    single = [sources(processor, folder, row).next()[0].extra["pixel_values"] for row in rows]
    pictures = [0, 1, 2, *(int(s) for s in source.data.docs.sample[6:10:2]), None, 3]
    kept = [p for p in pictures if p is not None for _ in range(2)]
    assert len(set(kept)) == 4 and batch.extra["pixel_values"].shape[0] == len(kept)
    for mine, picture in zip(batch.extra["pixel_values"], kept, strict=True):
        assert bool((mine == single[picture][0]).all())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (swift([vision.image("9.png"), vision.part(ASK)]), r"data.jsonl:2: column images: no such file: .*9.png"),
    (trl("<image>" + ASK, images=["images/broken.png"]), r"data.jsonl:2: column images: .*broken.png cannot be read"),
    (swift("<image><image>", **FILE), "no file for image 2"),
    (swift("<image>" + ASK, bad="<image>", **FILE), "no file for image 2"),
    (swift(ASK, rejected_images=["images/1.png"], **FILE), "column rejected_images: other images for the rejected"),
    (swift(ASK, rejected_videos=["a.mp4"], **FILE), "column rejected_videos: other videos for the rejected"),
    (swift(ASK, rejected_tools=[{"name": "f"}], **FILE), "column rejected_tools: other tools for the rejected"),
    ({"prompt": ASK, "chosen": GOOD, "rejected": BAD, **FILE}, "column prompt: plain text, .* its images have no"),
]


def test_the_same_images_for_the_rejected_completion(processor: Processor, folder: Path) -> None:
    """As ms-swift's documentation writes them."""
    row = swift("<image>" + ASK, **FILE)
    source = sources(processor, folder, row, row | {"rejected_images": row["images"]})
    assert source.rows == 2


@pytest.mark.parametrize(("row", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_refused_with_file_and_row(row: dict[str, Any], told: str, processor: Processor, folder: Path) -> None:
    (folder / "images" / "broken.png").write_bytes((folder / "images" / "0.png").read_bytes()[:60])
    with pytest.raises(DataError, match=told):
        sources(processor, folder, FORMS[0], row)
    assert sources(processor, folder, FORMS[0], row, strict=False).rows == 1


def test_no_cut_goes_through_an_image(processor: Processor, folder: Path) -> None:
    rows = [swift(PARTS, "a" * 30, "b" * 40), swift("c", "a" * 70, "b" * 60)]
    rows.append(swift([vision.part("c" * 40), vision.image("0.png")]))
    whole = sources(processor, folder, *rows).data.docs
    assert whole.image_end[0] == whole.image_end[1] > whole.image_end[2] == 0
    size = int(whole.image_end[0]) + len(ASK) + 8
    right = sources(processor, folder, *rows, max_length=size, truncation_strategy="right")
    assert right.data.docs.sample.tolist() == [0, 0, 1, 1] and right.data.docs.counted["deleted"] == 1
    (batch,) = right.next()
    assert batch.input_ids.shape[1] == size and all(v.shape[1] == size for v in batch.extra.values() if v.dim() == 2)
    with pytest.raises(DataError, match="none of 1 pairs remains"):
        sources(processor, folder, rows[2], max_length=20, truncation_strategy="right")
    with pytest.raises(DataError, match="none of 1 pairs remains"):
        sources(processor, folder, rows[0], max_length=size, truncation_strategy="left")


def test_pairs_without_images_go_past_a_blank_one(processor: Processor, folder: Path) -> None:
    source = sources(processor, folder, swift("no"), swift(PARTS))
    (text,), (other,) = source.next(), source.next()
    lengths = [len(source.data.docs.read(i)[0]) for i in range(2)]
    assert text.valid.sum(1).tolist() == lengths and text.extra.keys() == other.extra.keys()
    assert text.label_tokens == int(source.data.docs.labels[:2].sum())


def test_data_show_prints_images_and_certifies(
    processor: Processor, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(folder, tuple(FORMS))
    words = [data, "--task", "dpo", "--model", "unused", "--dataset_cache_dir", str(folder / "cache")]
    assert samples.main([*words, "--samples", "1"], lambda *_: processor) == 0
    printed = capsys.readouterr().out
    assert "chosen: " in printed and "rejected: " in printed
    assert printed.count("<image> x ") == 2, printed
    assert f"certified: {len(FORMS)} rows, {2 * len(FORMS)} completions, {2 * len(FORMS)} images" in printed
    assert "rendered with another prompt" not in printed
