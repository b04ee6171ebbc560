"""Token store: memory-mapped tokens on disk, one folder per data set.

    tokens.bin int32 [all tokens]
    mask.bin [all tokens]: loss weights; uint8, or float32 where --loss_scale has others than 0 and 1
    rows.npy int64 [rows + 1]: offsets   lines.npy int64 [rows]: place in the file
    labels.npy int64 [rows]: tokens with a label
    beside.bin, beside.npy int64 [2, rows + 1]: what rows keep beside their tokens, as JSON: the names of images, the
        columns of a prompt; offsets, and where the last image's tokens end
    values.npy float32 [units]: margins or labels, of preferences; a unit is one row here, or two (chosen, rejected);
        float32 [rows, n]: labels of texts, of classifiers
    units.npy int64 [units + 1]: offsets in rows, where units have different numbers of them (a query and its
        documents); values.npy has one value a row then
    manifest.json: counts, files, and `content`, a hash of tokens, mask and values

Owns the files' layout. A folder under its final name is complete: it is built under another name and renamed. Who
builds it, and when, belongs to `tokenization.py`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaswift.data.row_counters import MALFORMED, skipped_rows_counter_name
from megaswift.data.vision.media import IMAGE, RowMedia
from megaswift.errors import DataError, Problem

if TYPE_CHECKING:
    from megaswift.data.encode.rows import EncodedRows

VERSION = 1


def write_piece(folder: Path, number: int, piece: EncodedRows) -> None:
    """One worker's result for one part of a file; `done` comes last."""
    base = folder / f"piece-{number:06d}"
    piece.tokens.tofile(f"{base}.tokens")
    piece.mask.tofile(f"{base}.mask")
    np.save(f"{base}.rows.npy", np.stack([piece.lengths, _labels(piece), piece.lines]))
    if piece.values is not None:
        np.save(f"{base}.values.npy", piece.values)
    if piece.sizes is not None:
        np.save(f"{base}.units.npy", piece.sizes)
    if piece.beside:
        texts = [t.encode() for t in piece.beside]
        ends = [json.loads(t).get("end", 0) if t else 0 for t in piece.beside]
        Path(f"{base}.beside").write_bytes(b"".join(texts))
        np.save(f"{base}.beside.npy", np.array([[len(t) for t in texts], ends], dtype=np.int64))
    problems = [[p.what, p.rule, p.fix] for p in piece.problems]
    report = {"bad": piece.bad, "rows": len(piece.lengths), "causes": piece.causes, "notes": piece.notes}
    report["problems"] = problems
    base.with_suffix(".done").write_text(json.dumps(report))


def _labels(piece: EncodedRows) -> np.ndarray:
    """Labeled tokens of each row: those with loss; where labels are next tokens without the first, which has nothing
    before it."""
    total = np.concatenate([[0], np.cumsum(piece.mask != 0, dtype=np.int64)])
    ends = np.cumsum(piece.lengths)
    starts = ends - piece.lengths
    return total[ends] - total[np.minimum(starts + piece.first_label, ends)]


@dataclass(frozen=True)
class PieceReport:
    """What a piece says of malformed rows."""

    bad: int
    problems: list[Problem]
    causes: dict[str, int]
    rows: int
    """Those that could be read."""
    notes: dict[str, int]
    """What is counted of these."""


def read_piece_report(folder: Path, number: int) -> PieceReport | None:
    """The report of a finished piece."""
    path = folder / f"piece-{number:06d}.done"
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    return PieceReport(
        report["bad"], [Problem(*p) for p in report["problems"]], report["causes"], report["rows"], report["notes"]
    )


def merge_pieces(folder: Path, paths: list[str], target: Path, facts: dict[str, Any]) -> None:
    """Join the pieces, in order, into a store at `target`, whose parts came from the files `paths`."""
    new = folder / "store"
    new.mkdir()
    rows: list[np.ndarray] = []
    files: list[tuple[str, int]] = []
    digests = {".tokens": hashlib.blake2b(digest_size=16), ".mask": hashlib.blake2b(digest_size=16)}
    # Append the pieces' tokens and masks, and hash them on the way.
    with (new / "tokens.bin").open("wb") as tokens, (new / "mask.bin").open("wb") as mask:
        for i, path in enumerate(paths):
            base = folder / f"piece-{i:06d}"
            for suffix, out in ((".tokens", tokens), (".mask", mask)):
                with Path(f"{base}{suffix}").open("rb") as f:
                    while block := f.read(1 << 22):
                        out.write(block)
                        digests[suffix].update(block)
            rows.append(np.load(f"{base}.rows.npy"))
            files.append((path, rows[-1].shape[1]))
    # Write the index: where each row begins, its labels, and its line.
    lengths, labels, lines = np.concatenate(rows, axis=1) if rows else np.zeros((3, 0), dtype=np.int64)
    np.save(new / "rows.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(new / "labels.npy", labels)
    np.save(new / "lines.npy", lines)
    columns = _merge_beside(folder, len(paths), new)
    # Preference data has a value for each unit.
    values = [np.load(path) for path in sorted(folder.glob("piece-*.values.npy"))]
    if values:
        np.save(new / "values.npy", joined := np.concatenate(values))
        digests["values"] = hashlib.blake2b(joined.tobytes(), digest_size=16)
        facts = {"units": len(joined)} | facts
    sizes = [np.load(path) for path in sorted(folder.glob("piece-*.units.npy"))]
    if sizes:
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
        np.save(new / "units.npy", bounds)
        digests["units"] = hashlib.blake2b(bounds.tobytes(), digest_size=16)
        facts = facts | {"units": len(bounds) - 1}
    # The manifest comes last; the store appears under its name at once.
    (new / "manifest.json").write_text(
        json.dumps(
            {
                "version": VERSION,
                "rows": len(lengths),
                "tokens": int(lengths.sum()),
                "labels": int(labels.sum()),
                "files": files,
                "content": "-".join(d.hexdigest() for d in digests.values()),
                "beside": columns,
            }
            | facts,
            indent=1,
        )
    )
    new.rename(target)


def _merge_beside(folder: Path, pieces: int, new: Path) -> str:
    """A hash of all of it; empty where rows keep nothing."""
    named = [folder / f"piece-{i:06d}" for i in range(pieces)]
    bases = [base for base in named if base.with_suffix(".beside").exists()]
    if not bases:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    with (new / "beside.bin").open("wb") as out:
        for base in bases:
            part = base.with_suffix(".beside").read_bytes()
            digest.update(part)
            out.write(part)
    lengths, ends = np.concatenate([np.load(f"{base}.beside.npy") for base in bases], axis=1)
    np.save(new / "beside.npy", np.stack([np.concatenate([[0], np.cumsum(lengths)]), np.concatenate([ends, [0]])]))
    return digest.hexdigest()


class TokenStore:
    """A finished folder, opened for reading. Nothing but what is touched comes into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        empty = self.manifest["tokens"] == 0
        self.tokens: np.ndarray = (
            np.zeros(0, np.int32) if empty else np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
        )
        weighted = (folder / "mask.bin").stat().st_size > self.manifest["tokens"]
        mask_type = np.float32 if weighted else np.uint8
        self.mask: np.ndarray = (
            np.zeros(0, np.uint8) if empty else np.memmap(folder / "mask.bin", dtype=mask_type, mode="r")
        )
        self.offsets: np.ndarray = np.load(folder / "rows.npy", mmap_mode="r")
        self.labels: np.ndarray = np.load(folder / "labels.npy", mmap_mode="r")
        self.lines: np.ndarray = np.load(folder / "lines.npy", mmap_mode="r")
        keeps = (folder / "beside.npy").exists()
        self._beside: np.ndarray | None = np.load(folder / "beside.npy", mmap_mode="r") if keeps else None
        texts = bool(keeps and (folder / "beside.bin").stat().st_size)
        self._beside_texts: np.ndarray = (  # mapped once: every rank reads all prompts of a generation
            np.memmap(folder / "beside.bin", dtype=np.uint8, mode="r") if texts else np.zeros(0, np.uint8)
        )
        self.values: np.ndarray | None = np.load(folder / "values.npy") if "units" in self.manifest else None
        self.bounds: np.ndarray | None = None
        """int64 [units + 1]: where each unit's rows begin, if units differ, and the end."""
        if (folder / "units.npy").exists():
            self.bounds = np.load(folder / "units.npy")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def unit_bounds(self) -> np.ndarray:
        """int64 [units + 1]: where the rows of each unit begin, and the end."""
        if self.bounds is not None:
            return self.bounds
        return np.arange(len(self) // self.width + 1) * self.width

    @property
    def width(self) -> int:
        """Rows a unit, where all have the same number."""
        return len(self) // len(self.values) if self.values is not None and len(self.values) else 1

    @property
    def first_label(self) -> int:
        """The first token of a row that may have a label; 1 where labels are next tokens."""
        return int(self.manifest.get("first_label", 1))

    @property
    def skipped(self) -> str:
        """What was left out while reading, and why."""
        causes = self.manifest["causes"]
        other = self.manifest["bad"] - sum(causes.values())
        causes_text = [f"{count} with {cause}" for cause, count in sorted(causes.items())]
        if other:
            causes_text.insert(0, f"{other} malformed")
        return (
            f"{self.manifest['bad']} rows skipped: {', '.join(causes_text)}"
            if causes
            else f"{other} malformed rows skipped"
        )

    @property
    def counted(self) -> dict[str, int]:
        """Rows that were left out while reading, by cause, and what is counted of the others."""
        causes: dict[str, int] = self.manifest["causes"]
        malformed = self.manifest["bad"] - sum(causes.values())
        left_out = {MALFORMED: malformed} | {skipped_rows_counter_name(cause): count for cause, count in causes.items()}
        return {name: count for name, count in (left_out | self.manifest["notes"]).items() if count}

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, mask) of row i."""
        a = self.offsets[i]
        b = self.offsets[i + 1]
        return self.tokens[a:b], self.mask[a:b]

    def place(self, i: int) -> str:
        """`file:line` of row i."""
        first = 0
        for path, rows in self.manifest["files"]:
            if i < first + rows:
                return f"{path}:{self.lines[i]}"
            first += rows
        raise IndexError(i)

    @property
    def image_ends(self) -> np.ndarray:
        """int64 [rows]: tokens of a row up to the end of its last image; 0 without one."""
        return np.zeros(len(self), dtype=np.int64) if self._beside is None else np.asarray(self._beside[1, :-1])

    def beside(self, i: int) -> dict[str, Any] | None:
        """What row i keeps beside its tokens: {"text", "files", "end"} of its images, or a prompt's own
        (`prompts/source.py`)."""
        if self._beside is None or self._beside[0, i] == self._beside[0, i + 1]:
            return None
        columns: dict[str, Any] = json.loads(self._beside_texts[self._beside[0, i] : self._beside[0, i + 1]].tobytes())
        return columns

    def keeps_media(self, kind: str) -> bool:
        """Whether any row has images, or videos."""
        if self._beside is None or not self._beside[0, -1]:
            return False
        some = b'"files": ["' if kind == IMAGE else b'"videos": ['  # in a text, quotes have backslashes
        with (self.folder / "beside.bin").open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as kept:
            return kept.find(some) >= 0

    def check_images(self) -> None:
        """DataError for rows whose images or videos are gone since they were tokenized."""
        rows = np.flatnonzero(self.image_ends).tolist()
        lost = [
            (i, column, file)
            for i in rows
            for column, file in RowMedia.from_dict(self.beside(i) or {}).paths
            if not Path(file).is_file()
        ]
        if lost:
            problems = [Problem(self.place(i), f"column {name}: no such file: {file}") for i, name, file in lost[:10]]
            more = [Problem(f"and {len(lost) - 10} more files", "are missing too")] if len(lost) > 10 else []
            raise DataError([*problems, *more])
