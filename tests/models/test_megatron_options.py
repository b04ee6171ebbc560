"""Megatron-LM's architecture options: taken where they describe the model of config.json, an error where they do not.

Covers: megaswift/compat/names/architecture.py.
"""

from __future__ import annotations

import pytest

from megaswift.compat.names.architecture import ARCHITECTURE
from megaswift.config import load_config
from megaswift.families import family_of
from megaswift.models.megatron_options import VALUES, megatron_architecture_problems
from megaswift.models.published.moe import QWEN1_5_MOE_A2_7B
from megaswift.models.published.table import PUBLISHED, QWEN3_0_6B

QWEN3, QWEN_MOE = (family_of(c).spec(c) for c in (QWEN3_0_6B, QWEN1_5_MOE_A2_7B))
DENSE = (
    "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --max-position-embeddings 40960 --position-embedding-type rope "
    "--use-rotary-position-embeddings --rotary-base 1000000 --rotary-percent 1.0 --normalization RMSNorm "
    "--norm-epsilon 1e-6 --swiglu --disable-bias-linear --qk-layernorm --attention-dropout 0.0 --hidden-dropout 0"
)
EXPERTS = "--num-experts 60 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --add-qkv-bias --vocab-size 151936"


def architecture(words: str) -> dict[str, str]:
    """What the command line collects."""
    typed = ["--model", "x", "--dataset", "d.jsonl", *words.split()]
    return dict(load_config("pt", typed, environ={}).model.megatron_architecture)


def test_the_models_own_values() -> None:
    """Qwen3-0.6B and Qwen1.5-MoE as Megatron-LM's scripts describe them."""
    assert len(architecture(DENSE)) == 19
    assert megatron_architecture_problems(architecture(DENSE), QWEN3) == []
    assert megatron_architecture_problems(architecture(EXPERTS), QWEN_MOE) == []
    assert megatron_architecture_problems(architecture("--untie-embeddings-and-output-weights"), QWEN_MOE) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--num-layers 32", "28"),
        ("--norm-epsilon 1e-5", "1e-06"),
        ("--untie-embeddings-and-output-weights", "false"),
        ("--position-embedding-type learned_absolute", "rope"),
        ("--num-query-groups many", "8"),
        ("--num-experts 8", "0"),
        ("--add-qkv-bias", "false"),
    ],
)
def test_another_model(words: str, meant: str) -> None:
    (problem,) = megatron_architecture_problems(architecture(words), QWEN3)
    name = words.split()[0][2:].replace("-", "_")
    assert problem.what.startswith(f"--{name} ") and problem.rule.endswith(f"{name} {meant}")


def test_the_file_and_the_command_line_join() -> None:
    """Of two sources the later one's entry counts."""
    cfg = load_config("pt", ["--model", "x", "--dataset", "d.jsonl", "--num-layers", "28"], environ={})
    assert cfg.model.megatron_architecture == {"num_layers": "28"} and not cfg.notices


def test_every_option_has_a_value_for_every_family() -> None:
    assert set(VALUES) == set(ARCHITECTURE)
    for raw, _ in (PUBLISHED[name] for name in PUBLISHED):
        spec = family_of(raw).spec(raw)
        texts = {name: str(value(spec)) for name, value in VALUES.items()}
        assert megatron_architecture_problems(texts, spec) == []


def test_routers_are_compared_too() -> None:
    """Qwen1.5-MoE takes the softmax over all experts first; a family's table leaves out what is off."""
    own = "--moe-router-pre-softmax --moe-router-score-function softmax --moe_shared_expert_gate true"
    assert megatron_architecture_problems(architecture(own), QWEN_MOE) == []
    (problem,) = megatron_architecture_problems(architecture("--moe_router_pre_softmax false"), QWEN_MOE)
    assert problem.rule.endswith("moe_router_pre_softmax true")
    (problem,) = megatron_architecture_problems(architecture("--multi_latent_attention true"), QWEN3)
    assert problem.rule.endswith("multi_latent_attention false")
