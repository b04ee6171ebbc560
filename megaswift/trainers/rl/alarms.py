"""Warnings of generations that teach nothing, while there is time to change the run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megaswift.trainers.hook import Hook, Step
from megaswift.trainers.progress import warn
from megaswift.trainers.rl.source import RolloutSource

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

PATIENCE = 3
"""So many generations in a row before anything is said."""
APART = 1.05
"""Mean of exp |sampler's - trainer's log-probability| from which the two are not the same policy: bfloat16 alone stays
well below."""


class Alarms(Hook):
    """Looks at each generation when a step has used it for the first time; tells each kind of trouble once, and again
    after it was gone."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self.in_a_row: dict[str, int] = {}

    def on_step(self, loop: Loop, step: Step) -> None:
        """Counts."""
        if self.source.fresh:
            for kind, text in self.troubles(step).items():
                self.in_a_row[kind] = self.in_a_row.get(kind, 0) + 1 if text else 0
                if self.in_a_row[kind] == PATIENCE:
                    warn(f"the last {PATIENCE} generations, up to step {step.number}: {text}")

    def troubles(self, step: Step) -> dict[str, str]:
        """By kind what is wrong with the generation; empty where nothing is."""
        found, settings = self.source.metrics, self.source.settings
        spread = found.get("reward_std", math.inf)
        same = spread < 1e-8 if settings.group == 1 else found["frac_reward_zero_std"] == 1 and math.isfinite(spread)
        unscored = sum(math.isnan(rollout.total) for rollout, _ in self.source.fresh)
        whose = "all completions have" if settings.group == 1 else "all completions of a prompt have"
        apart = step.result.metrics.get("sampling/token_mult_prob_error", 1.0)
        return {
            "spread": f"{whose} the same reward (mean {found.get('reward', math.nan):.4g}), so their advantages are 0. "
            f"completions.jsonl shows them: are the "
            "rewards what they should be, the prompts neither too hard nor too easy?"
            if same
            else "",
            "unscored": f"every reward function returned None for {unscored} of {len(self.source.fresh)} completions, "
            "which have no effect on the loss"
            if unscored
            else "",
            "length": "every completion was cut off at --max_completion_length: the model may need more tokens, or "
            "does not know the token "
            "that ends an answer (its tokenizer's eos_token, eos_token_id of generation_config.json)"
            if found["completions/clipped_ratio"] == 1
            else "",
            "sampler": "the sampler's log-probabilities are not the trainer's (sampling/token_mult_prob_error "
            f"{apart:.3g}, 1 is none): the same dtype on both sides? --importance_sampling_correction true limits "
            "the effect"
            if apart > APART and "sampling/staleness" not in found
            else "",
        }
