"""Registrations: what a user adds without changing the package (docs/plugins.md), in a script or notebook for its own
process, or in a file of `--external_plugins` for every process of a run.

    from megaswift import plugins

    plugins.loss_scale("formula", {r"\\$[^$]+\\$": [2.0]})

    @plugins.reward("shorter")
    def shorter(completions, **columns): ...

Each function adds one thing under a name, which then is a value of its option like any other. A name that megaswift
itself has is an error; a name that was registered before is replaced. Nothing heavy is imported before it is
registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from megaswift.errors import ConfigError, Problem
from megaswift.options.option import PLUGIN_CHOICES
from megaswift.options.plugins import PLUGINS, digest_of_script

if TYPE_CHECKING:
    from megaswift.models.family import Family

_OWN: dict[str, set[str]] = {}
"""By kind, names that files and scripts have registered."""


def _take(kind: str, name: str, built_in: Iterable[str]) -> None:
    """ConfigError for a name that megaswift has."""
    own = _OWN.setdefault(kind, set())
    if name in set(built_in) - own:
        file = PLUGINS.reading or "megaswift.plugins"
        raise ConfigError(Problem(str(file), f"registers {kind} {name}, which megaswift has", "another name"))
    own.add(name)


def _note(option: str, name: str) -> None:
    """Keeps where a name was registered. `option`: that takes the name; the empty string: every run has it."""
    if PLUGINS.reading is None:
        PLUGINS.of_script[option, name] = None
    else:
        PLUGINS.of_script.pop((option, name), None)


def _choice(option: str, name: str) -> None:
    _note(option, name)
    if name not in PLUGIN_CHOICES.setdefault(option, []):
        PLUGIN_CHOICES[option].append(name)


_THINGS = frozenset({"function", "environment", "parse", "formula", "estimate", "make"})
"""Names that the parameter has which takes what is registered."""


def _or_decorator(register: Callable[..., None]) -> Any:
    """`register(name, thing, ...)`, or `@register(name, ...)` above the definition of the thing."""
    signature = inspect.signature(register)
    thing = next(name for name in signature.parameters if name in _THINGS)

    @wraps(register)
    def registered(*given: Any, **options: Any) -> Any:
        if thing in signature.bind_partial(*given, **options).arguments:
            return register(*given, **options)

        def decorated(made: Any) -> Any:
            register(*given, **options, **{thing: made})
            return made

        return decorated

    return registered


@_or_decorator
def reward(name: str, function: Any) -> None:
    """Register a reward function as a value of `--reward_funcs`.

    Args:
        name: The value of the option.
        function: A function, or a class whose instances are called, as a function of `FILE.py:function` is
            (docs/rewards.md). It returns a number for each completion.

    Raises:
        ConfigError: megaswift itself has a reward of this name.
    """
    from megaswift.rewards.functions import NAMED, SPELLINGS

    _take("reward", name, (*NAMED.names(), *SPELLINGS))
    PLUGINS.rewards[name] = function
    _note("reward_funcs", name)


@_or_decorator
def environment(name: str, environment: Any) -> None:
    """Register an environment of multi-turn rollouts as a value of `--environment`.

    Args:
        name: The value of the option.
        environment: A class, or a function that makes an environment, called without arguments for each completion.
    """
    PLUGINS.environments[name] = environment
    _note("environment", name)


@_or_decorator
def data_format(
    name: str,
    required: Sequence[str],
    parse: Callable[[Mapping[str, Any]], Any],
    tasks: Sequence[str] = ("sft",),
    detect: Callable[[Mapping[str, Any]], bool] | None = None,
) -> None:
    """Register a format of data rows. It is tried before megaswift's own formats.

    Args:
        name: The format's name in messages and reports.
        required: Columns that a row of this format has.
        parse: Called with each row. It returns a row of a format that megaswift has, an `UntokenizedSample`, or for
            preferences a `PreferenceExample`.
        tasks: The tasks whose data may have this format.
        detect: Called with a row that has the columns `required`; returns whether the row has this format.

    Raises:
        ConfigError: megaswift itself has a format of this name.
    """
    from megaswift.data.formats import FORMATS, RowFormat, parse_into_known_format

    _take("data format", name, (one.name for one in FORMATS))
    parsed = parse_into_known_format(name, parse, tasks)
    entry = RowFormat(name, tuple(required), parsed, tasks=tuple(tasks), rank=-9, common=True)
    FORMATS.replace(name, entry if detect is None else replace(entry, detect=detect))
    _note("", f"data format {name}")
    if PLUGINS.reading is not None:
        PLUGINS.with_formats.add(PLUGINS.reading)
    else:
        PLUGINS.script_formats[name] = digest_of_script(parse)


def loss_scale(name: str, table: Mapping[str, Any]) -> None:
    """Register a table of loss weights as a value of `--loss_scale`.

    Args:
        name: The value of the option.
        table: {"REGULAR EXPRESSION": [weight]} or {"KEYWORD": [weight, weight of the text that follows]}.

    Raises:
        ConfigError: megaswift itself has a table of this name.
    """
    from megaswift.data.options.loss_scale import NAMED

    _take("loss scale", name, NAMED)
    NAMED[name] = dict(table)
    _note("loss_scale", name)


@_or_decorator
def dpo_loss(name: str, formula: Callable[[Any], Any]) -> None:
    """Register a loss as a value of `--loss_type` in dpo.

    Args:
        name: The value of the option.
        formula: Called as `formula(pairs)` with a `PairLogprobsAndRatios` of p pairs; returns a loss for each pair,
            [p].

    Raises:
        ConfigError: megaswift itself has a DPO loss of this name.
    """
    from megaswift.losses.dpo_loss_types import LOSS_TYPES

    _loss("dpo", name, LOSS_TYPES)
    LOSS_TYPES[name] = _checked(name, formula, lambda pairs: pairs.margin, "pair")


@_or_decorator
def kto_loss(name: str, formula: Callable[[Any, Any, Any], Any], needs_kl: bool = False) -> None:
    """Register a loss as a value of `--loss_type` in kto.

    Args:
        name: The value of the option.
        formula: Called as `formula(rewards, desirable, zero)`; returns a loss for each completion, [n]. `rewards` [n]
            is beta x log-ratio, `desirable` [n] the labels, and `zero` [] beta x KL of mismatched pairs, or 0 without
            `needs_kl`.
        needs_kl: Whether mismatched pairs are scored to estimate the KL divergence.

    Raises:
        ConfigError: megaswift itself has a KTO loss of this name.
    """
    from megaswift.losses.kto import LOSS_TYPES
    from megaswift.losses.options.loss_table import KL_PAIRS

    _loss("kto", name, LOSS_TYPES, needs=frozenset({KL_PAIRS} if needs_kl else ()))
    LOSS_TYPES[name] = _checked(name, formula, lambda rewards, *_: rewards, "completion")


@_or_decorator
def cpo_loss(name: str, formula: Callable[[Any, Any], Any], per_token: bool = False) -> None:
    """Register a loss as a value of `--loss_type` in cpo.

    Args:
        name: The value of the option.
        formula: Called as `formula(rewards, settings)`; returns a loss for each pair, [p]. `rewards.chosen`,
            `rewards.rejected` and `rewards.difference` [p] are log-probabilities of answers; `settings` has `beta`,
            `simpo_gamma` and `label_smoothing`.
        per_token: Whether log-probabilities are means over the tokens of an answer instead of sums.

    Raises:
        ConfigError: megaswift itself has a CPO loss of this name.
    """
    from megaswift.losses.cpo import LOSS_TYPES, CpoLossType

    _loss("cpo", name, LOSS_TYPES)
    checked = _checked(name, formula, lambda rewards, _: rewards.difference, "pair")
    LOSS_TYPES[name] = CpoLossType(checked, per_token)


@_or_decorator
def orpo_loss(name: str, formula: Callable[[Any], Any]) -> None:
    """Register a loss as a value of `--loss_type` in orpo.

    Args:
        name: The value of the option.
        formula: Called as `formula(logps)`; returns a term for each pair, [p], which replaces the odds ratio's term
            and has weight `beta`. `logps.chosen`, `logps.rejected` and `logps.difference` [p] are mean
            log-probabilities of answers.

    Raises:
        ConfigError: megaswift itself has an ORPO loss of this name.
    """
    from megaswift.losses.orpo import LOSS_TYPES

    _loss("orpo", name, LOSS_TYPES)
    LOSS_TYPES[name] = _checked(name, formula, lambda logps: logps.difference, "pair")


@_or_decorator
def rm_loss(name: str, formula: Callable[[Any, Any], Any]) -> None:
    """Register a loss as a value of `--loss_type` in rm.

    Args:
        name: The value of the option.
        formula: Called as `formula(scores, margin)`; returns a loss for each pair, [p]. `scores.chosen`,
            `scores.rejected` and `scores.difference` are [p]; `margin` [p] comes from the rows, or is 0.

    Raises:
        ConfigError: megaswift itself has a reward-model loss of this name.
    """
    from megaswift.losses.reward import LOSS_TYPES

    _loss("rm", name, LOSS_TYPES)
    LOSS_TYPES[name] = _checked(name, formula, lambda scores, _: scores.difference, "pair")


@_or_decorator
def policy_loss(name: str, formula: Callable[[Any], Any], loss_agg_mode: str = "token-mean") -> None:
    """Register a loss as a value of `--loss_type` in grpo.

    Args:
        name: The value of the option.
        formula: Called as `formula(inputs)` with a `PolicyLossInputs`; returns a loss for each token, [b, s], neither
            masked nor reduced.
        loss_agg_mode: The divisor of the sum, unless `--loss_agg_mode` is given.

    Raises:
        ConfigError: megaswift itself has a policy loss of this name.
    """
    from megaswift.losses.policy_loss_types import LOSS_TYPES, PolicyLossType

    _loss("grpo", name, LOSS_TYPES, loss_agg_mode)
    LOSS_TYPES[name] = PolicyLossType(_checked(name, formula, lambda x: x.logprobs, "token"))


def _loss(
    task: str, name: str, formulas: Mapping[str, Any], mode: str | None = None, needs: frozenset[str] = frozenset()
) -> None:
    from megaswift.losses.options.loss_table import PLUGIN_LOSSES, LossEntry, loss_names
    from megaswift.losses.options.preference import LOSSES

    _take(f"{task} loss", name, (*formulas, *loss_names(task)))
    PLUGIN_LOSSES[task, name] = LossEntry(name, task, "plugin", needs, loss_agg_mode=mode)
    LOSSES[task] = loss_names(task)
    _choice("loss_type", name)


def _checked(name: str, formula: Callable[..., Any], like: Callable[..., Any], each: str) -> Callable[..., Any]:
    from megaswift.losses.user_loss import checked_formula

    return checked_formula(name, formula, like, each)


@_or_decorator
def advantage_estimator(
    name: str,
    estimate: Callable[[Any], Any],
    per_token: bool = False,
    compares: bool = True,
    kl_in_reward: bool = False,
) -> None:
    """Register an estimator as a value of `--advantage_estimator` in grpo.

    Args:
        name: The value of the option.
        estimate: Called with an `EstimatorInput` of n completions; returns their advantages, [n], or [n, t] with
            `per_token`.
        per_token: Whether each token has an advantage of its own.
        compares: Whether the estimator needs several completions of a prompt.
        kl_in_reward: The default of `--kl_in_reward`.

    Raises:
        ConfigError: megaswift itself has an estimator of this name.
    """
    from megaswift.losses.advantage_estimators import ESTIMATORS
    from megaswift.losses.options.estimator_table import (
        ESTIMATOR_NAMES,
        PLUGIN_ESTIMATORS,
        AdvantageEstimatorEntry,
        advantage_estimator_names,
    )

    _take("advantage estimator", name, ESTIMATORS.names())
    # The table that option rules read comes first, then the function, then the choice.
    PLUGIN_ESTIMATORS[name] = AdvantageEstimatorEntry(
        name,
        "grpo",
        "plugin",
        kl_in_reward=kl_in_reward,
        compares=compares,
        per_token=per_token,
    )
    ESTIMATORS.replace(name, estimate)
    ESTIMATOR_NAMES["grpo"] = advantage_estimator_names("grpo")
    _choice("advantage_estimator", name)


@_or_decorator
def callback(name: str, make: Callable[[], Any]) -> None:
    """Register a hook that every run of this command has.

    Args:
        name: The name under which a later file can replace it.
        make: Called on each rank; returns a `megaswift.trainers.hook.Hook`.
    """
    from megaswift.trainers.hook import PLUGIN_HOOKS

    PLUGIN_HOOKS[name] = make
    _note("", f"callback {name}")


@_or_decorator
def optimizer(
    name: str,
    make: Callable[[list[dict[str, Any]], Any], Any],
    states: Sequence[str],
    step: str | None = None,
    elementwise: bool = False,
) -> None:
    """Register an optimizer as a value of `--optimizer`.

    Args:
        name: The value of the option.
        make: Called as `make(groups, options)` with parameter groups and section `optim`; returns a torch optimizer.
            The `lr` and `weight_decay` of its groups are set before each step.
        states: The names of its states, each float32 in the parameter's shape.
        step: The name under which it counts steps, if it does.
        elementwise: Whether it updates each number by itself. Other optimizers need whole tensors and run on engine
            ddp only.

    Raises:
        ConfigError: megaswift itself has an optimizer of this name.
    """
    from megaswift.engine.options.optimizer import OPTIMIZERS, PLUGIN_OPTIMIZERS, PluginOptimizerParts

    _take("optimizer", name, OPTIMIZERS)
    PLUGIN_OPTIMIZERS[name] = PluginOptimizerParts(make, tuple(states), step, elementwise)
    _choice("optimizer", name)


def family(entry: Family) -> None:
    """Register a model family of the native engine.

    Args:
        entry: Its table of config.json's fields and of weights (docs/families.md).

    Raises:
        ConfigError: megaswift itself has a family of this name.
    """
    from megaswift.models.family import FAMILIES

    _take("model family", entry.name, FAMILIES.names())
    FAMILIES.replace(entry.name, entry)
    _note("", f"model family {entry.name}")
