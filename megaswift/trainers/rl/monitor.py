"""Warns about generations from which nothing can be learned, and ends a run in which no completion had a reward with
exit code 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megaswift.errors import EXIT_NO_PROGRESS, Problem, UserError
from megaswift.log import count_text
from megaswift.rewards.scoring import reward_function_flag
from megaswift.trainers.hook import Hook, Run, StepRecord
from megaswift.trainers.hooks.progress import print_warning
from megaswift.trainers.rl.source import RolloutSource

PATIENCE = 3
"""Generations in a row with the same trouble before a warning."""
APART = 1.05
"""Mean of exp |sampler's - trainer's log-probability| from which the two are not the same policy: bfloat16 alone stays
well below."""


class NoRewardsError(UserError):
    """No reward function applied to any completion."""

    title = "training failed: no completion had a reward"
    exit_code = EXIT_NO_PROGRESS


class RolloutMonitor(Hook):
    """Checks each generation after the first step that used it. Warns of each kind of trouble once, and again if it
    comes back."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self.in_a_row: dict[str, int] = {}
        self.completions = 0
        """Completions of the whole run."""
        self.rewarded = 0
        """Those of them that a reward function applied to."""
        self.silent = False
        """Whether no completion of the last generation had a reward."""

    def on_start(self, run: Run) -> None:
        """Start counting; a checkpoint without these counts is taken as one of a run that had rewards."""
        if run.step and not self.completions:
            self.completions = 1
            self.rewarded = 1

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Count a new generation, and warn of troubles that last for several of them."""
        if self.source.fresh:
            self.count(step.number)
            for kind, text in self.troubles(step).items():
                self.in_a_row[kind] = self.in_a_row.get(kind, 0) + 1 if text else 0
                if self.in_a_row[kind] == PATIENCE:
                    print_warning(f"the last {PATIENCE} generations, up to step {step.number}: {text}")

    def count(self, number: int) -> None:
        """Count a generation, and warn at the first of several in a row that have no reward at all."""
        given = sum(not math.isnan(rollout.total) for rollout, _ in self.source.fresh)
        if not given and not self.silent:
            print_warning(
                f"step {number}: {self.flags()} returned None for all {len(self.source.fresh)} completions: their "
                "advantages are 0"
            )
        self.completions += len(self.source.fresh)
        self.rewarded += given
        self.silent = not given

    def flags(self) -> str:
        """Return the options of the reward functions as the user typed them."""
        return ", ".join(reward_function_flag(function) for function in self.source.parts.scorer.functions)

    def on_end(self, run: Run) -> None:
        """Check progress before the last checkpoint, as for skipped steps."""
        if not run.interrupted and run.step >= run.total_steps:
            self.check_progress(run)

    def check_progress(self, run: Run) -> None:
        """Raise `NoRewardsError` where no completion of the whole run had a reward."""
        if self.completions and not self.rewarded:
            raise NoRewardsError(
                Problem(
                    self.flags(),
                    f"returned None for every completion of all {count_text(run.step, 'step')}: every advantage was "
                    "0, so nothing was learned. Nothing was exported",
                    "return a number for each completion that the function applies to, and None only for the others",
                )
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"completions": self.completions, "rewarded": self.rewarded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.completions = int(state["completions"])
        self.rewarded = int(state["rewarded"])

    def troubles(self, step: StepRecord) -> dict[str, str]:
        """Return what is wrong with the generation, by kind; empty where nothing is."""
        metrics = self.source.metrics
        settings = self.source.settings
        spread = metrics.get("reward_std", math.inf)
        same = spread < 1e-8 if settings.group == 1 else metrics["frac_reward_zero_std"] == 1 and math.isfinite(spread)
        unscored = sum(math.isnan(rollout.total) for rollout, _ in self.source.fresh)
        whose = "all completions have" if settings.group == 1 else "all completions of a prompt have"
        apart = step.result.metrics.get("sampling/token_mult_prob_error", 1.0)
        return {
            "spread": f"{whose} the same reward (mean {metrics.get('reward', math.nan):.4g}), so their advantages are "
            "0. Check the rewards in completions.jsonl, and whether the prompts are too hard or too easy"
            if same
            else "",
            "unscored": f"every reward function returned None for {unscored} of {len(self.source.fresh)} completions, "
            "which have no effect on the loss"
            if 0 < unscored < len(self.source.fresh)
            else "",
            "length": "every completion was cut off at --max_completion_length: the model may need more tokens, or "
            "does not generate the token that ends an answer (its tokenizer's eos_token, eos_token_id of "
            "generation_config.json)"
            if metrics["completions/clipped_ratio"] == 1
            else "",
            "sampler": "the sampler's log-probabilities differ from the trainer's (sampling/token_mult_prob_error "
            f"{apart:.3g}; 1: equal). Check that both use the same dtype; --importance_sampling_correction true limits "
            "the effect"
            if apart > APART and "sampling/staleness" not in metrics
            else "",
        }
