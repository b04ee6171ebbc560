"""Section `critic`: the value model of PPO, and the discounts and scales of its advantages."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import option
from megaswift.options.tasks import PPO


@dataclass(frozen=True)
class CriticConfig:
    """Critic"""

    critic_model: str | None = option(
        None,
        "Initial critic folder; default: the model",
        aliases=("value_model",),
        tasks=PPO,
        metavar="DIR",
        common=PPO,
    )
    critic_learning_rate: float | None = option(
        None, "Learning rate of the critic; default: learning_rate", above=0, tasks=PPO, metavar="X", common=PPO
    )
    vf_coef: float = option(0.1, "Value loss coefficient", minimum=0, tasks=PPO)
    cliprange_value: float = option(0.2, "Value clip range", above=0, tasks=PPO)
