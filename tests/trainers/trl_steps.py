"""Steps of TRL's own trainers."""

from __future__ import annotations

from typing import Any

ARGUMENTS: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
"""Our optimizer, every step logged, nothing written."""


def trained(trainer: Any) -> list[tuple[float, dict[str, Any]]]:
    """Trains: the loss of each step, unrounded, and what the trainer logged of it. One micro-batch a step."""
    losses: list[float] = []
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return list(zip(losses, [entry for entry in trainer.state.log_history if "grad_norm" in entry], strict=True))
