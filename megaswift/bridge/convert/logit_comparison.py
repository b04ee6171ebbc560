"""Two sets of weights as models: the logits that transformers computes from each, in float32 on the CPU.

Owns the prompts, the tolerance and loading any set of weights into transformers' own model. The tolerance is what one
and the same model shows between two ways of computing attention, so that it follows the model's size instead of being a
number out of the air.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.convert.weight_comparison import WeightComparisonSide
from megaswift.bridge.hf.bits import disable_4bit_cpu_repacking
from megaswift.bridge.hf.loading_report import LOADING_INFO, check_all_weights_loaded
from megaswift.bridge.hf.source import HfSource
from megaswift.data.tokenizer import load_tokenizer
from megaswift.errors import ConfigError, Problem, WeightsError, first_line

TIMES = 5.0
"""Tolerance over Hugging Face's own spread."""
LENGTHS = (1, 7, 32, 64, 150)
"""Tokens of the built-in prompts."""


@dataclass(frozen=True)
class ProbePrompt:
    """Token ids, and what to call them."""

    label: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptLogitsDifference:
    """The verdict on one prompt."""

    prompt: str
    tokens: int
    max_abs_diff: float
    """|A - B| over all positions; inf where one is not finite or the vocabularies differ."""
    spread: float
    """|sdpa - eager| of A."""
    largest: float
    """|logit| of A."""


def builtin_probe_prompts(vocabulary: int, positions: int) -> list[ProbePrompt]:
    """Make prompts of random tokens of several lengths, and one token again and again."""
    generator = torch.Generator().manual_seed(20)
    lengths = sorted({min(n, positions) for n in LENGTHS})
    prompts = [
        ProbePrompt(f"random, {n} long", tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()))
        for n in lengths
    ]
    return [*prompts, ProbePrompt("one token 24 times", (vocabulary // 2,) * min(24, positions))]


def read_probe_prompts(path: Path, tokenizer_of: Path, trust: bool) -> list[ProbePrompt]:
    """Read one prompt from each line: text, or token ids as a JSON list."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Problem(f"--prompts {path}", f"cannot be read: {error}", "give a text file with one prompt per line")
        ) from None
    if not lines:
        raise ConfigError(
            Problem(
                f"--prompts {path}", "has no prompts", "write one prompt per line: text, or token ids like [1, 2, 3]"
            )
        )
    tokenizer: Any = None
    prompts = []
    for number, line in enumerate(lines, 1):
        ids = _token_ids(line)
        if ids is None:
            tokenizer = tokenizer or load_tokenizer(tokenizer_of, trust, "token ids in the prompt file")
            ids = tuple(tokenizer(line)["input_ids"])
        if not ids:
            raise ConfigError(Problem(f"--prompts {path}:{number}", "the prompt has no tokens"))
        prompts.append(ProbePrompt(f"{path.name}:{number}", ids))
    return prompts


def _token_ids(line: str) -> tuple[int, ...] | None:
    try:
        ids = json.loads(line)
    except ValueError:
        return None
    return tuple(ids) if isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) else None


def load_float32_model(side: WeightComparisonSide, trust: bool) -> Any:
    """Load transformers' model in float32 with the weights of `side`; transformers reads folders itself where it
    can."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of what it did not find is an error of ours below
    how: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust, **LOADING_INFO}
    loaded: Any
    try:
        if isinstance(side.weights, HfSource):
            loaded = AutoModelForCausalLM.from_pretrained(side.path, **how)
        else:
            config = AutoConfig.from_pretrained(side.model, trust_remote_code=trust)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            with torch.device("meta"):
                kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust))
            weights = {name: side.weights.slice(name) for name in side.weights.names()}
            loaded = kind.from_pretrained(None, config=config, state_dict=weights, **how)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise WeightsError(Problem(str(side.path), f"transformers cannot load it: {first_line(error)}")) from None
    model = disable_4bit_cpu_repacking(loaded[0])
    loading = loaded[1]
    check_all_weights_loaded(str(side.path), loading)
    return model.eval()


@torch.no_grad()
def logits_per_prompt(model: Any, prompts: Sequence[ProbePrompt]) -> list[Tensor]:
    """Return the logits [tokens, vocabulary] of each prompt."""
    return [
        model(input_ids=torch.tensor([prompt.ids]), use_cache=False, return_dict=True).logits[0].float()
        for prompt in prompts
    ]


def require_prompt_ids_in_vocabulary(model: Any, prompts: Sequence[ProbePrompt]) -> None:
    """Raise an error for prompts with tokens that the model does not have."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    wrong = [p for p in prompts if max(p.ids) >= vocabulary]
    if wrong:
        raise ConfigError(
            [
                Problem(f"--prompts, {p.label}", f"has token id {max(p.ids)}; the vocabulary has {vocabulary} tokens")
                for p in wrong
            ]
        )


def logits_numerical_noise(
    model: Any, prompts: Sequence[ProbePrompt], first: Sequence[Tensor]
) -> tuple[list[float], str]:
    """Measure how far two computations of one model differ on each prompt, and name them: sdpa and eager attention, or
    float32 and float64."""
    other = "eager" if model.config._attn_implementation == "sdpa" else "sdpa"
    try:
        model.set_attn_implementation(other)
        second = logits_per_prompt(model, prompts)
        between = f"{'sdpa' if other == 'eager' else 'eager'} and {other} attention"
    except (ValueError, NotImplementedError):
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch's grouped product knows no float64
        model.double()
        second = logits_per_prompt(model, prompts)
        between = "float32 and float64 (it has only one attention implementation)"
    return [float((x - y).abs().max()) for x, y in zip(first, second, strict=True)], between


def compare_logits(
    a: WeightComparisonSide, b: WeightComparisonSide, prompts: Sequence[ProbePrompt] | None, trust: bool
) -> tuple[list[PromptLogitsDifference], float, str]:
    """Return a verdict on each prompt, the tolerance, and the two computations that give it. One model is in memory at
    a time."""
    model = load_float32_model(a, trust)
    config = model.config.get_text_config()
    chosen = prompts or builtin_probe_prompts(
        config.vocab_size, getattr(config, "max_position_embeddings", None) or LENGTHS[-1]
    )
    require_prompt_ids_in_vocabulary(model, chosen)
    logits_a = logits_per_prompt(model, chosen)
    noise, between = logits_numerical_noise(model, chosen, logits_a)
    del model
    model = load_float32_model(b, trust)
    require_prompt_ids_in_vocabulary(model, chosen)
    logits_b = logits_per_prompt(model, chosen)
    rows = [
        PromptLogitsDifference(p.label, len(p.ids), _gap(x, y), s, float(x.abs().max()))
        for p, x, y, s in zip(chosen, logits_a, logits_b, noise, strict=True)
    ]
    return rows, TIMES * max(noise), between


def _gap(x: Tensor, y: Tensor) -> float:
    """The largest difference; inf where there is none to speak of."""
    if x.shape != y.shape or not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return float("inf")
    return float((x - y).abs().max())
