"""`SwiftConfig`: the validated, frozen configuration of one run; loading and writing it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megaswift import compat
from megaswift.bridge.adapters.options.checks import train_type_defaults
from megaswift.config.resolve import Resolver
from megaswift.config.rules import ignored_option_names
from megaswift.config.sections import OPTIONS, SECTIONS, TRAINING, Sections
from megaswift.data.options.hub_ids import hub_source_from_environment
from megaswift.errors import Problem, storage_error
from megaswift.launchers.options.variables import is_launched_worker
from megaswift.options.command_line import read_command_line
from megaswift.options.files import read_config_file
from megaswift.options.plugins import plugins_of_sources
from megaswift.options.sources import ConfigSource, launch_source_from_environment, source_from_mapping
from megaswift.trainers.options.schedule import from_scratch_defaults


@dataclass(frozen=True, init=False)
class SwiftConfig(Sections):
    """Hold the options of one run, checked and frozen: `SwiftConfig(task="sft", parallel={"tp": 4}, dtype="bf16")`.

    Args:
        task: The task, such as `sft`; without it the one that the options name, else sft.
        options: Options by any of their spellings, or whole sections as dictionaries.

    Raises:
        ConfigError: With every mistake, each with a valid value.
    """

    def __init__(self, task: str | None = None, **options: Any) -> None:
        self._fill(Resolver(compat).resolve(task, plugins_of_sources([source_from_mapping(options, TRAINING)])))

    def _fill(self, sections: Sections) -> None:
        for f in fields(sections):
            object.__setattr__(self, f.name, getattr(sections, f.name))

    @classmethod
    def from_sources(
        cls,
        task: str | None,
        sources: Sequence[ConfigSource],
        complete: bool = False,
        beyond: _ConfigCheck | None = None,
    ) -> SwiftConfig:
        """Build a configuration from values that were read from files, a command line or the environment.

        Args:
            task: The task; None where the sources name it.
            sources: Values by place; later places override earlier ones.
            complete: A model and a data set must be given.
            beyond: Finds further problems in options that contradict each other, so that one error lists everything.

        Raises:
            ConfigError: With every mistake of every source.
        """
        config = cls.__new__(cls)

        def seen(refused: Sections) -> Iterable[Problem]:
            config._fill(refused)
            return beyond(config) if beyond else ()

        config._fill(Resolver(compat, complete, seen).resolve(task, plugins_of_sources(sources)))
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SwiftConfig:
        """Build a configuration from the dictionary that `to_dict` returned, or from flat names.

        Args:
            values: Options by section or by name, and the `task`.

        Raises:
            ConfigError: With every mistake, each with a valid value.
        """
        return cls(**values)

    def with_adapter_folder(self, folder: str) -> SwiftConfig:
        """Return the same configuration with `--adapters`, which also later calls of `replace` keep.

        The options that made the folder stay, although they are refused together with `--adapters`.

        Args:
            folder: The PEFT folder from which training starts.
        """
        started = copy.copy(self)
        object.__setattr__(started, "lora", replace(self.lora, adapters=folder))
        object.__setattr__(started, "_made_from", self)
        return started

    def replace(self, **options: Any) -> SwiftConfig:
        """Return a copy with other values of some options; derived values and defaults are worked out again.

        Args:
            options: New values by name or section; None unsets an option.

        Raises:
            ConfigError: With every mistake that the new values cause.
        """
        made_from: SwiftConfig | None = vars(self).get("_made_from")
        if made_from is not None:
            return made_from.replace(**options).with_adapter_folder(str(self.lora.adapters))
        unset = {n: None for n in self.typed if self.value(n) is None}  # what the user has left to nothing stays so
        given = unset | {n: self.value(n) for n in sorted(self.given)}
        from_scratch = from_scratch_defaults(self.task, given)
        derived = {**train_type_defaults(self.model.train_type), **from_scratch}
        again = {*given, "gradient_accumulation_steps", "add_version"}  # worked out again from what is given
        ambient = {
            n: self.value(n)
            for n, o in OPTIONS.items()
            if n not in again and self.value(n) not in (o.default, derived.get(n, o.default))
        }
        sources = [
            replace(source_from_mapping(ambient, TRAINING), ambient=True),
            source_from_mapping(given, TRAINING),
            source_from_mapping(options, TRAINING),
        ]
        return type(self).from_sources(self.task, sources)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values by section, enough to repeat the run.

        Returns:
            The task, and a dictionary for each section, without secrets and options that have no effect.
        """
        idle = ignored_option_names(self) | {name for name, o in OPTIONS.items() if o.details.get("secret")}
        if self.schedule.warmup_fits_run:  # read again, it would be the user's
            idle |= {"warmup_steps", "warmup_ratio"}
        sections: dict[str, Any] = {"task": self.task}
        for key in SECTIONS:
            sections[key] = {n: _plain(self.value(n)) for n, o in OPTIONS.items() if o.section == key and n not in idle}
        return sections

    def to_yaml(self) -> str:
        """Return the text of a configuration file, which `megaswift sft FILE` reads.

        Returns:
            YAML with the content of `to_dict`.
        """
        return config_yaml_text(self.to_dict())


def config_yaml_text(values: Mapping[str, Any]) -> str:
    """Such a dictionary as the text of a configuration file."""
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)  # without the object of a `NamedObject`
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return dict(value) if isinstance(value, dict) else value


_ConfigCheck = Callable[[SwiftConfig], Iterable[Problem]]


def load_config(
    task: str | None,
    argv: Sequence[str],
    complete: bool = False,
    environ: Mapping[str, str] | None = None,
    beyond: _ConfigCheck | None = None,
) -> SwiftConfig:
    """Read a command line into a configuration, with the files that it names and launch options of the environment.

    Flags override the environment, which overrides files. Settings of `accelerate launch` and USE_HF come last.

    Args:
        task: The task; None where a file names it.
        argv: The words behind the command.
        complete: A model and a data set must be given.
        environ: The environment; None for the one of this process.
        beyond: Finds further problems in options that contradict each other, so that one error lists everything.

    Raises:
        ConfigError: With every mistake of every source.
        UserError: A file cannot be read.
    """
    environ = os.environ if environ is None else environ
    line = read_command_line(list(argv), TRAINING)
    try:
        ambient = [compat.environment(environ), hub_source_from_environment(environ)]
        sources = [*ambient, *(read_config_file(f, TRAINING) for f in line.files)]
        if not is_launched_worker(environ):
            sources.append(launch_source_from_environment(environ))
        sources.append(ConfigSource(tuple(line.givens), tuple(line.problems)))
        return SwiftConfig.from_sources(task, sources, complete, beyond)
    except OSError as error:  # a value that is no path: the rules ask whether some of them exist
        raise storage_error(error) or error from None
