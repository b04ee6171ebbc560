"""Section `engine`: what spreads the model over processes, and the options of what is not the native engine."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option

ENGINES = ("auto", "megatron", "ddp", "fsdp2")
SPELLINGS = {"native": "megatron", "mcore": "megatron", "fsdp": "fsdp2"}
FSDP_WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "offload", "auto_wrap")


@dataclass(frozen=True)
class EngineConfig:
    """Engine"""

    engine: str = option(
        "megatron", "What spreads the model: Megatron-Core, or torch for models that need no model parallelism",
        aliases=("distributed_strategy",), choices=ENGINES, spellings=SPELLINGS)
    fsdp: tuple[str, ...] = option(
        (), "How fsdp2 shards; unset: full_shard", choices=FSDP_WORDS, metavar="WORD...")
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = option(
        (), "Class names of the modules that fsdp2 shards one by one; unset: the decoder layers", metavar="CLASS...")
