"""Images of a row: their placeholders in the messages, their files, and opening them.

Owns two forms of rows: parts of a content, as chat templates take them ({"type": "image", "image" | "path" | "url":
FILE}, OpenAI's `image_url` too), and a column `images` (or `image`) beside texts with `<image>` where each one goes. An
image is a file, or bytes in the data file (as `datasets` writes Parquet), which become one in the cache. Files are
opened one at a time, when their row is tokenized and when it is trained on; what a model makes of them belongs to
`vision_processor.py`.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.atomic_disk_writes import write_atomically
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    decode_json_cell,
    describe_value,
)
from megaswift.errors import first_line

TAG = "<image>"
OTHER_MEDIA = {"videos": "<video>", "video": "<video>", "audios": "<audio>", "audio": "<audio>"}
"""Columns of files that no model here reads, and their placeholders in texts."""
COLUMNS = ("images", "image")
KEYS = ("image", "path", "url", "image_url")
"""Of an image part: where its file may stand."""
Part = dict[str, Any]
Source = str | bytes
"""An image: the path of its file, or what is in it."""
DATA_URL = "data:image/png;base64,..."
CARRIED = "(in the row)"
"""What a part says of an image that has no path."""
SENT = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What strangers may send, by Pillow's names: it starts other programs for some formats, and few look at most of
them."""
MOST_PIXELS = 1 << 25
"""Of an image from a stranger: 100 MB once it is opened, whatever the size of its file."""


@dataclass(frozen=True)
class RowImageFolders:
    """Where a row's images lie."""

    data: Path | None
    """The data file's folder, to which paths are relative; None: the row is a stranger's, who may name no file."""
    kept: Path | None = None
    """Where images go that the row itself holds; None: they stay in memory."""


def raw_image_entries(row: Mapping[str, Any]) -> list[Any]:
    """What the columns of a row say of its images."""
    for column in COLUMNS:
        value = row.get(column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decode_json_cell(value, column, "a list of files")
        if value:
            return value if isinstance(value, list) else [value]
    return []


def has_images(row: Mapping[str, Any], sample: UntokenizedSample) -> bool:
    """Whether a row speaks of images: parts of contents, a column `images`, or a column `image` with a place for it."""
    texts = [m.get("content") for m in sample.messages]
    if any(isinstance(c, list) and any(p["type"] in ("image", "image_url") for p in c) for c in texts) or row.get(
        "images"
    ):
        return True
    return bool(row.get("image")) and any(isinstance(c, str) and TAG in c for c in texts)


def reject_other_media(row: Mapping[str, Any], sample: UntokenizedSample) -> None:
    """RowError for a row with videos or audio, which would be left out; a column `video` or `audio` alone, without a
    place in the texts, says nothing."""
    texts = [c for m in sample.messages if isinstance(c := m.get("content"), str)]
    for column, tag in OTHER_MEDIA.items():
        files = isinstance(row.get(column), str | list | tuple | dict) and bool(row[column])
        if files and (column.endswith("s") or any(tag in text for text in texts)):
            kind = "videos" if tag == "<video>" else "audio"
            expected = "rows of text and images; of a video, its frames as images" if kind == "videos" else "other rows"
            raise RowError(column, f"{kind}, which no model is trained on yet", expected)


def reject_images(row: Mapping[str, Any], sample: UntokenizedSample) -> None:
    """RowError for a row that speaks of images where the model reads text only, and for videos and audio."""
    reject_other_media(row, sample)
    if has_images(row, sample):
        raise RowError(
            "images", "images, but this model accepts only text", "rows without them, or a vision-language model"
        )


def reject_media_beside_plain_text(row: Mapping[str, Any], sample: UntokenizedSample) -> None:
    """RowError for a prompt in plain text that has images, videos or audio."""
    reject_other_media(row, sample)
    if has_images(row, sample):
        fault = "plain text, which is used without a chat template, so its images have no place"
        raise RowError("prompt", fault, "messages")


def attach_images(
    row: Mapping[str, Any], sample: UntokenizedSample, home: RowImageFolders
) -> tuple[UntokenizedSample, list[Source]]:
    """(the sample with each image as a part of a content, the images in order). RowError for videos and audio."""
    reject_other_media(row, sample)
    given = raw_image_entries(row)
    waiting = iter(given)
    files: list[Source] = []
    messages = []
    for i, message in enumerate(sample.messages):
        parts = list(_parts(message.get("content"), bool(given), f"messages[{i}].content"))
        if any(p["type"] == "image" for p in parts):
            message = {**message, "content": [_filed(p, waiting, home, files) for p in parts]}
        messages.append(message)
    left = list(waiting)
    if left and len(left) == len(given):
        _in_front(messages, [{"type": "image", "image": _file(value, home, files)} for value in left])
    elif left:
        raise RowError(
            "images",
            f"{len(given)} files for {len(given) - len(left)} placeholders",
            f"as many placeholders ({TAG}) as files",
        )
    return replace(sample, messages=tuple(messages)), files


def _parts(content: Any, tagged: bool, where: str) -> Iterator[Part]:
    """A content as parts; `<image>` is one where the row has a column of files."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        kind = part["type"]
        if kind == "text":
            texts = part["text"].split(TAG) if tagged else [part["text"]]
            for n, text in enumerate(texts):
                if n:
                    yield {"type": "image"}
                if text or len(texts) == 1:
                    yield {**part, "text": text}
        elif kind in ("image", "image_url"):
            yield {"type": "image", **{k: part[k] for k in KEYS if part.get(k) is not None}}
        else:
            raise RowError(where, f"a part of type {kind!r}", "text and image parts")


def _filed(part: Part, waiting: Iterator[Any], home: RowImageFolders, files: list[Source]) -> Part:
    """An image part with its file; one that names none takes the next of the column."""
    if part["type"] != "image":
        return part
    named = [part[k] for k in KEYS if k in part]
    value = named[0] if named else next(waiting, None)
    if value is None:
        raise RowError(
            "images", f"no file for image {len(files) + 1}", f"as many files as placeholders ({TAG} or image parts)"
        )
    return {"type": "image", "image": _file(value, home, files)}


def _in_front(messages: list[dict[str, Any]], parts: list[Part]) -> None:
    """Images that no text has a place for stand before the first question."""
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first_user is None:
        raise RowError("images", f"{len(parts)} files but no user message", "a user message that refers to them")
    content = messages[first_user].get("content") or []
    rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
    messages[first_user] = {**messages[first_user], "content": [*parts, *rest]}


def _file(value: Any, home: RowImageFolders, files: list[Source]) -> str:
    """What a part says of its image, which is also added to `files`."""
    if isinstance(value, Mapping):
        value = next((value[k] for k in ("bytes", "path", "url", "image") if value.get(k)), None)
    if isinstance(value, str) and value.startswith("data:"):
        value = _decoded(value)
    if isinstance(value, bytes):
        files.append(value if home.kept is None else str(_kept(value, home.kept)))
    elif isinstance(value, str) and value:
        files.append(str(_found(value, home.data)))
    else:
        raise RowError("images", describe_value(value), "a file path, or the bytes of the file")
    last = files[-1]
    return last if isinstance(last, str) else CARRIED


def _found(name: str, folder: Path | None) -> Path:
    scheme, mark, rest = name.partition("://")
    if mark and scheme.lower() != "file":
        raise RowError("images", f"{name[:60]}: URLs are not downloaded", "the path of a file" if folder else DATA_URL)
    if folder is None:
        raise RowError("images", f"{name[:60]}: files on the server are not read for clients", DATA_URL)
    path = Path(rest if mark else name).expanduser()
    path = path if path.is_absolute() else folder.absolute() / path
    if not path.is_file():
        raise RowError("images", f"no such file: {path}", "a path, relative to the data file's folder or absolute")
    return path


def _decoded(text: str) -> bytes:
    """The bytes of `data:image/png;base64,...`."""
    try:
        return base64.b64decode(text.partition(",")[2], validate=True)
    except ValueError:
        raise RowError("images", f"{text[:40]}... is not base64", f"{DATA_URL} or a file path") from None


def _kept(content: bytes, folder: Path) -> Path:
    """A file with these bytes, once and for all rows that bring them."""
    path = folder / hashlib.sha256(content).hexdigest()[:40]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, cached=True)
    return path


def open_image(image: Source, sent: bool = False) -> Any:
    """The image in RGB, the right way up: as transformers reads one. `sent`: a stranger's, of few formats and of
    limited size."""
    from PIL import Image, UnidentifiedImageError
    from transformers.image_utils import load_image

    label = image if isinstance(image, str) else f"an image of {len(image):,} bytes"
    try:
        if isinstance(image, str):
            return load_image(image)
        opened = Image.open(io.BytesIO(image), formats=SENT if sent else None)
        if sent and opened.width * opened.height > MOST_PIXELS:
            raise RowError("images", f"{opened.width} x {opened.height} pixels", f"at most {MOST_PIXELS:,} pixels")
        return load_image(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # what Pillow raises for a broken file
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else first_line(error)
        expected = f"an image in {', '.join(SENT)}" if sent else "an image file that Pillow opens"
        raise RowError("images", f"{label} cannot be read ({reason})", expected) from None
