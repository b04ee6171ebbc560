"""Registrations for files of `--external_plugins`: what a user adds without changing the package (docs/plugins.md).

    from megaswift import plugins

    plugins.loss_scale("formula", {r"\\$[^$]+\\$": [2.0]})

Each function adds one thing under a name, which then is a value of its option like any other. A name that megaswift
itself has is an error; a name of an earlier file is replaced. Nothing heavy is imported before it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaswift.config.option import PLUGIN_CHOICES
from megaswift.config.plugins import PLUGINS
from megaswift.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megaswift.models.family import Family

_OWN: dict[str, set[str]] = {}
"""By kind, names that files have registered."""


def _take(kind: str, name: str, built_in: Iterable[str]) -> None:
    """ConfigError for a name that megaswift has."""
    own = _OWN.setdefault(kind, set())
    if name in set(built_in) - own:
        file = PLUGINS.reading or "a file of --external_plugins"
        raise ConfigError(Problem(str(file), f"registers {kind} {name}, which megaswift has", "another name"))
    own.add(name)


def _choice(option: str, name: str) -> None:
    if name not in PLUGIN_CHOICES.setdefault(option, []):
        PLUGIN_CHOICES[option].append(name)


def reward(name: str, function: Any) -> None:
    """A value of `--reward_funcs`: a function or class, called as docs/rewards.md says of ms-swift's `orms`."""
    PLUGINS.rewards[name] = function


def data_format(
    name: str,
    required: Sequence[str],
    parse: Callable[[Mapping[str, Any]], Any],
    tasks: Sequence[str] = ("sft",),
    detect: Callable[[Mapping[str, Any]], bool] | None = None,
) -> None:
    """Rows with the columns `required`, of which `detect` may ask for more. `parse(row)` returns another row, of a
    format that megaswift has, or an `UntokenizedSample` (for preferences a `PreferenceExample`). Such rows are of this
    format before any other."""
    from megaswift.data.formats import FORMATS, RowFormat, parse_into_known_format

    _take("data format", name, (one.name for one in FORMATS))
    parsed = parse_into_known_format(name, parse, tasks)
    entry = RowFormat(name, tuple(required), parsed, tasks=tuple(tasks), rank=-9, common=True)
    FORMATS.replace(name, entry if detect is None else replace(entry, detect=detect))
    if PLUGINS.reading is not None:
        PLUGINS.with_formats.add(PLUGINS.reading)


def loss_scale(name: str, table: Mapping[str, Any]) -> None:
    """A table of `--loss_scale`: {"REGULAR EXPRESSION": [weight]} or {"KEYWORD": [weight, weight of what follows]}."""
    from megaswift.config.facts.loss_scale import NAMED

    _take("loss scale", name, NAMED)
    NAMED[name] = dict(table)


def dpo_loss(name: str, formula: Callable[[Any], Any]) -> None:
    """A value of `--loss_type` in dpo: `formula(PairLogprobsAndRatios)` -> [p], a loss for each pair."""
    from megaswift.losses.dpo_loss_types import LOSS_TYPES

    _loss("dpo", name, LOSS_TYPES)
    LOSS_TYPES[name] = formula


def kto_loss(name: str, formula: Callable[[Any, Any, Any], Any], needs_kl: bool = False) -> None:
    """A value of `--loss_type` in kto: `formula(rewards, desirable, zero)` -> [n], a loss for each completion.
    `rewards` [n]: beta x log-ratios; `desirable` [n]: labels; `zero` []: with `needs_kl` beta x KL of mismatched pairs,
    else 0."""
    from megaswift.config.parts.losses import KL_PAIRS
    from megaswift.losses.kto import LOSS_TYPES

    _loss("kto", name, LOSS_TYPES, needs=frozenset({KL_PAIRS} if needs_kl else ()))
    LOSS_TYPES[name] = formula


def cpo_loss(name: str, formula: Callable[[Any, Any], Any], per_token: bool = False) -> None:
    """A value of `--loss_type` in cpo: `formula(rewards, settings)` -> [p], a loss for each pair. `rewards.chosen`,
    `.rejected`, `.difference` [p]: log-probabilities of answers, sums, with `per_token` means; `settings`: `beta`,
    `simpo_gamma`, `label_smoothing`."""
    from megaswift.losses.cpo import LOSS_TYPES, CpoLossType

    _loss("cpo", name, LOSS_TYPES)
    LOSS_TYPES[name] = CpoLossType(formula, per_token)


def orpo_loss(name: str, formula: Callable[[Any], Any]) -> None:
    """A value of `--loss_type` in orpo: `formula(logps)` -> [p], in place of the odds ratio's term, of weight `beta`.
    `logps.chosen`, `.rejected`, `.difference` [p]: mean log-probabilities of answers."""
    from megaswift.losses.orpo import LOSS_TYPES

    _loss("orpo", name, LOSS_TYPES)
    LOSS_TYPES[name] = formula


def rm_loss(name: str, formula: Callable[[Any, Any], Any]) -> None:
    """A value of `--loss_type` in rm: `formula(scores, margin)` -> [p], a loss for each pair. `scores.chosen`,
    `.rejected`, `.difference` [p]; `margin` [p]: that of the rows, or 0."""
    from megaswift.losses.reward import LOSS_TYPES

    _loss("rm", name, LOSS_TYPES)
    LOSS_TYPES[name] = formula


def policy_loss(name: str, formula: Callable[[Any], Any], loss_agg_mode: str = "token-mean") -> None:
    """A value of `--loss_type` in grpo: `formula(PolicyLossInputs)` -> [b, s], a loss for each token, neither masked
    nor reduced; `loss_agg_mode`: by what the sum is divided, unless the option is given."""
    from megaswift.losses.policy_loss_types import LOSS_TYPES, PolicyLossType

    _loss("grpo", name, LOSS_TYPES, loss_agg_mode)
    LOSS_TYPES[name] = PolicyLossType(formula)


def _loss(
    task: str, name: str, formulas: Mapping[str, Any], mode: str | None = None, needs: frozenset[str] = frozenset()
) -> None:
    from megaswift.config.parts.losses import PLUGIN_LOSSES, LossEntry, loss_names
    from megaswift.config.parts.preference import LOSSES

    _take(f"{task} loss", name, (*formulas, *loss_names(task)))
    PLUGIN_LOSSES[task, name] = LossEntry(name, task, "plugin", needs, loss_agg_mode=mode)
    LOSSES[task] = loss_names(task)
    _choice("loss_type", name)


def advantage_estimator(
    name: str,
    estimate: Callable[[Any], Any],
    per_token: bool = False,
    compares: bool = True,
    kl_in_reward: bool = False,
) -> None:
    """A value of `--advantage_estimator` in grpo: `estimate(EstimatorInput)` -> advantages [n], or [n, t] with
    `per_token`. `compares`: it needs several completions of a prompt. `kl_in_reward`: default of that option."""
    from megaswift.config.parts.estimators import (
        ESTIMATOR_NAMES,
        PLUGIN_ESTIMATORS,
        AdvantageEstimatorEntry,
        advantage_estimator_names,
    )
    from megaswift.losses.advantage_estimators import ESTIMATORS

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


def callback(name: str, make: Callable[[], Any]) -> None:
    """A `megaswift.trainers.hook.Hook` of every run of this command; `make()` is called on each rank."""
    from megaswift.trainers.hook import PLUGIN_HOOKS

    PLUGIN_HOOKS[name] = make


def optimizer(
    name: str,
    make: Callable[[list[dict[str, Any]], Any], Any],
    states: Sequence[str],
    step: str | None = None,
    elementwise: bool = False,
) -> None:
    """A value of `--optimizer`: `make(groups, options)` -> a torch optimizer of these parameter groups, whose `lr` and
    `weight_decay` are set before each step; `options`: section `optim`. `states`: names of its states, each of the
    parameter's shape and float32; `step`: the name under which it counts steps, if it does. `elementwise`: it updates
    each number by itself; others run on engine ddp only, where tensors are whole."""
    from megaswift.config.parts.optimizer import OPTIMIZERS, PLUGIN_OPTIMIZERS, PluginOptimizerParts

    _take("optimizer", name, OPTIMIZERS)
    PLUGIN_OPTIMIZERS[name] = PluginOptimizerParts(make, tuple(states), step, elementwise)
    _choice("optimizer", name)


def family(entry: Family) -> None:
    """A model family of the native engine: a table of config.json's fields and of weights (docs/families.md)."""
    from megaswift.models.family import FAMILIES

    _take("model family", entry.name, FAMILIES.names())
    FAMILIES.replace(entry.name, entry)
