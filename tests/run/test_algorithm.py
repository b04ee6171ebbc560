"""The row `algorithm` of the first screen: what was chosen by name, and every coefficient that the choice reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.options.tasks import TASKS
from megaswift.run.algorithm import algorithm_text
from tests.registered_plugins import kept_registrations

REWARD = {"reward_funcs": ["accuracy"]}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"task": "sft"}, ""),
    (
        {"task": "pt", "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        "cross-entropy, mtp_num_layers 2, mtp_loss_scaling_factor 0.3",
    ),
    ({"task": "dpo", "beta": 0.3}, "loss_type sigmoid, beta 0.3"),
    (
        {"task": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2], "rpo_alpha": 0.5},
        "loss_type 1 x sigmoid + 0.2 x sft, beta 0.1, rpo_alpha 0.5",
    ),
    ({"task": "dpo", "loss_type": ["discopop"]}, "loss_type discopop, beta 0.1, discopop_tau 0.05"),
    ({"task": "kto"}, "loss_type kto, beta 0.1, desirable_weight 1, undesirable_weight 1"),
    ({"task": "orpo"}, "loss_type odds_ratio, beta 0.1"),
    ({"task": "cpo"}, "loss_type sigmoid, beta 0.1, cpo_alpha 1"),
    ({"task": "simpo"}, "loss_type simpo, beta 2, cpo_alpha 0, simpo_gamma 1"),
    ({"task": "rm", "center_rewards_coefficient": 0.01}, "loss_type bradley_terry, center_rewards_coefficient 0.01"),
    (
        {"task": "grpo", "beta": 0.04, "epsilon_high": 0.28, **REWARD},
        "advantage_estimator grpo, loss_type dapo, loss_agg_mode token-mean, beta 0.04 (KL k3 in the loss), "
        "epsilon 0.2, epsilon_high 0.28 (ratios clipped to 0.8 - 1.28), scale_rewards group, "
        "importance_sampling_level token",
    ),
    (
        {"task": "grpo", "loss_type": ["cispo"], **REWARD},
        "advantage_estimator grpo, loss_type cispo, loss_agg_mode token-mean, beta 0 (no KL penalty), "
        "epsilon_high 5 (largest ratio), scale_rewards group, importance_sampling_level token",
    ),
    (
        {"task": "ppo", **REWARD},
        "advantage_estimator gae, whiten_advantages true, loss_type bnpo, loss_agg_mode token-mean, "
        "beta 0.05 (KL k1 subtracted from the rewards), epsilon 0.2 (ratios clipped to 0.8 - 1.2), lam 0.95, "
        "vf_coef 0.1, cliprange_value 0.2",
    ),
    ({"task": "seq_cls", "num_labels": 1, "problem_type": "regression"}, "problem_type regression"),
    ({"task": "token_cls", "num_labels": 3}, ""),
    (
        {"task": "gkd", "lmbda": 0.25, "seq_kd": True, "teacher_model": "t", "sft_alpha": 0.1},
        "beta 0.5 (generalized Jensen-Shannon divergence), temperature 1, lmbda 0.25 (25% of steps on the model's "
        "completions, others on the teacher's), sft_alpha 0.1",
    ),
    (
        {"task": "gkd", "beta": 0.0, "lmbda": 0.0, "gkd_logits_topk": 8},
        "beta 0 (KL(teacher | model)), temperature 1, lmbda 0 (all steps on the rows'), gkd_logits_topk 8",
    ),
    ({"task": "embedding"}, "loss_type infonce, infonce_temperature 0.1"),
    (
        {"task": "embedding", "loss_type": ["contrastive"], "matryoshka_dims": [2, 4]},
        "loss_type contrastive, contrastive_margin 0.5, matryoshka_dims 2 4",
    ),
    ({"task": "reranker"}, "loss_type pointwise_reranker"),
    (
        {"task": "generative_reranker", "loss_type": ["listwise_reranker"]},
        "loss_type listwise_reranker, listwise_temperature 1, positive_token yes, negative_token no",
    ),
]


@pytest.mark.parametrize(("options", "text"), CASES)
def test_the_row(options: dict[str, Any], text: str) -> None:
    assert algorithm_text(SwiftConfig(**options)) == text


def test_every_task_has_a_case() -> None:
    assert {options["task"] for options, _ in CASES} == set(TASKS)


@kept_registrations()
def test_an_estimator_and_a_loss_of_a_plugin(tmp_path: Path) -> None:
    """They may read every option; those that were left as they are stay away from the screen."""
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "from megaswift import plugins\n"
        "plugins.advantage_estimator('median', lambda x: x.rewards - x.rewards.median())\n"
        "plugins.policy_loss('unclipped', lambda x: -x.advantages)\n"
    )
    options = {"task": "grpo", "external_plugins": [str(plugin)], "pass_at_k": 2, **REWARD}
    cfg = SwiftConfig(advantage_estimator="median", loss_type=["unclipped"], **options)
    assert algorithm_text(cfg) == (
        "advantage_estimator median, loss_type unclipped, loss_agg_mode token-mean, beta 0 (no KL penalty), "
        "pass_at_k 2, importance_sampling_level token"
    )
    given = SwiftConfig(advantage_estimator="median", loss_type=["unclipped"], epsilon=0.3, **options)
    assert "(no KL penalty), epsilon 0.3, pass_at_k 2" in algorithm_text(given), "without a claim of what it does"
    with pytest.raises(ConfigError) as caught:
        SwiftConfig(advantage_estimator="medain", loss_type=["unclipped"], **options)
    assert str(caught.value).count(" | median") == 1
    assert "(--external_plugins FILE registers others)" in str(caught.value)
