"""A rank of a torch engine that loads a model and tells what it has read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import Problem, WeightsError


@dataclass(frozen=True)
class Loading:
    """An engine on a folder. `step`: a checkpoint that is written there and read again."""

    folder: Path
    engine: str
    step: Path | None = None


def build(world: int, job: Loading) -> Any:
    """The engine with the folder's weights."""
    from megaswift.config import SwiftConfig
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    cfg = SwiftConfig(task="sft", model=str(job.folder), engine=job.engine, torch_dtype="float32", ddp_timeout=600)
    hf_config = json.loads((job.folder / "config.json").read_text())
    context = start_context(cfg, Layout.from_config(cfg.parallel, world))
    engine = make_engine(cfg, family_of(hf_config).spec(hf_config), job.folder, context)
    engine.load_hf(job.folder)
    return engine


def load(rank: int, world: int, job: Loading) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes of tensors that this rank has read of the model and of the checkpoint; the engine's weights."""
    from megaswift.bridge.file_tensor import OpenFileReader

    read, fill = [0], OpenFileReader.fill

    def counted(self: Any, *values: Any) -> None:
        before = self.bytes_read
        fill(self, *values)
        read[0] += self.bytes_read - before

    OpenFileReader.fill = counted  # type: ignore[method-assign]
    engine = build(world, job)
    model = read[0]
    if job.step is not None:
        engine.save(job.step)
        engine.load(job.step)
    return model, read[0] - model, dict(engine.hf_weights())


def fail(rank: int, world: int, job: Loading) -> str:
    """The error of a rank where rank 1 cannot read its share."""
    from megaswift.bridge.hf.source import HfSource

    if rank == 1:

        def unreadable(self: Any, name: str, *_: Any) -> Tensor:
            raise WeightsError(Problem(name, "cannot be read"))

        HfSource.slice = unreadable  # type: ignore[method-assign]
    try:
        build(world, job)
    except WeightsError as error:
        return str(error)
    return ""
