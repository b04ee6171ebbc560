"""`megaswift export`: writes a model folder with adapters merged in or with quantized linear layers, or converts it
from or to a Megatron checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megaswift import log
from megaswift.config.byte_size_text import byte_size_or_none
from megaswift.config.infer_deploy_export_parser import CommandParser, ParsedCommand
from megaswift.config.inference import ExportConfig, ModelLoadingOptions
from megaswift.config.inference_rules import LAYOUT, export_option_problems
from megaswift.config.inference_run_files import complete_export_options
from megaswift.convert import hf_to_megatron_command, megatron_to_hf_command, verify_command
from megaswift.errors import Problem, WeightsError
from megaswift.families.model_and_tokenizer_source import locate_model, with_fetched_adapters
from megaswift.families.model_type_option_check import model_type_option_mismatch_problems

Exported = TypeVar("Exported")

USAGE = """\
megaswift export: merge adapters into a model, quantize it, or convert it from or to a Megatron checkpoint

  megaswift export --adapters OUT/adapter --merge_lora true --output_dir MERGED
  megaswift export --model DIR --quantization_bit 4 --output_dir SMALL
  megaswift export --model DIR --adapters OUT/adapter --merge_lora true --quantization_bit 4 --output_dir SMALL
  megaswift export --model DIR --to_mcore true --output_dir MCORE
  megaswift export --mcore_model MCORE --to_hf true --output_dir DIR"""


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    return complete_export_options(with_fetched_adapters(parsed, "source"))


COMMAND = CommandParser("export", USAGE, ExportConfig, export_option_problems, _complete)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def _main(cfg: ExportConfig) -> int:
    target, export = Path(str(cfg.export.output_dir)), cfg.export
    log.quiet_libraries()
    if export.to_mcore:
        return _with_merged(cfg, target, _to_megatron) if export.merge_lora else _to_megatron(cfg, target)
    if export.to_hf and not export.merge_lora:
        return _to_hf(cfg, target)
    both = export.merge_lora and export.quantization_bit is not None
    written = _both(cfg, target) if both else (_merge if export.merge_lora else _quantize)(cfg, target)
    log.print_result(f"wrote {written}")
    return 0


def _to_megatron(cfg: ExportConfig, target: Path) -> int:
    """As `megaswift convert hf-to-megatron`."""
    folder = locate_model(cfg.source)
    layout = [(axis, getattr(cfg.export, option)) for option, axis in LAYOUT.items()]
    words = [word for axis, size in layout if size is not None for word in (f"--{axis}", str(size))]
    code = hf_to_megatron_command([str(folder), str(target), *words, *_dtype(cfg)])
    return code or _compare(cfg, folder, target)


def _to_hf(cfg: ExportConfig, target: Path) -> int:
    """As `megaswift convert megatron-to-hf`."""
    source = Path(str(cfg.export.mcore_model))
    words = ["--max_shard_size", cfg.export.max_shard_size, *_dtype(cfg)]
    return megatron_to_hf_command([str(source), str(target), *words]) or _compare(cfg, source, target)


def _dtype(cfg: ExportConfig) -> list[str]:
    return [] if cfg.export.torch_dtype is None else ["--dtype", cfg.export.torch_dtype]


def _compare(cfg: ExportConfig, source: Path, target: Path) -> int:
    """--test_convert_precision: as `megaswift convert verify`."""
    if not cfg.export.test_convert_precision:
        return 0
    return verify_command([str(source), str(target), *_dtype(cfg)])


def _with_merged(cfg: ExportConfig, target: Path, work: Callable[[ExportConfig, Path], Exported]) -> Exported:
    """`work` on the model with its adapters merged in, in full precision: four bits under an adapter would round it."""
    between = target.with_name(f".{target.name}.merged")
    shutil.rmtree(between, ignore_errors=True)
    try:
        _merge(cfg, between)
        return work(
            replace(cfg, source=replace(cfg.source, model=str(between), adapters=(), model_revision=None)), target
        )
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _both(cfg: ExportConfig, target: Path) -> Path:
    return _with_merged(cfg, target, _quantize)


def _merge(cfg: ExportConfig, target: Path) -> Path:
    folder = locate_model(cfg.source)  # before what follows imports torch
    if problems := _model_problems(cfg, folder):
        raise WeightsError(problems)
    from megaswift.bridge.merge_adapter_folder import merge_adapter_folder_into_base

    shard = byte_size_or_none(cfg.export.max_shard_size)
    assert shard is not None and cfg.source.adapters, "the command line was checked"
    return merge_adapter_folder_into_base(folder, cfg.source.adapter_folders[0], target, shard)


def _model_problems(cfg: ExportConfig, folder: Path) -> list[Problem]:
    """An expected model type or dtype that config.json does not have; merging keeps the dtype of each tensor."""
    from megaswift.families.family import read_config_json

    config, wanted = read_config_json(folder), cfg.export.torch_dtype
    own = config.get("dtype") or config.get("torch_dtype")
    problems = model_type_option_mismatch_problems(cfg.source.model_type, config)
    if wanted is not None and not cfg.export.to_mcore and own not in (None, wanted):
        rule = f"merging keeps the dtype of each tensor, {own}"
        problems.append(Problem(f"--torch_dtype {wanted}", rule, "leave it out"))
    return problems


def _quantize(cfg: ExportConfig, target: Path) -> Path:
    from megaswift.inference.precheck import locate_generation_model

    source = cfg.source
    weights = ModelLoadingOptions(
        model=source.model,
        model_type=source.model_type,
        use_hf=source.use_hf,
        model_revision=source.model_revision,
        trust_remote_code=source.trust_remote_code,
    )
    locate_generation_model(weights)  # before what follows imports torch
    from megaswift.inference.bitsandbytes_export import quantize_and_save_model

    return quantize_and_save_model(weights, cfg.export, target, cfg.export.max_shard_size)
