"""The sampler in this process against transformers: greedy tokens, log-probabilities, and that rows do not depend on
one another.

Covers: megaswift/rollout/backends/transformers_sampler.py, megaswift/rollout/decoding.py,
megaswift/rollout/kv_cache.py, megaswift/rollout/sampler.py, megaswift/rollout/weight_update.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)

from megaswift.errors import ConfigError, WeightsError
from megaswift.rollout import decoding, kv_cache
from megaswift.rollout.backends.transformers_sampler import TransformersSampler, build
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams, make_sampler, sampler_backend_names
from tests.vision_language_folders import write_vision_language

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("error::FutureWarning")]

PROMPTS = ((5, 6), (30, 40, 31, 42), (9, 9, 9, 7, 8, 20, 21, 22, 23), (11,), (30, 40, 31, 42), (44, 3, 2, 1, 17, 18))
NEW = 20
STOPS = (1, 7)


def weights(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        yield from load_file(file).items()


def filled(path: Path, **options: Any) -> TransformersSampler:
    made = build(path, SamplerOptions(**options))
    made.update_weights(weights(path))
    return made


@pytest.fixture(scope="module")
def ours(model: Path) -> TransformersSampler:
    return filled(model)


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model)


def greedy(theirs: Any, prompt: tuple[int, ...], **how: Any) -> list[int]:
    """transformers' own, the prompt alone, stop token included."""
    how = {"eos_token_id": list(STOPS), **how}
    out = theirs.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how)
    return out[0, len(prompt) :].tolist()


def forward(theirs: Any, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the completion's tokens by one pass without a cache."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        scores = (theirs(ids).logits[0].float() / temperature).log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def gap(theirs: Any, prompts: tuple[tuple[int, ...], ...], found: list[Completion], temperature: float = 1.0) -> float:
    pairs = zip(prompts, found, strict=True)
    return max(float((forward(theirs, p, c, temperature) - torch.tensor(c.logprobs)).abs().max()) for p, c in pairs)


def test_greedy_completions_are_those_of_transformers(ours: TransformersSampler, theirs: Any) -> None:
    found = ours.generate(PROMPTS, SamplingParams(NEW, temperature=0, stop_token_ids=STOPS), range(6))
    assert [list(c.token_ids) for c in found] == [greedy(theirs, p) for p in PROMPTS]
    assert [c.finished for c in found] == [c.token_ids[-1] in STOPS for c in found]
    assert {c.finished for c in found} == {True, False} and len({len(c.token_ids) for c in found}) > 2
    assert gap(theirs, PROMPTS, found) < 2e-6


def test_repetition_penalty_is_that_of_transformers(ours: TransformersSampler, theirs: Any) -> None:
    found = ours.generate(
        PROMPTS, SamplingParams(NEW, temperature=0, repetition_penalty=1.6, stop_token_ids=STOPS), range(6)
    )
    assert [list(c.token_ids) for c in found] == [greedy(theirs, p, repetition_penalty=1.6) for p in PROMPTS]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(NEW), SamplingParams(NEW, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01)]
)
def test_log_probabilities_are_those_of_a_full_forward_pass(
    ours: TransformersSampler, theirs: Any, sampling: SamplingParams
) -> None:
    """At the temperature, before the filters."""
    found = ours.generate(PROMPTS, sampling, range(6))
    assert gap(theirs, PROMPTS, found, sampling.temperature) < 5e-6


def test_a_completion_depends_on_its_prompt_and_seed_alone(model: Path, ours: TransformersSampler) -> None:
    sampling = SamplingParams(40, temperature=1.3, stop_token_ids=(1, 2, 3))
    prompts, seeds = [PROMPTS[i % 6] for i in range(12)], list(range(100, 112))
    together = ours.generate(prompts, sampling, seeds)
    alone = [ours.generate([p], sampling, [s])[0] for p, s in zip(prompts, seeds, strict=True)]
    small = filled(model, batch_size=5).generate(prompts[::-1], sampling, seeds[::-1])[::-1]
    for other in (alone, small):
        assert [c.token_ids for c in other] == [c.token_ids for c in together]
    assert len({c.token_ids for c in together}) == 12 and len({len(c.token_ids) for c in together}) > 4
    shorter = ours.generate(prompts, replace(sampling, max_tokens=9), seeds)
    assert [c.token_ids for c in shorter] == [c.token_ids[:9] for c in together]
    assert ours.generate(PROMPTS[:1], sampling, [3]) == ours.generate(PROMPTS[:1], sampling, [3])


@pytest.mark.parametrize("pause", [1, 3, 7])
@pytest.mark.parametrize("sampling", [SamplingParams(40, 1.3, stop_token_ids=(1, 2, 3)), SamplingParams(15, 0.0)])
def test_interrupted_completions_are_those_of_one_call(model: Path, sampling: SamplingParams, pause: int) -> None:
    """With equal weights, however often the sampler is stopped; some rows end before, some are full at other steps."""
    made = filled(model, batch_size=5)
    prompts = [PROMPTS[i % 6] for i in range(12)]
    seeds = list(range(100, 112))
    want = made.generate(prompts, sampling, seeds)
    found = [Completion((), (), False)] * 12
    calls = 0
    while left := [i for i in range(12) if not found[i].finished and len(found[i].token_ids) < sampling.max_tokens]:
        asked = iter(range(10**6))
        some = made.extend(
            [prompts[i] for i in left],
            [found[i] for i in left],
            sampling,
            [seeds[i] for i in left],
            lambda asked=asked: next(asked) > pause,  # type: ignore[misc]
        )
        for i, completion in zip(left, some, strict=True):
            found[i] = completion
        calls += 1
    assert calls > 3 and [c.token_ids for c in found] == [c.token_ids for c in want]
    assert [c.finished for c in found] == [c.finished for c in want]
    for mine, theirs in zip(found, want, strict=True):
        assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 5e-6


def test_tokens_after_new_weights_are_theirs(model: Path, theirs: Any) -> None:
    """Log-probabilities of each part are those of its own weights after the whole prefix."""
    made = filled(model)
    sampling = SamplingParams(12)
    asked = iter(range(99))
    begun = made.extend(PROMPTS, [Completion((), (), False)] * 6, sampling, range(6), lambda: next(asked) > 4)
    assert {len(c.token_ids) for c in begun} == {5} and gap(theirs, PROMPTS, begun) < 5e-6
    other = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    made.update_weights((name, 1.2 * tensor) for name, tensor in weights(model))
    whole = made.extend(PROMPTS, begun, sampling, range(6), bool)
    assert all(
        c.token_ids[:5] == b.token_ids and c.logprobs[:5] == b.logprobs for c, b in zip(whole, begun, strict=True)
    )
    prefixes = [(*prompt, *b.token_ids) for prompt, b in zip(PROMPTS, begun, strict=True)]
    tails = [Completion(c.token_ids[5:], c.logprobs[5:], c.finished) for c in whole]
    assert gap(other, tuple(prefixes), tails) < 5e-6 < gap(theirs, tuple(prefixes), tails)


def test_room_for_tokens_grows(ours: TransformersSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(30, stop_token_ids=(1,))
    want = ours.generate(PROMPTS, sampling, range(6))
    for module in (kv_cache, decoding):
        monkeypatch.setattr(module, "STEP", 3)
    assert [c.token_ids for c in ours.generate(PROMPTS, sampling, range(6))] == [c.token_ids for c in want]


def test_draws_leave_the_global_generator_alone(ours: TransformersSampler) -> None:
    before = torch.get_rng_state()
    ours.generate(PROMPTS, SamplingParams(4), range(6))
    assert torch.equal(before, torch.get_rng_state())


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        **more,
    }


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
KINDS = {
    "window": MistralConfig(**sizes(sliding_window=6)),
    "windows and tied head": Gemma3TextConfig(
        **sizes(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ),
    "experts": MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2)),
    "gated delta nets": AutoConfig.for_model("qwen3_next", **sizes(**LINEAR, **EXPERTS)),
    "gated delta nets, experts everywhere": AutoConfig.for_model("qwen3_5_moe_text", **sizes(**LINEAR, **EXPERTS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models(kind: str, tmp_path: Path) -> None:
    """Windows narrower than the rows, a tied head, experts that a file holds one by one, states in place of keys and
    values."""
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(KINDS[kind])
    for name, parameter in theirs.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)
        if name.endswith("A_log"):  # states that outlast the prompts
            parameter.data.sub_(4)
    theirs.eval().save_pretrained(tmp_path)
    made = filled(tmp_path)
    found = made.generate(PROMPTS, SamplingParams(NEW, temperature=0, stop_token_ids=STOPS), range(6))
    assert [list(c.token_ids) for c in found] == [greedy(theirs, p) for p in PROMPTS]
    assert len({len(c.token_ids) for c in found}) > 2 or "gated" not in kind  # rows were dropped on the way
    found = made.generate(PROMPTS, SamplingParams(NEW), range(6))
    assert gap(theirs, PROMPTS, found) < 5e-6
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, made.model.get_parameter(name)), name


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    config: PretrainedConfig = AutoConfig.for_model(
        "mamba", vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="vllm"):
        build(tmp_path, SamplerOptions())


def test_weights_that_do_not_fit_are_named(model: Path) -> None:
    made, right = build(model, SamplerOptions()), dict(weights(model))
    last = "model.norm.weight"
    for wrong, told in (
        ({n: t for n, t in right.items() if n != last}, f"lack 1 of 36 tensors: {last}"),
        ({**right, "model.norm.bias": right[last]}, "tensors that the model does not have: model.norm.bias"),
        ({**right, last: torch.ones(7)}, r"shape \[7\], the model has \[32\]: model.norm.weight"),
    ):
        with pytest.raises(WeightsError, match=told):
            made.update_weights(wrong.items())
        with pytest.raises(AssertionError):
            made.generate(PROMPTS, SamplingParams(1), range(6))


def test_tied_heads_come_once_or_twice_but_not_with_two_values(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(KINDS["windows and tied head"]).save_pretrained(tmp_path)
    right = dict(weights(tmp_path))
    embedding = right["model.embed_tokens.weight"]
    made = build(tmp_path, SamplerOptions())
    made.update_weights({**right, "lm_head.weight": embedding}.items())
    made.update_weights(
        {("lm_head.weight" if n == "model.embed_tokens.weight" else n): t for n, t in right.items()}.items()
    )
    assert torch.equal(made.model.model.embed_tokens.weight, embedding)
    with pytest.raises(WeightsError, match="tied"):
        made.update_weights({**right, "lm_head.weight": embedding + 1}.items())


def test_sleep_gives_memory_back_and_new_weights_wake(model: Path, theirs: Any) -> None:
    made = filled(model, dtype="float64")
    held = [p.untyped_storage().nbytes() for p in made.model.parameters()]
    assert sum(held) == 8 * sum(p.numel() for p in theirs.parameters())
    before = made.generate(PROMPTS, SamplingParams(NEW), range(6))
    made.sleep()
    assert all(p.untyped_storage().nbytes() == 8 for p in made.model.parameters())
    with pytest.raises(AssertionError):
        made.generate(PROMPTS, SamplingParams(NEW), range(6))
    made.update_weights((n, t + 0.05) for n, t in weights(model))
    assert made.generate(PROMPTS, SamplingParams(NEW), range(6)) != before
    made.wake()
    made.update_weights(weights(model))
    assert made.generate(PROMPTS, SamplingParams(NEW), range(6)) == before


def test_backends_are_found_by_name(model: Path) -> None:
    assert "transformers" in sampler_backend_names()
    assert isinstance(make_sampler("transformers", model, SamplerOptions()), TransformersSampler)
    with pytest.raises(ConfigError, match="did you mean transformers"):
        make_sampler("transformer", model, SamplerOptions())
    with pytest.raises(ConfigError, match="is not a torch dtype"):
        make_sampler("transformers", model, SamplerOptions(dtype="fp7"))


@pytest.mark.parametrize(("kind", "stacked"), [("qwen3_5_moe", True), ("qwen3_5_moe", False), ("qwen3_5", False)])
def test_a_language_model_inside_a_larger_one(kind: str, stacked: bool, tmp_path: Path) -> None:
    """Of a vision-language folder the native engine sends the language model alone, experts as the folder has them; the
    tower comes from the folder. What is not carried along must come."""
    folder = write_vision_language(tmp_path / "m", kind, stacked)
    sent = {name: t for name, t in weights(folder) if not name.startswith(("mtp.", "model.visual."))}
    made = build(folder, SamplerOptions())
    made.update_weights(sent.items())
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    theirs = whole.state_dict()
    ours = made.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lost = next(name for name in sent if name.endswith("down_proj") or name.endswith("down_proj.weight"))
    with pytest.raises(WeightsError, match="lack"):
        made.update_weights((name, t) for name, t in sent.items() if name != lost)
