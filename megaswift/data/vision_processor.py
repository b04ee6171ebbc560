"""Wraps the processor of a vision-language model: from a conversation's text and images to model inputs.

Owns loading it, one call for one conversation, and what each of its outputs is: a value a token, a row or an image.
transformers does the work; which rows come together belongs to `vision_batches.py`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.data.untokenized_sample import RowError
from megaswift.errors import Problem, WeightsError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Of a model folder, beside its tokenizer."""
EXTRA = "run pip install pillow; some models also need the torchvision built for the installed torch"
OWN = ("input_ids", "attention_mask")
"""Outputs that the batch has already; rows are padded on the right, where causal attention does not look."""
TOKEN, ROW, IMAGE = "token", "row", "image"
REFUSED = (ValueError, TypeError, KeyError, IndexError, RuntimeError)
"""What processors raise for a conversation that they cannot read."""


@dataclass(frozen=True)
class ProcessorFolderWithDigest:
    """Where a processor lies; plain values that travel to worker processes."""

    folder: str
    trust: bool = False
    digest: str = ""
    """Of its files: other files give other tokens."""
    max_pixels: int | None = None
    """`--max_pixels`: larger images are scaled down before the processor sees them."""


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
class ImageExpandedConversation:
    """A conversation as the processor reads it."""

    ids: list[int]
    text: str
    """With each image's placeholder replaced by its tokens."""
    spans: tuple[tuple[int, int], ...]
    """Characters of `text` that stand for images."""
    gained: tuple[tuple[int, int], ...]
    """(end of a placeholder in the text before, characters that the text has grown by up to there)."""

    def shifted(self, char: int) -> int:
        """Where a character of the text before now is."""
        return char + max((g for g in self.gained if g[0] <= char), default=(0, 0))[1]


@dataclass(frozen=True)
class BlankImageConversation:
    """A conversation about a blank image, for a micro-batch that has none."""

    ids: list[int]
    inputs: Mapping[str, Tensor]


def scale_to_max_pixels(image: Any, max_pixels: int | None) -> Any:
    """A PIL image of at most `max_pixels` pixels (width x height), its shape kept (bilinear, as ms-swift scales).
    Smaller ones as they are."""
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    ratio = (max_pixels / (width * height)) ** 0.5
    from PIL.Image import Resampling

    return image.resize((max(1, int(width * ratio)), max(1, int(height * ratio))), Resampling.BILINEAR)


class Processor:
    """transformers' processor of one model folder."""

    def __init__(self, spec: ProcessorFolderWithDigest) -> None:
        self.spec = spec
        self.inner = _load(spec)
        self.tokenizer = self.inner.tokenizer
        own = getattr(self.inner, "chat_template", None)
        if own and not self.tokenizer.chat_template:
            self.tokenizer.chat_template = own
        self._local = threading.local()

    @property
    def _mine(self) -> Any:
        """A copy for each thread: fast tokenizers refuse two callers at once."""
        if threading.current_thread() is threading.main_thread():
            return self.inner
        if not hasattr(self._local, "copy"):
            self._local.copy = copy.deepcopy(self.inner)
        return self._local.copy

    def _call(self, text: str, images: Sequence[Any], **options: Any) -> Any:
        """One conversation; special tokens are added as `apply_chat_template` adds them."""
        bos = self.tokenizer.bos_token
        options["add_special_tokens"] = bos is None or not text.startswith(bos)
        try:
            scaled = [scale_to_max_pixels(image, self.spec.max_pixels) for image in images]
            return self._mine(text=[text], images=[scaled] if images else None, **options)
        except REFUSED as error:
            raise RowError(
                "images",
                f"the model's processor rejects this conversation ({first_line(error)})",
                "as many images as placeholders in the text",
            ) from None

    def expand(self, text: str, images: Sequence[Any]) -> ImageExpandedConversation:
        """The tokens of a rendered conversation, and where its images are."""
        out = self._call(text, images, return_text_replacement_offsets=True)
        replacements = out.get("text_replacement_offsets")
        if images and not (replacements and replacements[0]):
            raise WeightsError(
                Problem(
                    f"the processor in {self.spec.folder} ({type(self.inner).__name__})",
                    "does not define the image placeholder in the text",
                    "use another model, or a newer version of transformers",
                )
            )
        pieces, spans, gained, position = [], [], [], 0
        for item in replacements[0] if images else ():
            begin, end = item["span"]
            pieces += [text[position:begin], item["replacement"]]
            spans.append(tuple(item["new_span"]))
            gained.append((end, item["new_span"][1] - end))
            position = end
        return ImageExpandedConversation(
            list(out["input_ids"][0]), "".join([*pieces, text[position:]]), tuple(spans), tuple(gained)
        )

    def inputs(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        """What the model reads of a conversation with images, its tokens (`input_ids` [1, n]) among it."""
        from torch import Tensor

        return {k: v for k, v in self._call(text, images, return_tensors="pt").items() if isinstance(v, Tensor)}

    def _blank(self, images: int) -> tuple[str, dict[str, Tensor]]:
        from jinja2.exceptions import TemplateError
        from PIL import Image

        parts = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": "x"}]
        try:
            text = self.inner.apply_chat_template(
                [{"role": "user", "content": parts}], chat_template=self.tokenizer.chat_template
            )
        except (TemplateError, *REFUSED) as error:
            raise WeightsError(
                Problem(
                    f"the chat template in {self.spec.folder}",
                    f"rejects a user message with images ({first_line(error)})",
                    "give --chat_template FILE that supports images",
                )
            ) from None
        # not of one color: some models drop images of zeros
        picture = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
        return text, self.inputs(text, [picture] * images)

    @cached_property
    def dummy(self) -> BlankImageConversation:
        """The same on every rank."""
        inputs = self._blank(1)[1]
        return BlankImageConversation(inputs["input_ids"][0].tolist(), inputs)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Of each output beside the tokens: whether it has a value a token [1, n, ...], a row [1, ...] or an image
        [..., ...]."""
        inputs = self._blank(2)[1]
        length = inputs["input_ids"].shape[1]
        return {
            k: TOKEN if v.shape[:2] == (1, length) else ROW if v.shape[0] == 1 else IMAGE
            for k, v in inputs.items()
            if k not in OWN
        }


def tokenizer_of_tokenizer_or_processor(reader: Any) -> Any:
    """The tokenizer of what a model's texts are read with: it is one, or a `Processor` has it."""
    return reader.tokenizer if isinstance(reader, Processor) else reader


def _load(spec: ProcessorFolderWithDigest) -> Any:
    from transformers import AutoProcessor

    label = f"processor in {spec.folder}"
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
