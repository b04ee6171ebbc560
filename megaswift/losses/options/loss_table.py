"""Every value of `--loss_type`: its task, its paper, and what it needs. Options of a loss name it in `only_with`.

One row a loss. The accepted values, `--help`, the rules about ignored and conflicting options, and what the trainer
computes beforehand all derive from these rows; the formulas are in `megaswift.losses`, under the same names. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

KL_PAIRS = "kl_pairs"
"""Needs log-probabilities of mismatched prompts and completions in each micro-batch (KTO's z0)."""
RUNNING_MEAN = "running_mean"
"""Needs the running mean of rewards (BCO's delta)."""
COVARIANCES = "covariances"
"""Needs the covariance of each token's log-probability and advantage over the global batch (Clip-Cov, KL-Cov)."""
# What the sum over tokens is divided by, under verl's names.
TOKEN_MEAN = "token-mean"
"""The tokens of the global batch."""
SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
"""The completions of the global batch."""
SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
"""The completions of the global batch, where each counts with the mean over its tokens."""
SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
"""The completions of the global batch times `max_completion_length`."""
AGG_MODES = (TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM, SEQ_MEAN_TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM_NORM)
TASK_OF = {"simpo": "cpo", "ppo": "grpo", "generative_reranker": "reranker"}
"""Tasks whose losses are rows of another task."""
ALPHAPO = "alphapo"
"""simpo without the likelihood term, with an `alpha`: a name for settings, not a formula of its own."""


@dataclass(frozen=True)
class LossOptionCondition:
    """A condition on the value of an option, without which a loss cannot be used."""

    option: str
    holds: Callable[[Any], bool]
    why: str
    """Follows the option and its value in the message."""
    fix: str


@dataclass(frozen=True)
class LossEntry:
    """One loss of one task."""

    name: str
    task: str
    paper: str
    needs: frozenset[str] = frozenset()
    """`KL_PAIRS`, `RUNNING_MEAN`, `COVARIANCES`."""
    requires: tuple[LossOptionCondition, ...] = ()
    loss_agg_mode: str | None = None
    """For a policy's loss: the default of `loss_agg_mode`."""


def _entry(task: str, name: str, paper: str, *requires: LossOptionCondition, needs: str = "") -> LossEntry:
    return LossEntry(name, task, paper, frozenset(needs.split()), requires)


def _policy(name: str, paper: str, mode: str, *requires: LossOptionCondition, needs: str = "") -> LossEntry:
    return replace(_entry("grpo", name, paper, *requires, needs=needs), loss_agg_mode=mode)


_UNSORTED = LossOptionCondition(
    "use_weighting",
    lambda v: not v,
    "weights individual pairs, but {loss_type} sorts the pairs",
    "--use_weighting false",
)
_SMOOTHED = LossOptionCondition(
    "label_smoothing", lambda v: v > 0, "must be > 0: exo_pair takes its logarithm", "--label_smoothing 0.001"
)
_BELOW_HALF = LossOptionCondition(
    "label_smoothing",
    lambda v: v < 0.5,
    "must be < 0.5: robust divides by 1 - 2 x label_smoothing",
    "--label_smoothing 0.1",
)
_LEVEL = "importance_sampling_level"
_PER_COMPLETION = LossOptionCondition(
    _LEVEL,
    lambda v: v != "token",
    "loss_type luspo uses one ratio per completion",
    "--importance_sampling_level sequence",
)
_PER_TOKEN = LossOptionCondition(
    _LEVEL,
    lambda v: v == "token",
    "loss_type vespo computes its own ratio per completion",
    "--importance_sampling_level token",
)
_CAP = LossOptionCondition(
    "epsilon_high",
    lambda v: v is None or v >= 1,
    "is the maximum ratio in loss_type cispo; below 1 it would clip the ratio of every token",
    "--epsilon_high 5",
)
_WHOLE = LossOptionCondition(
    "loss_agg_mode",
    lambda v: v in (None, SEQ_MEAN_TOKEN_MEAN),
    "does not apply to loss_type rloo: all tokens of a completion share one ratio, and all completions have equal "
    "weight",
    "--loss_type dapo, or leave out --loss_agg_mode",
)

LOSS_TABLE: tuple[LossEntry, ...] = (
    _entry("dpo", "sigmoid", "arXiv:2305.18290"),
    _entry("dpo", "hinge", "arXiv:2305.10425"),
    _entry("dpo", "ipo", "arXiv:2310.12036"),
    _entry("dpo", "exo_pair", "arXiv:2402.00856", _SMOOTHED),
    _entry("dpo", "nca_pair", "arXiv:2402.05369"),
    _entry("dpo", "robust", "arXiv:2403.00409", _BELOW_HALF),
    _entry("dpo", "bco_pair", "arXiv:2404.04656"),
    _entry("dpo", "sppo_hard", "arXiv:2405.00675"),
    _entry("dpo", "aot", "arXiv:2406.05882", _UNSORTED),
    _entry("dpo", "aot_unpaired", "arXiv:2406.05882", _UNSORTED),
    _entry("dpo", "apo_zero", "arXiv:2408.06266"),
    _entry("dpo", "apo_down", "arXiv:2408.06266"),
    _entry("dpo", "discopop", "arXiv:2406.08414"),
    _entry("dpo", "sft", "arXiv:2404.19733"),
    _entry("dpo", "sigmoid_norm", "arXiv:2411.15124"),
    _entry("kto", "kto", "arXiv:2402.01306", needs=KL_PAIRS),
    _entry("kto", "apo_zero_unpaired", "arXiv:2408.06266"),
    _entry("kto", "bco", "arXiv:2404.04656", needs=RUNNING_MEAN),
    _entry("cpo", "sigmoid", "arXiv:2401.08417"),
    _entry("cpo", "hinge", "arXiv:2305.10425"),
    _entry("cpo", "ipo", "arXiv:2310.12036"),
    _entry("cpo", "simpo", "arXiv:2405.14734"),
    _entry("cpo", ALPHAPO, "arXiv:2501.03884"),
    _entry("orpo", "odds_ratio", "arXiv:2403.07691"),
    _entry("rm", "bradley_terry", "arXiv:2203.02155"),
    _entry("embedding", "infonce", "arXiv:1807.03748"),
    _entry("embedding", "cosine_similarity", "arXiv:1908.10084"),
    _entry("embedding", "contrastive", "10.1109/CVPR.2006.100"),
    _entry("embedding", "online_contrastive", "10.1109/CVPR.2006.100"),
    _entry("embedding", "cosent", "10.1109/TASLP.2024.3402087"),
    _entry("reranker", "pointwise_reranker", "arXiv:1901.04085"),
    _entry("reranker", "listwise_reranker", "arXiv:2101.08751"),
    _entry("reranker", "listnet_reranker", "10.1145/1273496.1273513"),
    _policy("dapo", "arXiv:2503.14476", TOKEN_MEAN),
    _policy("grpo", "arXiv:2402.03300", SEQ_MEAN_TOKEN_MEAN),
    _policy("bnpo", "arXiv:2402.03300", TOKEN_MEAN),
    _policy("dr_grpo", "arXiv:2503.20783", SEQ_MEAN_TOKEN_SUM_NORM),
    _policy("cispo", "arXiv:2506.13585", TOKEN_MEAN, _CAP),
    _policy("sapo", "arXiv:2511.20347", SEQ_MEAN_TOKEN_MEAN),
    _policy("luspo", "arXiv:2602.05261", SEQ_MEAN_TOKEN_SUM, _PER_COMPLETION),
    _policy("vespo", "arXiv:2602.10693", TOKEN_MEAN, _PER_TOKEN),
    _policy("rloo", "arXiv:2402.14740", SEQ_MEAN_TOKEN_MEAN, _WHOLE),
    _policy(
        "clip_cov",
        "arXiv:2505.22617",
        TOKEN_MEAN,
        needs=COVARIANCES,
    ),
    _policy("kl_cov", "arXiv:2505.22617", TOKEN_MEAN, needs=COVARIANCES),
)
"""The first loss of a task is its default."""


PLUGIN_LOSSES: dict[tuple[str, str], LossEntry] = {}
"""By task and name, losses that `--external_plugins` have registered; they may read every option."""


def loss_entries(task: str, names: tuple[str, ...] | None = None) -> tuple[LossEntry, ...]:
    """Return the rows of a task in the order of the table, or those that `names` lists."""
    rows = (e for e in (*LOSS_TABLE, *PLUGIN_LOSSES.values()) if e.task == TASK_OF.get(task, task))
    return tuple(e for e in rows if names is None or e.name in names)


def loss_names(task: str) -> tuple[str, ...]:
    """Return the values that `loss_type` takes in a task, the default first."""
    return tuple(e.name for e in loss_entries(task))


def losses_needing(task: str, need: str) -> frozenset[str]:
    """Return the losses of a task that have this need."""
    return frozenset(e.name for e in loss_entries(task) if need in e.needs)
