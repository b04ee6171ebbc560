"""Sessions of agents under 64 kinds of published templates: whatever an agent edits, each turn stands behind the tokens
that the sampler was given for it.

Covers: megaswift/trainers/rl/agents/session.py.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.prompts.collate import RolloutCollator
from megaswift.data.prompts.source import Prompt
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.run.policy_task import rl_settings
from megaswift.trainers.rl.agents.session import REASONS, Segment, Session, SessionError
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.multi_turn import completion_of_session
from megaswift.trainers.rl.scorer import ScoredCompletion
from megaswift.trainers.rl.source import scored_completion_to_rollout_tokens
from megaswift.trainers.rl.waves import Ask
from tests.trainers.rl.dialogues import TOOLS, WORDS, Recorder
from tests.trainers.rl.makers import config
from tests.trainers.rl.test_sampled_tokens import KINDS, USER_ONLY, tokenizer_of

REQUESTS = 8


def edited(messages: list[Any], draws: random.Random, role: str) -> list[Any]:
    """The messages of the next request: more of them, or now and then a changed history."""
    kind = draws.random()
    if kind < 0.1 and len(messages) > 2:
        return messages[:1]
    if kind < 0.2:
        return [{**messages[0], "content": messages[0]["content"] + " again"}, *messages[1:]]
    if kind < 0.3 and messages[-1]["role"] == "assistant":
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"].strip()}]
    said = f"zq {draws.choice(WORDS).strip()}"
    return [*messages, {"role": role, "name": "search", "content": said} if role == "tool" else _user(said)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.wide
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [pytest.param(3, id="few"), pytest.param(12, id="all", marks=pytest.mark.slow)])
def test_whatever_an_agent_edits(name: str, count: int) -> None:
    tokenizer = tokenizer_of(name)
    reasons: Counter[str] = Counter()
    for number in range(count):
        draws = random.Random(f"{name} {number}")
        roles = ("user",) if name in USER_ONLY else ("user", "tool")
        recorder = Recorder(tokenizer, tools=True, seed=number)
        session = Session(
            ChatTurns(tokenizer), SamplingParams(20_000, stop_token_ids=recorder.stops), number, None, None
        )
        messages = [_user(f"dialogue {number} begins")]
        wrote: list[tuple[Segment, Ask, Completion]] = []
        for _ in range(REQUESTS):
            tools = TOOLS if draws.random() < 0.9 else TOOLS[:1]
            try:
                segment, ask = session.ask(messages, tools, draws.choice((None, None, 20)))
            except SessionError as error:  # a role that the template does not write at this place
                assert error.code == "invalid_messages"
                messages = messages[:1]
                continue
            completion = recorder.one(tuple(ask.context), SamplingParams(ask.room))
            turn = session.answer(segment, ask, completion)
            segment.history.append({"role": "assistant", "content": turn.content})
            wrote.append((segment, ask, completion))
            messages = edited([*messages, segment.history[-1]], draws, draws.choice(roles))
        for segment in session.segments:
            check(segment, [(ask, completion) for one, ask, completion in wrote if one is segment])
        reasons.update(segment.reason for segment in session.segments)
        answers = [c for segment in session.segments for one, _, c in wrote if one is segment]
        assert trained_tokens(session) == [token for completion in answers for token in completion.token_ids]
        roles_said = [message["role"] for message in session.messages]
        assert roles_said.count("assistant") == len(wrote) and roles_said[-1] == "assistant"
    assert reasons["first"] == count and reasons.keys() <= {*REASONS}
    assert count < 12 or {"edited", "rewound", "tools"} <= reasons.keys()


def trained_tokens(session: Session) -> list[int]:
    """The labels of the micro-batch of a session, each in the document of its segment."""
    settings = rl_settings(config(environment="w.py:World"), 1)
    talk = completion_of_session(session, 0.0, "--environment w.py:World")
    rollout = ScoredCompletion(talk.prompt(Prompt(0, (1,), "", {})), talk, "", {}, 0.0)
    tokens = scored_completion_to_rollout_tokens(0, rollout, settings)
    (batch,) = RolloutCollator(PaddingShape(), True, uniform=False).batches([[tokens]])
    segments = session.answered()
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [
        *accumulate((len(one.prompt_ids) + len(one.tokens) for one in segments), initial=0)
    ]
    assert batch.input_ids[0].tolist() == [t for one in segments for t in (*one.prompt_ids, *one.tokens)]
    return batch.labels[batch.loss_weights != 0].tolist()


def test_each_time_that_the_same_is_asked_has_a_seed_of_its_own() -> None:
    """However often: an agent may choose the best of hundreds of answers."""
    tokenizer = tokenizer_of(next(iter(KINDS)))
    session = Session(ChatTurns(tokenizer), SamplingParams(100), 0, None, None)
    asked = [session.ask([_user("dialogue")], None, None)[1] for _ in range(600)]
    assert len({(*ask.context,) for ask in asked}) == 1 and len({ask.seed for ask in asked}) == 600


@pytest.mark.parametrize(
    ("name", "arguments", "tools", "reasons"),
    [
        ("search", '{"query":  "a"}', TOOLS, ["first"]),
        ("search", '{"query": "b"}', TOOLS, ["first", "edited"]),
        ("other", '{"query": "a"}', TOOLS, ["first", "edited"]),
        ("search", '{"query": "a"}', TOOLS[:1], ["first", "tools"]),
    ],
)
def test_a_call_is_compared_by_its_name_and_arguments(
    name: str, arguments: str, tools: Any, reasons: list[str]
) -> None:
    """Not by its identifier or the blanks of its JSON; other tools begin a new segment too."""
    tokenizer = tokenizer_of(next(iter(KINDS)))
    session = Session(ChatTurns(tokenizer), SamplingParams(1000), 0, None, None)

    def message(number: str, name: str, arguments: str) -> dict[str, Any]:
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    segment, ask = session.ask([_user("dialogue")], TOOLS, None)
    session.answer(segment, ask, Completion((5, tokenizer.eos_token_id), (-0.5, -0.5), True))
    segment.history.append(message("1", "search", '{"query": "a"}'))
    session.ask([_user("dialogue"), message("2", name, arguments), _user("on")], tools, None)
    assert [one.reason for one in session.segments] == reasons


def test_a_session_ends_with_what_the_model_wrote() -> None:
    """An agent may return while the model still writes: these requests leave no token."""
    tokenizer = tokenizer_of(next(iter(KINDS)))
    session = Session(ChatTurns(tokenizer), SamplingParams(1000), 0, None, None)
    segment, ask = session.ask([_user("dialogue")], None, None)
    written = (5, tokenizer.eos_token_id)
    said = session.answer(segment, ask, Completion(written, (-0.5, -0.5), True)).content
    segment.history.append({"role": "assistant", "content": said})
    continued, _ = session.ask([_user("dialogue"), segment.history[-1], _user("on")], None, None)
    session.ask([_user("another")], None, None)
    assert continued is segment and len(session.segments) == 2 and len(segment.tokens) > len(written)
    talk = completion_of_session(session, 0.5, "--environment w.py:World")
    assert talk.token_ids == written and talk.own == (True, True) and talk.finished and talk.further == ()


@pytest.mark.parametrize(("most", "finished"), [(2, False), (3, True), (None, True)])
def test_an_answer_is_cut_at_the_room_that_was_asked_for(most: int | None, finished: bool) -> None:
    """A sampler that writes several turns at a time gives each of them the largest room. A session with such an answer
    is truncated."""
    tokenizer = tokenizer_of(next(iter(KINDS)))
    session = Session(ChatTurns(tokenizer), SamplingParams(1000), 0, None, None)
    segment, ask = session.ask([_user("dialogue")], None, most)
    written = (5, 6, tokenizer.eos_token_id)
    session.answer(segment, ask, Completion(written, (-0.5, -0.25, -0.125), True))
    assert segment.tokens == [*written[:most]] and segment.logprobs == [-0.5, -0.25, -0.125][:most]
    assert segment.finished == finished
    session.answer(*session.ask([_user("another")], None, None), Completion(written[2:], (-0.5,), True))
    assert completion_of_session(session, 0.0, "--environment w.py:World").finished == finished


def check(segment: Segment, turns: list[tuple[Ask, Completion]]) -> None:
    """The tokens of a segment are its turns' contexts and completions."""
    ids = [*segment.prompt_ids, *segment.tokens]
    own = [False] * len(ids)
    for ask, completion in turns:
        begin, end = len(ask.context), len(ask.context) + len(completion.token_ids)
        assert ids[:end] == [*ask.context, *completion.token_ids]
        own[begin:end] = [True] * len(completion.token_ids)
    assert [*[False] * len(segment.prompt_ids), *segment.own] == own
    assert segment.logprobs == [value for _, completion in turns for value in completion.logprobs]
