"""Items of torch_dist files: torch.load reads ours, we find the bytes in torch's; parts of tensors in files.

Covers: megaswift/bridge/file_tensor.py.
"""

from __future__ import annotations

import io
import itertools
import math
import time
from pathlib import Path

import pytest
import torch

from megaswift.bridge.checkpoint.tensor_file import ALIGNMENT, locate_torch_save_tensor, torch_save_zip_frame
from megaswift.bridge.file_tensor import OpenFileReader, bytes_view

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]
SHAPES = [(), (5,), (3, 4), (2, 3, 5), (0, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randn(shape).to(dtype)
    parts = torch_save_zip_frame(dtype, shape)
    assert len(parts.head) % ALIGNMENT == 0
    ours = parts.head + bytes(bytes_view(tensor)) + parts.tail
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert (
        loaded.dtype == dtype
        and bytes(bytes_view(loaded)) == bytes(bytes_view(tensor))
        and loaded.shape == tensor.shape
    )
    torchs = io.BytesIO()
    torch.save(tensor, torchs)
    for i, item in enumerate((ours, torchs.getvalue())):
        path = tmp_path / str(i)
        path.write_bytes(b"abc" + item + b"more")
        found = locate_torch_save_tensor(path, 3, len(item))
        assert found.shape == shape and found.dtype == dtype
        assert bytes(bytes_view(OpenFileReader().region(found, [0] * len(shape), shape))) == bytes(bytes_view(tensor))


def test_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Six, in a sparse file: torch finds the same bytes."""
    shape, path = (3, 1 << 30), tmp_path / "big"
    parts = torch_save_zip_frame(torch.bfloat16, shape)
    with path.open("wb") as file:
        file.write(parts.head)
        file.seek(len(parts.head) + 2 * math.prod(shape) - 2)
        file.write(bytes(bytes_view(torch.ones(1).bfloat16())) + parts.tail)
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert mapped.shape == shape and mapped[2, -2:].tolist() == [0, 1]
    found = locate_torch_save_tensor(path, 0, path.stat().st_size)
    assert OpenFileReader().region(found, (2, (1 << 30) - 2), (1, 2)).tolist() == [[0, 1]]


def test_every_region_of_a_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(60).view(3, 4, 5)
    parts = torch_save_zip_frame(tensor.dtype, (3, 4, 5))
    (tmp_path / "x").write_bytes(b"head" + parts.head + bytes(bytes_view(tensor)) + parts.tail)
    found, files = (
        locate_torch_save_tensor(tmp_path / "x", 4, (tmp_path / "x").stat().st_size - 4),
        OpenFileReader(),
    )
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in tensor.shape]
    for where in itertools.product(*spans):
        want = tensor[tuple(slice(*span) for span in where)]
        assert torch.equal(files.region(found, [a for a, _ in where], [b - a for a, b in where]), want)
    files.close()


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
def test_what_is_no_item(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="has no tensor at byte 0"):
        locate_torch_save_tensor(tmp_path / "x", 0, len(content))


def test_a_transposed_item_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(6).view(2, 3).t(), tmp_path / "x")
    with pytest.raises(ValueError, match="not in row-major order"):
        locate_torch_save_tensor(tmp_path / "x", 0, (tmp_path / "x").stat().st_size)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    torch.save(torch.arange(1000), tmp_path / "x")
    found = locate_torch_save_tensor(tmp_path / "x", 0, (tmp_path / "x").stat().st_size)
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:2000])
    for corner, extent in (([0], [1000]), ([900], [50])):
        with pytest.raises(OSError, match="ends at byte"):
            OpenFileReader().region(found, corner, extent)


def test_a_damaged_description_takes_no_time_and_memory(tmp_path: Path) -> None:
    """Opcode LONG_BINPUT with a place of 2^31 makes pickle's memo as large as that."""
    part = torch_save_zip_frame(torch.float32, (2, 3))
    data = part.head + bytes(24) + part.tail
    at = data.index(b"q", data.index(b"_rebuild_tensor_v2"))
    (tmp_path / "x").write_bytes(data[:at] + b"r\xff\xff\xff\x7f" + data[at + 5 :])
    began = time.process_time()
    with pytest.raises(ValueError, match="a memo index that is out of range"):
        locate_torch_save_tensor(tmp_path / "x", 0, len(data))
    assert time.process_time() - began < 5
