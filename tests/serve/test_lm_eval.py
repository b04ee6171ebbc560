"""lm-eval's own clients against the server: log-likelihoods and completions are transformers' own.

Covers: megaswift/serve/app.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.inference.models import plain
from tests.serve.test_app import TOKEN, serving

pytestmark = [pytest.mark.process, pytest.mark.slow]
NEW = 6


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("log"), "--model", str(model), "--served_model_name", "mine") as address:
        yield address


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_local_completions_scores_and_generates(url: str, model: Path) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=f"{url}/completions",
        model="mine",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        max_length=128,
        batch_size=2,
    )
    pairs = [("what is 1+2?", " 3"), ("what is 1+2?", " 4a"), ("x", "yz")]
    found = client.loglikelihood(requests("loglikelihood", pairs))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for (context, more), (score, is_greedy) in zip(pairs, found, strict=True):
        ids = tokenizer(context + more)["input_ids"]
        start = len(tokenizer(context)["input_ids"])
        with torch.no_grad():
            scores = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [float(scores[at - 1, ids[at]]) for at in range(start, len(ids))]
        assert score == pytest.approx(sum(own), abs=1e-4)
        assert is_greedy == all(int(scores[at - 1].argmax()) == ids[at] for at in range(start, len(ids)))
    asked = [("1+2?", {"until": ["zzz"], "max_gen_toks": NEW}), ("ab", {"until": ["zzz"], "max_gen_toks": NEW})]
    wanted = plain(theirs, tokenizer, [tokenizer(text)["input_ids"] for text, _ in asked], NEW, do_sample=False)
    assert client.generate_until(requests("generate_until", asked)) == wanted


def test_local_chat_completions_generates(url: str, model: Path) -> None:
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    client = LocalChatCompletion(base_url=f"{url}/chat/completions", model="mine", max_length=128)
    talk = JsonChatStr('[{"role": "user", "content": "1+2?"}]')
    found = client.generate_until(requests("generate_until", [(talk, {"until": ["zzz"], "max_gen_toks": NEW})]))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert found == plain(theirs, tokenizer, [tokenizer("<u>1+2?<e><a>")["input_ids"]], NEW, do_sample=False)
