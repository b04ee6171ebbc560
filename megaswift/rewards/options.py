"""Section `rewards`: reward functions and reward models, and the settings of the built-in functions."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import option
from megaswift.options.tasks import PPO, RL


@dataclass(frozen=True)
class RewardConfig:
    """Rewards"""

    reward_funcs: tuple[str, ...] = option(
        (),
        "Reward functions: accuracy, format, ... (docs/rewards.md), or FILE.py:function",
        aliases=("reward_functions",),
        tasks=RL,
        takes_objects=True,
        common=RL,
    )
    reward_model: tuple[str, ...] = option((), "Reward model folders", tasks=RL, metavar="DIR...", common=PPO)
    reward_weights: tuple[float, ...] = option(
        (), "Weight of each of reward_funcs, then of each reward_model; default: 1 each", tasks=RL, metavar="NUMBER..."
    )
    cosine_min_len_value_wrong: float = option(
        -0.5,
        "cosine reward: reward of a wrong answer of length 0",
        tasks=RL,
        only_with={"reward_funcs": "cosine"},
        neutral=(None,),
    )
    cosine_max_len_value_wrong: float = option(
        0.0,
        "cosine reward: reward of a wrong answer of length cosine_max_len",
        tasks=RL,
        only_with={"reward_funcs": "cosine"},
        neutral=(None,),
    )
    cosine_min_len_value_correct: float = option(
        1.0,
        "cosine reward: reward of a correct answer of length 0",
        tasks=RL,
        only_with={"reward_funcs": "cosine"},
        neutral=(None,),
    )
    cosine_max_len_value_correct: float = option(
        0.5,
        "cosine reward: reward of a correct answer of length cosine_max_len",
        tasks=RL,
        only_with={"reward_funcs": "cosine"},
        neutral=(None,),
    )
    cosine_max_len: int | None = option(
        None,
        "cosine reward: maximum length; default: max_completion_length",
        minimum=1,
        unit="tokens",
        tasks=RL,
        only_with={"reward_funcs": "cosine"},
        neutral=(None,),
    )
    repetition_n_grams: int = option(
        3,
        "repetition reward: n-gram size",
        minimum=1,
        unit="tokens",
        tasks=RL,
        only_with={"reward_funcs": "repetition"},
        neutral=(None,),
    )
    repetition_max_penalty: float = option(
        -1.0,
        "repetition reward: penalty if all n-grams repeat",
        maximum=0,
        tasks=RL,
        only_with={"reward_funcs": "repetition"},
        neutral=(None,),
    )
    soft_max_length: int | None = option(
        None,
        "soft_overlong reward: length of reward -1; default: max_completion_length",
        minimum=1,
        unit="tokens",
        tasks=RL,
        only_with={"reward_funcs": "soft_overlong"},
    )
    soft_cache_length: int | None = option(
        None,
        "soft_overlong reward: length of the interval over which it falls from 0 to -1",
        minimum=1,
        unit="tokens",
        tasks=RL,
        only_with={"reward_funcs": "soft_overlong"},
    )
    code_timeout: float = option(
        6.0,
        "code reward: time limit per test case",
        above=0,
        unit="seconds",
        tasks=RL,
        only_with={"reward_funcs": "code"},
    )
    code_memory: int = option(
        512,
        "code reward: memory limit per test case",
        minimum=16,
        unit="MiB",
        tasks=RL,
        only_with={"reward_funcs": "code"},
    )
    allow_unsafe_code: bool = option(
        False, "code reward: run programs even if no sandbox is available", tasks=RL, only_with={"reward_funcs": "code"}
    )
