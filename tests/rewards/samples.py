"""Samples to score."""

from __future__ import annotations

from typing import Any

from megaswift.rewards.reward_input import RewardInput


def judged(text: str, tokens: int | None = None, **columns: Any) -> RewardInput:
    """A completion of plain text; its tokens are its characters, or so many different ones."""
    ids = tuple(map(ord, text)) if tokens is None else tuple(range(tokens))
    return RewardInput("Q", text, ids, True, columns)


def said(text: str, **columns: Any) -> RewardInput:
    """The same as messages."""
    return RewardInput(
        [{"role": "user", "content": "Q"}],
        [{"role": "assistant", "content": text}],
        tuple(map(ord, text)),
        True,
        columns,
    )
