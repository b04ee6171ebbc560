"""The export at the end: OUT/hf, a Hugging Face folder that `transformers` loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaswift.bridge.hf_writer import HfWriter
from megaswift.engine.protocol import Engine
from megaswift.trainers import agree
from megaswift.trainers.progress import tell

if TYPE_CHECKING:
    from megaswift.trainers.build import Build


def export(engine: Engine, build: Build) -> None:
    """Streams the weights of all ranks into safetensors shards; rank 0 writes."""
    folder = build.outputs.hf
    writer = HfWriter(folder) if agree.rank() == 0 else None
    for name, tensor in engine.hf_weights():
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close(build.folder)
        tell(f"exported {folder}")
