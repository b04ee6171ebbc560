"""Conversations with an environment: their tokens are the template's own, the loss is on the model's, and mistakes have
names.

Covers: megaswift/trainers/rl/environment.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.data.prompts.source import Prompt
from megaswift.errors import ConfigError, RewardError
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams, make_sampler
from megaswift.trainers.rl.chat_turns import ChatTurns, Conversation, ModelTurn
from megaswift.trainers.rl.environment import (
    EnvironmentWithNamedErrors,
    load_environment_class,
    missing_column_problems,
)
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, MultiTurnRunner, rendering
from tests.data import makers
from tests.trainers.inputs import write_model

pytestmark = pytest.mark.wide

ENVIRONMENT = '''
class Echo:
    """Answers twice, with the number of the row."""

    def reset(self, prompt, number, **columns):
        self.number, self.turn = number, 0

    def step(self, answer):
        self.turn += 1
        return [{"role": "user", "content": f"{self.number}?"}], 0.25, self.turn == 3


class Odd(Echo):
    returned = [[], None, True]

    def step(self, answer):
        if self.returned == "raise":
            raise KeyError("nothing here")
        return self.returned


class Mute:
    def reset(self, prompt):
        pass
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("talk") / "model")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("environments") / "worlds.py"
    made.write_text(ENVIRONMENT, encoding="utf-8")
    return made


def talked(
    model: Path, file: Path, max_turns: int | None = None, most: int = 400
) -> tuple[Any, list[Prompt], list[MultiTurnCompletion]]:
    """Two conversations with Echo."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampler = make_sampler("transformers", model, SamplerOptions(dtype="float32"))
    sampler.update_weights(load_file(model / "model.safetensors").items())
    said = [({"role": "user", "content": f"{i}+1"},) for i in range(2)]
    prompts = [
        Prompt(
            i, tuple(tokenizer.apply_chat_template(list(s), add_generation_prompt=True)["input_ids"]), s, {"number": i}
        )
        for i, s in enumerate(said)
    ]
    made = load_environment_class(f"{file}:Echo")
    talk = MultiTurnRunner(
        lambda: EnvironmentWithNamedErrors("--environment worlds.py:Echo", made()), ChatTurns(tokenizer), max_turns
    )
    found = talk.write(sampler, SamplingParams(most, stop_token_ids=(1,)), prompts, [11, 12])
    return tokenizer, prompts, [c for c in found if isinstance(c, MultiTurnCompletion)]


def test_tokens_are_those_of_the_template(model: Path, file: Path) -> None:
    """The conversation rendered as a whole, except that a stop is a stop; own tokens are the assistant's texts."""
    tokenizer, prompts, found = talked(model, file)
    assert len(found) == 2
    for prompt, talk in zip(prompts, found, strict=True):
        assert talk.finished and talk.turns == 3 and talk.reward == 0.75
        assert [m["role"] for m in talk.messages] == ["assistant", "user", "assistant", "user", "assistant"]
        assert isinstance(prompt.content, tuple)
        spoken = [m for m, own in zip(talk.token_ids, talk.own, strict=True) if own]
        assert spoken.count(1) == 3, "each turn ends with a stop"
        assert (
            talk.rewards == (0.25,) * 3
            and [spoken[end - 1] for end in talk.ends] == [1] * 3
            and talk.ends[-1] == len(spoken)
        )
        texts, at = [], 0
        for _ in range(3):
            end = spoken.index(1, at)
            texts.append(tokenizer.decode(spoken[at:end]))
            at = end + 1
        replies = [{"role": "user", "content": f"{prompt.number}?"}] * 2
        turns = [{"role": "assistant", "content": text} for text in texts]
        messages = [*prompt.content, turns[0], replies[0], turns[1], replies[1], turns[2]]
        whole = tokenizer.decode([*prompt.token_ids, *talk.token_ids])
        assert bare(whole) == bare(tokenizer.apply_chat_template(messages, tokenize=False))


def bare(text: str) -> str:
    """Without the blanks that decoding puts between tokens."""
    return text.replace(" ", "")


def test_log_probabilities_are_those_of_the_own_tokens(model: Path, file: Path) -> None:
    """Of one pass over the whole conversation, as the trainer makes it."""
    theirs: Any = AutoModelForCausalLM.from_pretrained(model)
    for prompt, talk in zip(*talked(model, file)[1:], strict=True):
        ids = torch.tensor([[*prompt.token_ids, *talk.token_ids]])
        with torch.no_grad():
            logits = theirs(ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(-1)
        every = logits.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
        want = every[torch.tensor(talk.own)]
        assert len(talk.logprobs) == sum(talk.own) < len(talk.own)
        torch.testing.assert_close(torch.tensor(talk.logprobs), want, rtol=0, atol=5e-6)


def test_a_turn_that_is_longer_than_its_room_is_cut(model: Path, file: Path) -> None:
    """So are its log-probabilities, and the environment does not judge it: turns that are sampled together have the
    largest room of all."""
    tokenizer, prompts, _ = talked(model, file, 1, 4)

    class Long:
        def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
            return [Completion((*range(3, 10), 1), tuple(-i / 8 for i in range(8)), True) for _ in prompts]

    made = load_environment_class(f"{file}:Echo")
    talk = MultiTurnRunner(lambda: EnvironmentWithNamedErrors("x", made()), ChatTurns(tokenizer), None)
    sampler: Any = Long()
    (found,) = talk.write(sampler, SamplingParams(5, stop_token_ids=(1,)), prompts[:1], [11])
    assert found.token_ids == (3, 4, 5, 6, 7) and not found.finished and found.rewards == ()
    assert found.logprobs == (0.0, -0.125, -0.25, -0.375, -0.5)


class Calculator:
    """A tool: it adds what a call names, and ends with the first answer that is none."""

    role = "tool"

    def reset(self, prompt: Any, **columns: Any) -> None:
        self.asked = prompt

    def step(self, answer: str) -> Any:
        if "<tool_call>" not in answer:
            return [], 1.0, True
        call = json.loads(answer.split("<tool_call>")[1].split("</tool_call>")[0])
        return [{"role": self.role, "name": call["name"], "content": str(sum(call["arguments"].values()))}], 0.0, False


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_calls_of_tools_and_their_results(name: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a published template: the tokens are the whole conversation's, the loss is on the calls and the answer.

    Qwen3's writes an empty thought before an answer that is the last, and none before another.
    """
    monkeypatch.setattr(Calculator, "role", role)
    tokenizer, call = (
        makers.tokenizer("qwen", name),
        '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>',
    )
    said, turns = ({"role": "user", "content": "20 and 22?"},), [call, call, "The answer is 42."]

    class Scripted:
        """A sampler that knows what it will say."""

        def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
            ids = tokenizer(turns[self.turn] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            self.turn += 1
            return [Completion(tuple(ids), (-0.5,) * len(ids), True)]

        turn = 0

    prompt = tokenizer.apply_chat_template(list(said), add_generation_prompt=True, return_dict=False)
    talk, sampler = (
        MultiTurnRunner(
            lambda: EnvironmentWithNamedErrors("--environment e.py:Calculator", Calculator()),
            ChatTurns(tokenizer),
            None,
        ),
        Scripted(),
    )
    found: Any = talk.write(sampler, SamplingParams(400), [Prompt(0, tuple(prompt), said, {})], [1])[0]  # type: ignore[arg-type]
    result = {"role": role, "name": "add", "content": "42"}
    answers: list[Any] = [{"role": "assistant", "content": turn} for turn in turns]
    assert (
        found.messages == (answers[0], result, answers[1], result, answers[2])
        and found.turns == 3
        and found.reward == 1.0
    )
    before = tokenizer.apply_chat_template([*said, *found.messages[:-1]], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*prompt, *found.token_ids]) == f"{before}{turns[2]}<|im_end|>"
    own = [t for t, mine in zip(found.token_ids, found.own, strict=True) if mine]
    assert tokenizer.decode(own) == "".join(f"{turn}<|im_end|>" for turn in turns)
    theirs = tokenizer.decode([t for t, mine in zip(found.token_ids, found.own, strict=True) if not mine])
    assert (
        theirs.count("<tool_response>") == (2 if role == "tool" else 0)
        and theirs.count("42") == 2
        and "answer" not in theirs
    )


def test_turns_and_tokens_have_an_end(model: Path, file: Path) -> None:
    first = talked(model, file, max_turns=1)[2]
    assert all(c.turns == 1 and c.finished and all(c.own) and c.reward == 0.25 for c in first)
    room = len(first[0].token_ids) + 2
    short = talked(model, file, most=room)[2][0]
    assert not short.finished and short.turns == 1 and short.token_ids == first[0].token_ids, (
        "no room for a turn after it"
    )
    cut = talked(model, file, most=2)[2]
    assert all(not c.finished and len(c.token_ids) == 2 and c.reward == 0.0 for c in cut)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "return (messages, reward, done)"),
        (([], None, True), "the reward None"),
        (([], float("nan"), True), "the reward nan"),
        (([], "1", True), "the reward '1'"),
        ((["hello"], 0.0, False), "the messages"),
        ((None, 1.0, True), "the messages None"),
        ((5, 1.0, True), "the messages 5"),
        (("text", 1.0, True), "the messages 'text'"),
        (({"role": "user", "content": "x"}, 1.0, True), "the messages {"),
        (([{"role": 5, "content": "x"}], 1.0, True), "the messages [{"),
        (([{"role": "user", "content": None}], 1.0, True), "the messages [{"),
        (([{"role": "user", "content": "x", "raw": object()}], 1.0, True), "which JSON cannot hold"),
        (([{"role": "user", "content": "page \ud83d end"}], 1.0, False), "an unpaired surrogate (\\ud83d"),
        (([], 1e308, True), "the reward 1e+308"),
        (([], 1.0, "no"), "done as 'no'"),
        (([], 1.0, None), "done as None"),
        ("abc", "step returned 'abc'"),
        ({"messages": [], "reward": 1.0, "done": True}, "return (messages, reward, done)"),
        ("raise", "KeyError"),
    ],
)
def test_what_an_environment_gets_wrong(returned: Any, words: str, file: Path) -> None:
    made: Any = load_environment_class(f"{file}:Odd")()
    made.returned = returned
    with pytest.raises(RewardError) as error:
        EnvironmentWithNamedErrors("--environment worlds.py:Odd", made).step("text")
    assert words in str(error.value) and "--environment worlds.py:Odd" in str(error.value)


@pytest.mark.parametrize("reward", [True, np.True_, np.float32(1), torch.tensor(1.0), torch.tensor(True), 1])
def test_the_reward_of_a_turn_is_a_number_of_any_library(reward: Any, file: Path) -> None:
    made: Any = load_environment_class(f"{file}:Odd")()
    made.returned = ([], reward, True)
    found = EnvironmentWithNamedErrors("--environment worlds.py:Odd", made).step("text")
    assert found == ([], 1.0, True) and type(found[1]) is float


def test_a_column_that_reset_lacks_is_told_with_those_of_the_row(file: Path) -> None:
    echo = EnvironmentWithNamedErrors("--environment worlds.py:Echo", load_environment_class(f"{file}:Echo")())
    told = r"reset failed\n.*missing 1 required positional argument: 'number'\n.*columns: answer, tests"
    with pytest.raises(RewardError, match=told):
        echo.reset("2+2?", {"tests": [], "answer": "4"})


class Words:
    def reset(self, prompt, number, tests=(), *, answer, **columns) -> str:  # type: ignore[no-untyped-def]
        raise AssertionError

    def step(self, answer: str) -> Any:
        raise AssertionError


class Gym(Words):
    def reset(self, *, seed, options) -> str:  # type: ignore[no-untyped-def, override]
        raise AssertionError


class Leads:
    def run(self, prompt, base_url, number) -> float:  # type: ignore[no-untyped-def]
        raise AssertionError


def test_columns_that_a_class_needs() -> None:
    """Before training, by the signature; of a function that makes environments nothing is known."""
    has = frozenset({"answer", "level"})
    (problem,) = missing_column_problems("--environment w.py:Words", Words, has)
    assert problem.rule == "reset requires the column number; the data has answer, level"
    assert problem.fix == "--columns YOURS=number"
    assert len(missing_column_problems("w", Words, frozenset())) == 2
    (problem,) = missing_column_problems("w", Leads, frozenset({"level"}))
    assert problem.rule.startswith("run requires the column number") and problem.fix == "--columns level=number"
    assert not missing_column_problems("w", Words, has | {"number"}) and not missing_column_problems("w", Gym, has)
    assert not missing_column_problems("w", lambda: Words(), has)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            (
                "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{{ "
                "messages[-1].content }}"
            ),
            "no tools here",
        ),
        ("{{ messages[-1].content }}", "it omits the assistant's message"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "omits messages of the role tool",
        ),
        ("{{ 1 / (messages | length - 3) }}{{ messages[-1].content }}", "division by zero"),
    ],
)
def test_answers_that_a_template_cannot_write(template: str, told: str) -> None:
    tokenizer = makers.tokenizer("qwen", None)
    tokenizer.chat_template = template
    chat = ChatTurns(tokenizer)
    before = Conversation(({"role": "user", "content": "a"},), "a")
    with pytest.raises(RewardError) as error, rendering("--environment e.py:Tool", ["tool"]):
        chat.go_on(before, ModelTurn("b<|im_end|>", "b", "<|im_end|>"), [{"role": "tool", "content": "42"}])
    assert "--environment e.py:Tool: answers as tool, which the chat template does not render: " in str(error.value)
    assert told in str(error.value) and "try: return messages of another role" in str(error.value)


def test_a_class_that_is_none(file: Path) -> None:
    with pytest.raises(ConfigError, match="no step"):
        load_environment_class(f"{file}:Mute")
    with pytest.raises(ConfigError, match="has no Ecko"):
        load_environment_class(f"{file}:Ecko")


def test_the_next_turn_begins_as_enable_thinking_says() -> None:
    tokens = makers.tokenizer("qwen", "qwen3")
    answers = [{"role": "user", "content": "and now?"}]
    for variables, end in (({}, "assistant\n"), ({"enable_thinking": False}, "</think>\n\n")):
        chat = ChatTurns(tokens, variables)
        found = chat.go_on(chat.begin("what?"), ModelTurn("this<|im_end|>", "this", "<|im_end|>"), answers)
        assert found.between.endswith(end)


def test_what_a_step_returns_is_the_runs_own() -> None:
    class Keeps:
        said: Any = [{"role": "user", "content": "first", "extra": {"n": [1]}}]

        def reset(self, prompt: Any, **columns: Any) -> Any:
            prompt[0]["content"], columns["tags"][0] = "changed", "changed"

        def step(self, answer: str) -> Any:
            return self.said, np.float32(1), np.bool_(True)

    inner = Keeps()
    environment = EnvironmentWithNamedErrors("--environment e.py:Keeps", inner)
    prompt, columns = [{"role": "user", "content": "asked"}], {"tags": ["a"]}
    environment.reset(prompt, columns)
    assert prompt == [{"role": "user", "content": "asked"}] and columns == {"tags": ["a"]}
    messages, _, done = environment.step("text")
    inner.said[0]["extra"]["n"].append(2)
    assert messages == [{"role": "user", "content": "first", "extra": {"n": [1]}}] and done is True


@pytest.mark.parametrize(
    "returned", [5, True, {"role": "user"}, ["text"], object(), "half \udc80", [{"role": "user", "content": "\udc80"}]]
)
def test_an_observation_that_is_none(returned: Any) -> None:
    class Resets:
        def reset(self, prompt: Any) -> Any:
            return returned

    with pytest.raises(RewardError, match="--environment e.py:Resets: reset returned"):
        EnvironmentWithNamedErrors("--environment e.py:Resets", Resets()).reset("asked", {})  # type: ignore[arg-type]


def test_an_environment_that_cannot_be_made(file: Path) -> None:
    class Fails:
        def __init__(self) -> None:
            raise OSError("no browser")

    for make, told in ((Fails, "cannot be created\n(.*\n)*.*no browser"), (object, "has no reset and no step")):
        with pytest.raises(RewardError, match=told):
            EnvironmentWithNamedErrors.make("--environment e.py:Fails", make)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="annotations is _Feature, not a class"):
        file.with_name("other.py").write_text("from __future__ import annotations\n")
        load_environment_class(f"{file.with_name('other.py')}:annotations")
