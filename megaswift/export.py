"""`megaswift export`: writes a model folder with adapters merged in, or with quantized linear layers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaswift import log
from megaswift.config.byte_size import parse_byte_size
from megaswift.config.command_parser import CommandParser
from megaswift.config.inference import ExportConfig, ModelLoadingOptions
from megaswift.config.inference_rules import export_option_problems

USAGE = """\
megaswift export: merge adapters into a model, or quantize it

  megaswift export --model DIR --adapters OUT/adapter --merge_lora true --output_dir MERGED
  megaswift export --model DIR --quantization_bit 4 --output_dir SMALL
  megaswift export --model DIR --adapters OUT/adapter --merge_lora true --quantization_bit 4 --output_dir SMALL"""
HINTS = {
    "merge_adapters": "--merge_lora true",
    "ckpt_dir": "--adapters",
}
COMMAND = CommandParser("export", USAGE, ExportConfig, export_option_problems, HINTS)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def _main(cfg: ExportConfig) -> int:
    target, both = Path(str(cfg.export.output_dir)), cfg.export.merge_lora and cfg.export.quantization_bit is not None
    log.quiet_libraries()
    log.print_result(
        f"wrote {_both(cfg, target) if both else (_merge if cfg.export.merge_lora else _quantize)(cfg, target)}"
    )
    return 0


def _both(cfg: ExportConfig, target: Path) -> Path:
    """Merged first, in full precision, then quantized: four bits under an adapter would round it."""
    between = target.with_name(f".{target.name}.merged")
    shutil.rmtree(between, ignore_errors=True)
    try:
        _merge(cfg, between)
        return _quantize(
            replace(cfg, source=replace(cfg.source, model=str(between), adapters=None, model_revision=None)), target
        )
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _merge(cfg: ExportConfig, target: Path) -> Path:
    from megaswift.families.model_and_tokenizer_source import locate_model

    folder = locate_model(cfg.source)  # before what follows imports torch
    from megaswift.bridge.merge_adapter_folder import merge_adapter_folder_into_base

    shard = parse_byte_size(cfg.export.max_shard_size)
    assert shard is not None and cfg.source.adapters is not None, "the command line was checked"
    return merge_adapter_folder_into_base(folder, cfg.source.adapters, target, shard)


def _quantize(cfg: ExportConfig, target: Path) -> Path:
    from megaswift.inference.precheck import locate_generation_model

    source, bits = cfg.source, cfg.export.quantization_bit
    assert bits is not None, "the command line was checked"
    weights = ModelLoadingOptions(
        model=source.model,
        use_hf=source.use_hf,
        model_revision=source.model_revision,
        trust_remote_code=source.trust_remote_code,
    )
    locate_generation_model(weights)  # before what follows imports torch
    from megaswift.inference.bitsandbytes_export import quantize_and_save_model

    return quantize_and_save_model(weights, bits, target, cfg.export.max_shard_size)
