"""Rules for the options of `export`. No torch: errors of the command line are reported immediately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megaswift.base.byte_size import byte_size_or_none
from megaswift.errors import Problem
from megaswift.inference.options.checks import (
    model_option_problems,
    quantization_bit_problems,
    unused_option_problems,
)
from megaswift.inference.options.commands import (
    CALIBRATED,
    CALIBRATED_BITS,
    FP8,
    CalibrationOptions,
    ExportOptions,
    ExportUploadOptions,
    ModelPathOptions,
)
from megaswift.inference.options.parser import ParsedCommand
from megaswift.inference.options.run_files import adapter_config
from megaswift.inference.options.variants import ignored_option_problems
from megaswift.launchers.options.single_process import node_problems


def _no_adapters(model: str | None) -> Problem:
    """--merge_lora without --adapters; the folder of a LoRA run is often given as the model."""
    for folder in (Path(model), Path(model) / "adapter") if model is not None else ():
        if said := adapter_config(folder):
            base = said.get("base_model_name_or_path") or "BASE"
            rule = "contains LoRA adapters, not a model"
            return Problem(f"--model {model}", rule, f"--model {base} --adapters {folder} --merge_lora true")
    return Problem("--merge_lora true", "needs adapters", "--adapters DIR")


def _fp8(export: ExportOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    """--quant_method fp8 beside options of bitsandbytes."""
    if export.quantization_bit not in (None, 8):
        rule = f"conflicts with {parsed.label('quant_method')}, whose weights have 8 bits"
        yield Problem(parsed.label("quantization_bit"), rule, "leave it out")


def _calibrated(export: ExportOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    """--quant_method gptq and awq."""
    calibration: CalibrationOptions = parsed.sections["calibration"]
    method = parsed.label("quant_method")
    allowed = CALIBRATED_BITS[str(export.quant_method)]
    if export.quantization_bit is None:
        yield Problem(method, "needs the number of bits", f"--quant_bits {allowed[0]}")
    elif export.quantization_bit not in allowed:
        rule = f"{export.quant_method} weights have {' or '.join(map(str, allowed))} bits"
        yield Problem(parsed.label("quantization_bit"), rule, f"--quant_bits {allowed[0]}")
    if not calibration.dataset:
        yield Problem(method, "needs calibration rows", "--dataset FILE.jsonl; without rows: --quant_method fp8 or bnb")
    if calibration.group_size == 0:
        yield Problem("--group_size 0", "must be a number of inputs, or -1", "--group_size 128")


def export_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift export`."""
    yield from ignored_option_problems(parsed)
    source: ModelPathOptions = parsed.sections["source"]
    export: ExportOptions = parsed.sections["export"]
    converts = export.to_hf or export.to_mcore
    yield from node_problems(parsed.sections["launch"])
    yield from model_option_problems(source, export.mcore_model)
    if export.quant_method in CALIBRATED:
        yield from _calibrated(export, parsed)
    else:
        yield from _fp8(export, parsed) if export.quant_method == FP8 else quantization_bit_problems(export)
    upload: ExportUploadOptions = parsed.sections["upload"]
    writes = export.merge_lora or converts or export.quantizes
    if not writes and not upload.push_to_hub:
        yield Problem(
            "megaswift export",
            "needs --merge_lora, --quantization_bit, --quant_method, --to_mcore, --to_hf or --push_to_hub",
            "--merge_lora true --adapters DIR, --quantization_bit 4, or --to_hf true --mcore_model DIR",
        )
    if upload.push_to_hub:
        yield from _upload(export, source, writes)
    if export.merge_lora and not source.adapters:
        yield _no_adapters(source.model)
    if export.merge_lora and len(source.adapters) > 1:
        yield Problem("--adapters", "merges one adapter folder at a time", "export once per folder")
    if not export.merge_lora and source.adapters and export.quantizes and not converts:
        yield from unused_option_problems(parsed, ["adapters"], "would be ignored", "--merge_lora true")
    if export.merge_lora and not export.quantizes:
        yield from unused_option_problems(
            parsed, ["trust_remote_code"], "would be ignored: merging does not run model code"
        )
    yield from _conversion(export, source, parsed)
    if byte_size_or_none(export.max_shard_size) is None:
        yield Problem(f"--max_shard_size {export.max_shard_size}", "is not a valid size", "--max_shard_size 5GB")
    if export.output_dir is None and writes:
        yield Problem("--output_dir", "is missing", "--output_dir DIR (the folder to write)")
    elif (writes or not upload.push_to_hub) and export.output_dir is not None and Path(export.output_dir).exists():
        yield Problem(f"--output_dir {export.output_dir}", "already exists", "use another name; nothing is overwritten")


LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
"""Options of `export` and their axis of a layout."""


def conversion_notices(parsed: ParsedCommand) -> Iterator[str]:
    """Options that a conversion does not read, as they are part of commands for other toolkits."""
    export: ExportOptions = parsed.sections["export"]
    idle: dict[str, str] = {}
    if export.to_hf:
        idle |= dict.fromkeys(LAYOUT, "a Hugging Face folder has no layout")
    if export.to_hf and not export.merge_lora and export.mcore_model is not None:
        names = ("model", "model_type", "model_revision", "trust_remote_code")
        idle |= dict.fromkeys(names, "the checkpoint has the model's configuration")
    if export.to_mcore:
        idle["max_shard_size"] = "it is for safetensors files"
        idle["trust_remote_code"] = "a conversion does not run model code"
    yield from (f"{parsed.label(name)} has no effect: {why}" for name, why in idle.items() if parsed.given(name))


def calibration_notices(parsed: ParsedCommand) -> Iterator[str]:
    """Options of calibration in a command that does not calibrate, as they are part of commands for other toolkits."""
    export: ExportOptions = parsed.sections["export"]
    if export.quant_method in CALIBRATED:
        return
    names = (field.name for field in fields(CalibrationOptions))
    why = f"only --quant_method {' and '.join(CALIBRATED)} read rows"
    yield from (f"{parsed.label(name)} has no effect: {why}" for name in names if parsed.given(name))


def _upload(export: ExportOptions, source: ModelPathOptions, writes: bool) -> Iterator[Problem]:
    """--push_to_hub."""
    if export.to_mcore:
        rule = "uploads Hugging Face folders, and --to_mcore writes a Megatron checkpoint"
        yield Problem("--push_to_hub true", rule, "leave out --to_mcore")
    if writes:
        return
    if len(source.adapters) > 1:
        yield Problem("--adapters", "one folder is uploaded at a time", "export once per folder")
    if not source.adapters and source.model is not None and not Path(source.model).expanduser().is_dir():
        rule = "is not a folder on this machine; --push_to_hub uploads a folder"
        yield Problem(f"--model {source.model}", rule, "--model DIR or --adapters DIR")


def _conversion(export: ExportOptions, source: ModelPathOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    """--to_hf and --to_mcore."""
    if export.to_hf and export.to_mcore:
        yield Problem("--to_hf true", "conflicts with --to_mcore true", "convert in two commands")
    if not (export.to_hf or export.to_mcore):
        return
    if export.quantizes:
        name = "quantization_bit" if export.quantization_bit is not None else "quant_method"
        yield Problem(parsed.label(name), "cannot be combined with a conversion", "use two commands")
    if export.to_mcore:
        yield from unused_option_problems(
            parsed, ["mcore_model"], "is already a Megatron checkpoint", "--model DIR, or --to_hf true"
        )
    if source.adapters and not export.merge_lora:
        folder = source.adapter_folders[0]
        rule = "has PEFT's format, which training and inference read on any layout: there is nothing to convert"
        yield Problem(f"--adapters {folder}", rule, "use the folder as it is, or --merge_lora true")
    elif export.to_hf and export.mcore_model is None and not export.merge_lora:
        yield Problem("--to_hf true", "needs a Megatron checkpoint", "--mcore_model DIR")
    if export.to_hf and export.mcore_model is not None and export.merge_lora:
        yield Problem("--mcore_model", "cannot be combined with --merge_lora", "--model DIR --merge_lora true")
    if export.to_hf and export.merge_lora:
        yield from unused_option_problems(
            parsed, ["test_convert_precision"], "applies to a conversion; merging changes the weights"
        )
