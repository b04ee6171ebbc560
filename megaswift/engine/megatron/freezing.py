"""`--freeze_parameters` and `--trainable_parameters`: which weights of a rank train, before the model is wrapped.

Owns also the gradient of the first layer's input, which some layouts need although the embedding is frozen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron.core.transformer.transformer_config import TransformerConfig

from megaswift import distributed
from megaswift.bridge.plan import PlanEntry, WeightPlan
from megaswift.engine.megatron.lora.layers import require_output_grad_hook
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.weights import LocalParam
from megaswift.engine.trainable_patterns import nothing_trains_problem, unmatched_pattern_problem
from megaswift.errors import ConfigError


def freeze_weights(
    placed: Sequence[LocalParam], plan: WeightPlan, patterns: Sequence[str], trained: Sequence[str]
) -> None:
    """Parameters whose Hugging Face names match any of `patterns` do not train, unless one of `trained` matches.
    Collective.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing trains.
    """
    for option, given, trains in (("freeze_parameters", patterns, False), ("trainable_parameters", trained, True)):
        hits = _set_trainable(placed, given, trains)
        matched = {p for own in distributed.all_gather_objects(hits) for p in own} if given else set()
        missing = [p for p in given if p not in matched]
        if missing:
            examples = [name for entry in plan.entries[:12] for name in entry.hf][:4]
            raise ConfigError([unmatched_pattern_problem(option, p, examples) for p in missing])
    if patterns and not any(distributed.all_gather_objects(any(p.tensor.requires_grad for p in placed))):
        raise ConfigError(nothing_trains_problem(patterns))


def _set_trainable(placed: Iterable[LocalParam], patterns: Iterable[str], trains: bool) -> list[str]:
    """Parameters of which any Hugging Face name matches a pattern train, or do not; the patterns that match."""
    hits: list[str] = []
    for item in placed:
        found = [pattern for pattern in patterns if _matches(item.entry, [pattern])]
        if found and not item.entry.rule.buffer:  # a router's bias on the choice of experts never trains
            item.tensor.requires_grad_(trains)
        hits += found
    return hits


def _matches(entry: PlanEntry, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in entry.hf)


def _splits_experts(plan: WeightPlan, patterns: Sequence[str], trained: Sequence[str]) -> bool:
    """Whether of any layer's experts some train a weight that others do not."""
    kinds: dict[str, set[bool]] = {}
    for entry in plan.entries:
        if entry.expert is not None:
            kind = entry.megatron.replace(f".experts.{entry.expert}.", ".experts.")
            kinds.setdefault(kind, set()).add(_matches(entry, trained) or not _matches(entry, patterns))
    return any(len(trains) > 1 for trains in kinds.values())


def require_input_gradients(
    chunks: Iterable[SwiftGPT],
    config: TransformerConfig,
    plan: WeightPlan,
    patterns: Sequence[str],
    trained: Sequence[str],
) -> None:
    """With a frozen embedding, let the first layer's input require a gradient where the weights behind it need that.

    Megatron-Core's recomputed parts compute gradients only where an input requires one: without it the weights inside
    get none, in silence. Ranks of expert parallelism exchange gradients in each MoE layer: where one of them trains
    experts and another does not, one would wait for the other for ever.
    """
    granularity = config.recompute_granularity
    parts = set(config.recompute_modules or ())
    recomputes = granularity == "full" or (granularity == "selective" and parts != {"core_attn"})
    uneven = config.expert_model_parallel_size > 1 and _splits_experts(plan, patterns, trained)
    for chunk in chunks if patterns and (recomputes or uneven) else ():
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(require_output_grad_hook)
