"""The reward of quickstart_rl.sh: 1 for the expected answer to the letter, 0 for anything else."""

from __future__ import annotations

Message = dict[str, str]


def exact(
    prompts: list[list[Message]], completions: list[list[Message]], response: list[str], **columns: object
) -> list[float]:
    """One value a completion. `response` is the rows' last message, which the model does not see."""
    return [float(said[0]["content"].strip() == expected) for said, expected in zip(completions, response, strict=True)]
