"""The export at the end: OUT/hf, a Hugging Face folder that `transformers` loads."""

from __future__ import annotations

from megaswift.bridge.export import ExportOptions, export_hf
from megaswift.engine.megatron.engine import MegatronEngine
from megaswift.engine.protocol import Engine
from megaswift.trainers import agree
from megaswift.trainers.build import TEMPLATE, Build
from megaswift.trainers.progress import tell


def export(engine: Engine, build: Build) -> None:
    """Streams the weights of all ranks into safetensors shards, each tensor in the dtype it was loaded with; rank 0 writes.

    An export of an earlier start is replaced once the new one is whole.
    """
    assert isinstance(engine, MegatronEngine), "only the native engine knows the weight plan"
    folder = build.outputs.hf
    if agree.rank() == 0:
        export_hf(folder, engine.plan, engine.hf_weights(), ExportOptions(source=build.folder, overwrite=True))
        if build.cfg.data.chat_template:
            (folder / TEMPLATE).write_text(build.tokenizer.chat_template, encoding="utf-8")
        tell(f"exported {folder}")
    else:
        for _ in engine.hf_weights():
            pass
