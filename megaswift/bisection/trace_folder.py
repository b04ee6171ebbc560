"""A trace: the tensors of one optimizer step in a folder that another program can write (docs/bisect.md).

`trace.json` describes the run; each rank has `rank-N.safetensors` and, with names, kinds and micro-batches,
`rank-N.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaswift.errors import Problem, UserError
from megaswift.losses.contract import Batch
from megaswift.parallel.layout import Layout

FORMAT = 1
INDEX = "trace.json"
ADAPTER = "adapter"
"""The PEFT folder of the adapters from which the step began, in a trace that has any."""
INPUT = "input"
OUTPUT = "output"
LOSS = "loss"
RECOMPUTED = "recomputed"
"""An output of a recomputation that differs from that of the forward pass; equal ones are not kept."""
BACKWARD = "output_gradient"
GRADIENT = "gradient"
CLIPPED = "clipped_gradient"
WEIGHT = "weight"
GATHERED = "gathered_weight"
KINDS = (INPUT, OUTPUT, LOSS, RECOMPUTED, BACKWARD, GRADIENT, CLIPPED, WEIGHT, GATHERED)
"""In the order of a step."""
DIVISION = "division"
"""Whether a layer is on exactly one pipeline stage; the comparison finds it, and no trace has it."""
OF_PARAMETERS = (GRADIENT, CLIPPED, WEIGHT, GATHERED)
FIELDS = ("input_ids", "labels", "loss_weights", "valid", "cu_seqlens")
"""Names of inputs: the fields of a micro-batch that the reference needs."""
LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)")
"""An expert by its number on the rank, as plain Megatron names its parameters."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a rank."""

    kind: str
    name: str
    microbatch: int | None = None
    """Number on this data-parallel rank; None for parameters."""
    start: int = 0
    """Of a parameter in parts: the first element, in the flat shard of this rank."""

    @property
    def key(self) -> str:
        """The name in the safetensors file."""
        return "|".join(
            (self.kind, self.name, "" if self.microbatch is None else str(self.microbatch), str(self.start))
        )


@dataclass
class RankTrace:
    """The tensors of one rank, read or to be written."""

    rank: int
    tensors: dict[Entry, Tensor] = field(default_factory=dict)

    def add(self, entry: Entry, tensor: Tensor) -> None:
        """Keep a copy in host memory; a tensor that is there already stays."""
        if entry not in self.tensors:
            self.tensors[entry] = tensor.detach().to("cpu", copy=True).contiguous()

    def add_inputs(self, microbatches: Sequence[Batch]) -> None:
        """Keep the rows of every micro-batch. Every rank does: ranks that should have the same may not."""
        for number, batch in enumerate(microbatches):
            for name in FIELDS:
                value = getattr(batch, name)
                if value is not None:
                    self.add(Entry(INPUT, name, number), value)

    def write(self, folder: Path) -> None:
        """Write both files of the rank."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {entry.key: tensor for entry, tensor in self.tensors.items()}, folder / f"rank-{self.rank}.safetensors"
        )
        rows = [{"key": entry.key, **asdict(entry)} for entry in self.tensors]
        (folder / f"rank-{self.rank}.json").write_text(json.dumps({"rank": self.rank, "tensors": rows}, indent=1))


@dataclass(frozen=True)
class Trace:
    """A trace folder."""

    folder: Path
    about: Mapping[str, Any]
    """The content of `trace.json`."""

    @classmethod
    def open(cls, folder: Path) -> Trace:
        """Read the index.

        Raises:
            UserError: The folder is no trace of this format.
        """
        try:
            about = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                Problem(str(folder), f"is no trace: {error}", "docs/bisect.md describes the format")
            ) from None
        if about.get("format") != FORMAT or not isinstance(about.get("layout"), dict):
            rule = f"has format {about.get('format')!r}; this version reads {FORMAT}"
            raise UserError(Problem(str(folder / INDEX), rule, "record it again; docs/bisect.md describes the format"))
        return cls(folder, about)

    @cached_property
    def layout(self) -> Layout:
        """The ranks' grid."""
        return Layout(**self.about["layout"])

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapters from which the step began; None without adapters."""
        folder = self.folder / ADAPTER
        return folder if folder.is_dir() else None

    def ranks(self) -> Iterator[RankTrace]:
        """Read rank after rank."""
        for rank in range(self.layout.world_size):
            yield self.rank(rank)

    def rank(self, rank: int) -> RankTrace:
        """Read the tensors of a rank.

        Raises:
            UserError: A file is missing or damaged.
        """
        index = self.folder / f"rank-{rank}.json"
        try:
            rows = json.loads(index.read_text())["tensors"]
            found = RankTrace(rank)
            with safe_open(index.with_suffix(".safetensors"), "pt") as file:
                local = [int(match[1]) for row in rows for match in LOCAL_EXPERT.finditer(row["name"])]
                first = self.layout.coordinates(rank).ep * (max(local, default=0) + 1)
                for row in rows:
                    name = LOCAL_EXPERT.sub(lambda match: str(first + int(match[1])), row["name"])
                    entry = Entry(row["kind"], name, row.get("microbatch"), row.get("start", 0))
                    found.tensors[entry] = file.get_tensor(row["key"])
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            raise UserError(Problem(str(index), f"cannot be read: {error}", "record the trace again")) from None
        return found


def write_index(folder: Path, layout: Layout, dtype: torch.dtype, **more: Any) -> None:
    """Write `trace.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": FORMAT, "layout": asdict(layout), "dtype": str(dtype).removeprefix("torch."), **more}
    (folder / INDEX).write_text(json.dumps(about, indent=1))
