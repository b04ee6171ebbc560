"""Multi-turn rollouts: the model and an environment take turns.

Owns the turns and which tokens are the model's own; what the chat template writes between turns is `chat_turns.py`'s.
Conversations advance independently of each other (`waves.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import util
from itertools import accumulate, chain
from typing import Any

import numpy as np

from megaswift.data.prompts.source import Prompt
from megaswift.errors import ConfigError, Problem, RewardError
from megaswift.rollout.sampler import Completion, Sampler, SamplingParams
from megaswift.trainers.rl.agents.session import Session
from megaswift.trainers.rl.chat_turns import REFUSALS, ChatTurns, Conversation, ModelTurn, refusal_text
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors, Message, Observation, Turn
from megaswift.trainers.rl.waves import Ask, Asker, Leave, Talk, lead_conversations


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
    """Turns of the model."""
    rewritten: int = 0
    """Turns of the model after which the chat template writes the conversation otherwise than its tokens are."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt with the environment's first observation; empty where it gave none."""
    prompt_content: str | tuple[Message, ...] = ()
    """The same as `Prompt.content`."""
    segments: tuple[str, ...] = ()
    """Of an agent's session: why each of its segments began."""
    further: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Segments after the first that the model has answered: where in `token_ids` each begins, and its own prompt."""

    def prompt(self, given: Prompt) -> Prompt:
        """The prompt that was answered: the row's, with the first observation."""
        if not self.prompt_ids:
            return given
        return replace(given, token_ids=self.prompt_ids, content=self.prompt_content)

    @property
    def reward(self) -> float:
        """The environment's, added up."""
        return sum(self.rewards)


def model_token_mask(completion: Completion) -> tuple[bool, ...]:
    """Mark the tokens that are the model's own: all of them, except in a conversation."""
    return completion.own if isinstance(completion, MultiTurnCompletion) else (True,) * len(completion.token_ids)


def asked_prompt(given: Prompt, completion: Completion) -> Prompt:
    """Return the prompt that a completion answers."""
    return completion.prompt(given) if isinstance(completion, MultiTurnCompletion) else given


@dataclass
class _OpenDialogue:
    """A conversation under way."""

    prompt: Prompt
    flag: str
    """The environment, for messages."""
    room: int
    """Tokens that the model and the environment may write, all together."""
    asked: Prompt
    """The prompt with the environment's first observation."""
    conversation: Conversation | None = None
    """As the chat template writes it; None before the first turn."""
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    turns: int = 0
    rewritten: int = 0
    ended: bool = False
    finished: bool = False

    def closed(self) -> MultiTurnCompletion:
        """The completion that the conversation has become."""
        return MultiTurnCompletion(
            tuple(self.tokens),
            tuple(self.logprobs),
            self.finished,
            tuple(self.own),
            tuple(self.messages),
            tuple(self.rewards),
            tuple(self.ends),
            self.turns,
            self.rewritten,
            () if self.asked is self.prompt else self.asked.token_ids,
            () if self.asked is self.prompt else self.asked.content,
        )


@dataclass(frozen=True)
class MultiTurnRunner:
    """Leads the conversations of a run."""

    make: Callable[[], EnvironmentWithNamedErrors]
    chat: ChatTurns
    max_turns: int | None
    """Maximum turns of the model; None: until the environment ends it, or the tokens do."""
    max_length: int | None = None
    """Tokens of a prompt with its first observation and the completion; None: any number."""

    def write(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        greedy: Collection[int] = (),
    ) -> list[Completion]:
        """Write one conversation for each prompt; those of the places in `greedy` by the likeliest tokens.

        A turn's tokens depend on the conversation before it and on the seed, which is made of the conversation's seed
        and the number of the turn: not on when other conversations are ready.
        """

        def begin(number: int, ask: Asker) -> Talk[MultiTurnCompletion]:
            own = replace(sampling, temperature=0.0) if number in greedy else sampling
            return self._talk(prompts[number], seeds[number], own, ask)

        return [*lead_conversations(begin, len(prompts), sampler, sampling)]

    def _talk(self, prompt: Prompt, seed: int, sampling: SamplingParams, ask: Asker) -> Talk[MultiTurnCompletion]:
        """Lead one conversation, or let an agent do it."""
        environment: EnvironmentWithNamedErrors = yield self.make
        if environment.closes:
            yield Leave(environment.close)
        content: Any = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
        if environment.is_agent:
            session = Session(self.chat, sampling, seed, self.max_turns, self.max_length)
            with _endpoint(environment.flag).opened(session, ask) as address:
                reward = yield partial(environment.run, content, address, prompt.columns, session.begin)
            yield environment.close
            return completion_of_session(session, reward, environment.flag)
        observation = yield partial(environment.reset, content, prompt.columns, prompt.number)
        dialogue = self._begun(prompt, environment, observation, sampling.max_tokens)
        while not dialogue.ended:
            context = [*dialogue.asked.token_ids, *dialogue.tokens]
            drawn = np.random.SeedSequence([seed, dialogue.turns]).generate_state(1, np.uint64)[0] >> 1
            room = dialogue.room - len(dialogue.tokens)
            completion = yield Ask(context, room, int(drawn), not sampling.temperature)
            turn = self._said(dialogue, completion, sampling.stop_token_ids)
            if not dialogue.ended:
                answer = yield partial(environment.step, turn.content)
                self._answered(dialogue, turn, answer)
        yield environment.close
        return dialogue.closed()

    def _begun(
        self, prompt: Prompt, environment: EnvironmentWithNamedErrors, observation: Observation, most: int
    ) -> _OpenDialogue:
        """A conversation after the first observation of its environment."""
        if not observation:
            return _OpenDialogue(prompt, environment.flag, most, prompt)
        flag = environment.flag
        with rendering(flag, [] if isinstance(observation, str) else [m["role"] for m in observation]):
            asked, conversation = self._observed(prompt, observation)
        room = most if self.max_length is None else min(most, self.max_length - len(asked.token_ids))
        if room < 1:
            rule = f"reset returned an observation: the prompt now has {len(asked.token_ids)} tokens, no room to answer"
            raise RewardError(Problem(flag, rule, f"use a --max_length above {len(asked.token_ids)}"))
        return _OpenDialogue(prompt, flag, room, asked, conversation)

    def _observed(self, prompt: Prompt, observation: str | list[Message]) -> tuple[Prompt, Conversation | None]:
        """The prompt with an observation: text goes to the end of its last message, if that is a user's; messages
        follow it."""
        if isinstance(prompt.content, str) and isinstance(observation, str):
            ids = (*prompt.token_ids, *self.chat.tokens("", observation))
            return replace(prompt, token_ids=ids, content=prompt.content + observation), None
        asked: list[Message] = (
            [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else [*prompt.content]
        )
        added = 0
        if not isinstance(observation, str):
            asked += observation
            added = len(observation)
        elif asked[-1]["role"] == "user":
            asked[-1] = {**asked[-1], "content": _with_text(asked[-1].get("content"), observation)}
        else:
            asked.append({"role": "user", "content": observation})
            added = 1
        conversation = self.chat.begin(asked, prompt.tools, added)
        ids = tuple(self.chat.tokens("", conversation.text))
        return replace(prompt, token_ids=ids, content=tuple(asked)), conversation

    def _said(self, dialogue: _OpenDialogue, completion: Completion, stops: Sequence[int]) -> ModelTurn:
        """Add the model's turn, with as many tokens as there is room for."""
        room = dialogue.room - len(dialogue.tokens)
        ids = list(completion.token_ids[:room])
        before = [*dialogue.asked.token_ids, *dialogue.tokens]
        dialogue.tokens += ids
        dialogue.own += [True] * len(ids)
        dialogue.logprobs += completion.logprobs[:room]
        turn = self.chat.model_turn(before, ids, stops)
        dialogue.messages.append({"role": "assistant", "content": turn.content})
        dialogue.turns += 1
        dialogue.ended = not completion.finished or len(completion.token_ids) > room
        return turn

    def _answered(self, dialogue: _OpenDialogue, turn: ModelTurn, answer: Turn) -> None:
        """Add the environment's answer to the model's turn."""
        answers, reward, done = answer
        dialogue.rewards.append(reward)
        dialogue.ends.append(sum(dialogue.own))
        dialogue.finished = done or not answers or dialogue.turns == self.max_turns
        dialogue.ended = dialogue.finished
        if dialogue.ended:
            return

        # The answers as the chat template writes them, up to the model's next turn.
        with rendering(dialogue.flag, [m["role"] for m in answers]):
            if dialogue.conversation is None:
                dialogue.conversation = self.chat.begin(dialogue.asked.content, dialogue.asked.tools)
            found = self.chat.go_on(dialogue.conversation, turn, answers)
            tokens = self.chat.tokens(turn.end, found.between)
        if len(dialogue.tokens) + len(tokens) >= dialogue.room:  # no room for another turn: cut off
            dialogue.ended = True
            return
        dialogue.conversation = found.conversation
        dialogue.rewritten += found.rewritten
        dialogue.messages += answers
        dialogue.tokens += tokens
        dialogue.own += [False] * len(tokens)


def check_endpoint_packages(flag: str) -> None:
    """Raise ConfigError where the packages of the endpoint for an agent (`flag`) are missing."""
    lacking = [name for name in ("fastapi", "uvicorn") if util.find_spec(name) is None]
    if lacking:
        rule = f"is an agent, whose endpoint needs {' and '.join(lacking)}"
        raise ConfigError(Problem(flag, rule, "pip install 'megaswift[serve]'"))


def _endpoint(flag: str) -> Any:
    """The endpoint of this process."""
    check_endpoint_packages(flag)
    return importlib.import_module("megaswift.trainers.rl.agents.endpoint").agent_endpoint()


def completion_of_session(session: Session, reward: float, flag: str) -> MultiTurnCompletion:
    """Return an agent's session: its segments one after the other."""
    segments = session.answered()
    if not segments:
        raise RewardError(Problem(flag, "run returned and has not asked the model for anything", "use its base_url"))
    places = accumulate(len(one.tokens) for one in segments[:-1])
    logprobs = tuple(chain.from_iterable(one.logprobs for one in segments))
    return MultiTurnCompletion(
        tuple(chain.from_iterable(one.tokens for one in segments)),
        logprobs,
        all(one.finished for one in segments),
        tuple(chain.from_iterable(one.own for one in segments)),
        tuple(session.messages),
        (reward,),
        (len(logprobs),),
        sum(one.turns for one in segments),
        sum(one.rewritten for one in segments),
        segments[0].prompt_ids,
        segments[0].asked,
        tuple(one.reason for one in session.segments),
        tuple((place, one.prompt_ids) for place, one in zip(places, segments[1:], strict=True)),
    )


def _with_text(content: Any, text: str) -> Any:
    """A message's content with text behind it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return (content or "") + text


@contextmanager
def rendering(flag: str, roles: Sequence[str]) -> Iterator[None]:
    """Raise RewardError, naming the environment (`flag`), where the template refuses or omits its messages."""
    try:
        yield
    except REFUSALS as error:
        whose = f"answers as {' and '.join(dict.fromkeys(roles))}" if roles else "answers"
        raise RewardError(
            Problem(
                flag,
                f"{whose}, which the chat template does not render: {refusal_text(error)}",
                "return messages of another role, such as user, or use --chat_template FILE.jinja",
            )
        ) from None
