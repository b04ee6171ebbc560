"""Batches of prompts against transformers' own generate, one prompt at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megaswift.errors import ConfigError
from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator, generation_params
from megaswift.inference.options.commands import GenerationOptions
from tests.inference.models import PROMPTS, opened, plain

pytestmark = pytest.mark.wide

NEW = 14


@pytest.fixture(scope="module")
def ours(model: Path) -> Generator:
    return opened(model)[1]


@pytest.fixture(scope="module")
def theirs(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def ids(generator: Generator, texts: tuple[str, ...] = PROMPTS) -> list[tuple[int, ...]]:
    return [tuple(generator.tokenizer(t)["input_ids"]) for t in texts]


def test_greedy_rows_of_a_padded_batch_are_those_of_transformers(ours: Generator, theirs: tuple[Any, Any]) -> None:
    prompts = ids(ours)
    found = ours.generate([AnswerRequest(p, NEW) for p in prompts], GenerationParams())
    want = plain(*theirs, prompts, NEW, do_sample=False)
    assert [c.text for c in found] == want and len(set(want)) == len(want)


@pytest.mark.parametrize("how", [{"repetition_penalty": 1.7}, {"num_beams": 3}])
def test_penalties_and_beams(ours: Generator, theirs: tuple[Any, Any], how: dict[str, Any]) -> None:
    prompts = ids(ours)
    found = ours.generate([AnswerRequest(p, NEW) for p in prompts], GenerationParams(**how))
    assert [c.text for c in found] == plain(*theirs, prompts, NEW, do_sample=False, **how)


def test_drawn_tokens_follow_the_seed_as_in_transformers(ours: Generator, theirs: tuple[Any, Any]) -> None:
    [prompt] = ids(ours, ("1+2?",))
    how = {"temperature": 0.9, "top_p": 0.95, "top_k": 20}
    found = ours.generate([AnswerRequest(prompt, NEW)], GenerationParams(seed=7, **how))[0].text
    torch.manual_seed(7)
    assert [found] == plain(*theirs, [prompt], NEW, do_sample=True, **how)
    assert found == ours.generate([AnswerRequest(prompt, NEW)], GenerationParams(seed=7, **how))[0].text
    assert found != ours.generate([AnswerRequest(prompt, NEW)], GenerationParams(seed=8, **how))[0].text


def test_logprobs_are_the_log_softmax_of_the_models_logits(ours: Generator, theirs: tuple[Any, Any]) -> None:
    """Also under a penalty and a temperature: they are the model's, not those of the draw."""
    prompts = ids(ours)
    found = ours.generate(
        [AnswerRequest(p, NEW, logprobs=3) for p in prompts],
        GenerationParams(temperature=0.7, repetition_penalty=1.3, seed=1),
    )
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = [t.token for t in completion.logprobs]
        assert len(tokens) >= completion.tokens - 1
        with torch.no_grad():
            scores = theirs[0](torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)[len(prompt) - 1 :]
        for position, told in enumerate(completion.logprobs):
            best = scores[position].topk(3)
            assert told.logprob == pytest.approx(float(scores[position, told.token]), abs=2e-5)
            assert [p for _, p in told.top] == pytest.approx(best.values.tolist(), abs=2e-5)


def test_each_row_has_its_own_length_stop_texts_and_listener(ours: Generator) -> None:
    prompts = ids(ours)
    whole = [c.text for c in ours.generate([AnswerRequest(p, NEW) for p in prompts], GenerationParams())]
    stop = whole[1][4:7]
    heard: dict[int, list[str]] = {i: [] for i in range(len(prompts))}
    wanted = [
        AnswerRequest(p, NEW - i, (stop,) if i == 1 else (), 0, lambda text, told, i=i: heard[i].append(text))
        for i, p in enumerate(prompts)
    ]
    found = ours.generate(wanted, GenerationParams())
    assert found[1].text == whole[1][: whole[1].index(stop)] and found[1].reason == "stop"
    for i, completion in enumerate(found):
        assert "".join(heard[i]) == completion.text and whole[i].startswith(completion.text)
        assert completion.tokens <= NEW - i and (completion.reason == "stop" or completion.tokens == NEW - i)
    kept = [ours.tokenizer.decode([t.token]) for t in found[1].logprobs]
    assert "".join(kept).replace(" ", "").startswith(found[1].text.replace(" ", ""))


def test_a_cancelled_answer_ends_and_the_others_go_on(ours: Generator) -> None:
    first, second = (AnswerRequest(p, NEW) for p in ids(ours, PROMPTS[:2]))
    first.listener = lambda text, told: setattr(first, "cancelled", True)
    cancelled, whole = ours.generate([first, second], GenerationParams())
    assert cancelled.reason == "cancelled" and cancelled.tokens < 5 < whole.tokens


def test_an_end_token_ends_an_answer_and_is_no_text(model: Path, ours: Generator) -> None:
    prompts = ids(ours)
    told = ours.generate([AnswerRequest(p, NEW, logprobs=0) for p in prompts], GenerationParams())
    token = told[0].logprobs[3].token
    ending = Generator(ours.model, ours.tokenizer, ours.device)
    ending.ends = frozenset([*ours.ends, token])
    found = ending.generate([AnswerRequest(p, NEW) for p in prompts], GenerationParams())[0]
    first = [t.token for t in told[0].logprobs].index(token)
    assert found.reason == "stop" and found.tokens == first + 1
    assert found.text == ours.tokenizer.decode([t.token for t in told[0].logprobs][:first])


def test_what_is_not_set_comes_from_the_model_s_own_configuration() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert generation_params(GenerationOptions(), own) == GenerationParams(0.6, 0.9, 20)
    assert generation_params(GenerationOptions(temperature=0), own) == GenerationParams()
    assert generation_params(GenerationOptions(temperature=1.0, top_k=0), own) == GenerationParams(1.0, 0.9, 0)
    assert generation_params(GenerationOptions(), GenerationConfig()) == GenerationParams()
    with pytest.raises(ConfigError, match="--temperature 0.7"):
        generation_params(GenerationOptions(top_p=0.5), GenerationConfig())


def test_a_special_token_as_a_stop_text_ends_an_answer_at_once(ours: Generator) -> None:
    """The first special token that the model writes, which is no part of the text; streamed too."""
    prompts = ids(ours)
    special = {ours.tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "<u>", "<a>")}
    told = ours.generate([AnswerRequest(p, NEW, logprobs=0) for p in prompts], GenerationParams())
    row, place = next(
        (row, place)
        for row, answer in enumerate(told)
        for place, entry in enumerate(answer.logprobs)
        if entry.token in special
    )
    stop = ours.tokenizer.decode([told[row].logprobs[place].token])
    heard: list[str] = []
    request = AnswerRequest(prompts[row], NEW, (stop,), 0, lambda text, entries: heard.append(text))
    [found] = ours.generate([request], GenerationParams())
    before = [entry.token for entry in told[row].logprobs[:place]]
    assert (found.reason, found.tokens, found.text) == ("stop", place + 1, ours.tokenizer.decode(before))
    assert "".join(heard) == found.text and [e.token for e in found.logprobs] == before


def test_an_echoed_prompt_has_the_log_probabilities_that_transformers_gives_it(
    ours: Generator, theirs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of several lengths and none in one batch; a prompt longer than what is scored at a time."""
    monkeypatch.setattr("megaswift.inference.generator.SCORED_POSITIONS", 4)
    prompts = ids(ours)
    heard: list[str] = []
    requests = [
        AnswerRequest(p, new, logprobs=2, echo=text, listener=lambda said, entries: heard.append(said))
        for p, text, new in zip(prompts, PROMPTS, (0, 1, 3, 0, 2, 0), strict=True)
    ]
    found = ours.generate(requests, GenerationParams())
    assert "".join(heard).startswith("".join(PROMPTS))
    for prompt, text, request, answer in zip(prompts, PROMPTS, requests, found, strict=True):
        tokens = [entry.token for entry in answer.logprobs]
        assert answer.tokens == request.max_new_tokens and len(tokens) == len(prompt) + answer.tokens
        assert tuple(tokens[: len(prompt)]) == prompt and answer.text.startswith(text) and answer.reason == "length"
        assert [entry.start for entry in answer.logprobs[: len(prompt)]] == list(range(len(text)))
        with torch.no_grad():
            scores = theirs[0](torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert answer.logprobs[0].logprob is None and not answer.logprobs[0].top
        for place, entry in enumerate(answer.logprobs[1:]):
            assert entry.logprob == pytest.approx(float(scores[place, entry.token]), abs=2e-5)
            assert [value for _, value in entry.top] == pytest.approx(scores[place].topk(2).values.tolist(), abs=2e-5)


def test_an_echoed_answer_lists_its_end_token(ours: Generator) -> None:
    """So that as many entries follow the prompt's as tokens were generated: lm-eval leaves the last one out."""
    [prompt] = ids(ours, ("ab",))
    first = ours.generate([AnswerRequest(prompt, 1, logprobs=0)], GenerationParams())[0].logprobs[0].token
    ending = Generator(ours.model, ours.tokenizer, ours.device)
    ending.ends = frozenset([*ours.ends, first])
    [found] = ending.generate([AnswerRequest(prompt, 1, ("b",), logprobs=1, echo="ab")], GenerationParams())
    assert [entry.token for entry in found.logprobs] == [*prompt, first]
    told: list[int] = []
    request = AnswerRequest(prompt, 1, ("b",), 1, lambda text, new: told.extend(e.token for e in new), echo="ab")
    ending.generate([request], GenerationParams())
    assert told == [*prompt, first]
    assert (found.text, found.tokens, found.reason) == ("ab", 1, "stop")
