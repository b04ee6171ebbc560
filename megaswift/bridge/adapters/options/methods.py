"""PEFT's adapters as a table: a value of `train_type` to PEFT's class, and how options map to its fields. No torch, no
peft.

LoRA with its variants is in `lora.py`, because every engine serves it. Adapters that lengthen the
input (prompt and prefix tuning) are left out: losses are computed on the rows as the data give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PeftMethod:
    """One kind of adapter."""

    config: str
    """PEFT's configuration class."""
    takes: Mapping[str, str] = field(default_factory=dict)
    """Our option -> PEFT's field, beside target_modules and modules_to_save, which all have. Others would be ignored,
    and are refused."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """PEFT's defaults of options whose own are LoRA's."""
    whole: str = ""
    """Why parameters must be whole on every rank (ddp, zero0 to zero2); empty: fsdp2 and zero3 do too."""
    engines: tuple[str, ...] = ()
    """The only engines that serve it; empty: all of torch's."""
    bits: tuple[int, ...] = (4, 8)
    """Over which quantized weights PEFT trains it; over others it takes the packed bytes for weights (tried with PEFT
    0.21)."""


def _own(*names: str) -> dict[str, str]:
    """Options that bear PEFT's name."""
    return {name: name for name in names}


METHODS: dict[str, PeftMethod] = {
    "adalora": PeftMethod(
        "AdaLoraConfig",
        {
            "lora_alpha": "lora_alpha",
            "lora_dropout": "lora_dropout",
            **_own("init_r", "target_r", "tinit", "tfinal", "deltaT", "total_step", "orth_reg_weight"),
        },
        {"lora_alpha": 8.0},
        engines=("ddp",),
    ),
    "boft": PeftMethod(
        "BOFTConfig",
        {"lora_dropout": "boft_dropout", **_own("boft_block_size", "boft_block_num", "boft_n_butterfly_factor")},
    ),
    "delora": PeftMethod("DeloraConfig", {"lora_rank": "r", "lora_dropout": "module_dropout"}, bits=()),
    "fourierft": PeftMethod("FourierFTConfig", _own("n_frequency", "scaling")),
    "gralora": PeftMethod(
        "GraloraConfig",
        {"lora_rank": "r", "lora_alpha": "alpha", "lora_dropout": "gralora_dropout"},
        {"lora_rank": 32, "lora_alpha": 64.0},
    ),
    "hra": PeftMethod("HRAConfig", {"lora_rank": "r"}, bits=()),
    "ia3": PeftMethod("IA3Config", _own("feedforward_modules")),
    "loha": PeftMethod(
        "LoHaConfig",
        {"lora_rank": "r", "lora_alpha": "alpha", "lora_dropout": "module_dropout"},
        {"lora_alpha": 8.0},
        bits=(8,),
    ),
    "lokr": PeftMethod(
        "LoKrConfig",
        {"lora_rank": "r", "lora_alpha": "alpha", "lora_dropout": "module_dropout"},
        {"lora_alpha": 8.0},
        bits=(8,),
    ),
    "miss": PeftMethod("MissConfig", {"lora_rank": "r", "lora_dropout": "miss_dropout"}, {"lora_rank": 64}),
    "oft": PeftMethod("OFTConfig", {"lora_dropout": "module_dropout", **_own("oft_block_size")}),
    "randlora": PeftMethod(
        "RandLoraConfig",
        {
            "lora_rank": "r",
            "lora_alpha": "randlora_alpha",
            "lora_dropout": "randlora_dropout",
            **_own("projection_prng_key"),
        },
        {"lora_rank": 32, "lora_alpha": 640.0},
    ),
    "road": PeftMethod("RoadConfig"),
    "shira": PeftMethod("ShiraConfig", {"lora_rank": "r"}, {"lora_rank": 32}),
    "vblora": PeftMethod(
        "VBLoRAConfig",
        {"lora_rank": "r", "lora_dropout": "vblora_dropout"},
        {"lora_rank": 4},
        whole="its vector bank is shared by all layers",
    ),
    "vera": PeftMethod(
        "VeraConfig",
        {"lora_rank": "r", "lora_dropout": "vera_dropout", **_own("d_initial", "projection_prng_key")},
        {"lora_rank": 256},
    ),
    "waveft": PeftMethod("WaveFTConfig", _own("n_frequency", "scaling"), {"n_frequency": 2592, "scaling": 25.0}),
}
"""By `train_type`."""

VARIANTS: dict[str, str] = {"dora": "use_dora", "rslora": "use_rslora"}
"""Names of LoRA's variants -> the switch that `--train_type lora` has for them."""

LORAS = ("lora", "qlora")
"""Values of `train_type` that train LoRA, on every engine."""


def adapters_with(option: str) -> tuple[str, ...]:
    """Returns the values of `train_type` that have an option of LoRA."""
    return (*LORAS, *(name for name, method in METHODS.items() if option in method.takes))


SHARED = ("lora_rank", "lora_alpha", "lora_dropout")
OWNERS: dict[str, tuple[str, ...]] = {
    option: tuple(name for name, method in METHODS.items() if option in method.takes)
    for option in sorted({option for method in METHODS.values() for option in method.takes} - set(SHARED))
}
"""Options of section `peft` -> the adapters that have them."""
MAPPED = (
    "target_modules",
    "modules_to_save",
    "peft_type",
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
)
"""PEFT's fields that `--peft_config` may not set: an option or the run itself does."""
