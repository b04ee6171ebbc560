"""The export at the end: OUT/hf, a Hugging Face folder that `transformers` loads; of a LoRA run OUT/adapter, and OUT/hf
if it is merged."""

from __future__ import annotations

from megaswift import distributed, log
from megaswift.bridge.merge import merge_folders
from megaswift.engine.protocol import Engine
from megaswift.trainers.build import RunBuilder


def export_model(engine: Engine, build: RunBuilder) -> None:
    """The weights of all ranks, each tensor in the dtype it was loaded with. An export of an earlier start is replaced
    once it is whole."""
    if build.adapts:
        export_adapters(engine, build)
        return
    engine.export(build.outputs.hf, build.folder)
    distributed.run_on_rank0(lambda: build.write_template(build.outputs.hf))
    log.print_result(f"exported {build.outputs.hf}")


def export_adapters(engine: Engine, build: RunBuilder) -> None:
    """OUT/adapter; with --merge_lora OUT/hf from it and the base model's own files, so that nothing is rounded
    twice."""
    engine.write_adapter(build.outputs.adapter, build.base)
    log.print_result(f"wrote {build.outputs.adapter}, which PEFT loads")
    if build.cfg.lora.merge_lora:
        distributed.run_on_rank0(lambda: _merge(build), hours=24)
        log.print_result(f"exported {build.outputs.hf}, adapters merged in")


def _merge(build: RunBuilder) -> None:
    merge_folders(build.folder, build.outputs.adapter, build.outputs.hf, overwrite=True)
    build.write_template(build.outputs.hf)
