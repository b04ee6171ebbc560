"""A run's adapters as PEFT's configuration object, without a model. Errors that PEFT itself raises become
ConfigErrors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.adapters.options.methods import MAPPED, METHODS, PeftMethod
from megaswift.bridge.adapters.options.non_lora import NonLoraPeftConfig
from megaswift.errors import ConfigError, Problem, did_you_mean_hint, first_line

ENDLESS = 1 << 30
"""AdaLoRA's total_step while the run's length is not known yet."""


def build_peft_config(
    train_type: str, lora: LoraConfig, other: NonLoraPeftConfig, max_steps: int | None, task: str = "CAUSAL_LM"
) -> Any:
    """Returns the configuration that `peft.get_peft_model` takes.

    Args:
        other: The options of adapters other than LoRA.
        max_steps: The run's length; None: not known yet.
        task: PEFT's name of what the model is for.
    """
    import peft

    method = METHODS.get(train_type)
    if method is None:
        return peft.LoraConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,  # type: ignore[arg-type]
            target_parameters=list(lora.target_parameters) or None,
            **_where(lora, task),
        )
    kind = getattr(peft, method.config, None)
    label = f"--train_type {train_type}"
    if kind is None:
        raise ConfigError(Problem(label, f"the installed PEFT has no {method.config}", "run pip install -U peft"))
    fields = {**_taken(lora, other, max_steps, method), **_further(other.peft_config, kind, method)}
    try:
        return kind(**fields, **_where(lora, task))
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(label, f"PEFT rejects it: {first_line(error)}")) from None


def _where(lora: LoraConfig, task: str) -> dict[str, Any]:
    """Returns the fields that all adapters have: the modules they are put on, those that train whole."""
    targets: Any = list(lora.target_modules)
    if targets == ["all-linear"]:
        targets = "all-linear"
    elif len(targets) == 1 and re.search(r"[\\.*+?()|\[\]^$]", targets[0]):
        targets = targets[0]  # PEFT takes a regular expression as a string
    return {"target_modules": targets, "modules_to_save": list(lora.modules_to_save) or None, "task_type": task}


def _taken(lora: LoraConfig, other: NonLoraPeftConfig, max_steps: int | None, method: PeftMethod) -> dict[str, Any]:
    """The fields that have options."""
    options = {**vars(lora), **vars(other)}
    values = {field: options[option] for option, field in method.takes.items()}
    values = {field: list(v) if isinstance(v, tuple) else v for field, v in values.items()}
    if "boft_block_num" in values:  # PEFT wants exactly one of the two to be there
        number = values["boft_block_num"] or 0
        values |= {"boft_block_num": number, "boft_block_size": 0 if number else values["boft_block_size"]}
    if "total_step" in values:
        values["total_step"] = values["total_step"] or max_steps or ENDLESS
    if "feedforward_modules" in values:
        values["feedforward_modules"] = values["feedforward_modules"] or []
    return values


def _further(given: Mapping[str, str], kind: Any, method: PeftMethod) -> dict[str, Any]:
    """The fields of `--peft_config`: JSON values, other text as it is."""
    fields = {f.name for f in dataclasses.fields(kind) if f.init} - set(MAPPED)
    options = {field: option for option, field in method.takes.items()}
    problems = []
    accepted = {}
    for name, text in given.items():
        label = f"--peft_config {name}={text}"
        if name in options:
            problems.append(Problem(label, "is set by an option", f"--{options[name]} {text}"))
        elif name not in fields:
            rule = "is set by the run" if name in MAPPED else f"is not a field of PEFT's {method.config}"
            problems.append(
                Problem(label, rule, did_you_mean_hint(name, sorted(fields - set(options))) or "leave it out")
            )
        try:
            accepted[name] = json.loads(text)
        except json.JSONDecodeError:
            accepted[name] = text
    if problems:
        raise ConfigError(problems)
    return accepted


def train_type_for_peft_type(peft_type: str) -> str:
    """`train_type` of an adapter folder's peft_type; empty where none serves it."""
    if peft_type.upper() == "LORA":
        return "lora"
    return next((name for name in METHODS if name.upper() == peft_type.upper()), "")
