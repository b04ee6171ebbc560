"""Rotary frequencies beside those of transformers' models, for every kind of scaling that transformers knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from megaswift.engine.megatron.layers.rope import PositionRotary, inverse_frequencies
from megaswift.errors import WeightsError
from megaswift.families import family_of
from megaswift.models.published.dense import PHI_4
from megaswift.models.published.table import LLAMA_2_7B
from megaswift.models.spec import ModelSpec

LLAMA = {**LLAMA_2_7B, "max_position_embeddings": 64}
PHI = {**PHI_4, "max_position_embeddings": 128, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0 + i for i in range(64)]},
}
REFUSED = ("proportional",)


def made(kind: str) -> tuple[dict[str, Any], type[torch.nn.Module]]:
    """(a config.json with this scaling, transformers' class of its angles): Llama's, unless only Phi has it."""
    base, theirs = (PHI, Phi3RotaryEmbedding) if kind == "longrope" else (LLAMA, LlamaRotaryEmbedding)
    return {**base, "rope_scaling": {"rope_type": kind, **KINDS.get(kind, {"factor": 4.0})}}, theirs


def off(spec: ModelSpec, config: dict[str, Any], theirs: type[torch.nn.Module], length: int) -> float:
    """The largest difference of cosines and sines of a sequence of this length."""
    frequencies, factor = inverse_frequencies(spec)
    ours = PositionRotary(frequencies)
    ours.positions = torch.arange(length)[None]
    angles = ours()[:, 0, 0]
    fields = {k: v for k, v in config.items() if k != "model_type"}
    rotary = theirs(AutoConfig.for_model(config["model_type"], **fields))
    cosine, sine = rotary(torch.zeros(1), ours.positions)
    return float(max((angles.cos() * factor - cosine[0]).abs().max(), (angles.sin() * factor - sine[0]).abs().max()))


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_every_scaling_of_transformers_is_served_or_refused_with_a_reason(kind: str) -> None:
    """A kind that a new transformers brings fails here: it needs a row in ROPE_KEYS or ROPE_REFUSED."""
    config, theirs = made(kind)
    if kind in REFUSED:
        with pytest.raises(WeightsError, match=f"rope type '{kind}' is not supported: it"):
            family_of(config).spec(config)
    else:
        assert off(family_of(config).spec(config), config, theirs, 64) < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_longest_sequence_with_these_frequencies_is_transformers_own(kind: str) -> None:
    config, theirs = made(kind)
    spec = family_of(config).spec(config)
    assert spec.features.longest == 64
    assert off(spec, config, theirs, 64) < 1e-5 and off(spec, config, theirs, 65) > 1e-2
