"""How tensors fill buckets.

Covers: megaswift/engine/buckets.py.
"""

from __future__ import annotations

import torch

from megaswift.engine.buckets import DEVICE_BUCKET, HOST_BUCKET, aligned, bucket_size, filled


def test_consecutive_items_up_to_the_limit() -> None:
    """A larger one alone."""
    sizes = [3, 4, 3, 1, 12, 0, 10, 1]
    assert list(filled(sizes, lambda size: size, 10)) == [[3, 4, 3], [1], [12], [0, 10], [1]]
    assert list(filled([], lambda size: size, 10)) == []


def test_places_in_a_buffer() -> None:
    """Every dtype can begin there."""
    assert [aligned(size) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert bucket_size(torch.device("cpu")) == HOST_BUCKET
    assert bucket_size(torch.device("cuda")) == DEVICE_BUCKET
