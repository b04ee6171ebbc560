"""Training commands of other toolkits: which toolkit a program belongs to, and the task that it trains.

Owns the tables of programs. What their options mean is `config`'s; `launcher_words.py` reads the
launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from megaswift.compat.defaults import (
    LLAMA_FACTORY,
    MEGATRON_LM,
    MEGATRON_SWIFT,
    SWIFT,
    TRANSFORMERS,
    TRL,
)
from megaswift.compat.files.accelerate_file import named_accelerate_file
from megaswift.compat.scripts.launcher_words import (
    LAUNCH_SPELLINGS,
    LaunchedProgram,
    launch_values,
    launched_program,
    take_launcher_options,
)
from megaswift.compat.scripts.shell_variables import ExpandedWord
from megaswift.compat.scripts.shell_words import shell_commands
from megaswift.options.sources import ConfigSource, normalize_name
from megaswift.options.tasks import TASKS

MEGASWIFT = "megaswift"
CONSOLE_SCRIPTS = {"swift": SWIFT, "megatron": MEGATRON_SWIFT, "megaswift": MEGASWIFT, "trl": TRL}
WITHOUT_A_FILE = ("infer", "deploy", "export", "eval", "rollout", "app", "sample", "merge-lora", "web-ui")
"""Commands of ms-swift that take no YAML file here."""
TRL_TASKS = {"reward": "rm", "reward_modeling": "rm"} | {
    t: t for t in ("sft", "dpo", "kto", "gkd", "grpo", "orpo", "cpo", "ppo")
}
TRL_VARIANTS = {
    "rloo": ("grpo", "--advantage_estimator=rloo"),
    "gspo": ("grpo", "--importance_sampling_level=sequence"),
    "bco": ("kto", "--loss_type=bco"),
    "distillation": ("gkd", "--lmbda=1", "--beta=1"),
}
"""Scripts of TRL that are a task of ours with an option."""
STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
"""Stages of LLaMA-Factory."""
TRAINS = frozenset(
    {"model_name_or_path", "per_device_train_batch_size", "dataset_name", "model_id", "num_train_epochs"}
)
"""Names of transformers by which the arguments of any script show that it trains."""
MEGATRON_TRAINS = frozenset({"lr", "train_iters", "train_samples"})
"""Names of Megatron-LM that a program has which trains, and one that only evaluates has not."""
_SWIFT_FILE = re.compile(r"(?:^|[/.])(?:swift[/.])?cli[/.](_megatron[/.])?([\w-]+?)(?:\.py)?$")
_TRL_FILE = re.compile(r"(?:^|[/.])(?:trl[/.](?:scripts|experimental)|examples/scripts)[/.](?:\w+/)?(\w+?)(?:\.py)?$")
_MEGATRON_FILE = re.compile(r"(?:^|/)(?:pretrain|train)_(?:gpt|mamba|hybrid|llama|mixtral|moe)\w*\.py$")
_OWN_FILE = re.compile(rf"(?:^|/)megaswift[/.]({'|'.join(TASKS)}|rlhf)(?:\.py)?$")
_GUESS = ("grpo", "dpo", "kto", "orpo", "cpo", "ppo", "reward", "pretrain", "clm", "pt")


ACCELERATE = "accelerate"
"""A file of `accelerate config` by itself."""


@dataclass(frozen=True)
class ForeignCommand:
    """A command that trains, in another toolkit's words."""

    place: str
    """`train.sh:3`"""
    toolkit: str
    task: str | None
    words: tuple[ExpandedWord, ...] = ()
    """Its arguments."""
    file: ConfigSource | None = None
    """The options of a file that was given itself, in place of a command."""
    launcher: str = ""
    launch: Mapping[str, ExpandedWord] = field(default_factory=dict)
    launcher_options: Mapping[str, ExpandedWord] = field(default_factory=dict)
    environment: Mapping[str, ExpandedWord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the user has to look at."""


def foreign_commands(text: str, name: str) -> Iterator[ForeignCommand]:
    """The commands of a script that train, in order."""
    for command in shell_commands(text):
        program = launched_program(command.words)
        found = _recognized(program) if program else None
        if program is None or found is None:
            continue
        notes = found.notes
        if command.conditional:
            notes += (
                "the command stands in a condition, a loop or a function of the script: this file is one pass of it",
            )
        if program.unset:
            notes += (
                f"{', '.join(program.unset)}: not set in the script; options of the launcher in it are missing here",
            )
        if command.stray_lines:
            lines = ", ".join(map(str, command.stray_lines))
            notes += (
                f"no backslash before line {lines}, which begins with an option: it is read as part of the command",
            )
        yield replace(
            found,
            place=f"{name}:{command.line}",
            launcher=program.launcher,
            launch=launch_values(program, command.environment),
            launcher_options=program.other,
            environment=command.environment,
            notes=notes,
        )


def _recognized(program: LaunchedProgram) -> ForeignCommand | None:
    base = PurePosixPath(program.name).name
    words = tuple(program.words)
    if not program.launcher and base in CONSOLE_SCRIPTS and words:
        if CONSOLE_SCRIPTS[base] == TRL:
            words = take_launcher_options(program, (*LAUNCH_SPELLINGS, "accelerate_config"))
        return _subcommand(CONSOLE_SCRIPTS[base], words)
    if base in ("llamafactory-cli", "lmf"):
        return _of_stage(words[1:]) if words[:1] and words[0].text == "train" else None
    if found := _OWN_FILE.search(program.name):
        return ForeignCommand("", MEGASWIFT, _task(found[1]), words)
    if (found := _SWIFT_FILE.search(program.name)) and (found[2] in (*TASKS, "rlhf") or found[2] in WITHOUT_A_FILE):
        return ForeignCommand("", MEGATRON_SWIFT if found[1] else SWIFT, _task(found[2]), words)
    if found := _TRL_FILE.search(program.name):
        return _trl(found[1], words)
    names = {normalize_name(w.text.partition("=")[0]) for w in words if w.text.startswith("--")}
    if _MEGATRON_FILE.search(program.name) or ("micro_batch_size" in names and MEGATRON_TRAINS & names):
        return ForeignCommand("", MEGATRON_LM, "sft" if "sft" in names else "pt", _without(words, "--sft"))
    if "stage" in names and "model_name_or_path" in names:
        return _of_stage(words)
    return _any_script(base, words) if program.name.endswith(".py") and TRAINS & names else None


def _task(word: str) -> str | None:
    return None if word == "rlhf" else word


def _subcommand(toolkit: str, words: tuple[ExpandedWord, ...]) -> ForeignCommand | None:
    command = words[0].text
    if toolkit == TRL:
        return _trl(command, words[1:]) if command in (*TRL_TASKS, *TRL_VARIANTS) else None
    known = command in (*TASKS, "rlhf") or (command in WITHOUT_A_FILE and toolkit != MEGASWIFT)
    return ForeignCommand("", toolkit, _task(command), words[1:]) if known else None


def _trl(script: str, words: tuple[ExpandedWord, ...]) -> ForeignCommand | None:
    kind = script.removesuffix("_vlm")
    if kind in TRL_TASKS:
        return ForeignCommand("", TRL, TRL_TASKS[kind], words)
    if kind in TRL_VARIANTS:
        task, *extra = TRL_VARIANTS[kind]
        return ForeignCommand("", TRL, task, (*map(ExpandedWord, extra), *words))
    near = next((t for part, t in TRL_TASKS.items() if part in kind.split("_")), None)
    names = {normalize_name(w.text.partition("=")[0]) for w in words if w.text.startswith("--")}
    if near is None:
        note = f"TRL's {script} is not a task here"
        return ForeignCommand("", TRL, None, words, notes=(note,)) if TRAINS & names else None
    note = f"{script} is a script of its own: what it does beside its options is not in this file"
    return ForeignCommand("", TRL, near, words, notes=(note,))


def _of_stage(words: tuple[ExpandedWord, ...]) -> ForeignCommand:
    """LLaMA-Factory's arguments: the stage is the task; `a=b` overrides a file."""
    flags = tuple(replace(w, text=f"--{w.text}") if re.match(r"\w+=", w.text) else w for w in words)
    return ForeignCommand("", LLAMA_FACTORY, None, flags)


def _any_script(base: str, words: tuple[ExpandedWord, ...]) -> ForeignCommand:
    stem = base.removesuffix(".py").lower()
    guess = next((g for g in _GUESS if g in re.split(r"[_\W]", stem)), "sft")
    task = {"reward": "rm", "pretrain": "pt", "clm": "pt"}.get(guess, guess)
    note = f"{base} is not known: task {task} is a guess from its name, and its defaults may be its own"
    return ForeignCommand("", TRANSFORMERS, task, words, notes=(note,))


def _without(words: tuple[ExpandedWord, ...], flag: str) -> tuple[ExpandedWord, ...]:
    return tuple(w for w in words if w.text != flag)


def command_of_file(source: ConfigSource, name: str) -> ForeignCommand:
    """The command that a YAML or JSON file stands for, by the names in it."""
    source = named_accelerate_file(source)
    values = {given.name: str(given.value) for given in source.givens}
    if values.keys() == {"accelerate_config"}:
        note = "the file has settings of accelerate launch only, no model and no data; task sft is a guess"
        file = {"config_file": ExpandedWord(values["accelerate_config"])}
        return ForeignCommand(name, ACCELERATE, "sft", launcher="accelerate", launcher_options=file, notes=(note,))
    if values.get("stage") in STAGES:
        return ForeignCommand(name, LLAMA_FACTORY, None, file=source)
    swift = {"tuner_type", "rlhf_type", "load_from_cache_file", "padding_free", "split_dataset_ratio", "torch_dtype"}
    toolkit = SWIFT if swift & values.keys() or "model" in values else TRL
    megatron = {"micro_batch_size", "tensor_model_parallel_size", "mcore_model", "pipeline_model_parallel_size"}
    toolkit = MEGATRON_SWIFT if megatron & values.keys() else toolkit
    if {"rlhf_type", "task", "training_task", "algorithm"} & values.keys():
        return ForeignCommand(name, toolkit, None, file=source)
    stem = Path(name).stem.lower()
    guess = next((t for t in TASKS if t in re.split(r"[_\W]", stem)), "sft")
    note = f"the file does not name its task: {guess} is a guess; change it with the command, megaswift TASK FILE"
    return ForeignCommand(name, toolkit, guess, file=source, notes=(note,))


def file_of_script(folder: Path, name: str) -> Path | None:
    """A file that a script names, beside the script or from the current folder; None where there is none."""
    for place in (folder / name, Path(name)):
        try:
            if place.is_file():
                return place
        except OSError:  # a name that is too long
            return None
    return None
