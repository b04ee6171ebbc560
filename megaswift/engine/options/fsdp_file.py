"""Translates a user's `--fsdp_config` file (keys of transformers and accelerate) into options of the run. Pure, no
torch.

Owns which keys say how fsdp2 shards, which describe what is always so here, and which would be ignored: those are
mistakes, as are keys that contradict an option of the run. FSDP1's spellings mean their like in FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.config.sections import Sections
from megaswift.engine.options.engine import FSDP_STRATEGIES, FSDP_STRATEGY_OF_SPELLING, NO_SHARD, PREFETCH_SPELLINGS
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.options.option_json import read_option_object
from megaswift.options.values import option_value_text

ALWAYS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "cpu_ram_efficient_loading": ((True,), "models are always loaded shard by shard"),
    "sync_module_states": ((True, False), ""),
    "use_orig_params": ((True,), "FSDP2 always keeps the original parameters"),
    "limit_all_gathers": ((True,), "FSDP2 always limits all-gathers, without stopping the CPU"),
    "state_dict_type": (
        ("FULL_STATE_DICT",),
        "checkpoints contain full tensors, from which any engine and number of processes can resume",
    ),
    "version": ((1, 2), "FSDP2 is always used"),
}
"""Key -> the values that say what is so anyway, and what is so. Another value changes memory or speed at most, and gets
a notice."""
XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
INSTEAD = {
    "mixed_precision_policy": "--torch_dtype",
    "mixed_precision": "--torch_dtype",
    "xla_fsdp_settings": "leave it out",
    "ignored_modules": "--freeze_parameters, or leave it out",
    "ignored_params": "--freeze_parameters, or leave it out",
}
"""What does the work of a key that is not served."""
SHARDS = ("reshard_after_forward", "sharding_strategy")
OFFLOADS = ("offload_params", "cpu_offload")
LAYERS = ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap")
RECOMPUTES = "activation_checkpointing"
RECOMPUTE_OPTION = "recompute_granularity"
WRAP_POLICY = "auto_wrap_policy"
SMALLEST = "min_num_params"
ACCELERATE_SIZE = 100_000_000
"""accelerate's default, which it also writes where units are chosen by class."""
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
BACKWARD = "backward_prefetch"
FORWARD = "forward_prefetch"
TAKEN = (*SHARDS, *OFFLOADS, *LAYERS, RECOMPUTES, WRAP_POLICY, SMALLEST, BACKWARD, FORWARD)


@dataclass(frozen=True)
class FsdpFileOptions:
    """Options that a file stands for, by name, and what is wrong with the file."""

    options: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()


def read_fsdp_settings(named: str) -> dict[str, Any]:
    """The object of a JSON or YAML file, or of JSON itself; ConfigError where there is none. ms-swift's files have a
    section `fsdp_config` beside the words of `--fsdp`."""
    fix = 'give a file like {"reshard_after_forward": true}'
    given = read_option_object(named, f"--fsdp_config {named}", fix)
    section = given.get("fsdp_config")
    if not isinstance(section, dict):
        return given
    words = given.get("fsdp") or []
    return {"words": words.split() if isinstance(words, str) else words, **section}


def options_from_fsdp(given: Mapping[str, Any], label: str) -> FsdpFileOptions:
    """What a file says; `label` is how the user named it. Keys may begin with accelerate's `fsdp_`."""
    plain = {n.removeprefix("fsdp_"): _plain(value) for n, value in given.items() if not n.startswith("_")}
    named = [str(word) for word in plain.pop("words", [])]
    problems = [*_unserved(plain, label), *_types(plain, label)]
    if problems:
        return FsdpFileOptions({}, tuple(problems))
    said = [word for word in named if word in FSDP_STRATEGIES]
    ways = list(dict.fromkeys(said + [plain[name] for name in SHARDS if name in plain]))
    if len(ways) > 1:
        problems.append(
            Problem(f"{label}: {' and '.join(SHARDS)}", f"conflict: {' and '.join(ways)}", "keep one of the two")
        )
    offloads = "offload" in named or any(plain.get(name) for name in OFFLOADS)
    words = (*ways[:1], *(("offload",) if offloads else ()))
    layers = next((plain[name] for name in LAYERS if plain.get(name)), ())
    options: dict[str, Any] = {}
    if words:
        options["fsdp"] = words if ways else ("full_shard", *words)
    if layers:
        options["fsdp_transformer_layer_cls_to_wrap"] = tuple(layers)
    if (smallest := _smallest_unit(plain)) is not None:
        options["fsdp_min_num_params"] = smallest
    if plain.get(BACKWARD) == "no_prefetch":
        options["fsdp_backward_prefetch"] = plain[BACKWARD]
    if plain.get(FORWARD):
        options["fsdp_forward_prefetch"] = True
    if RECOMPUTES in plain:
        options[RECOMPUTE_OPTION] = "full" if plain[RECOMPUTES] else None
    return FsdpFileOptions(options, tuple(problems), tuple(_notices(plain, label)))


def _smallest_unit(plain: Mapping[str, Any]) -> int | None:
    """The size of units that are chosen by it: by name, or where no class and no other way is named. accelerate writes
    a size beside classes too, which decide then."""
    classes = any(plain.get(name) for name in LAYERS)
    way = plain.get(WRAP_POLICY)
    size = int(plain.get(SMALLEST) or (ACCELERATE_SIZE if way == WRAPS[1] else 0))
    return size if size and (way == WRAPS[1] or (way is None and not classes)) else None


def ddp_options_of_no_shard(named: str) -> dict[str, Any] | None:
    """What a file whose strategy is NO_SHARD amounts to; None for any other file, and for one with a mistake."""
    try:
        given = read_fsdp_settings(named)
    except ConfigError:
        return None
    settings = options_from_fsdp(given, named)
    words = settings.options.get("fsdp", ())
    if settings.problems or words[:1] != (NO_SHARD,):
        return None
    options: dict[str, Any] = {"engine": "ddp"}
    if "offload" in words:
        options["fsdp"] = ["offload"]
    if classes := settings.options.get("fsdp_transformer_layer_cls_to_wrap"):
        options["fsdp_transformer_layer_cls_to_wrap"] = list(classes)  # a notice names them
    if settings.options.get(RECOMPUTE_OPTION):
        options[RECOMPUTE_OPTION] = settings.options[RECOMPUTE_OPTION]
    return options


def _plain(value: Any) -> Any:
    """accelerate writes booleans and numbers as text, and a list as one text with commas."""
    if isinstance(value, str):
        low = value.strip().lower()
        return {"true": True, "false": False}.get(low, value.strip())
    return value


def _notices(plain: Mapping[str, Any], label: str) -> Iterator[str]:
    """Keys that ask for what FSDP2 does in another way."""
    for name, (allowed, why) in ALWAYS.items():
        value = plain.get(name, allowed[0])
        same = value.upper() if isinstance(value, str) else value
        if not any(same == v or str(same) == str(v) for v in allowed):
            yield f'{label}: "{name}": {json.dumps(value)} has no effect: {why}'
    if plain.get(SMALLEST) and _smallest_unit(plain) is None and int(plain[SMALLEST]) != ACCELERATE_SIZE:
        yield f'{label}: "{SMALLEST}": {plain[SMALLEST]} has no effect: the units are chosen by class'
    if plain.get(WRAP_POLICY) == WRAPS[2]:
        yield f'{label}: "{WRAP_POLICY}": "{WRAPS[2]}" has no effect: decoder layers are units, to save memory'


def _unserved(plain: Mapping[str, Any], label: str) -> Iterator[Problem]:
    """Keys that would be ignored."""
    for name, value in plain.items():
        if name in XLA:
            if value:
                yield Problem(f'{label}: "{name}": {json.dumps(value)}', "XLA is not supported", "leave it out")
        elif name not in (*TAKEN, *ALWAYS):
            fix = INSTEAD.get(name) or did_you_mean_hint(name, [*TAKEN, *ALWAYS]) or "leave it out"
            yield Problem(f'{label}: "{name}"', "would be ignored: fsdp2 does not support it", fix)


def _types(plain: dict[str, Any], label: str) -> Iterator[Problem]:
    """Values of the wrong kind among those that are taken; class names become a list."""
    for name in SHARDS:
        if name in plain:
            value = plain[name]
            if isinstance(value, bool):
                plain[name] = "full_shard" if value else "shard_grad_op"
            else:
                plain[name] = FSDP_STRATEGY_OF_SPELLING.get(str(value).lower(), value)
            if plain[name] not in (*FSDP_STRATEGIES, NO_SHARD):
                rule = "is not a supported sharding strategy"
                yield Problem(f'{label}: "{name}": {json.dumps(value)}', rule, "true or false")
    yield from _type_of_units_and_prefetch(plain, label)
    for name in (*OFFLOADS, RECOMPUTES, FORWARD):
        if not isinstance(plain.get(name, False), bool):
            yield Problem(f'{label}: "{name}": {json.dumps(plain[name])}', "must be true or false", "true")
    for name in LAYERS:
        value = plain.get(name, [])
        plain[name] = value = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not (isinstance(value, list) and all(isinstance(part, str) and part for part in value)):
            yield Problem(
                f'{label}: "{name}": {json.dumps(value)}', "must be a list of layer classes", '["Qwen3DecoderLayer"]'
            )


def _type_of_units_and_prefetch(plain: dict[str, Any], label: str) -> Iterator[Problem]:
    size = plain.get(SMALLEST) or 0
    if isinstance(size, bool) or not str(size).isdigit():
        yield Problem(f'{label}: "{SMALLEST}": {json.dumps(size)}', "must be a number of parameters", "100000000")
        plain[SMALLEST] = 0
    way = plain.get(WRAP_POLICY)
    way = plain[WRAP_POLICY] = None if way in (None, False, "") else str(way).upper()
    if way not in (None, *WRAPS):
        yield Problem(f'{label}: "{WRAP_POLICY}": "{way}"', f"must be one of {', '.join(WRAPS)}", WRAPS[0])
    if BACKWARD in plain:
        when = "none" if plain[BACKWARD] in (None, False) else str(plain[BACKWARD]).lower()
        plain[BACKWARD] = PREFETCH_SPELLINGS.get(when, when)
        if plain[BACKWARD] not in ("backward_pre", "no_prefetch"):
            rule = "must be backward_pre, backward_post or no_prefetch"
            yield Problem(f'{label}: "{BACKWARD}": {json.dumps(when)}', rule, '"backward_pre"')


def fsdp_file_options(c: Sections) -> FsdpFileOptions:
    """What the run's own file says, and what in it contradicts the run's options."""
    named = c.engine.fsdp_config
    if named is None:
        return FsdpFileOptions({})
    label = "--fsdp_config" if named.lstrip().startswith("{") else Path(named).name
    try:
        settings = options_from_fsdp(read_fsdp_settings(named), label)
    except ConfigError as error:
        return FsdpFileOptions({}, tuple(error.problems))
    conflicts = _contradictions(c, settings.options, label)
    return replace(settings, problems=(*settings.problems, *conflicts))


def _contradictions(c: Sections, options: Mapping[str, Any], label: str) -> Iterator[Problem]:
    for name, value in options.items():
        if name in c.given and _meaning(name, c.value(name)) != _meaning(name, value):
            from_file, own = (
                " ".join(v) if isinstance(v, tuple) else option_value_text(v) for v in (value, c.value(name))
            )
            yield Problem(f"--{name} {own}", f"conflicts with {label}, which sets {from_file}", "keep one of the two")


def _meaning(name: str, value: Any) -> set[str]:
    if not isinstance(value, tuple):
        return {value or "none"}
    words = set(value) - {"auto_wrap"}
    return words | {"full_shard"} if name == "fsdp" and not words - {"offload"} else words
