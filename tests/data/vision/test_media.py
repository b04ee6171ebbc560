"""Videos in rows: their forms, what is kept of them, what is refused.

Covers: megaswift/data/vision/media.py, megaswift/data/vision/placeholders.py.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.data.vision.files import VideoSampling
from megaswift.data.vision.media import RowMedia, RowVideo
from megaswift.data.vision.placeholders import RowImageFolders, attach_media, kinds_of_media

ASK = "what is it?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mp4", "0.png", "1.png", "2.png"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def sample(asked: Any) -> UntokenizedSample:
    return UntokenizedSample(({"role": "user", "content": asked}, {"role": "assistant", "content": "y"}), (None, None))


def attached(folder: Path, asked: Any, **row: Any) -> tuple[list[Any], RowMedia]:
    """(the parts of the question, files below `folder`)."""
    made, media = attach_media(row, sample(asked), RowImageFolders(folder, folder / "kept"))
    assert RowMedia.from_dict(json.loads(json.dumps({"text": "t", **media.to_dict()}))) == media
    content = made.messages[0]["content"]
    return content if isinstance(content, list) else [content], media


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


PARTS: list[dict[str, Any]] = [
    {"type": "video", "video": "a.mp4"},
    {"type": "video", "path": "a.mp4"},
    {"type": "video", "url": "file://{}/a.mp4"},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
]


@pytest.mark.parametrize("part", PARTS)
def test_parts(part: dict[str, Any], folder: Path) -> None:
    part = {k: v.format(folder) if isinstance(v, str) else v for k, v in part.items()}
    parts, media = attached(folder, [part, text(ASK)])
    assert media == RowMedia(videos=(RowVideo((str(folder / "a.mp4"),)),))
    assert parts == [{"type": "video", "video": str(folder / "a.mp4")}, text(ASK)]


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        ("<video>" + ASK, {"videos": ["a.mp4"]}),
        ("<video>" + ASK, {"videos": "a.mp4"}),
        ("<video>" + ASK, {"videos": '["a.mp4"]'}),
        ("<video>" + ASK, {"video": "a.mp4"}),
        ("<video>" + ASK, {"videos": [{"path": "a.mp4"}]}),
        ([{"type": "video"}, text(ASK)], {"videos": ["a.mp4"]}),
        (ASK, {"videos": ["a.mp4"]}),
    ],
)
def test_a_column_of_files(asked: Any, row: dict[str, Any], folder: Path) -> None:
    parts, media = attached(folder, asked, **row)
    assert media == RowMedia(videos=(RowVideo((str(folder / "a.mp4"),)),))
    assert [p["type"] for p in parts] == ["video", "text"] and kinds_of_media(row, sample(asked)) == {"video"}


def test_a_placeholder_in_a_text_part_takes_the_column_video(folder: Path) -> None:
    asked = [text("<video>" + ASK)]
    parts, media = attached(folder, asked, video="a.mp4")
    assert media == RowMedia(videos=(RowVideo((str(folder / "a.mp4"),)),)) and parts[1] == text(ASK)
    assert kinds_of_media({"image": "0.png"}, sample([text("<image>")])) == {"image"}


def test_lists_of_frames(folder: Path) -> None:
    """With their number a second where the row says it."""
    names = ["0.png", "1.png", "2.png"]
    files = tuple(str(folder / name) for name in names)
    for row in ({"videos": [names]}, {"video": names}, {"videos": json.dumps([names])}):
        assert attached(folder, "<video>" + ASK, **row)[1].videos == (RowVideo(files, True),)
    for part in ({"video": names, "fps": 2}, {"video": names, "sample_fps": 2.0}):
        parts, media = attached(folder, [{"type": "video", **part}, text(ASK)])
        assert media.videos == (RowVideo(files, True, 2.0),) and parts[0]["video"] == [*files]
    entry = {"frames": names, "fps": 0.5}
    assert attached(folder, "<video>", videos=[entry, "b.mp4"][:1])[1].videos == (RowVideo(files, True, 0.5),)


def test_images_and_videos_keep_their_places(folder: Path) -> None:
    """Each kind has files of its own; what no text has a place for stands in front, images first."""
    row = {"images": ["0.png", "1.png"], "videos": ["a.mp4", ["1.png", "2.png"]]}
    parts, media = attached(folder, "<video>a<image>b<video><image>", **row)
    assert [p["type"] for p in parts] == ["video", "text", "image", "text", "video", "image"]
    assert [Path(name).name for name in media.images] == ["0.png", "1.png"]
    assert [[Path(f).name for f in v.files] for v in media.videos] == [["a.mp4"], ["1.png", "2.png"]]
    parts, media = attached(folder, "no place", **row)
    assert [p["type"] for p in parts] == ["image", "image", "video", "video", "text"] and len(media) == 4
    parts, media = attached(folder, [{"type": "image", "image": "2.png"}, text("x")], images=["0.png", "1.png"])
    assert [Path(name).name for name in media.images] == ["0.png", "1.png", "2.png"]
    assert [Path(p["image"]).name for p in parts[:3]] == ["0.png", "1.png", "2.png"]


def test_bytes_become_a_file(folder: Path) -> None:
    _, media = attached(folder, "<video>", videos=[{"bytes": b"film", "path": None}])
    kept = Path(str(media.videos[0].files[0]))
    assert kept.read_bytes() == b"film" and kept.parent == folder / "kept"


@pytest.mark.parametrize(
    ("asked", "row", "told"),
    [
        ("<video> and <video>", {"videos": ["a.mp4"]}, "column 'videos': no file for video 2"),
        ("<video>", {"videos": ["a.mp4", "b.mp4"]}, r"2 files for 1 placeholders; .* \(<video>\)"),
        ("<video>", {"videos": ["c.mp4"]}, "column 'videos': no such file: .*c.mp4"),
        ("<video>", {"videos": ["https://host/a.mp4"]}, "URLs are not downloaded"),
        ("<video>", {"videos": [[]]}, "an empty list of frames"),
        ("<video>", {"videos": [["0.png", "9.png"]]}, "no such file: .*9.png"),
        ("<video>", {"videos": [{"frames": ["0.png"], "fps": -1}]}, "fps int -1; expected a number above 0"),
        ("<video>", {"videos": [{"path": "a.mp4", "fps": "fast"}]}, 'fps str "fast"'),
        (
            "<video>",
            {"videos": [{"path": "a.mp4", "max_pixels": 0.5}]},
            "max_pixels float 0.5; expected a whole number",
        ),
        ("<video>", {"videos": [{"path": "a.mp4", "fps": True}]}, "fps bool true"),
        ("<video>", {"videos": [{"path": "a.mp4", "fps": 1, "nframes": 4}]}, "fps and nframes of one video"),
        ("<video>", {"videos": [{"frames": ["0.png"], "nframes": 4}]}, "nframes of a video that is a list of frames"),
        ([{"type": "video", "video": "a.mp4", "video_start": 1.0}], {}, "video_start of one video, .* not supported"),
        (
            [{"type": "image", "image": "0.png", "resized_height": 28}],
            {},
            "column 'images': resized_height of one image",
        ),
        (
            "<image>",
            {"images": [{"path": "0.png", "min_pixels": 4}]},
            "min_pixels of one image, which is not supported",
        ),
        ("<video>", {"videos": [["0.png"]], "chat_template_kwargs": {"total_pixels": 9}}, "total_pixels of one video"),
        (
            "<video>",
            {"videos": ["a.mp4"], "chat_template_kwargs": '{"enable_thinking": false}'},
            "enable_thinking, which",
        ),
        (
            "<bbox>",
            {"images": ["0.png"], "objects": {"bbox": [[1, 2]]}},
            "column 'objects': boxes and names for <bbox>",
        ),
        ("<img>9.png</img>", {}, "no such file: .*9.png"),
        ("<video>", {"videos": [7]}, "int 7"),
    ],
)
def test_refused(asked: str, row: dict[str, Any], told: str, folder: Path) -> None:
    with pytest.raises(RowError, match=told):
        attached(folder, asked, **row)


def test_a_stranger_s_text_names_no_files() -> None:
    asked = "what is <img>a.png</img> in HTML?"
    assert attach_media({}, sample(asked), RowImageFolders(None)) == (sample(asked), RowMedia())


def test_strangers_send_no_videos(folder: Path) -> None:
    for value in ("a.mp4", "data:video/mp4;base64,AAAA"):
        with pytest.raises(RowError, match="not read for clients"):
            attach_media({}, sample([{"type": "video", "video": value}]), RowImageFolders(None))


def test_a_column_video_without_a_place_says_nothing(folder: Path) -> None:
    assert not attached(folder, ASK, video="v_123")[1] and not kinds_of_media({"video": "v_123"}, sample(ASK))


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        ([{"type": "video", "video": "a.mp4", "fps": 1.0, "max_pixels": 100, "min_frames": None}, text(ASK)], {}),
        ("<video>" + ASK, {"videos": [{"path": "a.mp4", "fps": "1", "max_pixels": 100.0}]}),
        ("<video>" + ASK, {"videos": ["a.mp4"], "chat_template_kwargs": {"fps": 1, "max_pixels": 100}}),
        ([{"type": "video", "fps": 1}], {"videos": ["a.mp4"], "chat_template_kwargs": {"fps": 9, "max_pixels": 100}}),
    ],
)
def test_what_a_row_says_of_a_video(asked: Any, row: dict[str, Any], folder: Path) -> None:
    """The part goes before the row; a sampling knows them all, and the option for what is left."""
    video = attached(folder, asked, **row)[1].videos[0]
    assert dict(video.settings) == {"fps": 1.0, "max_pixels": 100} and len({video, video}) == 1
    assert VideoSampling(fps=3.0, max_frames=7).of(video) == VideoSampling(1.0, None, 7, 100)
    frames = attached(folder, [{"type": "video", "video": ["0.png"], "sample_fps": "1", "max_frames": 2}])[1].videos[0]
    assert frames.fps == 1.0 and VideoSampling().of(frames) == VideoSampling(max_frames=2)
    few = attached(folder, [{"type": "video", "video": "a.mp4", "nframes": 4}])[1].videos[0]
    assert VideoSampling(fps=3.0).of(few) == VideoSampling(num_frames=4)


def test_what_a_row_says_of_images(folder: Path) -> None:
    asked = [{"type": "image", "image": "0.png"}, {"type": "image", "image": "1.png", "max_pixels": 64}]
    assert attached(folder, asked)[1].max_pixels == (None, 64) and not attached(folder, asked[:1])[1].max_pixels
    assert attached(folder, asked, chat_template_kwargs={"max_pixels": 9, "fps": 2})[1].max_pixels == (9, 64)


def test_images_as_other_programs_write_them(folder: Path) -> None:
    """ms-swift's `<img>`, and Anthropic's `source`."""
    parts, media = attached(folder, "a<img>1.png</img>b<img>0.png</img>")
    assert [Path(str(f)).name for f in media.images] == ["1.png", "0.png"]
    assert [p.get("text", "image") for p in parts] == ["a", "image", "b", "image"]
    parts, media = attached(folder, "<img>9.png</img><image>", images=["0.png"])
    assert len(media) == 1 and parts[0] == text("<img>9.png</img>")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"picture").decode()}
    media = attached(folder, [{"type": "image", "source": source}])[1]
    assert Path(str(media.images[0])).read_bytes() == b"picture"


def test_a_list_in_the_column_of_one_video(folder: Path) -> None:
    """Its frames, or as many videos as there are placeholders (Qwen's rows for fine-tuning)."""
    one = attached(folder, "<video>", video=["0.png", "1.png"])[1].videos
    assert [len(video.files) for video in one] == [2]
    two = attached(folder, "<video> and <video>", video=["a.mp4", "b.mp4"])[1].videos
    assert [Path(str(v.files[0])).name for v in two] == ["a.mp4", "b.mp4"] and not any(v.frames for v in two)


def test_columns_that_say_nothing(folder: Path) -> None:
    row = {"objects": {"bbox": []}, "chat_template_kwargs": {"enable_thinking": None}}
    assert not attached(folder, ASK, **row)[1]
