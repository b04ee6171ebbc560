"""The padding token of reward models: transformers reads a score at the token where training read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.hf.writer import write_non_tensor_files
from megaswift.data.tokenizer import score_padding_token
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.models.family import read_config_json
from megaswift.models.heads import SCORE, config_with_head, with_pad_token_id
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.reward_model import load_reward_models
from tests.trainers.inputs import write_model

TALK = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]


def changed(path: Path, **values: Any) -> None:
    stored = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))


def ends_with_end_token(folder: Path, tokenizer: str | None, config: int | None) -> Path:
    """A model whose conversations end with `<e>`, with these padding tokens."""
    write_model(folder)
    changed(folder / "tokenizer_config.json", pad_token=tokenizer)
    changed(folder / "config.json", pad_token_id=config)
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "config", "want"),
    [(None, None, 0), ("<e>", 1, 0), ("<e>", None, 0), (None, 1, 0), ("<u>", 1, 2), ("<pad>", 0, 0), (None, 44, 44)],
)
def test_no_conversation_ends_with_the_padding_token(
    tokenizer: str | None, config: int | None, want: int, tmp_path: Path
) -> None:
    """The tokenizer's own where it is no end; else the config's; else another special token."""
    folder = ends_with_end_token(tmp_path, tokenizer, config)
    tokens = AutoTokenizer.from_pretrained(folder)
    assert score_padding_token(tokens, read_config_json(folder)) == want
    ids = tokens(tokens.apply_chat_template(TALK, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids[-1] == 1 != want


def test_a_newline_that_ends_a_template_is_no_padding_either(tmp_path: Path) -> None:
    folder = ends_with_end_token(tmp_path, "<a>", None)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}<e><a>{% endfor %}")
    assert score_padding_token(AutoTokenizer.from_pretrained(folder), read_config_json(folder)) == 0


@pytest.mark.parametrize("padding", [None, "<e>"])
def test_the_exported_tokenizer_pads_with_it(padding: str | None, tmp_path: Path) -> None:
    folder = ends_with_end_token(tmp_path / "model", padding, None)
    tokens = AutoTokenizer.from_pretrained(folder)
    config = config_with_head(read_config_json(folder), SCORE)
    config = with_pad_token_id(config, score_padding_token(tokens, config))
    (tmp_path / "hf").mkdir()
    write_non_tensor_files(tmp_path / "hf", [], {}, config, folder)
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert exported.pad_token_id == read_config_json(tmp_path / "hf")["pad_token_id"] == 0
    assert exported.eos_token == tokens.eos_token and exported.get_vocab() == tokens.get_vocab()


@pytest.mark.parametrize("padding", [None, "<e>"])
def test_a_merged_reward_model_scores_at_the_last_token(padding: str | None, tmp_path: Path) -> None:
    """The oracle: PEFT's classifier with a padding token that no text has. Alone, padded by the tokenizer, and as
    --reward_model."""
    base = ends_with_end_token(tmp_path / "base", padding, None if padding is None else 1)
    torch.manual_seed(5)
    model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    options = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, options).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter_folder_into_base(base, tmp_path / "adapter", tmp_path / "merged")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "merged")
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    talks = [tokens.apply_chat_template([*TALK[:1], {**TALK[1], "content": x}], tokenize=False) for x in ("3", "4 ?")]
    model.config.pad_token_id = 20
    with torch.no_grad():
        each = [tokens(text, add_special_tokens=False, return_tensors="pt") for text in talks]
        want = [float(adapted(**inputs).logits) for inputs in each]
        assert [float(loaded(**inputs).logits) for inputs in each] == pytest.approx(want, abs=1e-5)
        both = tokens(talks, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="right")
        assert loaded(**both).logits[:, 0].tolist() == pytest.approx(want, abs=1e-5)
    (model,) = load_reward_models([str(tmp_path / "merged")], ModelLoadingOptions(torch_dtype="float32"))
    answers = [[{**TALK[1], "content": text}] for text in ("3", "4 ?")]
    assert model([RewardInput(TALK[:1], answer, (), True) for answer in answers]) == pytest.approx(want, abs=1e-5)
