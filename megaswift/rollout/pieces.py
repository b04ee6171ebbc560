"""Completions in pieces: vLLM and servers finish what they have begun, so a completion that may be interrupted is asked
for in short pieces, each after the tokens before it. These are in the sampler's prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaswift.rollout.sampler import Completion, SamplingParams

PIECE = 64
"""Tokens of a piece."""


@dataclass(frozen=True)
class Piece:
    """The next request to a sampler."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int


def next_piece(prompt: Sequence[int], written: Completion, sampling: SamplingParams, seed: int) -> Piece | None:
    """Return the next piece of a completion; None where it has ended. The first piece has the completion's own seed,
    every other one a seed made of it and of its place, below 2^63."""
    place = len(written.token_ids)
    if written.finished or place >= sampling.max_tokens:
        return None
    own = int(np.random.SeedSequence([seed, place]).generate_state(1, np.uint64)[0] >> 1) if place else seed
    some = replace(sampling, max_tokens=min(PIECE, sampling.max_tokens - place))
    return Piece([*prompt, *written.token_ids], some, own)


def with_piece(written: Completion, more: Completion) -> Completion:
    """Return a completion with the tokens of its next piece."""
    return replace(
        written,
        token_ids=written.token_ids + more.token_ids,
        logprobs=written.logprobs + more.logprobs,
        finished=more.finished,
    )
