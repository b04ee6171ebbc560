"""Section `engine`: the distributed backend and the options of the torch engines."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import option
from megaswift.options.tasks import EVERY_TASK

ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
ENGINES = ("auto", "megatron", "ddp", *ZERO, "fsdp2")
SPELLINGS = {"native": "megatron", "mcore": "megatron", "fsdp": "fsdp2", "deepspeed": "zero2"}
FSDP_STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
NO_SHARD = "no_shard"
"""FSDP1's strategy that is DDP."""
FSDP_STRATEGY_OF_SPELLING = {word: word for word in (*FSDP_STRATEGIES, NO_SHARD)} | {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": NO_SHARD,
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
    "_hybrid_shard_zero2": "hybrid_shard_zero2",
}
"""Sharding strategies by torch's names in lower case and by accelerate's numbers."""
NOTHING_WRAPPED = f"{NO_SHARD} is engine ddp, which wraps the whole model"
FSDP_WORDS = (*FSDP_STRATEGIES, "offload", "auto_wrap")
"""transformers' words. auto_wrap changes nothing: decoder layers are always the units."""

PREFETCH_SPELLINGS = {"backward_post": "no_prefetch", "none": "no_prefetch"}
"""FSDP1's other values. `backward_post` gathers the next unit after the gradients of this one, which is when it is
needed."""


@dataclass(frozen=True)
class EngineBackendConfig:
    """Distributed engine"""

    engine: str = option(
        "megatron",
        "Distributed backend; auto: chosen by layout, model size and devices",
        aliases=("distributed_strategy",),
        choices=ENGINES,
        spellings=SPELLINGS,
    )
    deepspeed: str | None = option(
        None,
        "As --engine zero2 and so on, or a DeepSpeed JSON file, or JSON",
        metavar="STAGE|FILE",
        common=EVERY_TASK,
    )
    ddp_backend: str | None = option(
        None,
        "Communication backend; default: nccl on GPUs, gloo on CPUs",
        aliases=("distributed_backend", "dist_backend"),
        choices=("nccl", "gloo"),
        metavar="BACKEND",
    )
    use_fsdp: bool = option(False, "Same as --engine fsdp2")
    fsdp: tuple[str, ...] = option(
        (),
        "FSDP2 sharding strategy and options; default: full_shard",
        choices=FSDP_WORDS,
        metavar="WORD...",
        only_with={"engine": "fsdp2"},
    )
    fsdp_config: str | None = option(
        None,
        "FSDP settings of transformers or accelerate: JSON or YAML file, or JSON",
        metavar="FILE",
        only_with={"engine": "fsdp2"},
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = option(
        (),
        "Module classes that fsdp2 shards as units; default: the decoder layers",
        metavar="CLASS...",
        only_with={"engine": "fsdp2"},
    )
    fsdp_min_num_params: int | None = option(
        None,
        "Units of fsdp2: modules with at least this many parameters; default: by class",
        aliases=("min_num_params",),
        minimum=1,
        unset=("0",),
        unit="parameters",
        only_with={"engine": "fsdp2"},
    )
    fsdp_backward_prefetch: str = option(
        "backward_pre",
        "When fsdp2 gathers the next unit in the backward pass",
        aliases=("backward_prefetch",),
        choices=("backward_pre", "no_prefetch"),
        spellings=PREFETCH_SPELLINGS,
        only_with={"engine": "fsdp2"},
        neutral=(None, False, 0, (), "backward_pre"),
    )
    fsdp_forward_prefetch: bool = option(
        False,
        "Gather the next unit of fsdp2 before each unit's forward pass",
        aliases=("forward_prefetch",),
        only_with={"engine": "fsdp2"},
    )
