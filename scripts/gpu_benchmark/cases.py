"""What `bench_gpu.py` measures: model shapes, training methods, rows and contenders, in the order in which they run.

Torch-free, so that listing cases costs nothing. Shapes are those of the published config.json files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}


def _qwen3(hidden: int, layers: int, mlp: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **QWEN3,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000.0,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 28, 3072, 16, True),
    "qwen3-1.7b": _qwen3(2048, 28, 6144, 16, True),
    "qwen3-4b": _qwen3(2560, 36, 9728, 32, True),
    "qwen3-8b": _qwen3(4096, 36, 12288, 32, False),
    "llama3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": {
        **_qwen3(2048, 48, 6144, 32, False),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
"""What a shape becomes with `--small`: the same model type, for a machine without a GPU."""
LENGTHS = {"4096": 4096, "8192": 8192, "packed": 4096}
"""Tokens a row, by the name of a case's rows. `packed`: documents of real lengths in rows of 4,096."""
SMALL_LENGTHS = {"4096": 64, "8192": 128, "packed": 64}
METHODS = ("full", "lora", "qlora", "fp8")
CONTENDERS = {
    "te": "megaswift on Transformer Engine's modules (QLoRA: its attention, with torch's products of NF4 weights)",
    "te_grouped": "the same with experts in Transformer Engine's grouped product, where torch's is the default",
    "bf16_moment": "the same as te with bfloat16 first moments, and no more recomputed than asked for (nothing)",
    "torch": "megaswift on plain torch layers",
    "hf": "a plain PyTorch loop over the transformers model (SDPA, bf16 weights and moments; adapters by PEFT, NF4 by "
    "bitsandbytes; FP8 is compared with its full weights)",
    "hf_compile": "the same loop under torch.compile (adapters of experts are registered once, where PEFT does it in "
    "each call)",
}


@dataclass(frozen=True)
class BenchmarkCase:
    """One measurement."""

    shape: str
    method: str
    rows: str
    contender: str

    @property
    def name(self) -> str:
        """`qwen3-8b/full/4096/te`."""
        return f"{self.shape}/{self.method}/{self.rows}/{self.contender}"


def parse_case(name: str) -> BenchmarkCase:
    """The inverse of `name`.

    Raises:
        ValueError: it names no case.
    """
    case = BenchmarkCase(*name.split("/")) if name.count("/") == 3 else None
    if case not in all_cases():
        raise ValueError(f"{name} is no case; --list names them")
    return case


def all_cases() -> list[BenchmarkCase]:
    """Every case, in the order in which they run: those with published targets and their peers first."""
    return list(dict.fromkeys(_in_order()))


def _in_order() -> Iterator[BenchmarkCase]:
    dense = [name for name, shape in SHAPES.items() if "num_experts" not in shape]
    contenders = [name for name in CONTENDERS if name not in ("te_grouped", "bf16_moment")]
    yield from (BenchmarkCase("qwen3-8b", method, "4096", "te") for method in METHODS)
    yield from (BenchmarkCase("qwen3-8b", "full", "4096", contender) for contender in contenders)
    yield BenchmarkCase("qwen3-8b", "full", "packed", "bf16_moment")
    yield from (BenchmarkCase(shape, "full", "4096", "te") for shape in dense)
    yield from (BenchmarkCase("qwen3-30b-a3b", "lora", "4096", contender) for contender in ("te", "te_grouped"))
    yield from (BenchmarkCase("qwen3-8b", method, rows, "te") for rows in LENGTHS for method in METHODS)
    yield from (BenchmarkCase(shape, "full", "4096", contender) for shape in dense for contender in contenders)
    yield from (BenchmarkCase("qwen3-8b", "lora", "4096", contender) for contender in contenders)
    yield from (BenchmarkCase("qwen3-8b", method, rows, "torch") for rows in LENGTHS for method in METHODS[:3])
    yield BenchmarkCase("qwen3-30b-a3b", "lora", "4096", "torch")
    yield from (BenchmarkCase("qwen3-8b", method, rows, "hf") for rows in LENGTHS for method in METHODS[:3])
    yield BenchmarkCase("qwen3-30b-a3b", "lora", "4096", "hf")
    yield from (BenchmarkCase("qwen3-8b", method, rows, "hf_compile") for rows in LENGTHS for method in METHODS[:3])
    yield BenchmarkCase("qwen3-30b-a3b", "lora", "4096", "hf_compile")
    for shape in SHAPES:
        methods = METHODS if shape in dense else ("lora", "qlora")
        yield from (BenchmarkCase(shape, method, rows, "te") for method in methods for rows in LENGTHS)


def matching_cases(patterns: Sequence[str]) -> list[BenchmarkCase]:
    """Cases whose name matches any of the patterns (`*` and `?` as in a shell); all of them without a pattern."""
    return [case for case in all_cases() if not patterns or any(fnmatch(case.name, p) for p in patterns)]


def config_of(case: BenchmarkCase, small: bool) -> dict[str, Any]:
    """The fields of the shape's config.json."""
    shape = SHAPES[case.shape]
    reduced = {name: SMALL[name] for name in shape.keys() & SMALL.keys()} if small else {}
    return {**shape, **reduced, "max_position_embeddings": 40960}


def row_length(case: BenchmarkCase, small: bool) -> int:
    """Tokens a row."""
    return (SMALL_LENGTHS if small else LENGTHS)[case.rows]


def document_lengths(case: BenchmarkCase, small: bool, seed: int) -> list[int]:
    """Lengths of the documents that fill one row.

    Packed rows have documents as chat data sets do: log-normal with a median of 450 tokens and sigma 0.9, so that a
    tenth is longer than 1,400. One document fills a row otherwise.
    """
    room = row_length(case, small)
    if case.rows != "packed":
        return [room]
    draw, lengths = random.Random(seed), []
    while room > 0:
        length = min(room, max(8, round(draw.lognormvariate(0.0, 0.9) * (8 if small else 450))))
        lengths.append(length if room - length >= 8 else room)
        room -= lengths[-1]
    return lengths
