"""Translates sources of a training command: one option of another toolkit may be several of ours, or the reverse.

Names that only differ in spelling are aliases on the options themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.bridge.adapters.options.methods import VARIANTS
from megaswift.compat.explanation import accepted_option
from megaswift.compat.files.accelerate_file import expand_accelerate_files, named_accelerate_file
from megaswift.compat.files.deepspeed_file import source_from_deepspeed_file
from megaswift.compat.files.fsdp import translated_fsdp_options
from megaswift.compat.files.hostfile import expand_hostfile
from megaswift.compat.names.architecture import with_collected_architecture
from megaswift.compat.names.neutral import NEUTRAL, neutral_option
from megaswift.compat.names.translated import (
    CACHED,
    DATALOADER_KEY,
    INTERVALS,
    JSON_TEXTS,
    NOTICED,
    PRECISIONS,
    RENAMED,
    SAMPLES,
    SCHEDULER_ARGUMENTS,
    SCHEDULER_DEFAULTS,
    SCHEDULER_KEY,
    SWITCHES,
    TASK_SPELLINGS,
    VALUES,
    WEIGHTS_ONLY,
)
from megaswift.compat.swift_rollout import translate_rollout_correction_options
from megaswift.config.sections import NAMES
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.zero_file import deepspeed_json_text, read_deepspeed_json
from megaswift.errors import ConfigError
from megaswift.options.sources import AcceptedOption, ConfigSource, GivenOptionValue
from megaswift.options.tasks import TASKS
from megaswift.options.values import FALSE, TRUE, option_value_text

_RESUME = "resume_from_checkpoint"
_HOST = ("vllm_server_host", "sglang_server_host")
_PORT = ("vllm_server_port", "sglang_server_port")
_DEFAULT_PORT = "8000"


def translated_sources(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """Return the sources in megaswift's terms.

    Files that they name (accelerate, DeepSpeed, hosts) are sources of their own in front of them, which count less.
    """
    whole = expand_hostfile(expand_accelerate_files([named_accelerate_file(source) for source in sources]))
    of_deepspeed = source_from_deepspeed_file(whole)
    return [_translated(source) for source in (of_deepspeed, *translate_rollout_correction_options(whole))]


def _translated(source: ConfigSource) -> ConfigSource:
    notices = [
        f"{given.label}: {given.value} is a task, so it is used as rlhf_type; train_type stays full"
        for given in source.givens
        if _names_task(given)
    ]
    givens: list[GivenOptionValue] = []
    accepted: list[AcceptedOption] = []
    original = {given.label: given.name for given in source.givens}
    for given in translated_options(source.givens):
        if original.get(given.label) in NOTICED and given.name in NAMES:
            notices.append(f"{given.label}: read as --{given.name} {option_value_text(given.value)}")
        option = accepted_option(given)
        if option is None:
            givens.append(given)
        else:
            accepted.append(option)
    translated = replace(source, givens=tuple(givens), accepted=tuple(accepted))
    return replace(translated, notices=(*source.notices, *notices))


def _names_task(given: GivenOptionValue) -> bool:
    """Megatron-SWIFT's `train_type` may be the task."""
    return NAMES.get(given.name) == "train_type" and str(given.value).lower() in (*TASKS, "rlhf")


def _with_cached_datasets(givens: Iterable[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """`cached_dataset` beside `dataset` adds its folders to it, as in ms-swift."""
    givens = list(givens)
    for given in givens:
        if given.name in CACHED and any(one.name == CACHED[given.name] for one in givens):
            continue
        added = [word for one in givens if CACHED.get(one.name) == given.name for word in _listed(one.value)]
        yield replace(given, value=[*_listed(given.value), *added]) if added else given


def _with_dataset_config(givens: Iterable[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """TRL's `dataset_name` with `dataset_config`: NAME:CONFIG."""
    givens = [one for one in givens if one.name != "dataset_config" or _text(one) != "none"]
    config = next((one for one in givens if one.name == "dataset_config"), None)
    named = [one for one in givens if NAMES.get(RENAMED.get(one.name, one.name)) == "dataset"]
    if config is None or len(named) != 1 or len(_listed(named[0].value)) != 1:
        yield from givens
        return
    for given in givens:
        if given is named[0]:
            label = f"{given.label} {config.label}"
            yield replace(given, name="dataset", value=f"{_listed(given.value)[0]}:{config.value}", label=label)
        elif given is not config:
            yield given


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def translated_options(givens: Sequence[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """The options of one source in megaswift's own terms.

    `train_type sft` is the task, `train_type dora` lora with `use_dora`. If `use_vllm` is true, `vllm_mode` selects
    where it runs. `deepspeed: {config_path: FILE}` is the file, `{stage: 2}` zero2. `bf16 true` is `torch_dtype
    bfloat16`, and `bf16 false` without another precision float32. `warmup_steps` below 1 is a fraction, as in
    transformers 5. A server's host and port are its URL. `eval_strategy no` unsets `eval_steps`.
    `resume_from_checkpoint` with WEIGHTS_ONLY is `model` or `adapters`.
    """
    givens = [replace(given, name="task") if _names_task(given) else given for given in givens]
    givens = list(_with_weights_of_checkpoint(givens))
    givens = list(translated_fsdp_options(givens))
    givens = list(_with_dataset_config(_with_cached_datasets(with_collected_architecture(givens))))
    values = {given.name: _text(given) for given in givens}
    unused = _unused_names(values)
    off = _unused_precisions(values)
    batches = {NAMES.get(name): text for name, text in values.items()}
    for given in givens:
        text = values[given.name]
        flag = "false" if text in FALSE else text
        if text in TRUE:
            flag = "true"
        meaning = VALUES.get((given.name, text)) or VALUES.get((given.name, flag))
        if given.name in unused or (given.name in SWITCHES and flag in ("false", "none")):
            continue
        if given.name in off:  # a notice names it
            if given.name in NEUTRAL:
                yield given
        elif given.name == _RESUME and flag in ("true", "false"):  # transformers: the newest of output_dir, or none
            yield replace(given, value="latest" if flag == "true" else None)
        elif NAMES.get(given.name) in INTERVALS and text in FALSE:  # YAML reads `no` as false
            yield replace(given, value="no")
        elif meaning is not None:
            yield replace(given, name=meaning[0], value=meaning[1])
        elif given.name == "warmup_steps" and 0 < _number(text) < 1:
            yield replace(given, name="warmup_ratio")
        elif given.name in SAMPLES and (batch := _number(batches.get("global_batch_size", ""))) >= 1:
            yield replace(given, name=SAMPLES[given.name], value=int(_number(text) // batch))
        elif given.name == "dataset_text_field" and "columns" not in values and text not in ("text", "none"):
            yield replace(given, name="columns", value={str(given.value): "text"})
        elif given.name == "distributed_timeout_minutes" and _number(text) > 0:
            yield replace(given, name="ddp_timeout", value=round(60 * _number(text)))
        elif given.name == "dataset_dir" and _names_datasets(values):  # LLaMA-Factory's: entries of a file in it
            yield given
        elif given.name in RENAMED or given.name in TASK_SPELLINGS:
            yield replace(given, name=RENAMED.get(given.name, "task"))
        elif given.name in _HOST:
            yield replace(given, name="rollout_server_url", value=_server_urls(given, givens))
        elif NAMES.get(given.name) == "train_type" and (switch := VARIANTS.get(text)) is not None:
            yield replace(given, value="lora")
            yield replace(given, name=switch, value=True)
        else:
            yield from _section_options(given)


def _with_weights_of_checkpoint(givens: Sequence[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """A checkpoint of which only the weights are asked for, as `model` or, where it has adapters, `adapters`."""
    only = any(given.name in WEIGHTS_ONLY and _text(given) in TRUE for given in givens)
    named = next(
        (g for g in givens if NAMES.get(g.name) == _RESUME and _text(g) not in ("latest", *TRUE, *FALSE)), None
    )
    if not only or named is None or named.value is None:
        yield from givens
        return
    folders = (Path(str(named.value)) / "adapter", Path(str(named.value)))
    adapter = next((str(folder) for folder in folders if (folder / "adapter_config.json").is_file()), None)
    for given in givens:
        own = NAMES.get(RENAMED.get(given.name, given.name))
        if given is named:
            yield replace(given, name="adapters" if adapter else "model", value=adapter or given.value)
        elif own != "ignore_data_skip" and own != ("adapters" if adapter else "model"):
            yield given


def _section_options(given: GivenOptionValue) -> Iterator[GivenOptionValue]:
    """The entries of an option whose value is a section of options; any other option as it is."""
    if given.name in JSON_TEXTS and isinstance(given.value, dict):
        yield replace(given, value=json.dumps(given.value))
    elif given.name == "deepspeed" and isinstance(given.value, dict):
        yield from _deepspeed_section(given, given.value)
    elif given.name == "lr_scheduler_kwargs" and (kwargs := _json_object(given.value)) is not None:
        yield from (_schedule_option(given, *entry) for entry in kwargs.items() if entry not in SCHEDULER_DEFAULTS)
        if kwargs.get("min_lr_ratio") is not None:  # of warmup_stable_decay: its warmup begins there
            yield replace(_schedule_option(given, "warmup_lr_rate", kwargs["min_lr_ratio"]), label=given.label)
    elif given.name == "chat_template_kwargs" and (_json_object(given.value) or {}).keys() == {"enable_thinking"}:
        yield replace(given, name="enable_thinking", value=(_json_object(given.value) or {})["enable_thinking"])
    elif given.name == "dataloader" and isinstance(given.value, dict):
        yield from (_dataloader_option(given, name, value) for name, value in given.value.items())
    else:
        yield given


def _deepspeed_section(given: GivenOptionValue, section: dict[str, Any]) -> Iterator[GivenOptionValue]:
    """`{config_path: FILE, stage: N}`, either of the two, or DeepSpeed's own keys. A file of another stage conflicts
    with the engine of `stage`."""
    path = section.get("config_path")
    stage = section.get("stage")
    if not section.keys() <= {"config_path", "stage"} or path is None and stage is None:
        yield replace(given, value=deepspeed_json_text(section))
    elif path is None:
        engine = f"zero{stage}"
        yield replace(given, name="deepspeed" if engine in ZERO else "engine", value=engine)
    else:
        yield replace(given, value=path)
        if stage is not None and str(stage) != str(_stage_of_file(str(path))):
            yield replace(given, name="engine", value=f"zero{stage}", label=f"{given.spelling} stage: {stage}")


def _stage_of_file(path: str) -> Any:
    """None for a file that cannot be read, which is reported elsewhere."""
    try:
        zero = read_deepspeed_json(path).get("zero_optimization")
    except ConfigError:
        return None
    return zero.get("stage", 0) if isinstance(zero, dict) else 0


def _dataloader_option(section: GivenOptionValue, name: str, value: Any) -> GivenOptionValue:
    """An entry of a section `dataloader`, in the terms of torch's DataLoader."""
    own = {"batch_size": "per_device_train_batch_size", "shuffle": "shuffle"}.get(name, f"dataloader_{name}")
    spelling = f"{section.spelling} {name}:"
    known = own in NAMES or neutral_option(own) is not None
    return GivenOptionValue(own if known else DATALOADER_KEY, value, f"{spelling} {value}", spelling)


def _schedule_option(given: GivenOptionValue, name: str, value: Any) -> GivenOptionValue:
    """An argument of a scheduler of transformers."""
    own = SCHEDULER_ARGUMENTS.get(name, SCHEDULER_KEY)
    value = {"min": False, "max": True}.get(value, value) if name == "mode" else value
    label = f"{given.spelling} {json.dumps({name: value})}"
    return GivenOptionValue(own, value, label, given.spelling)


def _json_object(value: Any) -> dict[str, Any] | None:
    """The object of an option that takes JSON; None for anything else."""
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(str(value))
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _text(given: GivenOptionValue) -> str:
    """In lower case; an empty entry of a file is none, and a list of one value is that value."""
    value = given.value[0] if isinstance(given.value, list | tuple) and len(given.value) == 1 else given.value
    return str(value).strip().lower()


def _unused_names(values: dict[str, str]) -> set[str]:
    """Names that another option of the source makes superfluous."""
    unused: set[str] = set()
    if {"use_vllm", "vllm_mode"} <= values.keys():
        unused.add("use_vllm" if values["use_vllm"] in TRUE else "vllm_mode")
    if any(name in values for name in _HOST):
        unused.update(_PORT)
    for strategy, interval in INTERVALS.items():
        if any(text in FALSE for name, text in values.items() if NAMES.get(name) == strategy):
            unused.update(name for name in values if NAMES.get(name) == interval)
    named = {NAMES.get(name): text for name, text in values.items()}
    if "deepspeed" in named:  # the stage is the file's or the preset's
        unused |= {name for name, text in values.items() if NAMES.get(name) == "engine" and text == "deepspeed"}
    if _precision(values.get("lora_dtype")) == _precision(named.get("torch_dtype")):
        unused.add("lora_dtype")
    return unused


def _unused_precisions(values: dict[str, str]) -> set[str]:
    """Precisions that are switched off; `bf16 false` without another precision is float32."""
    off = {name for name in PRECISIONS if values.get(name) in FALSE}
    chosen = any(NAMES.get(n) == "torch_dtype" or (n in PRECISIONS and n not in off) for n in values)
    return off if chosen else off - {"bf16"}


def _names_datasets(values: Iterable[str]) -> bool:
    """Whether data sets are named beside `dataset_dir`."""
    return any(NAMES.get(RENAMED.get(name, name)) == "dataset" for name in values if name != "dataset_dir")


def _precision(text: str | None) -> str | None:
    """A dtype under its long name."""
    return PRECISIONS.get(text or "", text)


def _server_urls(host: GivenOptionValue, givens: Sequence[GivenOptionValue]) -> list[str]:
    """One URL a host; ports in the same order."""
    hosts = _words(host)
    ports = next((_words(given) for given in givens if given.name in _PORT), [])
    return [f"http://{h}:{ports[min(i, len(ports) - 1)] if ports else _DEFAULT_PORT}" for i, h in enumerate(hosts)]


def _words(given: GivenOptionValue) -> list[str]:
    value = given.value if isinstance(given.value, list | tuple) else str(given.value).replace(",", " ").split()
    return [str(v) for v in value]
