"""Penalties and biases: values worked by hand, and answers of a plain loop over transformers' logits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator
from megaswift.inference.logit_penalties import LogitPenalties
from tests.inference.models import PROMPTS, opened

NEW = 12


def applied(penalties: LogitPenalties, logits: list[float], prompt: list[int], answer: list[int]) -> list[float]:
    seen = torch.zeros(1, len(logits), dtype=torch.bool)
    seen[0, prompt] = True
    return penalties.apply(torch.tensor([logits]), seen, torch.tensor([answer], dtype=torch.long))[0].tolist()


@pytest.mark.parametrize(
    ("penalties", "wanted"),
    [
        # tokens 1, 2 in the prompt; the answer so far is 2, 3, 3
        (LogitPenalties(), [2.0, 3.0, 4.0, -1.0]),
        (LogitPenalties(frequency=0.5), [2.0, 3.0, 3.5, -2.0]),
        (LogitPenalties(presence=0.5), [2.0, 3.0, 3.5, -1.5]),
        (LogitPenalties(frequency=-1.0, presence=0.25), [2.0, 3.0, 4.75, 0.75]),
        (LogitPenalties(repetition=2.0), [2.0, 1.5, 2.0, -2.0]),
        (LogitPenalties(repetition=2.0, frequency=0.5, presence=1.0), [2.0, 1.5, 0.5, -4.0]),
        (LogitPenalties(bias=((0, -100.0), (3, 5.0))), [-98.0, 3.0, 4.0, 4.0]),
        (LogitPenalties(repetition=2.0, bias=((3, 5.0),)), [2.0, 1.5, 2.0, 2.0]),  # the bias first, as in vLLM
    ],
)
def test_values_worked_by_hand(penalties: LogitPenalties, wanted: list[float]) -> None:
    assert applied(penalties, [2.0, 3.0, 4.0, -1.0], [1, 2], [2, 3, 3]) == wanted


def test_before_the_first_token_only_the_repetition_penalty_and_biases_count() -> None:
    how = LogitPenalties(2.0, 1.0, 1.0, ((0, 1.0),))
    assert applied(how, [1.0, 4.0, -2.0], [1, 2, 2], []) == [2.0, 2.0, -4.0]


@pytest.fixture(scope="module")
def ours(model: Path) -> Generator:
    return opened(model)[1]


def loop(model: Any, prompt: tuple[int, ...], sampling: GenerationParams) -> list[int]:
    """The likeliest token each time, one forward pass over everything for each; the formulas token by token."""
    answer: list[int] = []
    while len(answer) < NEW:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for token in {*prompt, *answer}:
            times = sampling.repetition_penalty
            logits[token] = logits[token] / times if logits[token] > 0 else logits[token] * times
        for token, count in Counter(answer).items():
            logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
        answer.append(max(range(len(logits)), key=logits.__getitem__))
        if answer[-1] == 1:
            break
    return answer


@pytest.mark.parametrize(
    "sampling",
    [
        GenerationParams(presence_penalty=2.0),
        GenerationParams(frequency_penalty=1.5, logit_bias=((7, 3.0), (9, -100.0))),
        GenerationParams(repetition_penalty=1.6, frequency_penalty=0.7, presence_penalty=-0.4),
    ],
    ids=["presence", "frequency-bias", "all"],
)
def test_a_padded_batch_answers_as_a_plain_loop_does(
    ours: Generator, model: Path, sampling: GenerationParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding token is one that answers use: as a token of the prompt it would be penalized."""
    theirs = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS]
    wanted = [loop(theirs, prompt, sampling) for prompt in prompts]
    assert wanted != [loop(theirs, prompt, GenerationParams()) for prompt in prompts]
    monkeypatch.setattr(ours, "pad", Counter(token for ids in wanted for token in ids).most_common(1)[0][0])
    found = ours.generate([AnswerRequest(prompt, NEW) for prompt in prompts], sampling)
    ends = [ids[:-1] if ids[-1] == 1 else ids for ids in wanted]
    assert [answer.text for answer in found] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in ends]


def test_min_p_is_that_of_transformers(ours: Generator, model: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(model)
    prompt = tuple(AutoTokenizer.from_pretrained(model)("1+2?")["input_ids"])
    how = {"temperature": 1.3, "min_p": 0.3}
    found = ours.generate([AnswerRequest(prompt, NEW)], GenerationParams(seed=5, **how))[0].text
    torch.manual_seed(5)
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=True, **how)[0, len(prompt) :]
    assert found == ours.tokenizer.decode(out, skip_special_tokens=True)
    without = ours.generate([AnswerRequest(prompt, NEW)], GenerationParams(temperature=1.3, seed=5))[0].text
    assert found != without
