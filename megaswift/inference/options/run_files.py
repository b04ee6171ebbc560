"""What the files of a run and of an adapter folder say, where `infer`, `deploy` and `export` leave it open: the base
model, the data, and names of results.

Owns those defaults. Files that cannot be read say nothing here; whoever opens them reports it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.base.versions import run_folder
from megaswift.config.sections import TRAINING
from megaswift.config.swift_config import SwiftConfig, load_config
from megaswift.data.options.agent_templates import AGENT_TEXTS
from megaswift.errors import ConfigError
from megaswift.inference.options.commands import (
    CALIBRATED,
    ExportOptions,
    ModelPathOptions,
    PromptFileOptions,
    split_adapter_name,
)
from megaswift.inference.options.launch import with_launch_variables
from megaswift.inference.options.parser import ParsedCommand
from megaswift.launchers.options.single_process import unused_processes_notice
from megaswift.options.files import CONFIG_HEADER, read_config_file
from megaswift.options.spelling import TypedOption

ADAPTER_CONFIG = "adapter_config.json"
RUN_CONFIG = "config.yaml"
STEP = re.compile(r"step-\d+")
LEVELS = 4
"""Folders from OUT down to OUT/checkpoints/step-N/adapter."""
SILENT = ("hf", "model", "checkpoints", "adapter")
"""Names of folders that do not tell one model from another."""


def adapter_config(folder: Path | str) -> dict[str, Any]:
    """adapter_config.json of an adapter folder; empty where there is none."""
    try:
        value = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def adapter_folder(path: str) -> str:
    """The PEFT folder that a path means: itself, or `adapter` in a run's output directory or step. In an output folder
    with versions it is that of the newest one."""
    inner = run_folder(Path(path), (ADAPTER_CONFIG, "adapter")) / "adapter"
    return str(inner) if not (Path(path) / ADAPTER_CONFIG).is_file() and (inner / ADAPTER_CONFIG).is_file() else path


def run_config_file(paths: Iterable[str | None]) -> Path | None:
    """config.yaml of the run that wrote the first of these folders that a run wrote."""
    for path in filter(None, paths):
        folder = Path(path).absolute()
        for place in (folder, *folder.parents[: LEVELS - 1]):
            file = place / RUN_CONFIG
            try:
                with file.open(encoding="utf-8") as stream:
                    written = stream.readline().startswith(CONFIG_HEADER)
            except (OSError, UnicodeDecodeError):
                continue
            if written:
                return file
    return None


def load_run_config(file: Path) -> SwiftConfig:
    """The configuration of a run; ConfigError where it cannot be read."""
    return load_config(None, [str(file)], environ={})


def _base_model(folder: str) -> tuple[str | None, str | None]:
    """The model that adapters were trained on, as their folder names it, or as their run does; and the run's folder of
    its configuration, for another program's checkpoint."""
    name = adapter_config(folder).get("base_model_name_or_path")
    named = name if isinstance(name, str) and name else None
    if named is not None and (not Path(named).is_dir() or (Path(named) / "config.json").is_file()):
        return named, None
    file = run_config_file([folder])
    if file is None:
        return named, None
    run = load_run_config(file).model
    return named or run.model, run.hf_config


def _with_base_model(parsed: ParsedCommand, key: str) -> ParsedCommand:
    """Adapters as PEFT folders, and their base model where no model is given."""
    options: ModelPathOptions = parsed.sections[key]
    entries = [split_adapter_name(entry) for entry in options.adapters]
    found = tuple(f"{name}={adapter_folder(path)}" if name else adapter_folder(path) for name, path in entries)
    options = replace(options, adapters=found)
    notices = parsed.notices
    base, hf_config = (None, None) if options.model or not found else _base_model(options.adapter_folders[0])
    if base is not None:
        options = replace(options, model=base, hf_config=options.hf_config or hf_config)
        notices = (*notices, f"--model {base}: the base model of {options.adapter_folders[0]}")
    return replace(parsed, sections={**parsed.sections, key: options}, notices=notices)


def short_folder_name(path: str) -> str:
    """What tells a model or its adapters from others: the last folder that says something; of a step its run's too."""
    parts = [part for part in reversed(Path(path).absolute().parts) if part not in SILENT]
    if not parts:
        return "model"
    return f"{parts[1]}-{parts[0]}" if STEP.fullmatch(parts[0]) and len(parts) > 1 else parts[0]


def _with_run_data(parsed: ParsedCommand) -> ParsedCommand:
    """--load_data_args: data set, columns, system message and template of the run, where the options do not name
    them."""
    weights: ModelPathOptions = parsed.sections["weights"]
    file: PromptFileOptions = parsed.sections["file"]
    source = run_config_file([*weights.adapter_folders, weights.model])
    if not file.load_data_args or source is None:
        return parsed
    run = load_run_config(source)
    names = run.data.val_dataset or run.data.dataset
    what = "validation rows" if run.data.val_dataset or run.data.split_dataset_ratio else "training rows"
    taken: dict[str, dict[str, Any]] = {
        "file": {"dataset": names, "columns": dict(run.data.columns)},
        "conversation": {"system": run.data.system, "chat_template": run.data.chat_template}
        | ({} if run.data.enable_thinking is None else {"enable_thinking": run.data.enable_thinking}),
    }
    sections = dict(parsed.sections)
    typed = dict(parsed.typed)
    for key, values in taken.items():
        fresh = {name: value for name, value in values.items() if (value or value is False) and not parsed.given(name)}
        sections[key] = replace(sections[key], **fresh)
        typed |= {name: TypedOption("", f"{source} {name}") for name in fresh}
    told = f"--load_data_args: {what} of {', '.join(names)} ({source})"
    notices = () if parsed.given("dataset") else (told,)
    return replace(parsed, sections=sections, typed=typed, notices=(*parsed.notices, *notices))


def _with_agent_template_of_run(parsed: ParsedCommand) -> ParsedCommand:
    """The --agent_template of the run, where it is text: the prompts are then those of training."""
    weights: ModelPathOptions = parsed.sections["weights"]
    source = run_config_file([*weights.adapter_folders, weights.model])
    if source is None or parsed.given("agent_template"):
        return parsed
    try:
        given = read_config_file(str(source), TRAINING).givens
    except ConfigError:
        return parsed
    name = next((one.value for one in given if one.name == "agent_template" and one.value in AGENT_TEXTS), None)
    if name is None:
        return parsed
    if "server" in parsed.sections and parsed.sections["backend"].infer_backend == "vllm":
        told = (
            f"--agent_template {name} of the run ({source}) has no effect: vLLM's chat template writes tools and calls"
        )
        return replace(parsed, notices=(*parsed.notices, told))
    talk = replace(parsed.sections["conversation"], agent_template=name)
    told = f"--agent_template {name}: as the run has it ({source})"
    return replace(parsed, sections={**parsed.sections, "conversation": talk}, notices=(*parsed.notices, told))


def _result_path(weights: ModelPathOptions, datasets: tuple[str, ...]) -> str:
    """A file that does not exist yet; that of an interrupted run is the same again."""
    owner = next(iter(weights.adapter_folders), weights.model or "model")
    stem = Path(datasets[0].partition("#")[0]).stem + (f"-and-{len(datasets) - 1}" if len(datasets) > 1 else "")
    folder = Path("infer_result", short_folder_name(owner))
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.jsonl").exists():
        number += 1
    return str(path)


def complete_infer_options(parsed: ParsedCommand) -> ParsedCommand:
    """`megaswift infer`: base model, data of a run, result file."""
    parsed = _with_agent_template_of_run(_with_run_data(_with_base_model(parsed, "weights")))
    weights: ModelPathOptions = parsed.sections["weights"]
    weights = replace(weights, adapters=weights.adapter_folders)
    parsed = with_launch_variables(replace(parsed, sections={**parsed.sections, "weights": weights}), os.environ)
    file: PromptFileOptions = parsed.sections["file"]
    if file.dataset and parsed.given("stream"):
        told = f"{parsed.label('stream')} has no effect: answers to a prompt file are written to its result file"
        parsed = replace(parsed, notices=(*parsed.notices, told))
    if not file.dataset and parsed.given("agent_template"):
        told = f"{parsed.label('agent_template')} has no effect: a conversation in the terminal has no tools"
        parsed = replace(parsed, notices=(*parsed.notices, told))
    if not file.dataset or file.result_path is not None:
        return parsed
    file = replace(file, result_path=_result_path(parsed.sections["weights"], file.dataset))
    return replace(parsed, sections={**parsed.sections, "file": file})


def _one_process(parsed: ParsedCommand, why: str) -> ParsedCommand:
    """A notice where NPROC_PER_NODE asks for processes that a command does not start."""
    processes = os.environ.get("NPROC_PER_NODE", "1")
    told = (f"NPROC_PER_NODE={processes} has no effect: {why}",) if processes != "1" else ()
    return replace(parsed, notices=(*parsed.notices, *told))


def complete_model_options(parsed: ParsedCommand, why: str) -> ParsedCommand:
    """Commands of one process that ask a model: base model of the adapters. `why`: the reason for one process."""
    parsed = _one_process(_with_base_model(parsed, "weights"), why)
    weights: ModelPathOptions = parsed.sections["weights"]
    weights = replace(weights, adapters=weights.adapter_folders)
    return replace(parsed, sections={**parsed.sections, "weights": weights})


def complete_deploy_options(parsed: ParsedCommand) -> ParsedCommand:
    """`megaswift deploy`: base model; several adapters without names are called as their folders are."""
    told = "a server is one process; --vllm_data_parallel_size N starts several models of a vLLM server"
    parsed = _one_process(_with_agent_template_of_run(_with_base_model(parsed, "weights")), told)
    weights: ModelPathOptions = parsed.sections["weights"]
    if len(weights.adapters) < 2:
        return parsed
    named = tuple(f"{name or short_folder_name(folder)}={folder}" for name, folder in weights.named_adapters)
    return replace(parsed, sections={**parsed.sections, "weights": replace(weights, adapters=named)})


def complete_export_options(parsed: ParsedCommand) -> ParsedCommand:
    """`megaswift export`: base model, the folder to write."""
    parsed = _with_base_model(parsed, "source")
    source: ModelPathOptions = parsed.sections["source"]
    export: ExportOptions = parsed.sections["export"]
    parsed = with_launch_variables(parsed, os.environ)
    parsed = replace(parsed, notices=(*parsed.notices, *unused_processes_notice(parsed.sections["launch"])))
    if not parsed.sections["upload"].push_to_hub:
        names = ("hub_model_id", "hub_token", "hub_private_repo", "commit_message")
        told = [f"{parsed.label(name)} has no effect: nothing is uploaded" for name in names if parsed.given(name)]
        parsed = replace(parsed, notices=(*parsed.notices, *told))
    origin = next(iter(source.adapter_folders), export.mcore_model or source.model)
    if export.output_dir is not None or origin is None or not (suffix := _suffix(export)):
        return parsed
    local = Path(origin)
    folder = local if local.exists() else Path(local.name)  # of a hub's model: here
    export = replace(export, output_dir=f"{folder}-{suffix}")
    return replace(parsed, sections={**parsed.sections, "export": export})


def _suffix(export: ExportOptions) -> str:
    if export.quant_method in CALIBRATED and export.quantization_bit is not None:
        return f"{export.quant_method}-int{export.quantization_bit}"
    if export.quantization_bit is not None:
        return f"bnb-int{export.quantization_bit}"
    kinds = (("mcore", export.to_mcore), ("merged", export.merge_lora), ("hf", export.to_hf))
    return next((suffix for suffix, chosen in kinds if chosen), "")
