"""Options whose name is the same in another toolkit and whose meaning is not, or whose value needs its own reading.

Names and values of the same meaning are in `compat/translation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megaswift.compat.defaults import LLAMA_FACTORY, MEGATRON_LM, MEGATRON_SWIFT, SWIFT, TRL
from megaswift.compat.scripts.llama_factory import with_registered_datasets
from megaswift.compat.scripts.migrated_run import MigratedOption, MigratedRun
from megaswift.config.sections import OPTIONS
from megaswift.options.sources import GivenOptionValue
from megaswift.options.tasks import RL, TASKS
from megaswift.options.values import FALSE

_CONVERT = "megaswift convert megatron-to-hf DIR MODEL --hf_config HF, HF being the model's Hugging Face folder"
"""How a checkpoint of another toolkit becomes a model folder."""


def with_own_meanings(run: MigratedRun, givens: Iterable[GivenOptionValue], folder: Path) -> list[GivenOptionValue]:
    """The options of a source in the words of the tables. `folder`: of the file that they are from."""
    givens = list(givens)
    if run.toolkit == LLAMA_FACTORY:
        givens = with_registered_datasets(run, givens, folder)
    reading = {
        LLAMA_FACTORY: _llama_factory,
        MEGATRON_LM: _megatron,
        MEGATRON_SWIFT: _megatron,
        TRL: _trl,
    }.get(run.toolkit)
    return [out for given in givens for out in (reading(run, given) if reading else [given])]


def _llama_factory(run: MigratedRun, given: GivenOptionValue) -> Iterator[GivenOptionValue]:
    value = str(given.value).strip().lower()
    if given.name == "stage":
        if value in TASKS and run.task in (None, "dpo"):
            run.task = run.task or value
        elif value not in TASKS:
            run.ask(given.label, "is not a task here")
    elif given.name == "pref_loss" and value in ("orpo", "simpo"):
        run.task = value
    elif given.name == "disable_gradient_checkpointing":
        yield replace(given, name="gradient_checkpointing", value="true" if value in FALSE else "false")
    elif given.name == "flash_attn" and value in ("fa2", "auto", "sdpa"):
        yield replace(given, name="attn_impl", value="flash" if value == "fa2" else value)
    elif given.name == "lora_target" and value == "all":
        yield replace(given, value="all-linear")
    elif given.name == "dataset_dir":
        run.left_out.append(f"{given.label}: data sets are named by their files")
    else:
        yield given


def _megatron(run: MigratedRun, given: GivenOptionValue) -> Iterator[GivenOptionValue]:
    if given.name == "load":
        run.ask(given.label, f"a checkpoint of {run.toolkit} is converted first", f"{_CONVERT}; then model: MODEL")
    elif given.name == "num_workers":
        yield replace(given, name="dataloader_num_workers")
    else:
        yield given


def _trl(run: MigratedRun, given: GivenOptionValue) -> Iterator[GivenOptionValue]:
    if given.name == "max_prompt_length" and run.task in RL and str(given.value).isdigit():
        yield replace(given, name="max_length")
    else:
        yield given


def with_run_lengths(run: MigratedRun) -> None:
    """`max_length` of reinforcement learning: the prompt alone there, prompt and completion here."""
    prompt = run.options.get("max_length")
    if run.task not in RL or prompt is None or run.toolkit not in (SWIFT, MEGATRON_SWIFT, TRL):
        return
    given = run.options.get("max_completion_length")
    completion = given.value if given is not None else OPTIONS["max_completion_length"].default
    comment = f"{prompt.label}, the prompt alone, + max_completion_length {completion}"
    run.options["max_length"] = MigratedOption("max_length", prompt.value + completion, prompt.label, comment)
