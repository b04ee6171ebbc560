"""The rewards of a run: functions and models of its options, and what can be wrong with them before anything is
built."""

from __future__ import annotations

from dataclasses import fields

from megaswift.config import SwiftConfig
from megaswift.rewards.contract import RewardFunction, RewardOptions
from megaswift.rewards.load import reward_functions


def rewards_of(cfg: SwiftConfig) -> list[RewardFunction]:
    """In the order of `reward_weights`; ConfigError with all that is wrong."""
    rl = cfg.rl
    functions = reward_functions(
        rl.reward_funcs, RewardOptions(**{f.name: getattr(rl, f.name) for f in fields(RewardOptions)})
    )
    if not rl.reward_model:
        return functions
    from megaswift.config.inference import WeightsOptions
    from megaswift.rewards.reward_model import reward_models  # loads transformers

    options = WeightsOptions(trust_remote_code=cfg.model.trust_remote_code)
    return [*functions, *reward_models(rl.reward_model, options, {f.name for f in functions})]


def weights_of(cfg: SwiftConfig) -> list[float]:
    """One for each reward."""
    rl = cfg.rl
    return [*rl.reward_weights] or [1.0] * (len(rl.reward_funcs) + len(rl.reward_model))
