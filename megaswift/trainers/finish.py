"""The export at the end: OUT/hf, a Hugging Face folder that `transformers` loads; of a LoRA run OUT/adapter, and OUT/hf if it is merged."""

from __future__ import annotations

from megaswift.bridge.export import ExportOptions, export_hf
from megaswift.bridge.merge import merge_folders
from megaswift.engine.megatron.engine import MegatronEngine
from megaswift.engine.protocol import Engine
from megaswift.trainers import adapters, agree
from megaswift.trainers.build import Build
from megaswift.trainers.progress import tell


def export(engine: Engine, build: Build) -> None:
    """Streams the weights of all ranks into safetensors shards, each tensor in the dtype it was loaded with; rank 0 writes.

    An export of an earlier start is replaced once the new one is whole.
    """
    assert isinstance(engine, MegatronEngine), "only the native engine knows the weight plan"
    if build.adapts:
        export_adapters(engine, build)
        return
    folder = build.outputs.hf
    if agree.rank() == 0:
        export_hf(folder, engine.plan, engine.hf_weights(), ExportOptions(source=build.folder, overwrite=True))
        build.write_template(folder)
        tell(f"exported {folder}")
    else:
        for _ in engine.hf_weights():
            pass


def export_adapters(engine: MegatronEngine, build: Build) -> None:
    """OUT/adapter; with --merge_lora OUT/hf from it and the base model's own files, so that nothing is rounded twice."""
    adapters.write(engine, build.outputs.adapter, build.base)
    tell(f"wrote {build.outputs.adapter}, which PEFT loads")
    if build.cfg.lora.merge_lora:
        agree.on_main(lambda: _merge(build), hours=24)
        tell(f"exported {build.outputs.hf}, adapters merged in")


def _merge(build: Build) -> None:
    merge_folders(build.folder, build.outputs.adapter, build.outputs.hf, overwrite=True)
    build.write_template(build.outputs.hf)
