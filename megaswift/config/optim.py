"""Section `optim`: the optimizer and its learning-rate schedule. The schedules themselves are in `megaswift.trainers.schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option

SCHEDULES = {"constant_with_warmup": "constant", "inverse-square-root": "inverse_sqrt", "inverse_square_root": "inverse_sqrt",
             "warmup_stable_decay": "wsd"}
ADAMS = {"adamw": "adam", "adamw_torch": "adam", "adamw_torch_fused": "adam"}


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    learning_rate: float = option(1e-5, "Highest learning rate", aliases=("lr",), above=0)
    min_lr: float = option(0.0, "Learning rate at the end of the schedule", minimum=0)
    lr_scheduler_type: str = option(
        "cosine", "Course of the learning rate after warm-up", aliases=("lr_decay_style",),
        choices=("constant", "linear", "cosine", "inverse_sqrt", "wsd"), spellings=SCHEDULES)
    warmup_ratio: float = option(0.0, "Part of the steps that warm up", aliases=("lr_warmup_fraction",), minimum=0, below=1)
    warmup_steps: int = option(0, "Steps that warm up, in place of warmup_ratio", aliases=("lr_warmup_iters",), minimum=0, unit="steps")
    wsd_decay_ratio: float = option(0.1, "Part of the steps in which wsd decays", above=0, maximum=1)
    weight_decay: float = option(0.1, "Weight decay of matrices: decoupled for adam, plain L2 for sgd", minimum=0)
    adam_beta1: float = option(0.9, "Decay of Adam's first moment", minimum=0, below=1)
    adam_beta2: float = option(0.95, "Decay of Adam's second moment", minimum=0, below=1)
    adam_epsilon: float = option(1e-8, "Adam's epsilon", aliases=("adam_eps",), above=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0: not", aliases=("clip_grad",), minimum=0)
    optimizer: str = option("adam", "adam is AdamW", aliases=("optim",), choices=("adam", "sgd"), spellings=ADAMS)
    sgd_momentum: float = option(0.9, "Momentum of sgd", minimum=0, below=1)
    precision_aware_optimizer: bool = option(
        False, "Moments in lower precision (Transformer Engine's Adam)", aliases=("use_precision_aware_optimizer",))
    optimizer_cpu_offload: bool = option(False, "Adam's moments and update on the host: less GPU memory, slower steps")
