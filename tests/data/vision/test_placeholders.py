"""Rows with images: their forms, the tokens and masks that transformers gives them, what is refused, what is cut.

Covers: megaswift/data/encode/rows.py, megaswift/data/vision/encode.py, megaswift/data/vision/processor.py,
megaswift/data/store/token_store.py, megaswift/data/vision/batches.py, megaswift/data/stream/rows.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.data import build
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.vision.processor import Processor
from megaswift.errors import DataError
from tests.data.makers import vision_processor
from tests.parity import vision

pytestmark = pytest.mark.wide

ASK, ANSWER = "what is it?", "a cat."
PARTS = [vision.image("0.png"), vision.part(ASK)]


def turns(asked: Any, answer: Any = ANSWER) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def sources(processor: Processor, folder: Path, *rows: dict[str, Any], per_device: int = 1, **options: Any) -> Any:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cached = {} if "streaming" in options else {"dataset_cache_dir": str(folder / "cache")}
    given = {"dataset": [str(data)], "shuffle": False, "engine": "ddp"} | cached | options
    cfg = SwiftConfig(task="sft", model="unused", **given)
    geometry = LoaderGeometry(per_device=per_device)
    return build.build_train_and_eval_sources(cfg.data, cfg.train, processor, geometry, "sft")[0]


FORMS: list[dict[str, Any]] = [
    turns(PARTS),
    turns([{"type": "image", "image": "images/0.png"}, vision.part(ASK)]),
    turns([{"type": "image_url", "image_url": {"url": "images/0.png"}}, vision.part(ASK)]),
    turns([{"type": "image"}, vision.part(ASK)]) | {"images": ["images/0.png"]},
    turns("<image>" + ASK) | {"images": ["images/0.png"]},
    turns("<image>" + ASK) | {"images": [{"path": "images/0.png"}]},
    turns("<image>" + ASK) | {"images": '["images/0.png"]'},
    turns(ASK) | {"images": "images/0.png"},
    {"query": "<image>" + ASK, "response": ANSWER, "images": ["images/0.png"]},
    {
        "image": "images/0.png",
        "conversations": [{"from": "human", "value": "<image>" + ASK}, {"from": "gpt", "value": ANSWER}],
    },
]


def test_forms_are_what_transformers_makes_of_parts(processor: Processor, folder: Path) -> None:
    source = sources(processor, folder, *FORMS)
    want = vision.inputs_of(processor.inner, json.dumps(turns(PARTS, [vision.part(ANSWER)])), folder)
    mask = want.pop("assistant_masks")[0].numpy()
    for i in range(len(FORMS)):
        ids, loss = source.data.docs.read(i)
        assert ids.tolist() == want["input_ids"][0].tolist() and loss.tolist() == mask.tolist(), FORMS[i]
        (batch,) = source.next()
        assert batch.extra.keys() == want.keys() - {"input_ids", "attention_mask"}
        for name, tensor in batch.extra.items():
            assert tensor.shape == want[name].shape and bool((tensor == want[name]).all()), name


def test_bytes_in_the_data_file(processor: Processor, folder: Path) -> None:
    """Parquet as `datasets` writes images, and OpenAI's messages."""
    import base64

    import pyarrow as pa
    import pyarrow.parquet as pq

    content = (folder / "images" / "0.png").read_bytes()
    asked = [{"type": "image", "text": None}, {"type": "text", "text": ASK}]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}]
    pq.write_table(
        pa.Table.from_pylist([{"messages": talk, "images": [{"bytes": content, "path": None}]}]),
        folder / "rows.parquet",
    )
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    rows = [turns([{"type": "image_url", "image_url": {"url": url}}, vision.part(ASK)]), turns(PARTS)]
    source = sources(processor, folder, *rows, dataset=[str(folder / "rows.parquet"), str(folder / "data.jsonl")])
    ids = [source.data.docs.read(i)[0].tolist() for i in range(3)]
    assert ids[0] == ids[1] == ids[2]
    pixels = [source.next()[0].extra["pixel_values"] for _ in range(3)]
    assert all(bool((p == pixels[2]).all()) for p in pixels) and len(list((folder / "cache" / "images").iterdir())) == 1


def test_masks_without_marks_in_the_template(processor: Processor, folder: Path) -> None:
    template = processor.tokenizer.chat_template
    rows = [turns(PARTS), turns([vision.part("so "), vision.image("1.png"), vision.part("?")]), turns("no image")]
    rows[1]["messages"] += turns([vision.part("and "), vision.image("2.png")], "b")["messages"]
    bare = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    strict = bare.replace("{% if c is string %}{{ c }}{% else %}{% for", "{% for").replace(
        "{% endif %}{% endfor %}{% endif %}", "{% endif %}{% endfor %}"
    )
    masks = []
    for text in (template, bare, strict):
        source = sources(processor, folder, *rows, chat_template=text)
        masks.append([source.data.docs.read(i) for i in range(3)])
    for other in masks[1:]:
        assert all(
            np.array_equal(a, b) for x, y in zip(masks[0], other, strict=True) for a, b in zip(x, y, strict=True)
        )


REFUSED: list[tuple[dict[str, Any], str]] = [
    (turns([vision.image("9.png"), vision.part(ASK)]), r"data.jsonl:1: column images: no such file: .*9.png"),
    (turns([{"type": "image", "url": "https://host/a.png"}]), "URLs are not downloaded"),
    (turns([{"type": "image", "image": "data:image/png;base64,?"}]), "is not base64"),
    (turns([{"type": "image", "image": "data:image/png;base64,AAAA"}]), "cannot be read"),
    (turns([{"type": "image"}]), "no file for image 1"),
    (turns("<image> and <image>") | {"images": ["images/0.png"]}, "no file for image 2"),
    (turns("<image>") | {"images": ["images/0.png", "images/1.png"]}, "2 files for 1 placeholders"),
    (turns(ASK) | {"images": [7]}, "int 7"),
    (turns([{"type": "video", "video": "a.mp4"}]), "column videos: no such file: .*a.mp4"),
    (turns("<video>?") | {"videos": ["images/0.png"]}, "data.jsonl:1: column videos: videos, but this model accepts"),
    (turns("<video> what?") | {"video": ["images/0.png"]}, "column videos: videos, but this model accepts only text"),
    (turns(PARTS) | {"audios": ["a.wav"]}, "column audios: audio, which no model"),
    (turns([vision.image("broken.png")]), r"broken.png cannot be read"),
]


@pytest.mark.parametrize(("row", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_refused_with_file_and_row(row: dict[str, Any], told: str, processor: Processor, folder: Path) -> None:
    (folder / "images" / "broken.png").write_bytes((folder / "images" / "0.png").read_bytes()[:60])
    with pytest.raises(DataError, match=told):
        sources(processor, folder, row)


def test_a_broken_image_can_be_skipped_and_is_counted(processor: Processor, folder: Path) -> None:
    source = sources(processor, folder, turns([vision.image("9.png")]), turns(PARTS), strict=False)
    assert source.rows == 1 and source.data.docs.stores[0].manifest["bad"] == 1


def test_max_pixels_of_one_image(processor: Processor, folder: Path) -> None:
    """As the option scales it, for this image alone."""
    parts = [{"type": "image", "image": f"images/{i}.png"} for i in (0, 1)]
    limited = [parts[0], parts[1] | {"max_pixels": 64}]
    (plain,) = sources(processor, folder, turns([*parts, vision.part(ASK)])).next()
    (own,) = sources(processor, folder, turns([*limited, vision.part(ASK)])).next()
    scaled = Processor(replace(processor.spec, max_pixels=64))
    (whole,) = sources(scaled, folder, turns([*parts, vision.part(ASK)])).next()
    first, second = own.extra["pixel_values"]
    assert bool((first == plain.extra["pixel_values"][0]).all()) and not bool((first == second).all())
    assert bool((second == whole.extra["pixel_values"][1]).all())


def test_a_placeholder_without_a_file_is_counted(tmp_path: Path) -> None:
    """Of a model whose own placeholder is another."""
    vision.write_images(tmp_path / "images")
    reader = vision_processor("qwen2_vl", tmp_path / "model")
    rows = [turns("<image>" + ASK), turns("<image>" + ASK) | {"images": ["images/0.png"]}, turns(ASK)]
    notes = sources(reader, tmp_path, *rows).data.docs.stores[0].manifest["notes"]
    assert notes == {"tags_without_files": 1}


OTHERS: list[dict[str, Any]] = [
    {"type": "audio", "audio": "a.wav"},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "document", "document": {"title": "t"}},
]
"""Parts that no model here reads."""


@pytest.mark.parametrize("other", OTHERS, ids=lambda part: part["type"])
def test_parts_that_no_model_reads_are_rendered_as_transformers_has_them(
    other: dict[str, Any], processor: Processor, folder: Path
) -> None:
    """Beside an image, before it, alone, and as an answer; without them, as this template omits them."""
    plain = [turns(PARTS), turns(PARTS), turns([]), turns(PARTS, [vision.part(ANSWER)])]
    rows = [turns([*PARTS, other]), turns([other, *PARTS]), turns([other]), turns(PARTS, [vision.part(ANSWER), other])]
    source = sources(processor, folder, *rows)
    for i, (row, want) in enumerate(zip(rows, plain, strict=True)):
        texts = [processor.inner.apply_chat_template(one["messages"], tokenize=False) for one in (row, want)]
        assert texts[0] == texts[1]
        made = vision.inputs_of(processor.inner, json.dumps(want | {"messages": _in_parts(want)}), folder)
        ids, loss = source.data.docs.read(i)
        assert ids.tolist() == made["input_ids"][0].tolist()
        assert loss.tolist() == made["assistant_masks"][0].tolist()
    assert source.data.docs.stores[0].manifest["notes"] == {"unused_parts": 4}


def _in_parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with all contents as parts, which the processor asks for."""
    contents = [
        m["content"] if isinstance(m["content"], list) else [vision.part(m["content"])] for m in row["messages"]
    ]
    return [m | {"content": content} for m, content in zip(row["messages"], contents, strict=True)]


def test_a_part_that_the_template_rejects_is_refused_with_its_words(processor: Processor, folder: Path) -> None:
    template = processor.tokenizer.chat_template
    strict = template.replace("{{ p['text'] }}", "{{ p['text'] if 'text' in p else raise_exception('only text') }}")
    assert strict != template
    with pytest.raises(DataError, match=r"content: a part of type 'audio': .* rejects this conversation .only text"):
        sources(processor, folder, turns([*PARTS, OTHERS[0]]), chat_template=strict)


def test_text_models_refuse_columns_of_images() -> None:
    tokens = vision.tokenizer("llava")
    data = SwiftConfig(task="sft", model="unused", dataset=["x"]).data
    encoder = RowEncoder(encode_spec(data, tokens, "sft"))
    from megaswift.data.untokenized_sample import RowError

    for row in FORMS[3:]:
        with pytest.raises(RowError, match="accepts only text"):
            encoder.render(row)
    for media, told in (({"videos": ["a.mp4"]}, "videos, but .* only text"), ({"audios": [["a.wav"]]}, "no model is")):
        with pytest.raises(RowError, match=told):
            encoder.render(turns(ASK) | media)
    with pytest.raises(RowError, match="enable_thinking, which is not read from rows"):
        encoder.render(turns(ASK) | {"chat_template_kwargs": {"enable_thinking": False}})
    encoder.render(turns(ASK) | {"image": "an unused column", "video": "another", "videos": [], "audios": 3})


def test_text_models_train_parts_of_images_as_the_template_writes_them() -> None:
    """With a count, even where it writes a placeholder: the image is lost."""
    tokens = vision.tokenizer("llava")
    encoder = RowEncoder(encode_spec(SwiftConfig(task="sft", model="unused", dataset=["x"]).data, tokens, "sft"))
    for row in (*FORMS[:3], turns([vision.part(ASK), OTHERS[0]])):
        rendered = encoder.render(row)
        assert rendered.text == tokens.apply_chat_template(row["messages"], tokenize=False)
        assert [rendered.text[a:b] for a, b in rendered.spans] == [ANSWER + "<e>"]
        assert rendered.notes == ("unused_parts",)


def test_rows_with_images_are_certified(processor: Processor, folder: Path) -> None:
    """All forms of a row; one with a placeholder too many is malformed, and an answer without loss is found."""
    from megaswift.data.show.loss_mask import LossMaskCertifier
    from megaswift.data.sources.readers import LocatedRow

    spec = encode_spec(SwiftConfig(task="sft", model="unused", dataset=["x"]).data, processor, "sft")
    rows = [*FORMS, turns("<image><image>" + ASK) | {"images": ["images/0.png"]}]
    located = [(str(folder / "data.jsonl"), LocatedRow(i, row)) for i, row in enumerate(rows)]
    findings = LossMaskCertifier(spec).certify(located)
    assert not findings.faults, findings
    assert (findings.images, findings.answers, findings.refused) == (len(FORMS), len(FORMS), 1)


def test_larger_images_are_scaled_down(processor: Processor, folder: Path) -> None:
    """The tokens and pixels of the processor on images that were scaled by hand; smaller ones are left alone."""
    from PIL import Image

    with Image.open(folder / "images" / "0.png") as opened:
        width, height = opened.size
        most = width * height // 3
        ratio = (most / (width * height)) ** 0.5
        small = opened.convert("RGB").resize((int(width * ratio), int(height * ratio)), Image.Resampling.BILINEAR)
    small.save(folder / "images" / "small.png")
    limited = Processor(replace(processor.spec, max_pixels=most))
    by_hand = turns("<image>" + ASK) | {"images": ["images/small.png"]}
    want, got = (
        sources(p, folder, row)
        for p, row in ((processor, by_hand), (limited, turns("<image>" + ASK) | {"images": ["images/0.png"]}))
    )
    assert want.data.docs.read(0)[0].tolist() == got.data.docs.read(0)[0].tolist()
    (expected,), (batch,) = want.next(), got.next()
    for name, tensor in expected.extra.items():
        assert bool((tensor == batch.extra[name]).all()), name
    whole = sources(processor, folder, turns("<image>" + ASK) | {"images": ["images/0.png"]}).next()[0]
    same = sources(Processor(replace(processor.spec, max_pixels=width * height)), folder, FORMS[4]).next()[0]
    assert all(bool((whole.extra[name] == same.extra[name]).all()) for name in whole.extra)
    assert any(whole.extra[n].shape != t.shape or bool((whole.extra[n] != t).any()) for n, t in batch.extra.items())


def test_no_cut_goes_through_an_image(processor: Processor, folder: Path) -> None:
    rows = [turns(PARTS, "a" * 30), turns("b", "b" * 60), turns([vision.part("c" * 40), vision.image("0.png")])]
    whole = sources(processor, folder, *rows).data.docs
    end = int(whole.image_end[0])
    assert whole.image_end[1] == 0 and whole.image_end[2] > 41
    size = len(ASK) + end + 6
    assert size < min(whole.length) and size < whole.image_end[2]
    right = sources(processor, folder, *rows, max_length=size, truncation_strategy="right")
    assert right.data.docs.sample.tolist() == [0, 1] and right.data.docs.counted["deleted"] == 1
    (batch,) = right.next()
    assert batch.input_ids.shape[1] == size and all(v.shape[1] == size for v in batch.extra.values() if v.dim() == 2)
    left = sources(processor, folder, *rows, max_length=size, truncation_strategy="left")
    assert left.data.docs.sample.tolist() == [1] and left.data.docs.counted["deleted"] == 2
    with pytest.raises(DataError, match="none of 1 rows remains"):
        sources(processor, folder, rows[2], max_length=20, truncation_strategy="right")


def test_a_row_without_images_goes_past_a_blank_one(processor: Processor, folder: Path) -> None:
    source = sources(processor, folder, turns("no"), turns(PARTS))
    (text,), (other,) = source.next(), source.next()
    own = len(source.data.docs.read(0)[0])
    assert int(text.valid.sum()) == own == text.tokens and text.valid[0, :own].all()
    assert (
        text.extra.keys() == other.extra.keys()
        and text.extra["pixel_values"].shape == other.extra["pixel_values"].shape
    )
    assert text.label_tokens == int(source.data.docs.labels[0])


def test_images_that_changed_or_went_are_told(processor: Processor, folder: Path) -> None:
    source = sources(processor, folder, turns(PARTS), dataloader_num_workers=2)
    source.next()
    (folder / "images" / "0.png").unlink()
    with pytest.raises(DataError, match=r"data.jsonl:1: column images"):
        source.data.batches([[source.data.read(0)]], source.shape, False)
    with pytest.raises(DataError, match=r"data.jsonl:1: column images: no such file"):
        sources(processor, folder, turns(PARTS))


MIXED = [turns(PARTS), turns("no"), turns([vision.image("1.png"), vision.part("and"), vision.image("2.png")]), FORMS[4]]


def equal(one: Any, other: Any) -> bool:
    """Two micro-batches, tensor by tensor; samples of later passes have further numbers in a stream."""
    named = [{**vars(b), **b.extra, "sample_ids": b.sample_ids % len(MIXED)} for b in (one, other)]
    tensors = [{k: v for k, v in n.items() if isinstance(v, torch.Tensor)} for n in named]
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(v, tensors[1][k]) for k, v in tensors[0].items())


def test_a_stream_gives_the_batches_of_stored_rows(
    processor: Processor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the ends of blocks and passes, and after a resume within a block."""
    monkeypatch.setattr("megaswift.data.stream.batches.BLOCK", 3)
    stored = sources(processor, folder, *MIXED, per_device=2)
    whole = sources(processor, folder, *MIXED, per_device=2, streaming=True, max_steps=9)
    for _ in range(2):
        assert equal(whole.next()[0], stored.next()[0])
    again = sources(processor, folder, *MIXED, per_device=2, streaming=True, max_steps=9)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        (want,), (one,), (other,) = stored.next(), whole.next(), again.next()
        assert equal(one, want) and equal(other, want)


def test_a_stream_names_or_skips_a_broken_image(
    processor: Processor, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "images" / "broken.png").write_bytes((folder / "images" / "0.png").read_bytes()[:60])
    rows = [turns(PARTS), turns([vision.image("broken.png"), vision.part(ASK)]), turns("no")]
    strict = sources(processor, folder, *rows, streaming=True, max_steps=3)
    strict.next()
    with pytest.raises(DataError, match=r"data.jsonl:2: column images: .*broken.png cannot be read"):
        strict.next()
    source = sources(processor, folder, *rows, streaming=True, max_steps=3, strict=False)
    counts = [source.next()[0].label_tokens for _ in range(3)]
    assert counts[0] and not counts[1] and counts[2] and source.stats["malformed"] == 1
    assert "data.jsonl:2" in capsys.readouterr().err
    lost = sources(processor, folder, turns("no"), turns(PARTS), streaming=True, max_steps=3)
    lost.next()
    (folder / "images" / "0.png").unlink()
    with pytest.raises(DataError, match=r"data.jsonl:2: column images: .*0.png"):
        lost.next()


def test_no_cut_in_a_stream_goes_through_an_image(processor: Processor, folder: Path) -> None:
    rows = [turns(PARTS, "a" * 30), turns("b", "b" * 60), turns([vision.part("c" * 40), vision.image("0.png")])]
    size = len(ASK) + int(sources(processor, folder, *rows).data.docs.image_end[0]) + 6
    for strategy, kept in (("right", [True, True, False]), ("left", [False, True, False])):
        options = {"max_length": size, "truncation_strategy": strategy, "streaming": True, "max_steps": 3}
        source = sources(processor, folder, *rows, **options)
        assert [bool(source.next()[0].label_tokens) for _ in range(3)] == kept
        assert source.stats["deleted"] == kept.count(False)


def test_packed_documents_bring_their_images(processor: Processor, folder: Path) -> None:
    """In the documents' order; a row of text alone has a blank one as a document of its own; streamed alike."""
    longest = max(sources(processor, folder, *MIXED, turns("b" * 60)).data.docs.length)
    options = {"packing": True, "max_length": int(longest)}
    rows = [*MIXED, turns("b" * 60)]
    stored = sources(processor, folder, *rows, **options)
    streamed = sources(processor, folder, *rows, **options, streaming=True, max_steps=9)
    alone = sources(processor, folder, *rows)
    single = {int(b.sample_ids[0]): b for b in (alone.next()[0] for _ in rows)}
    seen = []
    for _ in range(stored.rows):
        (batch,), (other,) = stored.next(), streamed.next()
        assert batch.cu_seqlens.tolist() == other.cu_seqlens.tolist() and torch.equal(batch.input_ids, other.input_ids)
        assert all(torch.equal(v, other.extra[k]) for k, v in batch.extra.items())
        samples = batch.sample_ids.tolist()
        seen += [i for i in samples if i >= 0]
        pictured = [single[i].extra["pixel_values"] for i in samples if i in (0, 2, 3)]
        if pictured:
            assert torch.equal(batch.extra["pixel_values"], torch.cat(pictured))
        else:
            assert samples[-1] == -1 and not batch.valid[0, int(batch.cu_seqlens[-2]) :].any()
    assert sorted(seen) == list(range(len(rows))) and stored.rows > 1
