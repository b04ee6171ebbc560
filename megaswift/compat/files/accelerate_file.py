"""A file of `accelerate config`, given to megaswift itself (`--accelerate_config FILE`, or as the configuration file):
its keys as options of the run. Names and meanings: accelerate 1.15.

Owns the keys of the file. What its settings mean is `accelerate_launch.py`, as under `accelerate launch`; the section
`fsdp_config` is `engine/options/fsdp_file.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.compat.files.accelerate_launch import options_from_accelerate_environment, settings_without_effect
from megaswift.compat.files.accelerate_parallel import (
    MEGATRON,
    PARALLELISM,
    splits_model,
    unknown_keys,
    variables_of_section,
)
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.options.option_json import read_option_object
from megaswift.options.sources import ConfigSource, GivenOptionValue

NAME = "accelerate_config"
_ZERO = "ACCELERATE_DEEPSPEED_"
DEEPSPEED = {
    "zero_stage": f"{_ZERO}ZERO_STAGE",
    "offload_optimizer_device": f"{_ZERO}OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": f"{_ZERO}OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": f"{_ZERO}OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": f"{_ZERO}OFFLOAD_PARAM_NVME_PATH",
    "deepspeed_config_file": f"{_ZERO}CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": f"{_ZERO}MOE_LAYER_CLS_NAMES",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
}
"""Key of the section `deepspeed_config`: the variable that `accelerate launch` sets."""
SEVERAL_MACHINES = (
    "every machine gets a command of its own, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, or --nnodes, "
    "--node_rank, --master_addr and --master_port"
)
HOSTFILE = "deepspeed_hostfile"
DEEPSPEED_SETTLED = {
    "zero3_init_flag": "models are always loaded shard by shard",
    "zero3_save_16bit_model": "exports contain whole tensors",
    "deepspeed_multinode_launcher": SEVERAL_MACHINES,
    "deepspeed_inclusion_filter": "CUDA_VISIBLE_DEVICES selects devices",
    "deepspeed_exclusion_filter": "CUDA_VISIBLE_DEVICES selects devices",
}
"""Its other keys, and why they change nothing. True, false, none and an empty value say nothing."""
LAUNCH = {"machine_rank": "node_rank", "main_process_ip": "master_addr", "main_process_port": "master_port"}
"""Key of a file for several machines: the option."""
SETTLED = {
    "compute_environment": "",
    "same_network": "",
    "main_training_function": "",
    "tpu_env": "",
    "rdzv_backend": "",
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL checks collectives",
    "enable_cpu_affinity": "processes are not bound to cores",
    "fp8_config": "--fp8_format sets the format",
    "fsdp_config": "distributed_type is not FSDP",
    "deepspeed_config": "distributed_type is not DEEPSPEED",
    "megatron_lm_config": "distributed_type is not MEGATRON_LM",
}
"""Keys without effect; those with a reason get a notice where they ask for something."""
READ = (
    *("distributed_type", "mixed_precision", "fp16", "num_processes", "num_machines", "use_cpu", "gpu_ids"),
    *("dynamo_config", "dynamo_backend", "downcast_bf16", "parallelism_config", *LAUNCH),
)
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_NOTHING = (None, "", "no", "none", "false", "true", "null")


def named_accelerate_file(source: ConfigSource) -> ConfigSource:
    """Return a source that names the file of a source which is one of accelerate's, else the source itself.

    Two names belong to accelerate alone; one of them in a file with a model or data is a mistake in it.
    """
    names = {given.name for given in source.givens}
    found = names & {"compute_environment", "distributed_type"}
    of_run = {NAMES.get(name) for name in names} & {"model", "dataset"}
    if not source.file or not found or (len(found) == 1 and of_run):
        return source
    return ConfigSource((GivenOptionValue(NAME, source.file, source.file, source.file),))


def expand_accelerate_files(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """The sources; what a file says has less weight than the rest of the source that names it."""
    expanded: list[ConfigSource] = []
    for source in sources:
        named = [given for given in source.givens if given.name == NAME]
        expanded += [source_from_accelerate_file(given) for given in named]
        expanded.append(replace(source, givens=tuple(g for g in source.givens if g not in named)) if named else source)
    return expanded


def source_from_accelerate_file(given: GivenOptionValue) -> ConfigSource:
    """The options of one file, what of it changes nothing, and what cannot be followed."""
    try:
        content = read_option_object(str(given.value), given.label, "give a file made by `accelerate config`")
    except ConfigError as error:
        return ConfigSource(problems=tuple(error.problems))
    label = Path(str(given.value)).name
    kind = (_text(content.get("distributed_type", "NO")) or "NO").upper()
    flat = [name for name in SECTIONS if content.get(name) is not None and not isinstance(content[name], dict)]
    if flat:
        fix = "give a file that accelerate config has made"
        rule = "must be a section of settings"
        return ConfigSource((), tuple(Problem(f"{label}: {name}: {content[name]}", rule, fix) for name in flat), ())
    sections = {name: dict(content.get(f"{name}_config") or {}) for name in ("deepspeed", "fsdp")}
    environ = _environ(content, kind, sections["deepspeed"])
    settings = options_from_accelerate_environment(environ)
    problems = [
        *_refused(content, kind, label),
        *_unknown(content, kind, sections["deepspeed"], label),
        *settings.problems,
    ]
    givens = [replace(g, label=f"{label}: {g.label}", spelling=f"{label}: {g.label}") for g in settings.givens]
    givens += [GivenOptionValue(n, v, f"{label}: {k}: {v}", f"{label}: {k}:") for k, n, v in _launch(content)]
    if kind == "DEEPSPEED" and _text(sections["deepspeed"].get(HOSTFILE)).lower() not in map(str, _NOTHING):
        file = str(sections["deepspeed"][HOSTFILE])
        givens.append(GivenOptionValue(HOSTFILE, file, f"{label}: {HOSTFILE}: {file}", f"{label}: {HOSTFILE}:"))
    if kind == "FSDP" and not splits_model(environ):
        givens = [g for g in givens if g.name != "fsdp"]  # of parallelism_config
        fsdp = sections["fsdp"] or {"fsdp_version": 2}
        givens.append(
            GivenOptionValue("fsdp_config", json.dumps(fsdp), f"{label}: fsdp_config", f"{label}: fsdp_config")
        )
    notices = [*_notices(content, kind, sections["deepspeed"], label)]
    notices += [f"{label}: {text}" for text in settings_without_effect(environ)]
    return ConfigSource(tuple(givens), tuple(problems), tuple(notices))


SECTIONS = ("deepspeed_config", "fsdp_config", "dynamo_config", "megatron_lm_config", "parallelism_config")


def _environ(content: Mapping[str, Any], kind: str, deepspeed: Mapping[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` would set, but for FSDP's."""
    precision = content.get("mixed_precision") or ("fp16" if content.get("fp16") is True else "no")
    dynamo = content.get("dynamo_config") or {}
    backend = content.get("dynamo_backend") or dynamo.get("dynamo_backend", "no")
    environ = {"ACCELERATE_MIXED_PRECISION": _text(precision), "ACCELERATE_DYNAMO_BACKEND": _text(backend)}
    for name, (variable, on) in PARALLEL_SECTIONS.items():
        if on(content, kind):
            environ |= {variable: "true", **variables_of_section(name, content.get(name) or {})}
    if kind == "DEEPSPEED":
        environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        said = {DEEPSPEED[k]: _text(v) for k, v in deepspeed.items() if k in DEEPSPEED and v is not None}
        environ |= {name: value for name, value in said.items() if value}
    return environ


PARALLEL_SECTIONS: Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], bool]]] = {
    "megatron_lm_config": (MEGATRON, lambda content, kind: kind == "MEGATRON_LM"),
    "parallelism_config": (PARALLELISM, lambda content, kind: bool(content.get("parallelism_config"))),
}
"""Section: the variable that says that it is used, and when it is."""


def _text(value: Any) -> str:
    """A value as a variable; YAML reads `no` as false."""
    if value is False:
        return "no"
    return "" if value is None else str(value)


def _launch(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(key, option, value) of processes and machines."""
    processes = content.get("num_processes")
    machines = content.get("num_machines") or 1
    if not (isinstance(processes, int) and isinstance(machines, int)):
        processes = machines = 1
    if processes > machines and processes % machines == 0:
        yield "num_processes", "nproc_per_node", processes // machines
    if machines > 1:
        yield "num_machines", "nnodes", machines
    for key, option in LAUNCH.items():
        if content.get(key) is not None and (machines != 1 or key == "main_process_port"):
            yield key, option, content[key]


def _refused(content: Mapping[str, Any], kind: str, label: str) -> Iterator[Problem]:
    if kind not in TYPES:
        fix = f"distributed_type: {' | '.join(TYPES)}"
        yield Problem(f"{label}: distributed_type: {content['distributed_type']}", "is not supported", fix)
    if str(content.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        rule = "is not supported: runs start on the machine where the command is given"
        yield Problem(f"{label}: compute_environment: {content['compute_environment']}", rule, "LOCAL_MACHINE")
    if content.get("use_cpu") is True:
        rule = "is not an option: a run uses CUDA devices where there are any"
        yield Problem(f"{label}: use_cpu: true", rule, 'set CUDA_VISIBLE_DEVICES="" and use_cpu: false')
    devices = str(content.get("gpu_ids") or "all").replace(" ", "")
    if devices != "all":
        yield Problem(
            f"{label}: gpu_ids: {devices}", "is not an option", f"set CUDA_VISIBLE_DEVICES={devices}, gpu_ids: all"
        )
    processes = content.get("num_processes")
    machines = content.get("num_machines") or 1
    if isinstance(processes, int) and isinstance(machines, int) and processes > 0 and processes % machines:
        rule = f"is not a multiple of num_machines {machines}"
        yield Problem(
            f"{label}: num_processes: {processes}", rule, f"num_processes: {max(1, processes // machines) * machines}"
        )


def _unknown(content: Mapping[str, Any], kind: str, deepspeed: Mapping[str, Any], label: str) -> Iterator[Problem]:
    known = (*READ, *SETTLED)
    for name, value in content.items():
        if name not in known and str(value).lower() not in map(str, _NOTHING) and not name.startswith("tpu_"):
            fix = did_you_mean_hint(name, known) or "leave it out"
            yield Problem(f"{label}: {name}: {value}", "would be ignored: megaswift does not read it", fix)
        elif name.startswith("tpu_") and value is True:
            yield Problem(f"{label}: {name}: true", "TPUs are not supported", f"{name}: false")
    for section, (_, on) in PARALLEL_SECTIONS.items():
        for name in unknown_keys(section, content.get(section) or {}) if on(content, kind) else ():
            yield Problem(f"{label}: {section}: {name}", "would be ignored: megaswift does not read it", "leave it out")
    for name in deepspeed:
        if name not in (*DEEPSPEED, *DEEPSPEED_SETTLED, HOSTFILE):
            fix = did_you_mean_hint(name, [*DEEPSPEED, *DEEPSPEED_SETTLED, HOSTFILE]) or "leave it out"
            yield Problem(f"{label}: deepspeed_config: {name}", "would be ignored: megaswift does not read it", fix)


def _notices(content: Mapping[str, Any], kind: str, deepspeed: Mapping[str, Any], label: str) -> Iterator[str]:
    own = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    for name, why in SETTLED.items():
        value = content.get(name)
        if why and value and own.get(name) != kind:
            yield f"{label}: {name} has no effect: {why}"
    if kind == "DEEPSPEED":
        for name, why in DEEPSPEED_SETTLED.items():
            if str(deepspeed.get(name, "")).lower() not in map(str, _NOTHING) and deepspeed.get(name) is not None:
                yield f"{label}: deepspeed_config: {name} has no effect: {why}"
