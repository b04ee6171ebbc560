"""Make a tiny Qwen3 model with random weights and a tokenizer trained on the bundled text, as a Hugging Face folder.

    python scripts/quickstart/make_model.py DATA_FOLDER MODEL_FOLDER

Owns the shape of the model and its chat template (with generation markers). Training belongs to `megaswift sft`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def texts(data: Path) -> list[str]:
    """Every message of the bundled conversations."""
    rows = [
        json.loads(line)
        for file in sorted(data.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return [message["content"] for row in rows for message in row["messages"]]


def make_tokenizer(corpus: list[str], vocab_size: int = 1536) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus + ["user", "assistant"] * 99, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=STOP, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights; every rank of TP 2 and PP 2 gets its share of heads and layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.08,  # 0.02 suits widths of thousands; so narrow a model needs twice the steps with it
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def main(data: Path, folder: Path) -> None:
    """Save both; the last line printed is the number of GPUs, for quickstart.sh."""
    logging.disable_progress_bar()
    tokenizer = make_tokenizer(texts(data))
    model = make_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(
        f"{folder}: Qwen3, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, vocabulary "
        f"{len(tokenizer)}"
    )
    print(f"gpus {torch.cuda.device_count()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
