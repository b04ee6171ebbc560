"""The images and videos of a prompt for reinforcement learning, read again for each batch that samples from it or
trains on it.

Owns what is kept of them beside the prompt's tokens, and the check that they still give those tokens. How several
prompts' images become one batch belongs to `vision/batches.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.media import IMAGE, RowMedia
from megaswift.data.vision.processor import Processor
from megaswift.errors import DataError, Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PromptImages:
    """What a prompt's images are read from."""

    text: str
    """The rendered prompt, a placeholder for each image and video."""
    media: RowMedia

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"text": self.text, **self.media.to_dict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any] | None) -> PromptImages | None:
        """The inverse; None for a prompt without images."""
        media = RowMedia.from_dict(state or {})
        return cls(state["text"], media) if state and media else None


class PromptImageReader:
    """Opens prompts' images and videos and gives what the model reads of them."""

    def __init__(self, processor: Processor, kinds: Collection[str] = (IMAGE,)) -> None:
        """`kinds`: of media that prompts of the run have."""
        self.processor = processor
        self.kinds = frozenset(kinds)

    def inputs(self, images: PromptImages, prompt: Sequence[int]) -> Mapping[str, Tensor]:
        """The processor's outputs for the prompt with these tokens (`input_ids` [1, n] among them); DataError where an
        image cannot be read any more or has another size."""
        names = f"the files {', '.join(path for _, path in images.media.paths)}"
        try:
            inputs = self.processor.inputs(images.text, images.media)
        except RowError as error:
            raise DataError(Problem(names, error.found, error.expected)) from None
        if inputs["input_ids"][0].tolist() != [*prompt]:
            fix = "restore the files, or use another --dataset_cache_dir"
            raise DataError(Problem(names, "have changed since tokenization: their sizes differ", fix))
        return inputs
