"""The model that the contenders of a benchmark train, and the optimizer that all of them take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
SIZES = {
    "tiny": (64, 2, 128, 4, 2, 16, 512),
    "20m": (384, 8, 1024, 6, 3, 64, 8192),
    "1b": (2048, 16, 6144, 16, 8, 128, 65536),
    "4b": (2560, 36, 9728, 32, 8, 128, 151936),
}
MODEL_TYPES = ("qwen3", "qwen3_5_text", "qwen3_5_moe_text")
LR, CLIP, DECAY, BETAS, EPS = 1e-4, 1.0, 0.1, (0.9, 0.95), 1e-8


def vocabulary(args: argparse.Namespace) -> int:
    """Tokens that the model has."""
    return SIZES[args.size][-1]


def make_model(args: argparse.Namespace, folder: Path) -> None:
    """Writes a random model of the asked type and size, and a tokenizer that TRL accepts, as a Hugging Face folder."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    size = dict(zip(FIELDS, SIZES[args.size], strict=True))
    size |= hybrid_sizes(args.model_type, size)
    config = AutoConfig.for_model(args.model_type, **size, tie_word_embeddings=False, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocabulary(args))}, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>").save_pretrained(folder)


def hybrid_sizes(model_type: str, size: dict[str, int]) -> dict[str, int]:
    """The sizes of gated delta nets, in the proportions of Qwen3.5, and of its experts: eight, of which two are active,
    and a shared one."""
    if model_type == "qwen3":
        return {}
    heads = size["hidden_size"] // 128 or 1
    found = {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
    found |= {"linear_key_head_dim": size["head_dim"], "linear_value_head_dim": size["head_dim"]}
    if model_type == "qwen3_5_moe_text":
        width = size["intermediate_size"] // 4
        found |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}
        found |= {"shared_expert_intermediate_size": width}
    return found


def load_hf(args: argparse.Namespace, folder: Path) -> Any:
    """The transformers model: float32 weights, SDPA attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(args.device).train()


def load_engine(args: argparse.Namespace, folder: Path, task: str) -> Any:
    """megaswift's engine on one process, with the model's weights."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import native_engine

    cfg = SwiftConfig(
        task=task,
        model=str(folder),
        torch_dtype=args.dtype,
        learning_rate=LR,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        distributed_optimizer=args.device == "cuda",
    )
    hf_config = json.loads((folder / "config.json").read_text())
    context = ParallelContext(Layout(1), timeout_s=600, seed=1)
    engine = native_engine(cfg, family_of(hf_config).spec(hf_config), context)
    engine.load_hf(folder)
    return engine


def trl_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same for a trainer of TRL, which writes and reports nothing."""
    return {
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "max_grad_norm": CLIP,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "bf16": args.dtype == "bfloat16",
        "use_cpu": args.device == "cpu",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
