"""Options that exist only with certain values of others: one rule for each selector in the `only_with` of an option.

A selector is another option (`optimizer`), or a fact that is more than the value of one option (`engine` also follows
from `--deepspeed`). `FACTS` lists the facts. A selector with the value `ANY` rules out no option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.bridge.adapters.options.checks import base_quantization_bits
from megaswift.config.rule import IgnoredOption, join_names
from megaswift.config.sections import OPTIONS, Sections
from megaswift.data.options.indexed import reads_indexed_data
from megaswift.engine.options.engine_checks import NATIVE, READS, engine_of_options, requested_engine
from megaswift.losses.options.estimator_table import PLUGIN_ESTIMATORS
from megaswift.losses.options.loss_table import PLUGIN_LOSSES, loss_entries
from megaswift.losses.options.preference import beta_of, loss_types_of
from megaswift.options.option import ANY, Option, Wanted
from megaswift.options.tasks import RL
from megaswift.options.values import option_value_text
from megaswift.trainers.options.evaluation_checks import DATA_OPTIONS, best_model_matters, has_evaluation_data
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_of,
    biasing_sampling_options,
    corrects_sampler_mismatch,
    kl_in_reward_of,
    policy_loss_of,
)


@dataclass(frozen=True)
class Fact:
    """A selector whose value is computed from a configuration."""

    read: Callable[[Sections], Any]
    """Computes the value."""
    reads: tuple[str, ...]
    """Options that decide the value."""
    wants: str = ""
    """Why an option with this selector has no effect, for the message; empty: derived from the wanted values."""
    fix: str = ""
    """What the message proposes; empty: derived likewise."""


def _loss_types(c: Sections) -> Any:
    names = (policy_loss_of(c),) if c.task in RL else (c.preference.loss_type or loss_types_of(c))
    return ANY if any(entry in PLUGIN_LOSSES.values() for entry in loss_entries(c.task, names)) else names


def _estimator(c: Sections) -> Any:
    name = advantage_estimator_of(c)
    return ANY if name in PLUGIN_ESTIMATORS else name


def _reward_functions(c: Sections) -> tuple[str, ...]:
    """Return which built-in functions with options the run uses, also under TRL's names
    (`get_cosine_scaled_reward`)."""
    built_in = [name for name in c.rewards.reward_funcs if ":" not in name]  # a colon: FILE:FUNCTION of the user
    with_options = dict.fromkeys(name for option in OPTIONS for name in values_with(option, "reward_funcs"))
    return tuple(short for short in with_options if any(short in name for name in built_in))


def _nodes(c: Sections) -> Any:
    """Return the number of machines on which torchrun starts processes. Other launchers have their own rules."""
    return (c.launch.nnodes or 1) if c.launch.launcher == "torchrun" else ANY


def _weight_bits(c: Sections) -> Any:
    """Return the bits of the frozen weights on a torch engine. The native engine is left to the selector `engine`."""
    return ANY if requested_engine(c) == NATIVE else base_quantization_bits(c)


FACTS: dict[str, Fact] = {
    "engine": Fact(engine_of_options, READS),
    "loss_type": Fact(_loss_types, ("loss_type",)),
    "advantage_estimator": Fact(_estimator, ("advantage_estimator",)),
    "beta": Fact(
        lambda c: beta_of(c) if c.task in RL else ANY,
        ("beta",),
        "beta is 0, so there is neither a KL penalty nor a reference model",
        "--beta 0.01",
    ),
    "kl_in_reward": Fact(kl_in_reward_of, ("beta", "kl_in_reward", "advantage_estimator")),
    "reward_funcs": Fact(_reward_functions, ("reward_funcs",)),
    "nnodes": Fact(_nodes, ("nnodes", "launcher")),
    "importance_sampling_correction": Fact(
        corrects_sampler_mismatch, ("importance_sampling_correction", "rollout_backend", "async_generation")
    ),
    "quantization_bit": Fact(_weight_bits, ("quantization_bit", "train_type", *READS)),
    "vision_model": Fact(lambda c: ANY, ("model",)),  # checked where the model's folder has been read
    "warmup": Fact(
        lambda c: c.schedule.warmup_steps or c.schedule.warmup_ratio,
        ("warmup_steps", "warmup_ratio"),
        "applies only to runs with a warmup",
        "--warmup_steps 100",
    ),
    "evaluation_data": Fact(
        has_evaluation_data,
        DATA_OPTIONS,
        "needs evaluation data",
        "--val_dataset FILE or --split_dataset_ratio 0.01",
    ),
    "best_model": Fact(
        best_model_matters,
        ("load_best_model_at_end", "save_strategy", "early_stopping_patience", "lr_scheduler_type"),
        "nothing depends on the best evaluation",
        "--load_best_model_at_end true",
    ),
    "indexed_data": Fact(
        reads_indexed_data, ("dataset",), "applies only to Megatron-LM's indexed data (PREFIX.idx)", "--dataset PREFIX"
    ),
    "rows_of_text": Fact(
        lambda c: not reads_indexed_data(c),
        ("dataset",),
        "indexed data are tokens already, cut into samples of max_length",
        "other data",
    ),
    "biased_sampling": Fact(
        biasing_sampling_options,
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        "completions are sampled from the policy's own distribution",
        "--top_p 0.9",
    ),
}
"""Facts by name. A selector that is not listed here is an option and has the option's value."""


def values_with(option: str, selector: str) -> tuple[str, ...]:
    """Return the listed values of a selector with which an option exists; empty: the option lists none."""
    wanted = OPTIONS[option].only_with.get(selector)
    return wanted.values if wanted else ()


def selector_value(c: Sections, name: str) -> Any:
    """Return the value of a selector in a configuration."""
    return FACTS[name].read(c) if name in FACTS else c.value(name)


def variant_rules() -> Iterator[IgnoredOption]:
    """Yield a rule for each option and selector: the option has no effect if the selector has another value."""
    for option in OPTIONS.values():
        for selector, wanted in option.only_with.items():
            yield _rule(option, selector, wanted)


def _rule(option: Option, selector: str, wanted: Wanted) -> IgnoredOption:
    fact = FACTS.get(selector)
    return IgnoredOption(
        option.name,
        fact.reads if fact else (selector,),
        lambda c: not wanted.holds(selector_value(c, selector)),
        (fact and fact.wants) or _reason(selector, wanted),
        (fact and fact.fix) or _fix(selector, wanted),
        option.neutral,
        notice=wanted.notice,
    )


def _texts(values: tuple[Any, ...]) -> list[str]:
    return [option_value_text(value) for value in values if value not in (None, "auto")]


def _reason(selector: str, wanted: Wanted) -> str:
    """Return why the option has no effect, for messages: the rest of a sentence that begins with the option."""
    if wanted.values == (None,):
        return f"applies only to runs without --{selector}"
    if wanted.values:
        names = join_names(_texts(wanted.values), "or")
        # The actual value is added where it is a name: `{engine}` is a placeholder, filled when the rule is broken.
        is_text = isinstance(wanted.values[0], str) and (selector == "engine" or selector not in FACTS)
        return f"applies only to --{selector} {names}" + (f" ({selector} is {{{selector}}})" if is_text else "")
    if wanted.excluded:
        return f"does not apply to --{selector} {join_names(_texts(wanted.excluded), 'or')}"
    if wanted.least is not None:
        return f"applies only to --{selector} {wanted.least} or more"
    return f"applies only to runs with --{selector}"


def _fix(selector: str, wanted: Wanted) -> str:
    """Return the option to give instead. Placeholders are filled when the rule is broken."""
    if selector == "engine":
        engine = wanted.values[0] if wanted.values else ""
        return {"megatron": "{to_megatron}", "fsdp2": "{to_fsdp2}"}.get(engine, "--engine ddp")
    if wanted.values == (None,):
        return f"leave out --{selector}"
    if wanted.values:
        return f"--{selector} {option_value_text(wanted.values[0])}"
    if wanted.least is not None:
        return f"--{selector} {wanted.least}"
    option = OPTIONS[selector]
    choice = next((choice for choice in option.choices if choice not in wanted.excluded), None)
    if choice or option.kind == "bool":
        return f"--{selector} {choice or 'false'}"
    return f"--{selector} {option.details.get('metavar') or option.unit.upper() or 'VALUE'}"


def variant_note(option: Option, choices: Mapping[str, tuple[str, ...]]) -> str:
    """Return a note for `--help`: with which losses or estimators an option exists; empty: with all of them.

    Args:
        choices: Selector -> its values in the task.
    """
    for selector, values in choices.items():
        with_it = [name for name in values if name in values_with(option.name, selector)]
        without = [name for name in values if name not in with_it]
        if not with_it or not without:
            continue
        if selector == "loss_type" and len(without) < len(with_it):
            return f"not for {selector} {', '.join(without)}"
        return f"{selector} {', '.join(with_it)}"
    return ""
