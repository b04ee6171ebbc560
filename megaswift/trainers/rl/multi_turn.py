"""Multi-turn rollouts: the model and an environment take turns.

Owns the turns, the tokens between them and which tokens are the model's own. All conversations of a rank go on
together, turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

import numpy as np

from megaswift.data.jinja_sandbox_limits import REFUSED
from megaswift.data.rl_prompts import Prompt
from megaswift.errors import Problem, RewardError, first_line
from megaswift.rollout.sampler import Completion, Sampler, SamplingParams
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors, Message

SAID = "megaswift-turn"
"""Stands for what the model said, to find the place in the template's text: what comes before it may depend on what
follows."""
DUMMY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SAID}]


@dataclass(frozen=True)
class MultiTurnCompletion(Completion):
    """`token_ids` hold the environment's text too; `logprobs` are of the model's own tokens."""

    own: tuple[bool, ...] = ()
    messages: tuple[Message, ...] = ()
    """The model's turns and the answers to them."""
    rewards: tuple[float, ...] = ()
    """The environment's, one for each turn of the model that it answered."""
    ends: tuple[int, ...] = ()
    """How many own tokens there were at the end of each of these turns."""
    turns: int = 0
    """Of the model."""

    @property
    def reward(self) -> float:
        """The environment's, added up."""
        return sum(self.rewards)


def model_token_mask(completion: Completion) -> tuple[bool, ...]:
    """Which tokens are the model's own: all, but in a conversation."""
    return completion.own if isinstance(completion, MultiTurnCompletion) else (True,) * len(completion.token_ids)


@dataclass
class _Open:
    """A conversation under way."""

    prompt: Prompt
    seed: int
    environment: EnvironmentWithNamedErrors
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    turns: int = 0
    ended: bool = False
    finished: bool = False

    def closed(self) -> MultiTurnCompletion:
        """As it is now."""
        return MultiTurnCompletion(
            tuple(self.tokens),
            tuple(self.logprobs),
            self.finished,
            tuple(self.own),
            tuple(self.messages),
            tuple(self.rewards),
            tuple(self.ends),
            self.turns,
        )


@dataclass(frozen=True)
class MultiTurnRunner:
    """How conversations of a run go."""

    make: Callable[[], EnvironmentWithNamedErrors]
    tokenizer: Any
    max_turns: int | None
    """Of the model; None: until the environment ends it, or the tokens do."""
    template_variables: Mapping[str, bool] = field(default_factory=dict)
    """What the run sets of the chat template."""

    def between(self, answers: Sequence[Message], flag: str) -> list[int]:
        """The tokens from the end of the model's turn to the beginning of its next: the template's text of the answers.

        RewardError that names the environment (`flag`) where the template has none.
        """

        def after(messages: Sequence[Message], prompt: bool) -> str:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt, **self.template_variables
                )
            )
            _, separator, rest = text.partition(SAID)
            if not separator:
                raise ValueError("it omits the assistant's message")
            return rest

        try:
            tail, rest, stop = after(DUMMY, False), after([*DUMMY, *answers], True), self.tokenizer.eos_token or ""
        except REFUSED as error:
            roles = " and ".join(dict.fromkeys(str(m["role"]) for m in answers))
            raise RewardError(
                Problem(
                    flag,
                    f"answers as {roles}, which the chat template does not render: {first_line(error)}",
                    "return messages of another role, such as user, from step, or use --chat_template FILE.jinja",
                )
            ) from None
        # the model wrote its end of turn
        end = tail.index(stop) + len(stop) if stop and stop in tail else len(commonprefix([tail, rest]))
        return list(self.tokenizer(rest[end:], add_special_tokens=False)["input_ids"])

    def write(
        self, sampler: Sampler, sampling: SamplingParams, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Completion]:
        """One conversation for each prompt."""
        every = [_Open(p, s, self.make()) for p, s in zip(prompts, seeds, strict=True)]
        for one in every:
            one.environment.reset(
                one.prompt.content if isinstance(one.prompt.content, str) else list(one.prompt.content),
                one.prompt.columns,
            )
        while under_way := [one for one in every if not one.ended]:
            room = max(sampling.max_tokens - len(one.tokens) for one in under_way)
            contexts = [[*one.prompt.token_ids, *one.tokens] for one in under_way]
            drawn = [
                int(np.random.SeedSequence([one.seed, one.turns]).generate_state(1, np.uint64)[0] >> 1)
                for one in under_way
            ]
            completions = sampler.generate(contexts, replace(sampling, max_tokens=room), drawn)
            for one, completion in zip(under_way, completions, strict=True):
                self._turn(one, completion, sampling.max_tokens)
        return [one.closed() for one in every]

    def _turn(self, one: _Open, completion: Completion, most: int) -> None:
        """The model's turn, and the environment's after it."""
        room = most - len(one.tokens)
        ids, whole = list(completion.token_ids[:room]), completion.finished and len(completion.token_ids) <= room
        one.tokens += ids
        one.own += [True] * len(ids)
        one.logprobs += completion.logprobs[:room]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        one.messages.append({"role": "assistant", "content": text})
        one.turns += 1
        if not whole:
            one.ended = True
            return
        answers, reward, done = one.environment.step(text)
        one.rewards.append(reward)
        one.ends.append(sum(one.own))
        one.finished = one.ended = done or not answers or one.turns == self.max_turns
        if one.ended:
            return
        tokens = self.between(answers, one.environment.flag)
        if len(one.tokens) + len(tokens) >= most:  # no room for another turn: cut off
            one.ended = True
            return
        one.messages += answers
        one.tokens += tokens
        one.own += [False] * len(tokens)
