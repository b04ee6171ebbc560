"""Section `optim`: the optimizer and its learning-rate schedule. The schedules themselves are in
`megaswift.trainers.schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option

SCHEDULES = {
    "constant_with_warmup": "constant",
    "inverse-square-root": "inverse_sqrt",
    "inverse_square_root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
PAGED = ("paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "paged_lion_8bit")
LIONS = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit")
OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", *LIONS)
GALORE = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
EVERYWHERE = ("adam", "sgd")
"""Those of the native engine too."""
ON_PARTS = ("lion_32bit", "paged_adamw_32bit", "paged_lion_32bit")
"""Those that fsdp2 steps as well: each number by itself."""
OPTIMIZERS = (*EVERYWHERE, "adafactor", *GALORE, *OF_BITSANDBYTES)
SPELLINGS = {
    "adamw": "adam",
    "adamw_torch": "adam",
    "adamw_torch_fused": "adam",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
}
"""transformers' and bitsandbytes' names."""
BETAS = ("adam", "galore_adamw", "galore_adamw_8bit", *OF_BITSANDBYTES)
EPSILON = tuple(name for name in BETAS if name not in LIONS)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    learning_rate: float = option(1e-5, "Highest learning rate; unset with adapters: 1e-4", aliases=("lr",), above=0)
    min_lr: float = option(0.0, "Learning rate at the end of the schedule; inverse_sqrt: its lowest", minimum=0)
    lr_scheduler_type: str = option(
        "cosine",
        "Course of the learning rate after warm-up",
        aliases=("lr_decay_style",),
        choices=("constant", "linear", "cosine", "inverse_sqrt", "wsd"),
        spellings=SCHEDULES,
    )
    warmup_ratio: float = option(
        0.0, "Part of the steps that warm up", aliases=("lr_warmup_fraction",), minimum=0, below=1
    )
    warmup_steps: int = option(
        0, "Steps that warm up, in place of warmup_ratio", aliases=("lr_warmup_iters",), minimum=0, unit="steps"
    )
    wsd_decay_ratio: float = option(0.1, "Part of the steps in which wsd decays", above=0, maximum=1)
    weight_decay: float = option(0.1, "Weight decay of matrices: decoupled for adam, plain L2 for sgd", minimum=0)
    adam_beta1: float = option(0.9, "Decay of Adam's (and Lion's) first moment", minimum=0, below=1)
    adam_beta2: float = option(0.95, "Decay of Adam's second moment, of Lion's first", minimum=0, below=1)
    adam_epsilon: float = option(1e-8, "Adam's epsilon", aliases=("adam_eps",), above=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0: not", aliases=("clip_grad",), minimum=0)
    optimizer: str = option(
        "adam",
        "adam is AdamW; others than adam and sgd: engine ddp or fsdp2",
        aliases=("optim",),
        choices=OPTIMIZERS,
        spellings=SPELLINGS,
    )
    sgd_momentum: float = option(0.9, "Momentum of sgd", minimum=0, below=1)
    precision_aware_optimizer: bool = option(
        False,
        "Main weights in 2 more bytes, not 4 (Transformer Engine's Adam)",
        aliases=("use_precision_aware_optimizer",),
    )
    optimizer_cpu_offload: bool = option(False, "Adam's moments and update on the host: less GPU memory, slower steps")
    galore_rank: int = option(128, "Rank that GaLore projects gradients to", minimum=1)
    galore_update_proj_gap: int = option(200, "Steps between new projections of GaLore", minimum=1, unit="steps")
    galore_scale: float = option(0.25, "GaLore's updates are multiplied by it", above=0)
    galore_proj_type: str = option(
        "std",
        "Side that GaLore projects: the smaller one, the larger, or as named",
        choices=("std", "reverse_std", "right", "left", "full"),
    )
    galore_target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Patterns of modules that GaLore projects; all-linear: all but the head",
        aliases=("optim_target_modules",),
        metavar="PATTERN...",
    )
