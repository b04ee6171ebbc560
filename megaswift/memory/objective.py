"""What a task asks of a training step besides passes over its rows: documents of a row, outputs of the head, forward
passes before the step, and a copy of the weights of a reference.

Owns these facts by task, from the options alone; the losses themselves are `megaswift/losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config import SwiftConfig
from megaswift.losses.options.loss_table import KL_PAIRS, RUNNING_MEAN, losses_needing
from megaswift.losses.options.preference import loss_types_of, needs_reference
from megaswift.options.tasks import PAIRS

LAST_TOKENS = ("rm", "seq_cls")
"""Tasks that score whole documents."""
DEVICE = "device"
HOST = "host"
UNITS = {**dict.fromkeys(PAIRS, "pairs"), "kto": "examples"}
"""Names of rows."""
FIELDS = {
    "dpo": ("logprobs", "entropy", "correct", "mean_logit"),
    "kto": ("logprobs", "entropy", "mean_logit"),
    **dict.fromkeys(("orpo", "cpo", "simpo"), ("logprobs", "mean_logit")),
}
"""Outputs of the vocabulary's head that a loss and its metrics read."""


@dataclass(frozen=True)
class Objective:
    """The loss of a run, as far as memory and time of a step depend on it."""

    unit: str = "rows"
    """What batch sizes count."""
    documents: int = 1
    """Documents of such a unit, each of up to max_length tokens."""
    fields: tuple[str, ...] = ("logprobs", "correct")
    """Outputs of the vocabulary's head."""
    last_tokens: bool = False
    """Whether the head reads the last token of each document alone."""
    forward_passes: float = 0
    """Forward passes over the rows of a step before it trains."""
    reference: str = ""
    """Where a copy of the weights lies for the reference: `device`, `host`, or empty where there is none."""


def objective_of(cfg: SwiftConfig) -> Objective:
    """Return the objective of a run of a task in `megaswift.options.tasks.PLANNED`."""
    fields = FIELDS.get(cfg.task, Objective.fields)
    if cfg.task == "dpo" and cfg.preference.use_weighting:
        fields = (*fields, "log_sum_sq")
    return Objective(
        UNITS.get(cfg.task, Objective.unit),
        2 if cfg.task in PAIRS else 1,
        fields,
        cfg.task in LAST_TOKENS,
        forward_passes_before_step(cfg),
        _reference(cfg),
    )


def forward_passes_before_step(cfg: SwiftConfig) -> float:
    """Count the forward passes of a step before it trains: for the reference's scores, KTO's reference point, BCO's
    running mean.

    A pass over KTO's mismatched answers counts as a whole one, because they have as many tokens as the batch's own.
    """
    if not needs_reference(cfg):
        return 0
    loss_type = loss_types_of(cfg)[0]
    if loss_type in losses_needing("kto", KL_PAIRS):
        return 3  # the model on mismatched answers, and the reference on these and on the batch's own
    by_reference = not cfg.preference.precompute_ref_log_probs
    return by_reference + (loss_type in losses_needing("kto", RUNNING_MEAN))


def _reference(cfg: SwiftConfig) -> str:
    """New adapters need no copy, because the base model is the reference; scores that are computed before training
    need none either."""
    preference = cfg.preference
    if not needs_reference(cfg) or preference.precompute_ref_log_probs or cfg.model.train_type != "full":
        return ""
    return HOST if preference.offload_reference else DEVICE
