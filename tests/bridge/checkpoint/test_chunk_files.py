"""Boxes, their files and tables, without ranks: writing and reading, refusing what is no table."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megaswift.bridge.checkpoint import chunk_files as files
from megaswift.bridge.checkpoint import metadata
from megaswift.bridge.checkpoint.chunk_files import RankTensorChunk
from megaswift.errors import Problem


def halves(key: str, tensor: Tensor, at: int) -> list[RankTensorChunk]:
    """A tensor as two boxes of rows."""
    whole = tuple(tensor.shape)
    rest = (0,) * (tensor.dim() - 1)
    return [RankTensorChunk(key, whole, (0, *rest), tensor[:at]), RankTensorChunk(key, whole, (at, *rest), tensor[at:])]


def index_of(folder: Path) -> Metadata:
    """The tables, which have to be sound."""
    index = metadata.read_torch_dist_metadata(folder)
    assert isinstance(index, Metadata)
    return index


def test_other_boxes_read_what_was_written(tmp_path: Path) -> None:
    """Rows split at 2 are read split at 5, into another dtype too; files and tables stay as they are when the folder
    moves."""
    tensor = torch.randn(8, 3)
    files.dcp_save_rank_tensor_chunks(
        tmp_path / "a", [*halves("x", tensor, 2), RankTensorChunk("y", (4,), (0,), torch.arange(4.0))]
    )
    (tmp_path / "a").rename(tmp_path / "b")
    assert str(tmp_path).encode() not in (tmp_path / "b" / ".metadata").read_bytes()
    index = index_of(tmp_path / "b")
    assert metadata.missing_or_short_file_problems(tmp_path / "b", index) == []
    out, half = torch.empty(8, 3), torch.empty(4, dtype=torch.bfloat16)
    wanted = [*halves("x", out, 5), RankTensorChunk("y", (4,), (0,), half)]
    items, problems = files.plan_chunk_reads(index, wanted)
    assert not problems
    files.read_planned_chunks(tmp_path / "b", index, wanted, items)
    assert torch.equal(out, tensor) and torch.equal(half, torch.arange(4, dtype=torch.bfloat16))


def test_padded_rows(tmp_path: Path) -> None:
    """More rows than were saved: zero; fewer: the first ones."""
    files.dcp_save_rank_tensor_chunks(tmp_path, [RankTensorChunk("x", (5, 2), (0, 0), torch.ones(5, 2), padded=True)])
    index = index_of(tmp_path)
    more, fewer = torch.full((8, 2), 7.0), torch.full((3, 2), 7.0)
    wanted = [
        RankTensorChunk("x", (8, 2), (0, 0), more[:4], True),
        RankTensorChunk("x", (8, 2), (4, 0), more[4:], True),
        RankTensorChunk("x", (3, 2), (0, 0), fewer, True),
    ]
    items, problems = files.plan_chunk_reads(index, wanted)
    assert not problems
    files.read_planned_chunks(tmp_path, index, wanted, items)
    assert more.sum(1).tolist() == [2.0] * 5 + [0.0] * 3 and fewer.sum() == 6


def test_problems_name_the_tensor(tmp_path: Path) -> None:
    """A missing tensor, another shape, a hole: all at once."""
    files.dcp_save_rank_tensor_chunks(
        tmp_path,
        [RankTensorChunk("x", (4, 2), (0, 0), torch.ones(2, 2)), RankTensorChunk("y", (3,), (0,), torch.ones(3))],
    )
    wanted = [
        RankTensorChunk("z", (1,), (0,), torch.ones(1)),
        RankTensorChunk("y", (2,), (0,), torch.ones(2)),
        RankTensorChunk("x", (4, 2), (0, 0), torch.ones(4, 2)),
    ]
    texts = [str(p) for p in files.plan_chunk_reads(index_of(tmp_path), wanted)[1]]
    assert texts[0] == "z: is not in the checkpoint"
    assert texts[1] == "y: has shape [3] in the checkpoint and [2] in this model"
    assert texts[2].startswith("x: is incomplete")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.path}",)


def test_tables_run_no_code(tmp_path: Path) -> None:
    """A pickle that calls something is refused, uncalled."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=Evil(tmp_path / "ran"))))
    found = metadata.read_torch_dist_metadata(tmp_path)
    assert isinstance(found, Problem) and "system" in found.rule
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"nonsense", pickle.dumps([1])])
def test_broken_tables(content: bytes, tmp_path: Path) -> None:
    """A problem that names the file, no traceback."""
    (tmp_path / ".metadata").write_bytes(content)
    found = metadata.read_torch_dist_metadata(tmp_path)
    assert isinstance(found, Problem) and str(tmp_path / ".metadata") in found.what


def test_files_are_checked(tmp_path: Path) -> None:
    """Missing, then truncated."""
    files.dcp_save_rank_tensor_chunks(tmp_path, [RankTensorChunk("x", (100,), (0,), torch.ones(100))])
    index, file = index_of(tmp_path), tmp_path / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "is truncated" in metadata.missing_or_short_file_problems(tmp_path, index)[0].rule
    file.unlink()
    assert metadata.missing_or_short_file_problems(tmp_path, index) == [Problem(str(file), "is missing")]


@pytest.mark.parametrize("harm", ["", "zeros", "noise", "another tensor"])
def test_a_stored_tensor_that_is_another_is_named(harm: str, tmp_path: Path) -> None:
    """Before torch.load meets it; the file has the size that the tables say."""
    tensor = torch.randn(8, 3)
    files.dcp_save_rank_tensor_chunks(
        tmp_path, [*halves("x", tensor, 2), RankTensorChunk("y", (4,), (0,), torch.arange(4.0))]
    )
    index = index_of(tmp_path)
    items, _ = files.plan_chunk_reads(index, halves("x", torch.empty(8, 3), 5))
    place, info = next((place, info) for place, info in index.storage_data.items() if place.fqn == "x")
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    if harm == "another tensor":
        other = next(info for key, info in index.storage_data.items() if key.fqn == "y")
        index.storage_data[place] = other
    elif harm:
        new = bytes(info.length) if harm == "zeros" else random.Random(1).randbytes(info.length)
        data[info.offset : info.offset + info.length] = new
        path.write_bytes(data)
    problems = files.damaged_item_problems(tmp_path, index, items)
    assert [p.what for p in problems] == [str(tmp_path / index.storage_data[place].relative_path)] * bool(harm)
    assert all("place x" in p.rule or "where x should be" in p.rule for p in problems)
