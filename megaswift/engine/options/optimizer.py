"""Section `optim`: the optimizer and its learning-rate schedule. The schedules themselves are in
`megaswift.trainers.schedule`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megaswift.options.option import but_not, is_set, option
from megaswift.options.tasks import GRPO, PREFERENCES

PLATEAU = "reduce_lr_on_plateau"
NO_CRITIC = ("sft", "pt", *PREFERENCES, *GRPO)
"""Tasks that train one model."""

SCHEDULES = {
    "constant_with_warmup": "constant",
    "inverse-square-root": "inverse_sqrt",
    "inverse_square_root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}
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

    learning_rate: float = option(1e-5, "Peak learning rate; unset with adapters: 1e-4", aliases=("lr",), above=0)
    lorap_lr_ratio: float | None = option(
        None,
        "LoRA+: learning rate of B over that of A; unset: the same",
        aliases=("loraplus_lr_ratio",),
        above=0,
        only_with={"train_type": ("lora", "qlora")},
    )
    min_lr: float = option(
        0.0,
        "Final learning rate of the schedule (inverse_sqrt: lower bound)",
        minimum=0,
        only_with={"lr_scheduler_type": but_not("constant")},
    )
    min_lr_ratio: float | None = option(
        None,
        "Final learning rate as a fraction of learning_rate, instead of min_lr",
        aliases=("min_lr_rate",),
        minimum=0,
        maximum=1,
        only_with={"lr_scheduler_type": but_not("constant")},
    )
    lr_scheduler_type: str = option(
        "cosine",
        "Learning-rate schedule after warmup",
        aliases=("lr_decay_style",),
        choices=(
            "constant",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_warmup_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "wsd",
            PLATEAU,
        ),
        spellings=SCHEDULES,
    )
    warmup_ratio: float = option(
        0.0, "Fraction of steps used for warmup", aliases=("lr_warmup_fraction",), minimum=0, below=1
    )
    warmup_steps: int = option(
        0, "Warmup steps, instead of warmup_ratio", aliases=("lr_warmup_iters",), minimum=0, unit="steps"
    )
    lr_warmup_init: float = option(
        0.0, "Learning rate at the first warmup step", minimum=0, only_with={"warmup": is_set(notice=True)}
    )
    lr_warmup_init_ratio: float | None = option(
        None,
        "The same as a fraction of learning_rate, instead of lr_warmup_init",
        aliases=("warmup_lr_rate",),
        minimum=0,
        maximum=1,
        only_with={"warmup": is_set(notice=True)},
    )
    lr_decay_iters: int | None = option(
        None, "Steps after which the schedule has reached its final rate; unset: all steps", minimum=1, unit="steps"
    )
    lr_num_cycles: int = option(
        1, "Cycles of cosine_with_restarts", minimum=1, only_with={"lr_scheduler_type": "cosine_with_restarts"}
    )
    lr_power: float = option(
        1.0, "Exponent of the polynomial schedule", above=0, only_with={"lr_scheduler_type": "polynomial"}
    )
    wsd_decay_ratio: float = option(
        0.1, "Fraction of steps in the decay phase of wsd", above=0, maximum=1, only_with={"lr_scheduler_type": "wsd"}
    )
    wsd_decay_steps: int | None = option(
        None,
        "Steps in the decay phase of wsd, instead of wsd_decay_ratio",
        aliases=("lr_wsd_decay_iters", "num_decay_steps"),
        minimum=1,
        unit="steps",
        only_with={"lr_scheduler_type": "wsd"},
    )
    wsd_stable_steps: int | None = option(
        None,
        "Steps of wsd between warmup and decay; unset: until the decay at the end",
        aliases=("num_stable_steps",),
        minimum=0,
        unit="steps",
        only_with={"lr_scheduler_type": "wsd"},
    )
    wsd_decay_style: str = option(
        "cosine",
        "Shape of the decay phase of wsd",
        aliases=("lr_wsd_decay_style",),
        choices=("cosine", "linear", "minus_sqrt", "exponential"),
        spellings={"1-sqrt": "minus_sqrt"},
        only_with={"lr_scheduler_type": "wsd"},
    )
    weight_decay: float = option(0.1, "Weight decay of matrices: decoupled for adam, L2 for sgd", minimum=0)
    plateau_factor: float = option(
        0.1,
        "reduce_lr_on_plateau: factor of the learning rate",
        above=0,
        below=1,
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_patience: int = option(
        10,
        "reduce_lr_on_plateau: evaluations without improvement that are tolerated",
        minimum=0,
        unit="evaluations",
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_threshold: float = option(
        1e-4,
        "reduce_lr_on_plateau: change of the metric that is an improvement",
        minimum=0,
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_threshold_mode: str = option(
        "rel",
        "reduce_lr_on_plateau: threshold as a fraction of the best value, or absolute",
        choices=("rel", "abs"),
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_cooldown: int = option(
        0,
        "reduce_lr_on_plateau: evaluations after a reduction that do not count",
        minimum=0,
        unit="evaluations",
        only_with={"lr_scheduler_type": PLATEAU},
    )
    start_weight_decay: float | None = option(
        None,
        "Weight decay of the first step where weight_decay_incr_style is not constant",
        minimum=0,
        tasks=NO_CRITIC,
        only_with={"weight_decay_incr_style": but_not("constant")},
    )
    end_weight_decay: float | None = option(
        None,
        "Weight decay after the last step, with start_weight_decay",
        minimum=0,
        tasks=NO_CRITIC,
        only_with={"weight_decay_incr_style": but_not("constant")},
    )
    weight_decay_incr_style: str = option(
        "constant",
        "Course of the weight decay from start_weight_decay to end_weight_decay",
        choices=("constant", "linear", "cosine"),
        tasks=NO_CRITIC,
    )
    vit_lr: float | None = option(
        None,
        "Peak learning rate of the vision encoder; unset: learning_rate",
        above=0,
        metavar="RATE",
        only_with={"engine": but_not("megatron"), "vision_model": True, "freeze_vit": False},
        neutral=(None,),
    )
    aligner_lr: float | None = option(
        None,
        "Peak learning rate of the aligner; unset: learning_rate",
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
        "Muon: Newton-Schulz iterations of a step",
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
        "Gradients' data type with precision_aware_optimizer; bf16: 2 bytes less",
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
        "precision_aware_optimizer: store of main weights what bfloat16 ones lack",
        only_with={"engine": ("megatron", "auto"), "precision_aware_optimizer": True, "optimizer_cpu_offload": False},
        neutral=(True,),
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep Adam's moments on the CPU and update there: less GPU memory, slower steps",
        only_with={"engine": ("megatron", "auto")},
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
