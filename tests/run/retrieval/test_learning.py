"""Embedding models and rerankers learn: held-out figures rise beyond their 95% intervals, on three seeds.

Covers: megaswift/run/retrieval/task.py.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.runs import run

pytestmark = [pytest.mark.process, pytest.mark.slow]
THINGS = [f"thing{i}" for i in range(24)]
WORDS = ["where", "is", "the", "of", "belongs", "to", "likes", "a", "and", "."]
HELD_OUT = 150


def write_model(folder: Path) -> Path:
    """A small Qwen3 with random weights over whole words, whose tokenizer appends an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<end>", "<unk>", "yes", "no", *WORDS, *THINGS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and rows on pairs of things, of which the held-out ones are other pairs."""
    made = tmp_path_factory.mktemp("learning")
    write_model(made / "model")
    generator = random.Random(0)
    pairs = [(a, b) for a in THINGS for b in THINGS if a != b]
    generator.shuffle(pairs)

    def row(a: str, b: str) -> dict[str, object]:
        c = generator.choice(THINGS)
        negatives = [f"the {b} likes a {c} .", f"the {c} belongs to the {b} ."]
        return {
            "anchor": f"where is the {a} of the {b}",
            "positive": f"the {a} belongs to the {b} .",
            "negative": negatives,
        }

    for name, some in (("held", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row(a, b)) + "\n" for a, b in some))
    return made


def interval(share: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `HELD_OUT` rows."""
    z = 1.96
    middle = (share + z * z / (2 * HELD_OUT)) / (1 + z * z / HELD_OUT)
    half = z / (1 + z * z / HELD_OUT) * math.sqrt(share * (1 - share) / HELD_OUT + z * z / (4 * HELD_OUT**2))
    return middle - half, middle + half


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("task", "figure", "options"),
    [
        ("embedding", "recall@1", ("--tp", 2, "--learning_rate", 2e-3)),
        ("reranker", "mrr", ("--tp", 2, "--loss_type", "listwise_reranker", "--learning_rate", 2e-3)),
        ("generative_reranker", "mrr", ("--tp", 2, "--learning_rate", 2e-3)),
    ],
)
def test_held_out_figures_rise(
    task: str, figure: str, options: tuple[object, ...], seed: int, folder: Path, tmp_path: Path
) -> None:
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "train.jsonl")]
    inputs += ["--val_dataset", str(folder / "held.jsonl"), "--dataset_cache_dir", str(folder / "cache")]
    more = ("--max_steps", 80, "--per_device_train_batch_size", 16, "--max_length", 64, "--seed", seed)
    run(inputs, tmp_path / "out", *more, "--eval_on_start", "true", *options, task=task, ranks=2)
    first, *_, last = read_lines(tmp_path / "out" / "eval.jsonl")
    assert interval(last[figure])[0] > interval(first[figure])[1], (first[figure], last[figure])
