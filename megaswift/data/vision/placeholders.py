"""Images and videos of a row: their placeholders in the messages, and their files.

Owns two forms of rows: parts of a content, as chat templates take them ({"type": "image", "image" | "path" | "url":
FILE}, OpenAI's `image_url` too, and the same of `video`), and columns `images` and `videos` (or `image`, `video`)
beside texts with `<image>` and `<video>` where each one goes. An image is a file, or bytes in the data file (as
`datasets` writes Parquet), which become one in the cache; a video is that too, or the list of its frames. What is in
the files is read by `files.py`, when a row is tokenized and when it is trained on.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.data.templates.roles import RESULTS
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    decode_json_cell,
    describe_value,
    is_data,
    is_parts,
)
from megaswift.data.vision.media import (
    FRAMES_SETTINGS,
    IMAGE,
    SETTING_FIXES,
    SETTINGS,
    VIDEO,
    RowMedia,
    RowVideo,
    Source,
    positive_number,
    reading_settings,
)

TAGS = {IMAGE: "<image>", VIDEO: "<video>"}
"""Placeholders in texts."""
COLUMNS = {IMAGE: ("images", "image"), VIDEO: ("videos", "video")}
AUDIO = ("audios", "audio")
"""Columns of audio files, which no model here reads."""
AUDIO_TAG = "<audio>"
"""The placeholder of audio in texts."""
KEYS = {IMAGE: ("image", "path", "url", "image_url", "source"), VIDEO: ("video", "path", "url", "video_url")}
"""The keys of a part that may hold its file (`source`: Anthropic's)."""
RATES = ("fps", "sample_fps")
"""The keys that may hold the frames per second of a video that is a list of frames."""
TYPES = {"image": IMAGE, "image_url": IMAGE, "video": VIDEO, "video_url": VIDEO}
"""Kinds of media by the types of parts."""
AUDIO_TYPES = ("audio", "audio_url", "input_audio")
"""Types of parts that hold audio, which no model here reads."""
Part = dict[str, Any]
DATA_URL = "data:image/png;base64,..."
CARRIED = "(in the row)"
"""What a part says of an image that has no path."""
OF_ROW = "chat_template_kwargs"
"""The column of what a row says of all its images and videos."""
PATH_TAG = re.compile(r"<img>(.+?)</img>", re.DOTALL)
"""An image in a text, by its file."""
BOXES = ("<bbox>", "<ref-object>")
"""Placeholders for what ms-swift's column `objects` holds."""


@dataclass(frozen=True)
class RowImageFolders:
    """Where a row's images lie."""

    data: Path | None
    """The data file's folder, to which paths are relative; None: the row is a stranger's, who may name no file."""
    kept: Path | None = None
    """Where images go that the row itself holds; None: they stay in memory."""


def media_entries(row: Mapping[str, Any], kind: str, places: int) -> list[Any]:
    """What the columns of a row say of its images, or of its videos, for so many placeholders."""
    plural, one = COLUMNS[kind]
    for column in (plural, one):
        value = row.get(column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decode_json_cell(value, column, "a list of files")
        if value:
            # a list in the column of one video is its frames, but for several placeholders
            several = kind == IMAGE or column == plural or (isinstance(value, list) and places == len(value) > 1)
            return value if isinstance(value, list) and several else [value]
    return []


def places_without_files(sample: UntokenizedSample, kind: str) -> int:
    """Placeholders of a kind in texts, and parts that name no file."""
    parts = [part for part in _parts_of(sample) if TYPES.get(part["type"]) == kind]
    tags = sum(text.count(TAGS[kind]) for text in texts_of(sample))
    return tags + sum(all(part.get(key) is None for key in KEYS[kind]) for part in parts)


def kinds_of_media(row: Mapping[str, Any], sample: UntokenizedSample) -> frozenset[str]:
    """What a row speaks of, images or videos: parts of contents, and columns."""
    return _kinds_of_columns(row, sample) | {TYPES[part["type"]] for part in _parts_of(sample) if part["type"] in TYPES}


def _kinds_of_columns(row: Mapping[str, Any], sample: UntokenizedSample) -> frozenset[str]:
    """Whether a row has a column `images`, or a column `image` with a place for it in its texts; `videos` alike."""
    found = set()
    for kind, (plural, one) in COLUMNS.items():
        if row.get(plural) or (row.get(one) and any(TAGS[kind] in text for text in texts_of(sample))):
            found.add(kind)
    return frozenset(found)


def texts_of(sample: UntokenizedSample) -> list[str]:
    """The texts of all messages, parts of contents among them."""
    plain = [c for m in sample.messages if isinstance(c := m.get("content"), str)]
    return plain + [part["text"] for part in _parts_of(sample) if part["type"] == "text"]


def _parts_of(sample: UntokenizedSample) -> list[Part]:
    """The parts of all contents that are lists."""
    return [part for m in sample.messages if is_parts(c := m.get("content")) for part in c]


def has_tag_without_file(sample: UntokenizedSample) -> bool:
    """Whether a text still has a placeholder, of a sample whose images and videos are parts."""
    return any(tag in text for text in texts_of(sample) for tag in (*TAGS.values(), AUDIO_TAG))


def settings_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of all its images and videos. RowError for variables of the chat template, which are the
    run's."""
    given = decode_json_cell(row.get(OF_ROW) or {}, OF_ROW, "an object")
    if not isinstance(given, Mapping):
        raise RowError(OF_ROW, describe_value(given), "an object")
    settings = {name: value for name, value in given.items() if value is not None}
    other = [name for name in settings if name not in SETTINGS[VIDEO] and name not in SETTING_FIXES]
    if other:
        fault = f"{', '.join(other)}, which is not read from rows"
        raise RowError(OF_ROW, fault, "options of the run, as --enable_thinking, and rows without it")
    return settings


def reject_unread_columns(row: Mapping[str, Any], sample: UntokenizedSample) -> None:
    """RowError for a row with audio, boxes or variables of the chat template, which would be left out; a column `audio`
    or `objects` alone, without a place in the texts, says nothing."""
    if OF_ROW in row and sample.messages:
        settings_of_row(row)
    if row.get("objects") and any(tag in text for text in texts_of(sample) for tag in BOXES):
        fault = f"boxes and names for {' and '.join(BOXES)}, which are not filled in"
        raise RowError("objects", fault, "texts that have them already, as the model writes them")
    for column in AUDIO:
        if column not in row or not isinstance(row[column], str | list | tuple | dict) or not row[column]:
            continue
        if column.endswith("s") or any(AUDIO_TAG in text for text in texts_of(sample)):
            raise RowError(column, "audio, which no model is trained on yet", "rows of text, images and videos")


def reject_media(row: Mapping[str, Any], sample: UntokenizedSample, text_part: bool = False) -> None:
    """RowError for a row with columns of images, videos or audio where the model reads text only. Parts of contents go
    to the chat template, which decides about them.

    Args:
        text_part: The run trains the language model of a vision-language model alone, whose chat template would write
            placeholders that nothing fills in: parts are rejected too.
    """
    reject_unread_columns(row, sample)
    for kind in sorted(kinds_of_media(row, sample)) if text_part else ():
        found = f"{kind}s, but --engine megatron trains only the language model of this model"
        raise RowError(f"{kind}s", found, "rows without them, or --engine fsdp2 or zero3, which train the whole model")
    for kind in sorted(_kinds_of_columns(row, sample)):
        found = f"{kind}s, but this model accepts only text"
        raise RowError(f"{kind}s", found, "rows without them, or a vision-language model")


def reject_media_beside_plain_text(row: Mapping[str, Any], sample: UntokenizedSample) -> None:
    """RowError for a prompt in plain text that has images, videos or audio."""
    reject_unread_columns(row, sample)
    for kind in sorted(kinds_of_media(row, sample)):
        fault = f"plain text, which is used without a chat template, so its {kind}s have no place"
        raise RowError("prompt", fault, "messages")


def reject_unread_contents(sample: UntokenizedSample) -> None:
    """RowError for a content that a model cannot be asked with: a part other than text, images and videos, or JSON that
    is neither text nor parts where no tool returned it."""
    for i, message in enumerate(sample.messages):
        content = message.get("content")
        where = f"messages[{i}].content"
        if message["role"] in RESULTS or _may_hold_media(content):
            continue
        if not is_parts(content):
            raise RowError(where, describe_value(content), "a string, or a list of parts")
        other = next(part["type"] for part in content if part["type"] != "text" and part["type"] not in TYPES)
        raise RowError(where, f"a part of type {other!r}", "text, image and video parts")


def attach_media(
    row: Mapping[str, Any], sample: UntokenizedSample, home: RowImageFolders
) -> tuple[UntokenizedSample, RowMedia]:
    """(the sample with each image and video as a part of a content, their files in order). RowError for audio."""
    reject_unread_columns(row, sample)
    given = {kind: media_entries(row, kind, places_without_files(sample, kind)) for kind in COLUMNS}
    if not given[IMAGE] and home.data is not None:  # a stranger's text is text
        sample, given[IMAGE] = _with_tags_for_paths(sample)
    if row.get(COLUMNS[VIDEO][0]) is None and VIDEO not in kinds_of_media(row, sample):
        given[VIDEO] = []  # a column `video` alone says nothing
    attached = _AttachedMedia(home, {kind: iter(values) for kind, values in given.items()}, settings_of_row(row))
    messages = []
    for message in sample.messages:
        content = message.get("content")
        if is_data(content) or (message["role"] in RESULTS and not _may_hold_media(content)):
            messages.append(message)
            continue
        tagged = [kind for kind, values in given.items() if values]
        parts = list(_parts(content, tagged))
        if any(p["type"] in TYPES for p in parts):
            message = {**message, "content": [attached.filed(p) for p in parts]}
        messages.append(message)
    for kind in reversed(given):
        left = list(attached.waiting[kind])
        if left and len(left) == len(given[kind]):
            _in_front(messages, kind, [attached.part(kind, {}, value) for value in left])
        elif left:
            raise RowError(
                f"{kind}s",
                f"{len(given[kind])} files for {len(given[kind]) - len(left)} placeholders",
                f"as many placeholders ({TAGS[kind]}) as files",
            )
    return replace(sample, messages=tuple(messages)), attached.media(messages)


class _AttachedMedia:
    """The files that the parts of a row's contents have been given."""

    def __init__(
        self, home: RowImageFolders, waiting: Mapping[str, Iterator[Any]], settings: Mapping[str, Any]
    ) -> None:
        """`settings`: what the row says of all of them."""
        self.home = home
        self.waiting = waiting
        self.settings = settings
        self._made: list[tuple[Part, Source | RowVideo, float | None]] = []
        self._counts = dict.fromkeys(COLUMNS, 0)

    def filed(self, part: Part) -> Part:
        """A part with its file; one that names none takes the next of the column."""
        if part["type"] not in TYPES:
            return part
        kind = part["type"]
        self._counts[kind] += 1
        named = [part[k] for k in KEYS[kind] if k in part]
        value = named[0] if named else next(self.waiting[kind], None)
        if value is None:
            raise RowError(
                f"{kind}s",
                f"no file for {kind} {self._counts[kind]}",
                f"as many files as placeholders ({TAGS[kind]} or {kind} parts)",
            )
        return self.part(kind, part, value)

    def part(self, kind: str, part: Part, value: Any) -> Part:
        """What templates and people read of an image or a video."""
        max_pixels = None
        if kind == IMAGE:
            sources = [source for source in (part, value, self.settings) if isinstance(source, Mapping)]
            max_pixels = dict(reading_settings(kind, False, sources)).get("max_pixels")
            file: Source | RowVideo = _file(value, self.home, IMAGE)
            shown: Any = file if isinstance(file, str) else CARRIED
        else:
            file = _video(part, value, self.home, self.settings)
            names = [one if isinstance(one, str) else CARRIED for one in file.files]
            shown = names if file.frames else names[0]
        made = {"type": kind, kind: shown}
        self._made.append((made, file, max_pixels))
        return made

    def media(self, messages: list[dict[str, Any]]) -> RowMedia:
        """The files in the order of their parts."""
        contents = [c for m in messages if isinstance(c := m.get("content"), list)]
        places = {id(part): n for n, part in enumerate(part for content in contents for part in content)}
        made = sorted(self._made, key=lambda one: places[id(one[0])])
        videos = tuple(file for _, file, _ in made if isinstance(file, RowVideo))
        images = [(file, limit) for _, file, limit in made if not isinstance(file, RowVideo)]
        limits = tuple(limit for _, limit in images)
        return RowMedia(tuple(file for file, _ in images), videos, limits if any(limits) else ())


def _may_hold_media(content: Any) -> bool:
    """Whether a content is text, or parts that are texts, images and videos."""
    if is_parts(content):
        return all(part["type"] == "text" or part["type"] in TYPES for part in content)
    return content is None or isinstance(content, str)


def _parts(content: Any, tagged: list[str]) -> Iterator[Part]:
    """A content as parts; a placeholder in a text is one where the row has a column of such files. Parts of other types
    go to the chat template as they are."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        if part["type"] == "text":
            yield from _split_at_tags(part, tagged)
        elif part["type"] in TYPES:
            yield {k: v for k, v in part.items() if v is not None} | {"type": TYPES[part["type"]]}
        else:
            yield part


def _with_tags_for_paths(sample: UntokenizedSample) -> tuple[UntokenizedSample, list[str]]:
    """The sample with `<image>` in place of each `<img>FILE</img>`, and the files, in order."""
    files: list[str] = []
    messages = []
    for message in sample.messages:
        content = message.get("content")
        if isinstance(content, str):
            files += PATH_TAG.findall(content)
            message = {**message, "content": PATH_TAG.sub(TAGS[IMAGE], content)}
        messages.append(message)
    return (replace(sample, messages=tuple(messages)), files) if files else (sample, files)


def _split_at_tags(part: Part, tagged: list[str]) -> Iterator[Part]:
    """A text part, cut where placeholders stand."""
    if not tagged:
        yield part
        return
    kind, *rest = tagged
    texts = part["text"].split(TAGS[kind])
    for n, text in enumerate(texts):
        if n:
            yield {"type": kind}
        if text or len(texts) == 1:
            yield from _split_at_tags({**part, "text": text}, rest)


def _in_front(messages: list[dict[str, Any]], kind: str, parts: list[Part]) -> None:
    """Images or videos that no text has a place for stand before the first question."""
    asking = (i for i, m in enumerate(messages) if m["role"] == "user" and not is_data(m.get("content")))
    first_user = next(asking, None)
    if first_user is None:
        raise RowError(f"{kind}s", f"{len(parts)} files but no user message", "a user message that refers to them")
    content = messages[first_user].get("content") or []
    rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
    messages[first_user] = {**messages[first_user], "content": [*parts, *rest]}


def _video(part: Part, value: Any, home: RowImageFolders, settings: Mapping[str, Any]) -> RowVideo:
    """A file, or a list of frames with their number a second. `settings`: what the row says of all its videos."""
    sources = [source for source in (part, value) if isinstance(source, Mapping)]
    rates = [source[k] for source in sources for k in RATES if source.get(k)]
    if isinstance(value, Mapping):
        value = next((value[k] for k in ("video", "frames", "bytes", "path", "url") if value.get(k)), None)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decode_json_cell(value, "videos", "a file, or the list of its frames")
    if home.data is None:
        raise RowError("videos", "videos, which are not read for clients", "images")
    if not isinstance(value, list):
        file = _file(value, home, VIDEO)
        if isinstance(file, bytes):
            raise RowError("videos", f"a video as {len(file):,} bytes", "the path of its file")
        return RowVideo((file,), settings=reading_settings(VIDEO, False, [*sources, settings]))
    if not value:
        raise RowError("videos", "an empty list of frames", "the files of a video's frames")
    of_row = {name: settings.get(name) for name in (*FRAMES_SETTINGS, *SETTING_FIXES)}
    own = reading_settings(VIDEO, True, [*sources, of_row])
    rate = positive_number(rates[0], "videos", "fps") if rates else None
    return RowVideo(tuple(_file(one, home, VIDEO) for one in value), True, rate, own)


def _file(value: Any, home: RowImageFolders, kind: str) -> Source:
    """The file of an image, a video or a frame; RowError where there is none."""
    if isinstance(value, Mapping):
        if value.get("type") == "base64":  # Anthropic's
            value = {"url": f"data:;base64,{value.get('data')}"}
        value = next((value[k] for k in ("bytes", "path", "url", "image") if value.get(k)), None)
    if isinstance(value, str) and value.startswith("data:"):
        value = _decoded(value, kind)
    if isinstance(value, bytes):
        return value if home.kept is None else str(_kept(value, home.kept))
    if isinstance(value, str) and value:
        return str(_found(value, home.data, kind))
    raise RowError(f"{kind}s", describe_value(value), "a file path, or the bytes of the file")


def _found(name: str, folder: Path | None, kind: str) -> Path:
    column = f"{kind}s"
    scheme, mark, rest = name.partition("://")
    if mark and scheme.lower() != "file":
        fix = "the path of a file" if folder else DATA_URL
        raise RowError(column, f"{name[:60]}: URLs are not downloaded", fix)
    if folder is None:
        raise RowError(column, f"{name[:60]}: files on the server are not read for clients", DATA_URL)
    path = Path(rest if mark else name).expanduser()
    path = path if path.is_absolute() else folder.absolute() / path
    if not path.is_file():
        raise RowError(column, f"no such file: {path}", "a path, relative to the data file's folder or absolute")
    return path


def _decoded(text: str, kind: str) -> bytes:
    """The bytes of `data:image/png;base64,...`."""
    try:
        return base64.b64decode(text.partition(",")[2], validate=True)
    except ValueError:
        raise RowError(f"{kind}s", f"{text[:40]}... is not base64", f"{DATA_URL} or a file path") from None


def _kept(content: bytes, folder: Path) -> Path:
    """A file with these bytes, once and for all rows that bring them."""
    path = folder / hashlib.sha256(content).hexdigest()[:40]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, cached=True)
    return path
