"""Several adapters: added up where they have no names, chosen by name where they have; PEFT's merged weights are the
reference."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.config.inference import ModelLoadingOptions, PlacementOptions
from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator
from megaswift.inference.load_adapters import selectable_adapters
from megaswift.inference.load_generation_model import load_config_tokenizer_and_processor, load_model_and_prompt_device
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
