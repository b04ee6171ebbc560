"""The images and videos of a row, as their files.

Owns what is kept of them beside a row's tokens, as JSON: {"files": [...], "videos": [...]}, so that they are found
again when the row is trained on. Finding them in a row belongs to `placeholders.py`, reading them to
`files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.data.untokenized_sample import RowError, describe_value

Source = str | bytes
"""An image or a video: the path of its file, or what is in it."""
# Kinds of media, by the types of their parts in a content.
IMAGE = "image"
VIDEO = "video"
SETTINGS = {
    IMAGE: ("max_pixels",),
    VIDEO: ("fps", "nframes", "min_frames", "max_frames", "max_pixels"),
}
"""What a row may say of one image or video, by the names of qwen-vl-utils."""
FRAMES_SETTINGS = ("max_frames", "max_pixels")
"""The settings of a video that is a list of frames."""
SETTING_FIXES = {
    "min_pixels": "a larger image, or `size` in the model's preprocessor_config.json",
    "total_pixels": "max_pixels, of one frame",
    "resized_height": "max_pixels, or an image of that size",
    "resized_width": "max_pixels, or an image of that size",
    "raw_fps": "sample_fps, how many frames a second these are",
    "video_start": "a file with that part of the video",
    "video_end": "a file with that part of the video",
}
"""Settings of qwen-vl-utils that are not followed, and what to do instead."""


def reading_settings(kind: str, frames: bool, sources: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """What a row says of how an image or a video is read, the first source first; RowError for what is not followed.
    `frames`: the video is a list of them, whose number a second is another thing."""
    column = f"{kind}s"
    settings = dict[str, float]()
    for source in sources:
        for name, fix in SETTING_FIXES.items():
            if source.get(name) is not None:
                raise RowError(column, f"{name} of one {kind}, which is not supported", fix)
        for name in SETTINGS[kind]:
            value = source.get(name)
            if value is None or name in settings or (frames and name == "fps"):
                continue
            if frames and name not in FRAMES_SETTINGS:
                raise RowError(column, f"{name} of a video that is a list of frames", "the frames that are to be read")
            settings[name] = positive_number(value, column, name, whole=name != "fps")
    if {"fps", "nframes"} <= settings.keys():
        raise RowError(column, "fps and nframes of one video", "one of the two")
    return tuple(settings.items())


def positive_number(value: Any, column: str, name: str, whole: bool = False) -> float:
    """A number above 0, which may be written as text; RowError for anything else."""
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf") or (whole and number != int(number)):
        expected = "a whole number above 0" if whole else "a number above 0"
        raise RowError(column, f"{name} {describe_value(value)}", expected)
    return int(number) if whole else number


def plural_of_kinds(kinds: Iterable[str]) -> str:
    """`images`, `videos`, or `images and videos`."""
    return " and ".join(f"{kind}s" for kind in sorted(kinds))


@dataclass(frozen=True)
class RowVideo:
    """A video: a file, or its frames as images."""

    files: tuple[Source, ...]
    """The file, or that of each frame."""
    frames: bool = False
    fps: float | None = None
    """Frames a second, of frames alone; a file says so itself."""
    settings: tuple[tuple[str, float], ...] = ()
    """What the row says of how it is read, by `SETTINGS`; the options of the run hold for the rest."""

    @property
    def named(self) -> Source | list[Source]:
        """The path of the file, or the list of those of its frames."""
        return [*self.files] if self.frames else self.files[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        own: dict[str, Any] = {"settings": dict(self.settings)} if self.settings else {}
        if not self.frames:
            return {"video": self.files[0]} | own
        return {"frames": [*self.files]} | ({} if self.fps is None else {"fps": self.fps}) | own

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RowVideo:
        """The inverse."""
        own = tuple(state.get("settings", {}).items())
        if "video" in state:
            return cls((state["video"],), settings=own)
        return cls(tuple(state["frames"]), True, state.get("fps"), own)


@dataclass(frozen=True)
class RowMedia:
    """The images and the videos of a row, each in the order of their placeholders."""

    images: tuple[Source, ...] = ()
    videos: tuple[RowVideo, ...] = ()
    max_pixels: tuple[float | None, ...] = ()
    """The limit of each image, where the row gives any."""

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    @property
    def kinds(self) -> frozenset[str]:
        """`IMAGE` and `VIDEO`, as far as the row has them."""
        media = ((IMAGE, self.images), (VIDEO, self.videos))
        return frozenset(kind for kind, files in media if files)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(column, path) of all files that have one."""
        files = [("images", file) for file in self.images]
        files += [("videos", file) for video in self.videos for file in video.files]
        return [(column, file) for column, file in files if isinstance(file, str)]

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `videos` and `max_pixels` only where there are any."""
        more = {"videos": [video.to_dict() for video in self.videos], "max_pixels": [*self.max_pixels]}
        return {"files": [*self.images]} | {name: values for name, values in more.items() if values}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RowMedia:
        """The inverse; other keys are left alone."""
        videos = tuple(RowVideo.from_dict(video) for video in state.get("videos", ()))
        return cls(tuple(state.get("files", ())), videos, tuple(state.get("max_pixels", ())))
