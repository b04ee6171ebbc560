"""Reward models: the score of each text alone by transformers, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.errors import RewardError, WeightsError
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.rewards import reward_model as rewards
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.reward_model import load_reward_models
from megaswift.rewards.scoring import reward_function_flag, score_rewards
from tests.rewards.samples import judged, said
from tests.trainers.inputs import write_model

pytestmark = pytest.mark.wide

TEXTS = ["a", "what is 3+4?", "0123456789 abc " * 3, "b", "1+2", "the end</s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base, path = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("scored") / "hf"
    write_model(base)
    torch.manual_seed(3)
    made: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    made.score.weight.data.normal_()
    made.save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
    return path


def alone(folder: Path, texts: list[str]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0].item()
            for text in texts
        ]


def with_padding(folder: Path, token: int | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": token}))


@pytest.mark.parametrize("padding", ["none", "own", "of a text"])
@pytest.mark.parametrize("tokens", [1, 30, 10000])
def test_scores_are_those_of_each_text_alone(
    padding: str, tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with_padding(
        folder,
        {"none": None, "own": 0, "of a text": tokenizer("b", add_special_tokens=False)["input_ids"][-1]}[padding],
    )
    monkeypatch.setattr(rewards, "TOKENS", tokens)
    (model,) = load_reward_models([str(folder)], ModelLoadingOptions())
    assert model.name == folder.parent.name and model._model is None
    assert reward_function_flag(model) == f"--reward_model {folder}"
    scores = score_rewards([model], [2.0], [judged(text) for text in TEXTS])
    assert scores.per_function[model.name] == pytest.approx(alone(folder, ["Q" + text for text in TEXTS]), abs=1e-5)
    assert scores.total == [2 * score for score in scores.per_function[model.name]] and len(set(scores.total)) == len(
        TEXTS
    )


def test_a_text_may_end_in_any_token(folder: Path) -> None:
    """transformers, asked about one row without padding, reads it at its end; so does a batch, whatever token fills it
    up."""
    with_padding(folder, None)
    (model,) = load_reward_models([str(folder)], ModelLoadingOptions())
    rows = [[5, 0], [7, 3, 4, 1], [9, 2], [8]]
    with torch.no_grad():
        wanted = [model.load()(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    assert model._scores(rows).tolist() == pytest.approx(wanted, abs=1e-5) and model.load().config.pad_token_id is None


def test_messages_are_rendered_by_the_models_own_template(folder: Path) -> None:
    with_padding(folder, None)
    (model,) = load_reward_models([str(folder)], ModelLoadingOptions())
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert model([said("hi"), said("ho")]) == pytest.approx(
        alone(folder, ["<user>Q<assistant>hi", "<user>Q<assistant>ho"]), abs=1e-5
    )
    model.tokenizer.chat_template = None
    with pytest.raises(RewardError, match="has no chat template, which is needed for prompts of messages"):
        model([said("hi")])
    assert isinstance(model([RewardInput("a", "b", (1,), True)])[0], float)


def test_several_models_have_names_of_their_own(folder: Path) -> None:
    name = folder.parent.name
    assert [m.name for m in load_reward_models([str(folder)] * 2, ModelLoadingOptions(), taken=[name])] == [
        f"{name}-2",
        f"{name}-3",
    ]


def test_mistakes_are_told_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "language")
    with pytest.raises(WeightsError) as error:
        load_reward_models([str(tmp_path / "language"), str(tmp_path / "nowhere"), str(folder)], ModelLoadingOptions())
    assert (
        "is not a reward model" in str(error.value)
        and "no such folder" in str(error.value)
        and len(error.value.problems) == 2
    )
