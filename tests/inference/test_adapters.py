"""Several adapters: added up where they have no names, chosen by name where they have; PEFT's merged weights are the
reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.inference.adapters import selectable_adapters
from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator
from megaswift.inference.model import load_config_tokenizer_and_processor, load_model_and_prompt_device
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from tests.bridge.adapters.test_merge import EMBEDDINGS
from tests.inference.models import PROMPTS, adapters, plain

pytestmark = pytest.mark.wide
NEW = 8


@pytest.fixture(scope="module")
def two(model: Path) -> tuple[str, str]:
    first, second = (adapters(model.parent / f"adapter-{seed}", model, seed) for seed in (5, 6))
    return str(first), str(second)


def merged(model: Path, *folders: str) -> list[str]:
    """What a model answers whose weights have the adapters in them."""
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for folder in folders:
        theirs = peft.PeftModel.from_pretrained(theirs, folder).merge_and_unload()
    return plain(theirs, tokenizer, [tokenizer(p)["input_ids"] for p in PROMPTS], NEW, do_sample=False)


def generator(model: Path, entries: tuple[str, ...], merge: bool = False) -> Generator:
    options = ModelLoadingOptions(model=str(model), adapters=entries, merge_adapters=merge)
    prepared = load_config_tokenizer_and_processor(options, None)
    loaded, device = load_model_and_prompt_device(prepared, PlacementOptions())
    return Generator(loaded, prepared.tokenizer, device, selectable_adapters(options))


def answers(generator: Generator, adapter: str = "") -> list[str]:
    requests = [AnswerRequest(tuple(generator.tokenizer(t)["input_ids"]), NEW) for t in PROMPTS]
    return [a.text for a in generator.generate(requests, GenerationParams(adapter=adapter))]


@pytest.mark.parametrize("merge", [False, True])
def test_without_names_they_add_up(merge: bool, model: Path, two: tuple[str, str]) -> None:
    want = merged(model, *two)
    assert answers(generator(model, two, merge)) == want
    assert want not in (merged(model, two[0]), merged(model, two[1]), merged(model))


def test_with_names_a_request_selects_one(model: Path, two: tuple[str, str]) -> None:
    both = generator(model, (f"a={two[0]}", f"b.2={two[1]}"))
    for name, folders in (("b.2", two[1:]), ("", ()), ("a", two[:1]), ("b.2", two[1:])):
        assert answers(both, name) == merged(model, *folders), name


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("what", EMBEDDINGS)
def test_trained_embeddings_of_a_tied_model(what: str, merge: bool, model: Path, tmp_path: Path) -> None:
    """PEFT's logits, beside the weights and in them."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(model, base, ignore=shutil.ignore_patterns("adapter-*"))
    tied = AutoModelForCausalLM.from_pretrained(base, tie_word_embeddings=True)
    tied.save_pretrained(base)
    adapted = peft.get_peft_model(tied, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **EMBEDDINGS[what]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(adapter)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        want = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(ids).logits
        found = generator(base, (str(adapter),), merge).model(ids).logits
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, want, atol=1e-2)
    assert torch.allclose(found, want, atol=1e-4)
