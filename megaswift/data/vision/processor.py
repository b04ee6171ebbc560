"""Wraps the processor of a vision-language model: from a conversation's text, images and videos to model inputs.

Owns loading it, one call for one conversation, and what each of its outputs is: a value a token, a row or an image.
transformers does the work; which rows come together belongs to `batches.py`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.files import (
    OpenedVideo,
    VideoSampling,
    open_image,
    open_video,
    scale_to_max_pixels,
)
from megaswift.data.vision.media import IMAGE as MEDIUM_IMAGE
from megaswift.data.vision.media import VIDEO as MEDIUM_VIDEO
from megaswift.data.vision.media import RowMedia, RowVideo, plural_of_kinds
from megaswift.errors import Problem, WeightsError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""The processor's files in a model folder, in addition to those of its tokenizer."""
EXTRA = "run pip install pillow; some models also need the torchvision built for the installed torch"
VIDEO_EXTRA = (
    "install the torchvision that was built for the installed torch; video files need a decoder too: pip install av"
)
OWN = ("input_ids", "attention_mask")
"""Outputs that the batch has already; rows are padded on the right, where causal attention does not look."""
TOKEN = "token"
ROW = "row"
IMAGE = "image"
REFUSED = (ValueError, TypeError, KeyError, IndexError, RuntimeError)
"""What processors raise for a conversation that they cannot read."""


@dataclass(frozen=True)
class ProcessorFolderWithDigest:
    """Where a processor lies; plain values that travel to worker processes."""

    folder: str
    trust: bool = False
    digest: str = ""
    """A digest of its files: other files give other tokens."""
    max_pixels: int | None = None
    """`--max_pixels`: larger images are scaled down before the processor sees them."""
    videos: VideoSampling = VideoSampling()


def processor_folder_and_files_digest(folder: Path, trust: bool) -> ProcessorFolderWithDigest:
    """The spec of the processor in a model's folder."""
    digest = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return ProcessorFolderWithDigest(str(folder), trust, digest.hexdigest())


def image_support_problems(folder: Path, label: str) -> list[Problem]:
    """What a vision-language model's folder, or this machine, lacks for reading images. No torch."""
    problems = []
    if importlib.util.find_spec("PIL") is None:
        problems.append(Problem(label, "needs pillow to read images, which is not installed", EXTRA))
    if not any((folder / name).is_file() for name in FILES[:2]):
        problems.append(
            Problem(
                str(folder),
                f"has no processor ({FILES[0]} or {FILES[1]})",
                "copy the model's processor files into the folder of config.json",
            )
        )
    return problems


@dataclass(frozen=True)
class MediaExpandedConversation:
    """A conversation as the processor reads it."""

    ids: list[int]
    text: str
    """With each image's and video's placeholder replaced by its tokens."""
    spans: tuple[tuple[int, int], ...]
    """Characters of `text` that stand for images and videos."""
    gained: tuple[tuple[int, int], ...]
    """(end of a placeholder in the text before, characters that the text has grown by up to there)."""

    def shifted(self, char: int) -> int:
        """Where a character of the text before now is."""
        return char + max((g for g in self.gained if g[0] <= char), default=(0, 0))[1]


@dataclass(frozen=True)
class BlankMediaConversation:
    """A conversation about a blank image or video, for a micro-batch that has none."""

    ids: list[int]
    inputs: Mapping[str, Tensor]


class Processor:
    """transformers' processor of one model folder."""

    def __init__(self, spec: ProcessorFolderWithDigest) -> None:
        self.spec = spec
        self.inner = _load(spec)
        self.tokenizer = self.inner.tokenizer
        own = getattr(self.inner, "chat_template", None)
        if own and not self.tokenizer.chat_template:
            self.tokenizer.chat_template = own
        _choose_frames(getattr(self.inner, "video_processor", None), spec.videos)
        self._blanks: dict[tuple[str, ...], BlankMediaConversation] = {}
        self._local = threading.local()

    @property
    def _mine(self) -> Any:
        """A copy for each thread: fast tokenizers refuse two callers at once."""
        if threading.current_thread() is threading.main_thread():
            return self.inner
        if not hasattr(self._local, "copy"):
            self._local.copy = copy.deepcopy(self.inner)
        return self._local.copy

    def _opened(self, media: RowMedia, sent: bool) -> tuple[list[Any], list[OpenedVideo]]:
        """The pixels of images and videos, none larger than the options allow; RowError for broken files."""
        if media.videos and self.video_problem:
            raise RowError(*self.video_problem)
        limits = media.max_pixels or (None,) * len(media.images)
        images = [
            scale_to_max_pixels(open_image(file, sent), self.spec.max_pixels if limit is None else int(limit))
            for file, limit in zip(media.images, limits, strict=True)
        ]
        return images, [self._opened_video(video) for video in media.videos]

    def _opened_video(self, video: RowVideo) -> OpenedVideo:
        """The frames of a video; what its row says of them goes before the options."""
        sampling = self.spec.videos.of(video)
        choose = None
        reader = getattr(self._mine, "video_processor", None)
        if reader is not None and video.settings:
            if "min_frames" in dict(video.settings) and not hasattr(reader, "min_frames"):
                fault = "min_frames, which the model's processor does not have"
                raise RowError("videos", fault, "fps or nframes")
            reader = copy.copy(reader)
            _choose_frames(reader, sampling)
        if reader is not None and reader.do_sample_frames:
            choose = partial(reader.sample_frames, fps=reader.fps, num_frames=reader.num_frames)
        return open_video(video, sampling, choose)

    def _call(self, text: str, images: Sequence[Any], videos: Sequence[OpenedVideo], **options: Any) -> Any:
        """One conversation; special tokens are added as `apply_chat_template` adds them."""
        bos = self.tokenizer.bos_token
        options["add_special_tokens"] = bos is None or not text.startswith(bos)
        if videos:  # frames have been chosen
            options |= {"videos": [[video.frames for video in videos]], "do_sample_frames": False}
            options["video_metadata"] = [copy.deepcopy(video.metadata) for video in videos]
        try:
            return self._mine(text=[text], images=[[*images]] if images else None, **options)
        except REFUSED as error:
            column = "videos" if videos else "images"
            raise RowError(
                column,
                f"the model's processor rejects this conversation ({first_line(error)})",
                f"as many {'images and videos' if videos else 'images'} as placeholders in the text",
            ) from None

    def expand(self, text: str, media: RowMedia) -> MediaExpandedConversation:
        """The tokens of a rendered conversation, and where its images and videos are."""
        out = self._call(text, *self._opened(media, False), return_text_replacement_offsets=True, return_tensors="pt")
        replacements = out.get("text_replacement_offsets")
        if media and not (replacements and replacements[0]):
            raise WeightsError(
                Problem(
                    f"the processor in {self.spec.folder} ({type(self.inner).__name__})",
                    "does not define the image placeholder in the text",
                    "use another model, or a newer version of transformers",
                )
            )
        pieces = []
        spans = []
        gained = []
        position = 0
        for item in replacements[0] if media else ():
            begin, end = item["span"]
            pieces += [text[position:begin], item["replacement"]]
            spans.append(tuple(item["new_span"]))
            gained.append((end, item["new_span"][1] - end))
            position = end
        return MediaExpandedConversation(
            out["input_ids"][0].tolist(), "".join([*pieces, text[position:]]), tuple(spans), tuple(gained)
        )

    def inputs(self, text: str, media: RowMedia, sent: bool = False) -> dict[str, Tensor]:
        """What the model reads of a conversation with images and videos, its tokens (`input_ids` [1, n]) among it.
        `sent`: a stranger sent the files."""
        return self._tensors(text, *self._opened(media, sent))

    def _tensors(self, text: str, images: Sequence[Any], videos: Sequence[OpenedVideo]) -> dict[str, Tensor]:
        from torch import Tensor

        out = self._call(text, images, videos, return_tensors="pt")
        return {k: v for k, v in out.items() if isinstance(v, Tensor)}

    def _blank(self, kinds: Sequence[str]) -> dict[str, Tensor]:
        """What the model reads of a conversation about blank images and videos of these kinds."""
        import numpy as np
        from jinja2.exceptions import TemplateError
        from PIL import Image
        from transformers.video_utils import VideoMetadata

        parts = [*({"type": kind} for kind in kinds), {"type": "text", "text": "x"}]
        try:
            text = self.inner.apply_chat_template(
                [{"role": "user", "content": parts}], chat_template=self.tokenizer.chat_template
            )
        except (TemplateError, *REFUSED) as error:
            raise WeightsError(
                Problem(
                    f"the chat template in {self.spec.folder}",
                    f"rejects a user message with {plural_of_kinds({*kinds})} ({first_line(error)})",
                    "give --chat_template FILE that supports them",
                )
            ) from None
        # not of one color: some models drop images of zeros
        picture = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
        frames = np.stack([np.asarray(picture)] * 2)
        metadata = VideoMetadata(total_num_frames=2, fps=2.0, frames_indices=[0, 1], height=32, width=32)
        return self._tensors(
            text,
            [picture for kind in kinds if kind == MEDIUM_IMAGE],
            [OpenedVideo(frames, metadata) for kind in kinds if kind == MEDIUM_VIDEO],
        )

    @cached_property
    def video_problem(self) -> tuple[str, str, str] | None:
        """Describes why the model cannot read a row with videos: the column, the reason, and what is expected; None
        where it can. WeightsError where a package is missing."""
        expected = "rows without videos; frames can be given as images"
        if "video_processor" not in type(self.inner).get_attributes():
            return "videos", "videos, but this model accepts only text and images", expected
        if getattr(self.inner, "video_processor", None) is None:
            needs = "are read by torchvision, which is not installed"
            raise WeightsError(Problem(f"videos for the processor in {self.spec.folder}", needs, VIDEO_EXTRA))
        try:
            self._blank([MEDIUM_VIDEO])
        except (RowError, WeightsError) as error:
            return (
                "videos",
                f"videos, but the model's chat template has no place for them ({first_line(error)})",
                expected,
            )
        return None

    def blank(self, kinds: Sequence[str]) -> BlankMediaConversation:
        """A conversation about one of each of these kinds, the same on every rank."""
        key = tuple(kinds)
        if key not in self._blanks:
            inputs = self._blank(key)
            self._blanks[key] = BlankMediaConversation(inputs["input_ids"][0].tolist(), inputs)
        return self._blanks[key]

    def reads_videos(self) -> bool:
        """Whether the model reads videos, and this machine can."""
        try:
            return self.video_problem is None
        except WeightsError:
            return False

    @cached_property
    def kinds(self) -> dict[str, str]:
        """For each output other than the tokens: whether it has a value a token [1, n, ...], a row [1, ...] or an image
        [..., ...]."""
        found: dict[str, str] = {}
        for kind in (MEDIUM_IMAGE, *([MEDIUM_VIDEO] if self.reads_videos() else [])):
            inputs = self._blank([kind, kind])
            length = inputs["input_ids"].shape[1]
            for name, values in inputs.items():
                if name in OWN:
                    continue
                if values.shape[:2] == (1, length):
                    found[name] = TOKEN
                else:
                    found[name] = ROW if values.shape[0] == 1 else IMAGE
        return found


def _choose_frames(reader: Any, wanted: VideoSampling) -> None:
    """A processor's part for videos takes these settings."""
    if reader is None:
        return
    if wanted.num_frames is not None:
        reader.fps = None
        reader.num_frames = wanted.num_frames
        reader.do_sample_frames = True
    elif wanted.fps is not None:
        reader.fps = wanted.fps
        reader.num_frames = None
        reader.do_sample_frames = True
    for name in ("min_frames", "max_frames"):
        if getattr(wanted, name) is not None and hasattr(reader, name):
            setattr(reader, name, getattr(wanted, name))


def tokenizer_of_tokenizer_or_processor(reader: Any) -> Any:
    """The tokenizer of what a model's texts are read with: it is one, or a `Processor` has it."""
    return reader.tokenizer if isinstance(reader, Processor) else reader


def _load(spec: ProcessorFolderWithDigest) -> Any:
    label = f"processor in {spec.folder}"
    try:
        from transformers import AutoProcessor
    except (ImportError, RuntimeError) as error:
        torchvision = importlib.util.find_spec("torchvision") is not None
        rule = "cannot be read: transformers cannot be imported" + " with the installed torchvision" * torchvision
        fix = "install the torchvision built for the installed torch, or uninstall it" if torchvision else EXTRA
        raise WeightsError(Problem(label, f"{rule} ({first_line(error.__cause__ or error)})", fix)) from None
    try:
        processor = AutoProcessor.from_pretrained(spec.folder, trust_remote_code=spec.trust)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = isinstance(error, ImportError) or "`torchvision` to be installed" in str(error)
        processor = _without_videos(spec) if missing else None
        if processor is None:
            rule = f"needs a package that is not installed: {first_line(error)}"
            unreadable = Problem(label, f"cannot be read: {first_line(error)}", "use the model's own processor files")
            raise WeightsError(Problem(label, rule, EXTRA) if missing else unreadable) from None
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise WeightsError(
            Problem(label, "is not an image processor", f"use the model's own processor files ({', '.join(FILES[:2])})")
        )
    return processor


def _without_videos(spec: ProcessorFolderWithDigest) -> Any:
    """The processor without the part for videos, which needs torchvision and has nothing to do here; None where that is
    not the reason."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    named = next((name for path in FILES if (name := _class_name(Path(spec.folder) / path))), "")
    kind = getattr(transformers, named, None)
    if (
        importlib.util.find_spec("torchvision") is not None
        or kind is None
        or "video_processor" not in kind.get_attributes()
    ):
        return None

    class WithoutVideos(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return (
                None
                if argument_name == "video_processor"
                else super().check_argument_for_proper_class(argument_name, argument)
            )

    parts: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    loaded = [
        None if name == "video_processor" else parts[name].from_pretrained(spec.folder)
        for name in kind.get_attributes()
    ]
    settings, _ = kind.get_processor_dict(spec.folder)
    return WithoutVideos.from_args_and_dict(loaded, settings)


def _class_name(path: Path) -> str:
    """The class that a processor's file names."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("processor_class") or "")
    except (OSError, ValueError):
        return ""
