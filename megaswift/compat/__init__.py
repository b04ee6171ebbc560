"""Layer 1: other toolkits, in front of the loader: their names and values, their files, their scripts. No torch.

This module is the only door. The loader asks it to translate sources, and again when it meets a name or a value that
it does not have. The tables are imported only where something is not megaswift's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megaswift.config.sections import NAMES, OPTIONS, Sections
from megaswift.engine.options.engine import ZERO
from megaswift.errors import Problem
from megaswift.options.sources import ConfigSource, GivenOptionValue
from megaswift.options.tasks import TASK_NAMES
from megaswift.options.values import FALSE, TRUE, InvalidValue, parse_option_value

_VARIABLES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
"""How the variables of `accelerate launch` begin."""
_FILES = ("fsdp_config", "hostfile")
"""Own options whose files another toolkit's reader understands."""
_BY_NAME = ("cached_dataset", "cached_val_dataset", "rollout_importance_sampling_mode")
"""Own spellings that mean more than the option."""
_NARROW = ("train_type", "fsdp", "warmup_steps")
"""Own options for which other toolkits have further values."""
_THEIRS = {
    "engine": ("deepspeed",),
    "eval_strategy": FALSE,
    "loss_type": ("nll", "chunked_nll", "dft"),
    "save_strategy": FALSE,
    "resume_from_checkpoint": (*TRUE, *FALSE),
}
"""Own option: values that other toolkits give it with a meaning of their own."""


def translate(sources: Sequence[ConfigSource], known: Mapping[str, str] = NAMES) -> list[ConfigSource]:
    """Return the sources of a training command in megaswift's names and values; what no table has stays as it is."""
    if all(_is_own(given) for source in sources for given in source.givens) and not _repeats(sources):
        return list(sources)
    from megaswift.compat.translation import translated_sources

    return translated_sources(sources)


def explain(given: GivenOptionValue, known: Mapping[str, str], task: str | None) -> list[Problem]:
    """Return what is wrong with a name that is not an option of training; empty where no table has it."""
    from megaswift.compat.explanation import unknown_option_problems

    return unknown_option_problems(given, known, task)


def instead(option: str, value: Any) -> str:
    """Return what to do in place of another toolkit's value of `option`; empty where no table has it."""
    from megaswift.compat.names.answers import foreign_value_advice

    return foreign_value_advice(option, str(value))


def notices(sections: Sections, spellings: Iterable[str]) -> Iterator[str]:
    """Yield a line about defaults that differ from those of the toolkit that the spellings are from."""
    used = list(spellings)
    if all(name in OPTIONS for name in used):
        return
    from megaswift.compat.defaults import differing_defaults_notice

    yield from differing_defaults_notice(sections, used)


def environment(environ: Mapping[str, str]) -> ConfigSource:
    """Return the options that variables of `accelerate launch` amount to."""
    if not _has_variables(environ):
        return ConfigSource()
    from megaswift.compat.files.accelerate_launch import options_from_accelerate_environment

    return options_from_accelerate_environment(environ)


def unread_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each kind of variables of ms-swift that are set."""
    from megaswift.compat.variables import unread_variables_notices

    return unread_variables_notices(environ)


def environment_notices(environ: Mapping[str, str], sections: Sections, alone: bool) -> Iterator[str]:
    """Yield a line for each variable of ms-swift or `accelerate launch` that changes nothing in this run.

    Args:
        alone: The run starts no processes of its own.
    """
    yield from unread_variables(environ)
    if not _has_variables(environ):
        return
    from megaswift.compat.files.accelerate_launch import accelerate_notices

    yield from accelerate_notices(environ, sections, alone)


def python_api_problems(environ: Mapping[str, str]) -> list[Problem]:
    """Return what `accelerate launch` asks of a run whose configuration is made by the user's own code."""
    if not _has_variables(environ):
        return []
    from megaswift.compat.files.accelerate_launch import python_api_accelerate_engine_problems

    return python_api_accelerate_engine_problems(environ)


def _has_variables(environ: Mapping[str, str]) -> bool:
    return any(name.startswith(_VARIABLES) for name in environ)


def _is_own(given: GivenOptionValue) -> bool:
    """Whether name and value mean what they say: there is nothing to translate."""
    if given.name in TASK_NAMES:
        return True
    option = OPTIONS.get(NAMES.get(given.name, ""))
    if option is None or option.name in _FILES or given.name in _BY_NAME or isinstance(given.value, Mapping):
        return False
    value = given.value
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    text = str(value).strip().lower()
    if given.value is None:
        return True
    if option.name == "deepspeed":
        return text in ZERO
    if option.name in _NARROW:
        return _parses(given)
    return text not in _THEIRS.get(option.name, ())


def _parses(given: GivenOptionValue) -> bool:
    try:
        parse_option_value(OPTIONS[NAMES[given.name]], given.value)
    except InvalidValue:
        return False
    return True


def _repeats(sources: Sequence[ConfigSource]) -> bool:
    """Whether a source sets an option by two names."""
    for source in sources:
        names = [NAMES.get(given.name, given.name) for given in source.givens]
        if len(set(names)) < len(names):
            return True
    return False
