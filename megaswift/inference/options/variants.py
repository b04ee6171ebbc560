"""Options of `infer`, `deploy` and `export` that exist only with certain values of others: the facts that their
`only_with` names, and the problems of options that would be ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaswift.config.derived_rules import Fact, Selectors
from megaswift.errors import Problem
from megaswift.inference.options.commands import CALIBRATED, FP8
from megaswift.inference.options.parser import ParsedCommand
from megaswift.inference.options.placement import AUTOMATIC, DISK, parse_device_map
from megaswift.options.option import ANY, build_option_table
from megaswift.options.values import option_value_text


def _value(parsed: ParsedCommand, name: str) -> Any:
    """Return the value of an option that the command has."""
    return next(getattr(section, name) for section in parsed.sections.values() if hasattr(section, name))


def _backend_with(section: str, parsed: ParsedCommand) -> Any:
    """Return the backend of the command that has this section; other commands have the option in any case."""
    return _value(parsed, "infer_backend") if section in parsed.sections else ANY


def _bits(parsed: ParsedCommand) -> int | None:
    """Return the bits of bitsandbytes."""
    return None if _value(parsed, "quant_method") in (FP8, *CALIBRATED) else _value(parsed, "quantization_bit")


def _prompt_files(parsed: ParsedCommand) -> Any:
    dataset = _value(parsed, "dataset")
    return dataset if dataset or not _value(parsed, "load_data_args") else ANY


def _places_by_itself(parsed: ParsedCommand) -> bool:
    """Whether the device map leaves the placement of modules to accelerate; a wrong map has a problem of its own."""
    device_map = _value(parsed, "device_map")
    return device_map in AUTOMATIC or isinstance(parse_device_map(device_map), Problem)


def _uses_disk(parsed: ParsedCommand) -> bool:
    placed = parse_device_map(_value(parsed, "device_map"))
    return _places_by_itself(parsed) or (isinstance(placed, dict) and DISK in placed.values())


def _writes_folder(parsed: ParsedCommand) -> bool:
    export = parsed.sections["export"]
    writes = export.merge_lora or export.to_hf or export.to_mcore or export.quantizes
    return writes or not _value(parsed, "push_to_hub")


def _reward_functions(parsed: ParsedCommand) -> tuple[str, ...]:
    """Return which built-in functions with options are used, also under TRL's names."""
    built_in = [name for name in _value(parsed, "reward_funcs") if ":" not in name]
    with_options = ("cosine", "repetition", "soft_overlong", "code")
    return tuple(short for short in with_options if any(short in name for name in built_in))


FACTS: dict[str, Fact] = {
    "reward_funcs": Fact(_reward_functions, ("reward_funcs",)),
    "scored": Fact(
        lambda parsed: bool(_value(parsed, "reward_funcs") or _value(parsed, "reward_model")),
        ("reward_funcs", "reward_model"),
        "completions have no rewards",
        "--reward_funcs accuracy, or --reward_model DIR",
    ),
    "server_backend": Fact(
        lambda parsed: _backend_with("server", parsed),
        ("infer_backend",),
        "vLLM's server does not have it",
        "--infer_backend transformers",
    ),
    "file_backend": Fact(
        lambda parsed: _backend_with("file", parsed),
        ("infer_backend",),
        "applies only to --infer_backend transformers (infer_backend is vllm)",
        "--infer_backend transformers",
    ),
    "quantization_bit": Fact(_bits, ("quantization_bit", "quant_method")),
    "dataset": Fact(
        _prompt_files, ("dataset", "load_data_args"), "applies only to a prompt file", "--dataset FILE.jsonl"
    ),
    "logprobs": Fact(
        lambda parsed: _value(parsed, "logprobs") if _value(parsed, "dataset") else ANY,
        ("logprobs", "dataset"),
        "needs --logprobs",
        "--logprobs true",
    ),
    "automatic_placement": Fact(
        _places_by_itself, ("device_map",), "--device_map already places all modules", "--device_map auto"
    ),
    "disk": Fact(_uses_disk, ("device_map",), "--device_map puts no module on disk", "--device_map auto"),
    "conversion": Fact(
        lambda parsed: _value(parsed, "to_hf") or _value(parsed, "to_mcore"),
        ("to_hf", "to_mcore"),
        "applies only to a conversion",
        "--to_mcore true or --to_hf true",
    ),
    "written_folder": Fact(
        _writes_folder,
        ("push_to_hub", "merge_lora", "to_hf", "to_mcore", "quantization_bit", "quant_method"),
        "applies to a folder that is written, and nothing is",
        "--merge_lora true",
    ),
}
"""Facts by name. A selector that is not listed here is an option and has the option's value."""


def selectors_of(sections: dict[str, type]) -> Selectors:
    """Return the options of a command by these sections, with their selectors."""
    return Selectors(build_option_table(sections).options, FACTS, _value)


def ignored_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """Yield a problem for each given option that would be ignored. Other than in training, a value that equals the
    default is a mistake too, unless the declaration lists it as `neutral`."""
    selectors = selectors_of({name: type(section) for name, section in parsed.sections.items()})
    for rule in selectors.rules():
        neutral = selectors.options[rule.option].details.get("neutral", ())
        if parsed.given(rule.option) and _value(parsed, rule.option) not in neutral and rule.when(parsed):
            values = {name: option_value_text(_value(parsed, name)) for name in selectors.options}
            why = rule.why.format_map(values)
            yield Problem(parsed.label(rule.option), f"would be ignored: {why}", f"{rule.fix}, or leave it out")
