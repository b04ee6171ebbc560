"""Translates ms-swift's options of the importance sampling correction, whose modes have the same names with
different meanings.

Its `sequence_*` takes the geometric mean of a completion's ratios, where TRL takes the product, and its `sequence_mask`
keeps the weights of tokens (`_apply_rollout_importance_sampling` of its GRPO trainer). Both options are read together,
whichever source they come from, since the threshold means one thing or the other by the mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megaswift.options.sources import ConfigSource, GivenOptionValue

MODE = "rollout_importance_sampling_mode"
THRESHOLD = "rollout_importance_sampling_threshold"
DEFAULT_THRESHOLD = 2.0
"""ms-swift's."""
MEANINGS = {
    "token_truncate": ("token_truncate", "importance_sampling_clip_max"),
    "token_mask": ("token_mask", "importance_sampling_clip_max"),
    "sequence_truncate": ("geometric_truncate", "importance_sampling_clip_max"),
    "sequence_mask": ("token_truncate", "importance_sampling_filter_max"),
}
"""Its mode -> our mode, and the option that its threshold is."""
UNSET = ("none", "null", "")


def translate_rollout_correction_options(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """The sources without these two options, and what they mean where the last of them stood."""
    foreign = [
        (i, given) for i, source in enumerate(sources) for given in source.givens if given.name in (MODE, THRESHOLD)
    ]
    if not foreign:
        return list(sources)
    last = {given.name: given for _, given in foreign}
    rest = [
        replace(s, givens=tuple(given for given in s.givens if given.name not in (MODE, THRESHOLD))) for s in sources
    ]
    last_source = foreign[-1][0]
    rest[last_source] = replace(
        rest[last_source], givens=(*rest[last_source].givens, *_meant(last.get(MODE), last.get(THRESHOLD)))
    )
    return rest


def _meant(mode: GivenOptionValue | None, threshold: GivenOptionValue | None) -> Iterator[GivenOptionValue]:
    name = "" if mode is None else _text(mode)
    label = "" if mode is None else mode.label
    if threshold is not None:
        label = threshold.label
    value = DEFAULT_THRESHOLD if threshold is None else threshold.value
    if mode is None or name in UNSET or name not in MEANINGS:
        if mode is not None and name not in UNSET:
            yield GivenOptionValue("importance_sampling_mode", mode.value, mode.label)
        if threshold is not None:
            yield GivenOptionValue("importance_sampling_clip_max", value, label)
        return
    ours, bound = MEANINGS[name]
    yield GivenOptionValue("importance_sampling_mode", ours, mode.label)
    yield GivenOptionValue(bound, value, label)
    if bound != "importance_sampling_clip_max":
        yield GivenOptionValue(
            "importance_sampling_clip_max", None, mode.label
        )  # the tokens' own weights, without a bound


def _text(given: GivenOptionValue) -> str:
    value = given.value[0] if isinstance(given.value, list | tuple) and len(given.value) == 1 else given.value
    return "" if value is None else str(value).strip().lower()
