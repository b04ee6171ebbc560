"""Rules for optimizer options, and which engines support which optimizer. The names are in
`engine/options/optimizer.py`."""

from __future__ import annotations

import math

from megaswift.config.rule import ONE_OF, ConflictingOptions, Test
from megaswift.config.sections import Sections
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.engine_checks import AUTO, NATIVE, READS, drive_parts_of_option, requested_engine
from megaswift.engine.options.optimizer import (
    ELEMENTWISE,
    EVERYWHERE,
    GALORE,
    PAGED,
    PLUGIN_OPTIMIZERS,
    SCALED_MOMENT_DTYPES,
    is_elementwise_plugin,
)


def uses_distributed_optimizer(requested: bool, optimizer: str) -> bool:
    """Whether the native engine splits the optimizer's state over data-parallel ranks: Megatron-Core does it for adam
    only."""
    return requested and optimizer == "adam"


def can_shard_optimizer(c: Sections) -> bool:
    """Return whether `distributed_optimizer` may be given: not with sgd or a plugin's optimizer."""
    return c.optim.optimizer != "sgd" and c.optim.optimizer not in PLUGIN_OPTIMIZERS


def _needs_whole_tensors(c: Sections) -> bool:
    return c.optim.optimizer in PLUGIN_OPTIMIZERS and not is_elementwise_plugin(c.optim.optimizer)


def _serves(c: Sections, built_in: tuple[str, ...]) -> bool:
    """Whether an engine with these optimizers steps the run's; of plugins a rule of its own says it."""
    return c.optim.optimizer in (*built_in, *PLUGIN_OPTIMIZERS)


def _is_scaled(name: str) -> Test:
    return lambda c: c.value(name) in SCALED_MOMENT_DTYPES


OPTIMIZER_CLASHES: tuple[ConflictingOptions, ...] = (
    *(
        ConflictingOptions(
            (name, "optimizer"),
            lambda c, name=name: c.value(name) is not None and c.optim.optimizer in GALORE,  # type: ignore[misc]
            "gives parts of the model learning rates of their own, which GaLore does not have",
            "--optimizer adam",
        )
        for name in ("vit_lr", "aligner_lr")
    ),
    *(
        ConflictingOptions(
            (name, "lorap_lr_ratio"),
            lambda c, name=name: c.value(name) is not None and c.optim.lorap_lr_ratio is not None,  # type: ignore[misc]
            "conflicts with lorap_lr_ratio: each sets the learning rates of groups of weights",
            ONE_OF,
        )
        for name in ("vit_lr", "aligner_lr")
    ),
    *(
        ConflictingOptions(
            (name,),
            _is_scaled(name),
            "is not supported: Transformer Engine scales such moments by the largest of each shard, so a resumed run "
            "would continue with other values, and each step makes float32 copies of all of them",
            f"--{name} bf16, or fp32",
        )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    ConflictingOptions(
        ("main_grads_dtype", "torch_dtype"),
        lambda c: c.optim.main_grads_dtype == "bf16" and c.model.torch_dtype in ("float32", "float16"),
        "needs bfloat16 weights, but torch_dtype is {torch_dtype}",
        "--torch_dtype bfloat16, or --main_grads_dtype fp32",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: requested_engine(c) not in ("ddp", AUTO) and _needs_whole_tensors(c),
        "is a plugin's, registered without elementwise=True, but this engine steps parts of tensors",
        "plugins.optimizer(..., elementwise=True) if it updates each number by itself, or --engine ddp",
    ),
    ConflictingOptions(
        ("optimizer", "deepspeed"),
        lambda c: c.optim.optimizer in PLUGIN_OPTIMIZERS and bool(drive_parts_of_option(c.engine.deepspeed)),
        "is a plugin's, whose states DeepSpeed cannot keep on a drive",
        '"device": "cpu" in the file, or --optimizer adam',
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: requested_engine(c) == NATIVE and not _serves(c, EVERYWHERE),
        "the native engine supports adam and sgd",
        "--engine ddp, or --optimizer adam",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: requested_engine(c) in ZERO and not _serves(c, ("adam",)),
        "ZeRO supports only adam (AdamW)",
        "--optimizer adam, or --engine ddp",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: requested_engine(c) == "fsdp2" and not _serves(c, (*EVERYWHERE, *ELEMENTWISE)),
        "needs whole matrices or blocks, but fsdp2 shards them",
        "--engine ddp, or --optimizer adam",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: requested_engine(c) == "fsdp2" and c.optim.optimizer in PAGED and "offload" in c.engine.fsdp,
        "conflicts with --fsdp offload, which already keeps optimizer states on the CPU",
        ONE_OF,
    ),
    ConflictingOptions(
        ("optimizer", "train_type"),
        lambda c: c.optim.optimizer in GALORE and c.model.train_type != "full",
        "projects gradients of weight matrices, which are frozen with train_type {train_type}",
        "--optimizer adam",
    ),
    ConflictingOptions(
        ("precision_aware_optimizer", "distributed_optimizer"),
        lambda c: c.optim.precision_aware_optimizer and not c.parallel.distributed_optimizer,
        "needs distributed_optimizer",
        "--distributed_optimizer true",
    ),
)


_POWER = "must be a power of two, which multiplies and divides without rounding"


def _is_power_of_two(c: Sections, name: str) -> bool:
    return math.log2(c.value(name)).is_integer()


LOSS_SCALE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("initial_loss_scale",),
        lambda c: not _is_power_of_two(c, "initial_loss_scale"),
        _POWER,
        "--initial_loss_scale 65536",
    ),
    ConflictingOptions(
        ("min_loss_scale",), lambda c: not _is_power_of_two(c, "min_loss_scale"), _POWER, "--min_loss_scale 1"
    ),
    ConflictingOptions(
        ("initial_loss_scale", "min_loss_scale"),
        lambda c: c.optim.initial_loss_scale < c.optim.min_loss_scale,
        "is less than min_loss_scale {min_loss_scale}",
        "--min_loss_scale 1",
    ),
)
