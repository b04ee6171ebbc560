"""Real input of the smallest kind: a Hugging Face model folder with its tokenizer, and a file of conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] }}<e>{% endgeneration "
    "%}{% else %}<u>{{ m['content'] }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SPECIAL = ["<pad>", "<e>", "<u>", "<a>"]


def write_model(folder: Path, layers: int = 2, **sizes: int) -> Path:
    """A Qwen3 of some ten thousand parameters, unless `sizes` differ, and a character tokenizer that marks the
    generation."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz0123456789 ?=+", "<unk>"]
    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<e>",
        unk_token="<unk>",
        additional_special_tokens=["<u>", "<a>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(3)
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    } | sizes
    config = Qwen3Config(
        vocab_size=len(words),
        num_hidden_layers=layers,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        **fields,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_inputs(folder: Path, lr: str = "1e-2", **sizes: int) -> list[str]:
    """A model and its data in `folder`, and the options of a run on them, four rows a micro-batch."""
    model, data = write_model(folder / "model", **sizes), write_conversations(folder / "data.jsonl")
    return [
        "--model",
        str(model),
        "--dataset",
        str(data),
        "--dataset_cache_dir",
        str(folder / "cache"),
        "--per_device_train_batch_size",
        "4",
        "--lr",
        lr,
    ]


def logits(model: torch.nn.Module) -> torch.Tensor:
    """[1, 36, V] of the same tokens each time, in evaluation mode."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(4, 40)[None]).logits
        return found


def write_conversations(path: Path, rows: int = 48, seed: int = 0) -> Path:
    """Sums of one-digit numbers."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            turns = [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def write_preferences(folder: Path, rows: int) -> None:
    """A model in `folder`, pairs.jsonl and judged.jsonl: sums of one-digit numbers, right and wrong."""
    write_model(folder / "model")
    draw, pairs, judged = random.Random(0), [], []
    for i in range(rows):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        ask = {"role": "user", "content": f"{a}+{b}="}
        wrong = str(a + b + draw.randint(1, 4)) * draw.randint(1, 3)
        pairs.append({"messages": [ask, {"role": "assistant", "content": str(a + b)}], "rejected_response": wrong})
        judged.append(
            {"messages": [ask, {"role": "assistant", "content": wrong if i % 3 else str(a + b)}], "label": not i % 3}
        )
    for name, made in (("pairs", pairs), ("judged", judged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def preference_inputs(folder: Path, task: str, model: bool = True) -> list[str]:
    """The options of a run on them; `model` False: on another model."""
    data = folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")
    start = ["--model", str(folder / "model")] if model else []
    return [*start, "--dataset", str(data), "--dataset_cache_dir", str(folder / "cache")]
