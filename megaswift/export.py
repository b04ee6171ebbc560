"""`megaswift export`: writes a model folder with adapters merged in or with quantized linear layers, converts it from
or to a Megatron checkpoint, and uploads what it wrote, or a folder that exists, to a hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megaswift import log
from megaswift.base.byte_size import byte_size_or_none
from megaswift.base.command_words import HELP
from megaswift.commands.convert import hf_to_megatron_command, megatron_to_hf_command, verify_command
from megaswift.compat.inference import InferenceToolkits
from megaswift.config.sections import TRAINING
from megaswift.data.model_tokenizer import tokenizer_or_processor_for
from megaswift.data.store.write import main as write_cached_datasets
from megaswift.data.store.write import words_of_cached_dataset
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.folders.adapter import base_model_name_or_empty
from megaswift.folders.saved_steps import refuse_damaged_part
from megaswift.folders.source import locate_model, with_fetched_adapters
from megaswift.inference.options.commands import CALIBRATED, FP8, ExportConfig, ModelLoadingOptions, ModelPathOptions
from megaswift.inference.options.export import LAYOUT, calibration_notices, conversion_notices, export_option_problems
from megaswift.inference.options.launch import node_option_values
from megaswift.inference.options.parser import CommandParser, ParsedCommand
from megaswift.inference.options.run_files import (
    ADAPTER_CONFIG,
    complete_export_options,
    short_folder_name,
)
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.first_node import run_on_node_0
from megaswift.launchers.options.single_process import place_among_nodes
from megaswift.models.model_type import model_type_option_mismatch_problems
from megaswift.options.command_line import read_command_line
from megaswift.options.files import read_config_file
from megaswift.trainers.hub_clients import HubRepository, hub_client, hub_client_problems

Exported = TypeVar("Exported")

USAGE = """\
megaswift export: merge adapters into a model; quantize, convert and upload models

  megaswift export --adapters OUT/adapter --merge_lora true --output_dir MERGED
  megaswift export --model DIR --quantization_bit 4 --output_dir SMALL
  megaswift export --model DIR --quant_method fp8 --output_dir SMALL
  megaswift export --model DIR --quant_method gptq --quant_bits 4 --dataset FILE --output_dir NEW
  megaswift export --adapters OUT/adapter --merge_lora true --quantization_bit 4 --output_dir SMALL
  megaswift export --model DIR --to_mcore true --output_dir MCORE
  megaswift export --mcore_model MCORE --to_hf true --output_dir DIR
  megaswift export --to_cached_dataset true --model DIR --dataset FILE... --output_dir FOLDER
  megaswift export --adapters OUT/adapter --push_to_hub true --hub_model_id ORGANIZATION/NAME"""


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    parsed = complete_export_options(with_fetched_adapters(parsed, "source"))
    return replace(parsed, notices=(*parsed.notices, *conversion_notices(parsed), *calibration_notices(parsed)))


COMMAND = CommandParser("export", USAGE, ExportConfig, InferenceToolkits("export"), export_option_problems, _complete)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    if (words := words_of_cached_dataset(argv)) is not None:
        return write_cached_datasets(words, tokenizer_or_processor_for)
    if not argv or any(word in HELP for word in argv):
        return COMMAND.run(argv, _main)
    take_cluster_variables(os.environ)
    line = read_command_line(list(argv), COMMAND.table)
    files = [read_config_file(file, TRAINING).givens for file in line.files if Path(file).is_file()]
    file = {one.name: one.value for givens in files for one in givens}
    flags = {one.name: one.value for one in line.givens}
    place = place_among_nodes(node_option_values(flags, os.environ, file), os.environ)
    return run_on_node_0(place, "export", lambda: COMMAND.run(argv, _main))


def _main(cfg: ExportConfig) -> int:
    log.quiet_libraries()
    if not cfg.upload.push_to_hub:
        return _write(cfg, Path(str(cfg.export.output_dir)))
    export = cfg.export
    writes = export.merge_lora or export.to_hf or export.quantizes
    folder = Path(str(export.output_dir)) if writes else _folder_to_upload(cfg.source)
    repository = _open_repository(cfg, folder)
    code = _write(cfg, folder) if writes else 0
    if code == 0:
        message = cfg.upload.commit_message or f"upload {short_folder_name(str(folder))}"
        log.print_result(repository.send_or_explain(folder, message))
    return code


def _folder_to_upload(source: ModelPathOptions) -> Path:
    """The adapters, else the model folder."""
    if not source.adapters:
        folder = locate_model(source)
        if not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):  # a step of training
            fix = f"--to_hf true --mcore_model {source.model} --push_to_hub true"
            raise WeightsError(Problem(f"--model {source.model}", f"{folder} has no *.safetensors", fix))
        refuse_damaged_part(folder)
        return folder
    folder = Path(source.adapter_folders[0])
    refuse_damaged_part(folder)
    if Path(base := base_model_name_or_empty(folder)).is_absolute():
        log.warn(
            f"{folder / ADAPTER_CONFIG} names a folder of this machine as the base model ({base}): write the hub ID of "
            "the base model there, or the adapters load on this machine only"
        )
    return folder


def _open_repository(cfg: ExportConfig, folder: Path) -> HubRepository:
    """Created before anything is written, so that a wrong token or name shows then."""
    upload = cfg.upload
    use_hf = cfg.source.use_hf
    if problems := hub_client_problems(upload.push_to_hub, use_hf):
        raise ConfigError(problems)
    name = upload.hub_model_id or short_folder_name(str(folder))
    repository = HubRepository(hub_client(use_hf, upload.hub_token), upload.hub_token, name)
    repository.create(upload.hub_private_repo)
    return repository


def _write(cfg: ExportConfig, target: Path) -> int:
    export = cfg.export
    if export.to_mcore:
        return _with_merged(cfg, target, _to_megatron) if export.merge_lora else _to_megatron(cfg, target)
    if export.to_hf and not export.merge_lora:
        return _to_hf(cfg, target)
    if export.merge_lora and export.quantizes:
        written = _both(cfg, target)
    elif export.merge_lora:
        written = _merge(cfg, target)
    else:
        written = _quantize(cfg, target)
    log.print_result(f"wrote {written}")
    return 0


def _to_megatron(cfg: ExportConfig, target: Path) -> int:
    """As `megaswift convert hf-to-megatron`."""
    from megaswift.models.family import read_config_json

    folder = locate_model(cfg.source)
    if problems := model_type_option_mismatch_problems(cfg.source.model_type, read_config_json(folder)):
        raise WeightsError(problems)
    layout = [(axis, getattr(cfg.export, option)) for option, axis in LAYOUT.items()]
    words = [word for axis, size in layout if size is not None for word in (f"--{axis}", str(size))]
    code = hf_to_megatron_command([str(folder), str(target), *words, *_dtype(cfg)])
    return code or _compare(cfg, folder, target)


def _to_hf(cfg: ExportConfig, target: Path) -> int:
    """As `megaswift convert megatron-to-hf`."""
    source = Path(str(cfg.export.mcore_model))
    words = ["--max_shard_size", cfg.export.max_shard_size, *_dtype(cfg)]
    if cfg.source.hf_config is not None:
        words += ["--hf_config", cfg.source.hf_config]
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
            replace(
                cfg, source=replace(cfg.source, model=str(between), adapters=(), model_revision=None, hf_config=None)
            ),
            target,
        )
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _both(cfg: ExportConfig, target: Path) -> Path:
    return _with_merged(cfg, target, _quantize)


def _merge(cfg: ExportConfig, target: Path) -> Path:
    folder = locate_model(cfg.source)  # before what follows imports torch
    if problems := _model_problems(cfg, folder):
        raise WeightsError(problems)
    from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base

    shard = byte_size_or_none(cfg.export.max_shard_size)
    assert shard is not None and cfg.source.adapters, "the command line was checked"
    return merge_adapter_folder_into_base(folder, cfg.source.adapter_folders[0], target, shard)


def _model_problems(cfg: ExportConfig, folder: Path) -> list[Problem]:
    """An expected model type or dtype that config.json does not have; merging keeps the dtype of each tensor."""
    from megaswift.models.family import read_config_json

    config = read_config_json(folder)
    wanted = cfg.export.torch_dtype
    own = config.get("dtype") or config.get("torch_dtype")
    problems = model_type_option_mismatch_problems(cfg.source.model_type, config)
    if wanted is not None and not cfg.export.to_mcore and own not in (None, wanted):
        rule = f"merging keeps the dtype of each tensor, {own}"
        problems.append(Problem(f"--torch_dtype {wanted}", rule, "leave it out"))
    return problems


def _quantize(cfg: ExportConfig, target: Path) -> Path:
    from megaswift.inference.prechecks import locate_generation_model, require_package

    source = cfg.source
    weights = ModelLoadingOptions(
        model=source.model,
        model_type=source.model_type,
        use_hf=source.use_hf,
        model_revision=source.model_revision,
        hf_config=source.hf_config,
        trust_remote_code=source.trust_remote_code,
    )
    if cfg.export.quant_method in CALIBRATED:
        require_package("llmcompressor", f"--quant_method {cfg.export.quant_method}")
    locate_generation_model(weights)  # before what follows imports torch
    if cfg.export.quant_method == FP8:
        from megaswift.inference.fp8_export import export_fp8_folder

        shard = byte_size_or_none(cfg.export.max_shard_size)
        assert shard is not None, "the command line was checked"
        return export_fp8_folder(weights, target, shard)
    if cfg.export.quant_method in CALIBRATED:
        from megaswift.inference.calibrated_export import export_calibrated_folder

        return export_calibrated_folder(weights, cfg.export, cfg.calibration, target)
    from megaswift.inference.bitsandbytes_export import quantize_and_save_model

    return quantize_and_save_model(weights, cfg.export, target, cfg.export.max_shard_size)
