"""What options of the optimizer mean together, and which engine can step which. The names: `config/optim.py`."""

from __future__ import annotations

from megaswift.config.engine import ZERO
from megaswift.config.engine_rules import NATIVE, READS, engine_of
from megaswift.config.optim import BETAS, EPSILON, EVERYWHERE, GALORE, ON_PARTS, PAGED
from megaswift.config.rule_types import ONE_OF, ConflictingOptions, IgnoredOption, Test

_NAME = ("optimizer",)
_OPTIONS = {"adam_beta1": BETAS, "adam_beta2": BETAS, "adam_epsilon": EPSILON}
_GALORE_OPTIONS = ("galore_rank", "galore_update_proj_gap", "galore_scale", "galore_proj_type", "galore_target_modules")
_NOT_GALORE: Test = lambda c: c.optim.optimizer not in GALORE  # noqa: E731


def _without(names: tuple[str, ...]) -> Test:
    return lambda c: c.optim.optimizer not in names


OPTIMIZER_IGNORED: tuple[IgnoredOption, ...] = (
    *(
        IgnoredOption(name, _NAME, _without(readers), "the optimizer {optimizer} has none", "--optimizer adam")
        for name, readers in _OPTIONS.items()
    ),
    *(
        IgnoredOption(
            name, _NAME, _NOT_GALORE, "belongs to GaLore (optimizer is {optimizer})", "--optimizer galore_adamw"
        )
        for name in _GALORE_OPTIONS
    ),
)

OPTIMIZER_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: engine_of(c) == NATIVE and c.optim.optimizer not in EVERYWHERE,
        "the native engine steps adam and sgd",
        "--engine ddp, or --optimizer adam",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: engine_of(c) in ZERO and c.optim.optimizer != "adam",
        "ZeRO steps AdamW",
        "--optimizer adam, or --engine ddp",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: engine_of(c) == "fsdp2" and c.optim.optimizer not in (*EVERYWHERE, *ON_PARTS),
        "steps whole matrices, or blocks of them, and fsdp2 holds parts",
        "--engine ddp, or --optimizer adam",
    ),
    ConflictingOptions(
        ("optimizer", *READS),
        lambda c: engine_of(c) == "fsdp2" and c.optim.optimizer in PAGED and "offload" in c.engine.fsdp,
        "pages states to the host, where --fsdp offload has them all the time",
        ONE_OF,
    ),
    ConflictingOptions(
        ("optimizer", "train_type"),
        lambda c: c.optim.optimizer in GALORE and c.model.train_type != "full",
        "projects gradients of the model's matrices, and with train_type {train_type} none of them trains",
        "--optimizer adam",
    ),
)
