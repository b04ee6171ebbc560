"""Sources in order of weight to one checked set of sections; all mistakes of all sources in one ConfigError.

Owns precedence, spellings and task names. Reading is `source.py`, values are `values.py`, meaning is `rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.config.adapter_rules import defaults
from megaswift.config.data import ALIGNMENT
from megaswift.config.option import Option
from megaswift.config.peft_methods import VARIANTS
from megaswift.config.rl_batch import BATCH_OPTIONS, default_passes
from megaswift.config.rl_clashes import missing_rewards
from megaswift.config.rules import check
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, TASKS, Sections
from megaswift.config.source import Given, Source
from megaswift.config.swift_correction import in_our_terms
from megaswift.config.values import TRUE, Invalid, parse, show
from megaswift.errors import ConfigError, Problem, nearest

TASK_NAMES = (*TASKS, "rlhf")
"""Values of `train_type` that name a task; those of TASKS exist here."""

HINTS = {
    "bf16": "--torch_dtype bfloat16",
    "fp16": "--torch_dtype float16",
    "fp32": "--torch_dtype float32",
    "gradient_checkpointing_kwargs": "leave it out: layers are recomputed without re-entrance",
    "optim_args": "--galore_rank and the like",
    "distributed_timeout_minutes": "--ddp_timeout, in seconds",
    "sequence_parallel_size": "--context_parallel_size",
    "world_size": "--nproc_per_node",
    "resume": "--resume_from_checkpoint latest",
    "flash_attn": "--attn_impl flash",
    "use_flash_attn": "--attn_impl flash",
    "eval_strategy": "--eval_steps",
    "save_strategy": "--save_steps",
    "logging_dir": "--output_dir: TensorBoard's files lie in OUT/runs",
    "quant_method": "--quantization_bit 4: bitsandbytes it is",
    "load_in_4bit": "--quantization_bit 4",
    "load_in_8bit": "--quantization_bit 8",
    "vllm_server_host": "--vllm_server_base_url http://HOST:PORT",
    "vllm_server_port": "--vllm_server_base_url http://HOST:PORT",
    "vllm_max_model_len": "--max_length: prompt and completion",
    "vllm_max_model_length": "--max_length: prompt and completion",
    "max_prompt_length": "--max_length: prompt and completion",
    "sleep_level": "--rollout_sleep true",
    "vllm_group_port": "--rollout_sync_folder DIR",
    "vllm_server_group_port": "--rollout_sync_folder DIR",
    "vllm_max_lora_rank": "--lora_rank: samplers make room for it",
    "external_plugins": "--reward_funcs FILE.py:function",
    "num_mini_batches": "--generation_batch_size",
    "tokenizer": "--model: the tokenizer lies in the model's folder",
}
"""Names of other toolkits that have another shape here."""


@dataclass
class State:
    """What was understood so far, and what was wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    ambient: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    task: str | None = None


Beyond = Callable[[Sections], Iterable[Problem]]
"""What else is wrong with these sections, beyond what they say together."""


def resolve(
    task: str | None, sources: Iterable[Source], complete: bool = False, beyond: Beyond | None = None
) -> Sections:
    """The checked sections of `task` (None: what the sources say, else sft). `complete`: model and dataset must be
    there.

    `beyond` is asked only where the sections are refused although every value in them was understood: what it finds is
    told with the rest.
    """
    state = State(task=task)
    for source in in_our_terms(list(sources)):
        state.problems += source.problems
        _take(state, source)
    state.values = {**defaults(state.values.get("train_type")), **state.values}
    given = frozenset(name for name in state.labels if state.values.get(name) is not None and name not in state.ambient)
    if state.values.get("packing") is None:
        state.values["packing"] = state.task in ALIGNMENT
    if (passes := default_passes(state.task, state.values)) and not state.wrong & {"num_generations", *BATCH_OPTIONS}:
        state.values["gradient_accumulation_steps"] = passes.number
        state.notices.append(passes.text)
    parts = {
        key: cls(**{n: v for n, v in state.values.items() if OPTIONS[n].section == key})
        for key, cls in SECTIONS.items()
    }
    sections = Sections(task=state.task or "sft", **parts, given=given, notices=tuple(state.notices))
    problems = [*state.problems, *check(sections, state.labels, frozenset(state.wrong))]
    problems += [p for p in _missing(sections, state) if complete]
    if problems:
        if beyond and not state.problems:
            told = {p.what for p in problems}
            problems += [p for p in beyond(sections) if p.what not in told]
        raise ConfigError(dict.fromkeys(problems))  # one given value may set several options
    return sections


def _take(state: State, source: Source) -> None:
    first: dict[str, Given] = {}
    for given in _spelled_out(source.givens):
        if given.name in ("task", "rlhf_type") or (
            NAMES.get(given.name) == "train_type" and str(given.value).lower() in TASK_NAMES
        ):
            _take_task(state, given)
            continue
        option = OPTIONS.get(NAMES.get(given.name, ""))
        if option is None:
            state.problems.append(_unknown(given))
            continue
        take_value(state, option, given, first.get(option.name))
        first.setdefault(option.name, given)
        (state.ambient.add if source.ambient else state.ambient.discard)(option.name)


def _spelled_out(givens: Sequence[Given]) -> Iterator[Given]:
    """`train_type dora` is lora with `use_dora`; of `use_vllm` and `vllm_mode` together the second says which, where
    the first is true."""
    said = {given.name: str(given.value).strip().lower() for given in givens}
    twice = {"use_vllm", "vllm_mode"} <= said.keys()
    idle = None if not twice else "use_vllm" if said["use_vllm"] in TRUE else "vllm_mode"
    for given in givens:
        if given.name == idle:
            continue
        switch = VARIANTS.get(str(given.value).lower()) if NAMES.get(given.name) == "train_type" else None
        if switch is None:
            yield given
        else:
            yield from (Given(given.name, "lora", given.label), Given(switch, True, given.label))


def take_value(state: State, option: Option, given: Given, earlier: Given | None) -> None:
    """One value; `earlier`: one of the same source for the same option."""
    try:
        value = parse(option, given.value)
    except Invalid:
        error = refusal(option.of_task(state.task), given.value)
        state.problems.append(Problem(given.label, error.rule, error.fix))
        state.wrong.add(option.name)
        state.labels.setdefault(option.name, given.label)
        return
    if earlier and option.name not in state.wrong and value != state.values[option.name]:
        rule = f"{earlier.label} says otherwise" + (f" (both set {option.name})" if earlier.name != given.name else "")
        state.problems.append(Problem(given.label, rule, f"one of the two: --{option.name} {show(value)}"))
        return
    state.values[option.name], state.labels[option.name] = value, given.label
    state.wrong.discard(option.name)


def refusal(option: Option, raw: Any) -> Invalid:
    """What is wrong with a value that does not parse."""
    try:
        parse(option, raw)
    except Invalid as error:
        return error
    raise AssertionError("parsed before, with more choices")


def _take_task(state: State, given: Given) -> None:
    name = str(given.value).lower()
    if given.name not in ("task", "rlhf_type"):
        state.notices.append(f"{given.label}: {name} is a task, so it is taken as rlhf_type; train_type stays full")
    if name not in TASKS:
        here = ", ".join(f"{n} ({text})" for n, text in TASKS.items())
        fix = nearest(name, list(TASKS)) or "megaswift sft"
        state.problems.append(Problem(given.label, f"is not a task of this version; tasks are {here}", fix))
    elif state.task is None:
        state.task = name
    elif name != state.task:
        state.problems.append(Problem(given.label, f"but this is {state.task}", f"megaswift {name} ..."))


def _unknown(given: Given) -> Problem:
    hint = HINTS.get(given.name)
    positive = given.name.removeprefix("no_")
    if hint is None and positive != given.name and positive in NAMES:
        hint = f"--{positive} false"
    close = f"--{hint}" if hint and not hint.startswith("--") else hint
    return Problem(
        given.label,
        "is not an option",
        close or nearest(given.name, list(NAMES)) or "megaswift sft --help lists them all",
    )


def _missing(sections: Sections, state: State) -> Iterable[Problem]:
    if sections.model.model is None and "model" not in state.wrong:
        yield Problem("--model", "is missing", "--model DIR, a Hugging Face model folder")
    if not sections.data.dataset and "dataset" not in state.wrong:
        yield Problem("--dataset", "is missing", "--dataset data.jsonl")
    if not state.wrong & {"reward_funcs", "reward_model", "environment"}:
        yield from missing_rewards(sections)
