"""Agents that ask the run's model over OpenAI's API, by OpenAI's client: token ids are kept and only continued, and an
edited history begins a new segment.

Covers: megaswift/trainers/rl/agents/endpoint.py, megaswift/trainers/rl/agents/session.py.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import openai
import pytest

from megaswift.base.user_code import CLOCK
from megaswift.data.prompts.source import Prompt
from megaswift.errors import ConfigError, RewardError
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.serve.app import RequestRefused
from megaswift.trainers.rl import multi_turn
from megaswift.trainers.rl.agents.endpoint import TaggedCallParser, _OpenSession, agent_endpoint
from megaswift.trainers.rl.agents.session import Session
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, MultiTurnRunner
from tests.data import makers
from tests.trainers.rl.dialogues import TOOLS

CALL = '<tool_call>\n{"name": "search", "arguments": {"city": "Łódź"}}\n</tool_call>'
WAIT = 60.0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return makers.tokenizer("qwen", "qwen2_5")


class Says:
    """A sampler that says the next of some texts, one list for all conversations, and records what it was asked."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.asked: list[tuple[tuple[int, ...], int, Completion]] = []
        self.limits: list[int] = []

    def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
        return [self.one(tuple(p), sampling, seed) for p, seed in zip(prompts, seeds, strict=True)]

    def one(self, prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> Completion:
        text = self.texts[len(self.asked) % len(self.texts)]
        ids = self.tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        found = Completion(tuple(ids[: sampling.max_tokens]), (-0.5,) * min(len(ids), sampling.max_tokens), True)
        if len(ids) > sampling.max_tokens:
            found = Completion(found.token_ids, found.logprobs, False)
        self.asked.append((prompt, seed, found))
        self.limits.append(sampling.max_tokens)
        return found


class SaysSingle(Says):
    """The same, one prompt at a time."""

    def generate_one(self, prompt: Any, sampling: SamplingParams, seed: int, number: int) -> Completion:
        return self.one(tuple(prompt), sampling, seed)


def led(
    run: Callable[..., Any], sampler: Any, tokenizer: Any, count: int = 1, **limits: Any
) -> list[MultiTurnCompletion]:
    """The completions of an agent whose method is `run`."""

    class Agent:
        async def run(self, prompt: Any, base_url: str, **columns: Any) -> Any:
            if asyncio.iscoroutinefunction(run):
                return await run(prompt, base_url, **columns)
            return await asyncio.to_thread(run, prompt, base_url, **columns)

    said = ({"role": "user", "content": "go"},)
    ids = tuple(tokenizer.apply_chat_template(list(said), add_generation_prompt=True, return_dict=False))
    agent: Any = Agent
    runner = MultiTurnRunner(
        lambda: EnvironmentWithNamedErrors("--environment a.py:Agent", agent()),
        ChatTurns(tokenizer),
        limits.get("max_turns"),
        limits.get("max_length"),
    )
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = SamplingParams(limits.get("most", 600), stop_token_ids=(stop,))
    found = runner.write(sampler, sampling, [Prompt(i, ids, said, {"row": i}) for i in range(count)], range(count))
    return [one for one in found if isinstance(one, MultiTurnCompletion)]


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=WAIT)


def check_segments(found: MultiTurnCompletion, asked: list[tuple[tuple[int, ...], int, Completion]]) -> None:
    """Tokens trained are tokens sampled, each turn after the tokens that the sampler was given. `asked`: segment by
    segment."""
    edges = [0, *(place for place, _ in found.further), len(found.token_ids)]
    prompts = [found.prompt_ids, *(prompt for _, prompt in found.further)]
    texts = [(*prompt, *found.token_ids[a:b]) for prompt, (a, b) in zip(prompts, pairwise(edges), strict=True)]
    own = [t for t, mine in zip(found.token_ids, found.own, strict=True) if mine]
    assert own == [token for _, _, completion in asked for token in completion.token_ids]
    number = 0
    for context, _, completion in asked:
        turn = (*context, *completion.token_ids)
        number += texts[number][: len(turn)] != turn
        assert texts[number][: len(turn)] == turn
    assert number == len(texts) - 1
    assert list(found.logprobs) == [v for _, _, completion in asked for v in completion.logprobs]


@pytest.mark.wide
@pytest.mark.parametrize("kind", [Says, SaysSingle])
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_is_continued(kind: type[Says], stream: bool, tokenizer: Any) -> None:
    """With a tool's call and its result; the tokens are those of the whole conversation."""

    def run(prompt: Any, base_url: str, row: int) -> float:
        made = client(base_url)
        messages: list[Any] = [{"role": "system", "content": "be brief"}, *prompt]
        for _ in range(3):
            given: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 0.3}
            if stream:
                parts = [part for part in made.chat.completions.create(stream=True, **given) if part.choices]
                text = "".join(part.choices[0].delta.content or "" for part in parts)
                calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
                reason = parts[-1].choices[0].finish_reason
            else:
                choice = made.chat.completions.create(**given).choices[0]
                text, reason = choice.message.content or "", choice.finish_reason
                calls = choice.message.tool_calls or []  # type: ignore[assignment]
            reply: Any = {"role": "assistant", "content": text}
            if calls:
                function: Any = calls[0].function
                assert reason == "tool_calls" and json.loads(function.arguments) == {"city": "Łódź"}
                called = {"name": function.name, "arguments": function.arguments}
                reply["tool_calls"] = [{"id": calls[0].id, "type": "function", "function": called}]
                messages += [reply, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
            else:
                assert reason == "stop"
                messages += [reply, {"role": "user", "content": "and now?"}]
        return 0.75

    sampler = kind(tokenizer, f"I look.\n{CALL}", "It rains.  ", "Bye.")
    [found] = led(run, sampler, tokenizer)
    assert found.segments == ("first",) and not found.further and found.turns == 3 and found.finished
    assert found.reward == 0.75 and found.ends == (sum(found.own),)
    check_segments(found, sampler.asked)
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": f"I look.\n{CALL}"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains.  "},
        {"role": "user", "content": "and now?"},
    ]
    whole = tokenizer.apply_chat_template(said, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    ids = [*found.prompt_ids, *found.token_ids]
    assert ids[: len(whole)] == whole and tokenizer.decode(ids[len(whole) :]) == "Bye.<|im_end|>"
    assert [m["role"] for m in found.messages] == ["assistant", "tool", "assistant", "user", "assistant"]


EDITS: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "edited": lambda messages, more: messages.__setitem__(0, {"role": "user", "content": "go on"}),
    "edited answer": lambda messages, more: messages.__setitem__(1, {"role": "assistant", "content": "tw"}),
    "rewound": lambda messages, more: messages.__delitem__(slice(1, None)),
    "asked again": lambda messages, more: messages.pop(),
    "tools": lambda messages, more: more.update(tools=TOOLS),
    "answers itself": lambda messages, more: messages.extend(
        [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "go"}]
    ),
}
REASON = {"edited answer": "edited", "asked again": "rewound", "answers itself": "edited"}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_history_begins_a_new_segment(edit: str, tokenizer: Any) -> None:
    def run(prompt: Any, base_url: str, row: int) -> None:
        made = client(base_url)
        messages = list(prompt)
        more: dict[str, Any] = {}
        for turn in range(3):
            answer = made.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"next {turn}"}]
            if turn == 0:
                EDITS[edit](messages, more)

    sampler = Says(tokenizer, "one", "two and more", "three")
    [found] = led(run, sampler, tokenizer)
    assert found.segments == ("first", REASON.get(edit, edit)) and found.reward == 0.0
    assert found.turns == 3 and len(found.further) == 1
    check_segments(found, sampler.asked)
    said = [message["content"] for message in found.messages]
    assert said == ["one", "two and more", *said[2:-1], "three"] and found.messages[-2]["role"] == "user"


def test_two_histories_at_a_time_are_two_segments(tokenizer: Any) -> None:
    """As a main agent and its helper have them: each is continued, whichever asked last."""

    def run(prompt: Any, base_url: str, row: int) -> None:
        made = client(base_url)
        talks = [[{"role": "user", "content": name}] for name in ("main", "helper")]
        for _ in range(2):
            for messages in talks:
                answer = made.chat.completions.create(model="m", messages=messages).choices[0].message.content
                messages += [{"role": "assistant", "content": str(answer)}, {"role": "user", "content": "more"}]

    sampler = Says(tokenizer, "one", "two", "three and four", "five")
    [found] = led(run, sampler, tokenizer)
    assert found.segments == ("first", "edited") and found.turns == 4
    check_segments(found, [*sampler.asked[::2], *sampler.asked[1::2]])
    said = [message["content"] for message in found.messages]
    assert said == ["one", "two", "more", "three and four", "more", "five"], "in the order in which they were written"


def test_seeds_depend_on_what_is_asked_and_not_on_the_order(tokenizer: Any) -> None:
    def seeds(names: list[str]) -> dict[str, list[int]]:
        def run(prompt: Any, base_url: str, row: int) -> None:
            for name in names:
                client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": name}])

        sampler = Says(tokenizer, "one")
        led(run, sampler, tokenizer)
        found: dict[str, list[int]] = {}
        for name, (_, seed, _) in zip(names, sampler.asked, strict=True):
            found.setdefault(name, []).append(seed)
        return found

    one, other = seeds(["a", "b", "a"]), seeds(["b", "a", "a"])
    assert one == other and len({seed for each in one.values() for seed in each}) == 3


@pytest.mark.parametrize("kind", [Says, SaysSingle])
def test_an_agent_that_waits_for_all_others_holds_none(kind: type[Says], tokenizer: Any) -> None:
    done = threading.Semaphore(0)

    def run(prompt: Any, base_url: str, row: int) -> float:
        made = client(base_url)
        messages = list(prompt)
        for turn in range(3):
            if row == 3 and turn == 1:
                for _ in range(7):
                    assert done.acquire(timeout=WAIT), "the others wait for this one"
            answer = made.chat.completions.create(model="m", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(turn)}]
        done.release()
        return float(row)

    found = led(run, kind(tokenizer, "one", "two", "three"), tokenizer, count=8)
    assert [one.reward for one in found] == [*range(8)] and all(one.turns == 3 for one in found)


@pytest.mark.parametrize(
    ("given", "words", "code"),
    [
        ({"stop": ["x"]}, "stop is not supported", None),
        ({"logprobs": True}, "logprobs is not supported", None),
        ({"n": 2}, "n: a run answers a request once", None),
        ({"messages": []}, "must be a list of 1 to", None),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "--max_length is 1000", "context_length_exceeded"),
        ({"response_format": {"type": "json_object"}}, "not supported", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "images",
            None,
        ),
    ],
)
def test_requests_that_are_refused(given: dict[str, Any], words: str, code: str | None, tokenizer: Any) -> None:
    def run(prompt: Any, base_url: str, row: int) -> None:
        with pytest.raises(openai.BadRequestError) as error:
            client(base_url).chat.completions.create(**{"model": "m", "messages": prompt, **given})
        assert words in str(error.value) and error.value.code == code
        client(base_url).chat.completions.create(model="m", messages=prompt)

    sampler = Says(tokenizer, "one")
    [found] = led(run, sampler, tokenizer, max_length=1000)
    assert found.segments == ("first",) and len(sampler.asked) == 1


def test_limits_of_turns_and_tokens(tokenizer: Any) -> None:
    def run(prompt: Any, base_url: str, row: int) -> None:
        made = client(base_url)
        first = made.chat.completions.create(model="m", messages=prompt, max_tokens=2)
        assert first.choices[0].finish_reason == "length" and first.usage is not None
        assert first.usage.completion_tokens == 2
        made.chat.completions.create(model="m", messages=[*prompt, *prompt])
        with pytest.raises(openai.BadRequestError, match="the run allows 2 turns"):
            made.chat.completions.create(model="m", messages=prompt)

    sampler = Says(tokenizer, "one two three four five six seven")
    [found] = led(run, sampler, tokenizer, max_turns=2)
    assert sampler.limits == [2, 600] and found.segments == ("first", "edited")

    def talks(prompt: Any, base_url: str, row: int) -> None:
        messages = list(prompt)
        while True:
            try:
                answer = client(base_url).chat.completions.create(model="m", messages=messages).choices[0]
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
                return
            messages += [{"role": "assistant", "content": answer.message.content}, *prompt]

    [found] = led(talks, Says(tokenizer, "one two"), tokenizer, most=60)
    assert found.own[-1] and 1 < found.turns < 10 and len(found.token_ids) <= 60 and found.segments == ("first",)


PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_an_agent_may_be_another_program(tokenizer: Any) -> None:
    def run(prompt: Any, base_url: str, row: int) -> float:
        command = [sys.executable, "-c", PROGRAM, prompt[0]["content"]]
        done = subprocess.run(command, env={"OPENAI_BASE_URL": base_url}, capture_output=True, text=True, check=True)
        return float(len(done.stdout.strip()))

    [found] = led(run, Says(tokenizer, "four"), tokenizer)
    assert found.reward == 4.0 and tokenizer.decode(found.token_ids) == "four<|im_end|>"


def test_other_programs_of_the_machine_find_no_session(tokenizer: Any) -> None:
    """Nor does a web page by another name of this machine; an address is of no use after its session."""
    addresses = []

    def run(prompt: Any, base_url: str, row: int) -> None:
        addresses.append(base_url)
        client(base_url).chat.completions.create(model="m", messages=prompt)
        request = urllib.request.Request(f"{base_url}/models", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)

    led(run, Says(tokenizer, "one"), tokenizer)
    assert addresses[0].startswith("http://127.0.0.1:")
    for address in (addresses[0], f"{agent_endpoint().address}/sessions/x/v1"):
        with pytest.raises(openai.NotFoundError, match="no such session"):
            client(address).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("1", "run returned the reward '1' (defined at"),
        (float("nan"), "run returned the reward nan"),
        (None, "run returned and has not asked the model for anything"),
        (KeyError("gone"), "run failed"),
    ],
)
def test_what_an_agent_gets_wrong(returned: Any, words: str, tokenizer: Any) -> None:
    def run(prompt: Any, base_url: str, row: int) -> Any:
        if isinstance(returned, KeyError):
            raise returned
        return returned

    with pytest.raises(RewardError) as error:
        led(run, Says(tokenizer, "one"), tokenizer)
    assert words in str(error.value) and "--environment a.py:Agent" in str(error.value)


def test_the_time_of_an_agent_does_not_run_while_the_model_writes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests at a time: it runs again when both are answered."""
    renewed: list[bool] = []
    monkeypatch.setattr(CLOCK, "renew", lambda number, timed: renewed.append(timed))

    async def run(prompt: Any, base_url: str, row: int) -> None:
        made = openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=WAIT)
        talks = [[{"role": "user", "content": name}] for name in ("main", "helper")]
        await asyncio.gather(*(made.chat.completions.create(model="m", messages=talk) for talk in talks))

    led(run, SaysSingle(tokenizer, "one", "two"), tokenizer)
    assert len(renewed) == 4 and renewed[0] is False and renewed[-1] is True


def test_packages_that_the_endpoint_needs(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_turn.util, "find_spec", lambda name: None if name == "uvicorn" else True)
    with pytest.raises(ConfigError, match=r"a.py:Agent: is an agent, whose endpoint needs uvicorn(.*\n)*.*\[serve\]"):
        led(lambda prompt, base_url, row: 0.0, Says(tokenizer, "one"), tokenizer)


@pytest.mark.wide
@pytest.mark.parametrize("kind", [Says, SaysSingle])
def test_an_error_of_the_sampler_is_the_runs(kind: type[Says], tokenizer: Any) -> None:
    """The agents' requests are refused at once, those that come later too."""
    refused: list[tuple[int, int]] = []
    done = threading.Semaphore(0)

    class Fails(kind):  # type: ignore[misc,valid-type]
        def one(self, *arguments: Any) -> Completion:
            raise ZeroDivisionError("the sampler")

    def run(prompt: Any, base_url: str, row: int) -> None:
        codes = []
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as error:
                client(base_url).chat.completions.create(model="m", messages=prompt)
            codes.append(error.value.status_code)
            time.sleep(0.2)
        refused.append((codes[0], codes[1]))
        done.release()

    with pytest.raises(ZeroDivisionError, match="the sampler") as failure:
        led(run, Fails(tokenizer, "one"), tokenizer, count=3)
    assert all(done.acquire(timeout=10) for _ in range(3)), "an agent waits for an answer"
    assert {first for first, _ in refused} <= {503, 404} and {second for _, second in refused} == {404}
    assert failure.tb is not None and not agent_endpoint().sessions, "also while the error holds the conversations"


def test_a_session_that_ends_before_its_request_is_read(tokenizer: Any) -> None:
    """The request gets the status of one that comes later."""
    session = Session(ChatTurns(tokenizer), SamplingParams(100), 0, None, None)
    session.ended = True
    anybody: Any = None
    with pytest.raises(RequestRefused) as refused:
        _OpenSession(session, anybody, anybody).ask(b'{"model": "m", "messages": [{"role": "user", "content": "go"}]}')
    assert refused.value.status == 404 and refused.value.code == "session_not_found"


@pytest.mark.parametrize(
    ("text", "outside", "calls"),
    [
        ("hello", "hello", []),
        (f"a\n{CALL}\n{CALL}", "a", [("search", '{"city": "Łódź"}')] * 2),
        ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("<tool_call>no</tool_call> b", "<tool_call>no</tool_call> b", []),
        ('<tool_call>{"name": "search"}', "", [("search", "{}")]),
    ],
)
def test_calls_between_tags(text: str, outside: str, calls: list[Any]) -> None:
    found = TaggedCallParser(frozenset({"search"})).parse(text, cut=False)
    assert (found[0], [tuple(call) for call in found[1]]) == (outside, calls)
