"""Rows with labels in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.labeled.collate import StreamedLabels, collate_labeled
from megaswift.data.stream.rows import StreamRowEncoderAndPacker
from megaswift.losses.contract import Batch


@dataclass
class LabeledStreamProcessor(StreamRowEncoderAndPacker):
    """Rows of tokens with their labels, or packed rows of documents."""

    width: int = 0
    """Numbers of a text's label; 0: tokens have classes of their own."""

    def batches(self, taken: Sequence[Any], geometry: LoaderGeometry) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        own = geometry.own(self.cut_rows(taken))
        labels = StreamedLabels(self.images, self.width) if self.width else None
        batches = collate_labeled(own, self.options.packing, self.shape, geometry.uniform, labels)
        self.images.forget_earlier_blocks()
        return batches
