"""Reads the files of images and videos: pixels as transformers reads them, and which frames of a video are taken.

Owns the limits on images from strangers, the choice of a video decoder, and scaling to `--max_pixels`. Which frames a
model wants is said by its processor; transformers' own functions read the files.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.media import RowVideo, Source
from megaswift.errors import Problem, WeightsError, first_line

if TYPE_CHECKING:
    import numpy as np

SENT = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What strangers may send, by Pillow's names: it starts other programs for some formats, and few look at most of
them."""
MOST_PIXELS = 1 << 25
"""Maximum pixels of an image from a stranger: 100 MB once it is opened, whatever the size of its file."""
DECODERS = {"pyav": "av", "decord": "decord", "opencv": "cv2"}
"""transformers' names of video decoders beside torchcodec, and their packages, in order of preference."""


@dataclass(frozen=True)
class VideoSampling:
    """Which frames of a video are read, and how large; None: as the model's processor says."""

    fps: float | None = None
    """Frames a second. For videos that are lists of frames: the rate of these frames."""
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    """Larger frames are scaled down before the processor sees them."""
    num_frames: int | None = None
    """Frames of a file in all, in place of `fps`; rows alone say it."""

    def of(self, video: RowVideo) -> VideoSampling:
        """With what the row says of this video."""
        own: dict[str, Any] = dict(video.settings)
        if "nframes" in own:
            own |= {"num_frames": own.pop("nframes"), "fps": None}
        return replace(self, **own)


@dataclass(frozen=True)
class OpenedVideo:
    """The frames of a video, uint8 [frames, height, width, 3], and transformers' `VideoMetadata` of them."""

    frames: np.ndarray
    metadata: Any


def scale_to_max_pixels(image: Any, max_pixels: int | None) -> Any:
    """A PIL image of at most `max_pixels` pixels (width x height), its shape kept (bilinear, as ms-swift scales).
    Smaller ones as they are."""
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    ratio = (max_pixels / (width * height)) ** 0.5
    from PIL.Image import Resampling

    return image.resize((max(1, int(width * ratio)), max(1, int(height * ratio))), Resampling.BILINEAR)


def open_image(image: Source, sent: bool = False, column: str = "images") -> Any:
    """The image in RGB, the right way up: as transformers reads one. `sent`: a stranger's, of few formats and of
    limited size; `column`: what a fault is of."""
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
        raise RowError(column, f"{label} cannot be read ({reason})", expected) from None


def open_video(video: RowVideo, sampling: VideoSampling, choose_frames: Callable[..., Any] | None) -> OpenedVideo:
    """The frames of a video, with what its row says in `sampling` already. `choose_frames(metadata=...)` gives the
    indices of those to read of a file, as transformers' processors do; None: all of them. RowError for a file that
    cannot be read."""
    opened = _frames_of_images(video, sampling) if video.frames else _frames_of_file(video, sampling, choose_frames)
    if sampling.max_pixels is None or opened.frames.shape[1] * opened.frames.shape[2] <= sampling.max_pixels:
        return opened
    import numpy as np
    from PIL import Image

    scaled = [scale_to_max_pixels(Image.fromarray(frame), sampling.max_pixels) for frame in opened.frames]
    return OpenedVideo(np.stack([np.asarray(frame) for frame in scaled]), opened.metadata)


def _frames_of_images(video: RowVideo, sampling: VideoSampling) -> OpenedVideo:
    """Images of one size; all of them are taken, unless there are more than `max_frames`."""
    import numpy as np
    from transformers.video_utils import VideoMetadata

    images = [np.asarray(open_image(file, column="videos")) for file in video.files]
    shapes = sorted({image.shape[:2] for image in images})
    if len(shapes) > 1:
        sizes = ", ".join(f"{width} x {height}" for height, width in shapes[:3])
        raise RowError("videos", f"a video whose frames differ in size ({sizes})", "frames of one size")
    indices = _at_most([*range(len(images))], sampling.max_frames)
    metadata = VideoMetadata(
        total_num_frames=len(images), fps=video.fps or sampling.fps, frames_indices=indices, height=shapes[0][0],
        width=shapes[0][1],
    )  # fmt: skip
    return OpenedVideo(np.stack([images[i] for i in indices]), metadata)


def _frames_of_file(video: RowVideo, sampling: VideoSampling, choose_frames: Callable[..., Any] | None) -> OpenedVideo:
    import numpy as np
    from transformers.video_utils import load_video

    def chosen(metadata: Any, **_: Any) -> list[int]:
        every = range(metadata.total_num_frames or 0)
        if not every:
            raise ValueError("it does not say how many frames it has")
        indices = [*every] if choose_frames is None else [int(i) for i in choose_frames(metadata=metadata)]
        return _at_most(indices, sampling.max_frames)

    file = video.files[0]
    label = file if isinstance(file, str) else f"a video of {len(file):,} bytes"
    decoder = video_decoder()
    if not decoder:
        rule = "needs a package that decodes videos, and none is installed"
        raise WeightsError(Problem(label, rule, "pip install av, or torchcodec; a list of frames needs none"))
    try:
        frames, metadata = load_video(file, backend=decoder, sample_indices_fn=chosen)
    except _errors_of_decoders() as error:
        reason = first_line(error) or type(error).__name__
        raise RowError(
            "videos", f"{label} cannot be read ({reason})", "a video file that can be decoded, as MP4"
        ) from None
    frames = np.asarray(frames)
    if frames.shape[-1] != 3:  # channels first, as torchcodec gives them
        frames = frames.transpose(0, 2, 3, 1)
    metadata.frames_indices = [int(i) for i in metadata.frames_indices]
    return OpenedVideo(frames, metadata)


def _at_most(indices: list[int], count: int | None) -> list[int]:
    """These, or `count` of them at equal distances."""
    if count is None or len(indices) <= count:
        return indices
    apart = (len(indices) - 1) / max(count - 1, 1)
    return [indices[round(i * apart)] for i in range(count)]


def video_decoder() -> str:
    """transformers' name of the decoder that reads video files here; empty where none is installed."""
    from transformers.utils import import_utils

    usable = getattr(import_utils, "is_torchcodec_usable", None)
    if usable is not None and usable(decode="video"):
        return "torchcodec"
    return next((name for name, package in DECODERS.items() if importlib.util.find_spec(package)), "")


def _errors_of_decoders() -> tuple[type[BaseException], ...]:
    """What they raise for a file that they cannot read; PyAV's and OpenCV's errors are classes of their own."""
    own = [getattr(sys.modules.get("av"), "FFmpegError", None), getattr(sys.modules.get("cv2"), "error", None)]
    known = (OSError, ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError, EOFError)
    return (*known, ZeroDivisionError, StopIteration, *(one for one in own if one is not None))
