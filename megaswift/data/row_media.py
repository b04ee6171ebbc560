"""The images and videos of a row, as their files.

Owns what is kept of them beside a row's tokens, as JSON: {"files": [...], "videos": [...]}, so that they are found
again when the row is trained on. Finding them in a row belongs to `attach_row_media.py`, reading them to
`open_media_files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Source = str | bytes
"""An image or a video: the path of its file, or what is in it."""
IMAGE, VIDEO = "image", "video"
"""Kinds of media, by the types of their parts in a content."""


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

    @property
    def named(self) -> Source | list[Source]:
        """The path of the file, or the list of those of its frames."""
        return [*self.files] if self.frames else self.files[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        if not self.frames:
            return {"video": self.files[0]}
        return {"frames": [*self.files]} | ({} if self.fps is None else {"fps": self.fps})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RowVideo:
        """The inverse."""
        if "video" in state:
            return cls((state["video"],))
        return cls(tuple(state["frames"]), True, state.get("fps"))


@dataclass(frozen=True)
class RowMedia:
    """The images and the videos of a row, each in the order of their placeholders."""

    images: tuple[Source, ...] = ()
    videos: tuple[RowVideo, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    @property
    def kinds(self) -> frozenset[str]:
        """`IMAGE` and `VIDEO`, as far as the row has them."""
        return frozenset([IMAGE] * bool(self.images) + [VIDEO] * bool(self.videos))

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(column, path) of all files that have one."""
        files = [("images", file) for file in self.images]
        files += [("videos", file) for video in self.videos for file in video.files]
        return [(column, file) for column, file in files if isinstance(file, str)]

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `videos` only where there are any."""
        videos = [video.to_dict() for video in self.videos]
        return {"files": [*self.images]} | ({"videos": videos} if videos else {})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RowMedia:
        """The inverse; other keys are left alone."""
        videos = tuple(RowVideo.from_dict(video) for video in state.get("videos", ()))
        return cls(tuple(state.get("files", ())), videos)
