"""Section `optim`: the optimizer and its learning-rate schedule. The schedules themselves are in
`megaswift.trainers.schedule`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megaswift.options.option import but_not, option
from megaswift.options.tasks import DATASETS, EVERY_TASK, GRPO

NO_CRITIC = (*DATASETS, *GRPO)
"""Tasks that train one model."""

PAGED = ("paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "paged_lion_8bit")
LIONS = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit")
OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", *LIONS)
GALORE = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
EVERYWHERE = ("adam", "sgd")
"""Those of the native engine too."""
SCALED_MOMENT_DTYPES = ("fp16", "fp8")
"""Megatron-LM's data types of Adam's moments that Transformer Engine stores with a scale; refused."""
MOMENT_DTYPES = ("fp32", "bf16", *SCALED_MOMENT_DTYPES)
ELEMENTWISE = ("lion_32bit", "paged_adamw_32bit", "paged_lion_32bit")
"""Those that step each number by itself, so that fsdp2 can step the parts of a tensor."""
MUON = "muon"
OPTIMIZERS = (*EVERYWHERE, "adafactor", MUON, *GALORE, *OF_BITSANDBYTES)
SPELLINGS = {
    "adamw": "adam",
    "adamw_torch": "adam",
    "adamw_torch_fused": "adam",
    "adamw_hf": "adam",
    "adamw_apex_fused": "adam",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
}
"""transformers' and bitsandbytes' names."""
BETAS = ("adam", MUON, "galore_adamw", "galore_adamw_8bit", *OF_BITSANDBYTES)
EPSILON = tuple(name for name in BETAS if name not in LIONS)


@dataclass(frozen=True)
class PluginOptimizerParts:
    """An optimizer that a file of `--external_plugins` has registered."""

    make: Callable[[list[dict[str, Any]], OptimConfig], Any]
    states: tuple[str, ...]
    """float32 tensors of the parameter's shape."""
    step: str | None
    """The state that counts steps."""
    elementwise: bool = False
    """Each number is updated by itself, so that a part of a tensor may be stepped alone."""


PLUGIN_OPTIMIZERS: dict[str, PluginOptimizerParts] = {}


def is_elementwise_plugin(name: str) -> bool:
    """Return whether an optimizer is a plugin's that may step parts of tensors: on every engine."""
    return name in PLUGIN_OPTIMIZERS and PLUGIN_OPTIMIZERS[name].elementwise


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule"""

    learning_rate: float = option(
        1e-5,
        "Peak learning rate; default with adapters: 1e-4, random_init: 3e-4",
        aliases=("lr",),
        above=0,
        common=EVERY_TASK,
    )
    lorap_lr_ratio: float | None = option(
        None,
        "LoRA+: learning rate of B divided by that of A; default: the same rate",
        aliases=("loraplus_lr_ratio",),
        above=0,
        only_with={"train_type": ("lora", "qlora")},
    )
    weight_decay: float = option(0.1, "Weight decay of matrices: decoupled for adam, L2 for sgd", minimum=0)
    vit_lr: float | None = option(
        None,
        "Peak learning rate of the vision encoder; default: learning_rate",
        above=0,
        metavar="RATE",
        only_with={"engine": but_not("megatron"), "vision_model": True, "freeze_vit": False},
        neutral=(None,),
    )
    aligner_lr: float | None = option(
        None,
        "Peak learning rate of the aligner; default: learning_rate",
        above=0,
        metavar="RATE",
        only_with={"engine": but_not("megatron"), "vision_model": True, "freeze_aligner": False},
        neutral=(None,),
    )
    adam_beta1: float = option(
        0.9,
        "Decay rate of Adam's first moment (Lion: interpolation of the update)",
        minimum=0,
        below=1,
        only_with={"optimizer": BETAS},
    )
    adam_beta2: float = option(
        0.95,
        "Decay rate of Adam's second moment (Lion: of the momentum)",
        minimum=0,
        below=1,
        only_with={"optimizer": BETAS},
    )
    adam_epsilon: float = option(
        1e-8, "Epsilon in Adam's denominator", aliases=("adam_eps",), above=0, only_with={"optimizer": EPSILON}
    )
    max_grad_norm: float = option(1.0, "Gradient clipping norm; 0: no clipping", aliases=("clip_grad",), minimum=0)
    initial_loss_scale: float = option(
        2.0**16,
        "float16: loss scale of the first step, a power of two",
        minimum=1,
        maximum=2.0**32,
        only_with={"torch_dtype": but_not("float32", "bfloat16", notice=True)},
        neutral=(65536.0,),
    )
    min_loss_scale: float = option(
        1.0,
        "float16: lower bound of the loss scale, a power of two",
        minimum=1,
        maximum=2.0**32,
        only_with={"torch_dtype": but_not("float32", "bfloat16", notice=True)},
        neutral=(1.0,),
    )
    loss_scale_window: int = option(
        1000,
        "float16: steps with finite gradients before the loss scale is doubled",
        minimum=1,
        unit="steps",
        only_with={"torch_dtype": but_not("float32", "bfloat16", notice=True)},
        neutral=(1000,),
    )
    hysteresis: int = option(
        2,
        "float16: steps with non-finite gradients before the loss scale is halved",
        minimum=1,
        unit="steps",
        only_with={"torch_dtype": but_not("float32", "bfloat16", notice=True)},
        neutral=(2,),
    )
    optimizer: str = option(
        "adam",
        "Optimizer; adam is AdamW. All except adam and sgd need --engine ddp or fsdp2",
        aliases=("optim",),
        choices=OPTIMIZERS,
        spellings=SPELLINGS,
    )
    sgd_momentum: float = option(0.9, "SGD momentum", minimum=0, below=1, only_with={"optimizer": "sgd"})
    muon_momentum: float = option(
        0.95, "Muon: momentum of matrices", minimum=0, below=1, only_with={"optimizer": MUON}, neutral=(0.95,)
    )
    muon_use_nesterov: bool = option(
        True, "Muon: Nesterov momentum", aliases=("muon_nesterov",), only_with={"optimizer": MUON}, neutral=(True,)
    )
    muon_num_ns_steps: int = option(
        5,
        "Muon: Newton-Schulz iterations per step",
        minimum=1,
        maximum=99,
        only_with={"optimizer": MUON},
        neutral=(5,),
    )
    precision_aware_optimizer: bool = option(
        False,
        "Store main weights in 2 extra bytes instead of 4 (Transformer Engine's Adam)",
        aliases=("use_precision_aware_optimizer",),
        only_with={
            "engine": ("megatron", "auto"),
            "optimizer": "adam",
            "optimizer_cpu_offload": but_not(True, notice=True),
        },
    )
    main_grads_dtype: str = option(
        "fp32",
        "Data type of gradients with precision_aware_optimizer; bf16: 2 bytes less",
        choices=("fp32", "bf16"),
        only_with={"engine": ("megatron", "auto"), "precision_aware_optimizer": True, "optimizer_cpu_offload": False},
        neutral=("fp32",),
    )
    exp_avg_dtype: str = option(
        "fp32",
        "Data type of Adam's first moment with precision_aware_optimizer",
        choices=MOMENT_DTYPES,
        only_with={"engine": ("megatron", "auto"), "precision_aware_optimizer": True, "optimizer_cpu_offload": False},
        neutral=("fp32",),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "Data type of Adam's second moment with precision_aware_optimizer",
        choices=MOMENT_DTYPES,
        only_with={"engine": ("megatron", "auto"), "precision_aware_optimizer": True, "optimizer_cpu_offload": False},
        neutral=("fp32",),
    )
    store_param_remainders: bool = option(
        True,
        "precision_aware_optimizer: store only the bits that bfloat16 weights lack",
        only_with={"engine": ("megatron", "auto"), "precision_aware_optimizer": True, "optimizer_cpu_offload": False},
        neutral=(True,),
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep Adam's moments on the CPU and update there: less GPU memory, slower steps",
        only_with={"engine": ("megatron", "auto"), "optimizer": "adam"},
    )
    optimizer_offload_fraction: float = option(
        1.0,
        "Fraction of the optimizer state that optimizer_cpu_offload moves",
        minimum=0,
        maximum=1,
        only_with={"engine": ("megatron", "auto"), "optimizer_cpu_offload": True},
        neutral=(1.0,),
    )
    galore_rank: int = option(
        128, "GaLore: rank of the gradient projection", minimum=1, only_with={"optimizer": GALORE}
    )
    galore_update_proj_gap: int = option(
        200, "GaLore: steps between updates of the projection", minimum=1, unit="steps", only_with={"optimizer": GALORE}
    )
    galore_scale: float = option(0.25, "GaLore: scale of the update", above=0, only_with={"optimizer": GALORE})
    galore_proj_type: str = option(
        "std",
        "GaLore: side to project (std: the smaller one, reverse_std: the larger)",
        choices=("std", "reverse_std", "right", "left", "full"),
        only_with={"optimizer": GALORE},
    )
    galore_target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "GaLore: regular expressions for modules; all-linear: all except lm_head",
        aliases=("optim_target_modules",),
        metavar="PATTERN...",
        only_with={"optimizer": GALORE},
    )
