"""Section `lora`: rank, targets and output of LoRA adapters.

Matching of target names is in `models.targets`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.bridge.adapters.options.methods import LORAS, adapters_with
from megaswift.options.option import but_not, option
from megaswift.options.tasks import DATASETS, EVERY_TASK


@dataclass(frozen=True)
class LoraConfig:
    """LoRA

    With --train_type lora, only the adapters are trained. They are written to OUT/adapter in PEFT's format.
    """

    lora_rank: int = option(
        8,
        "Adapter rank r",
        aliases=("lora_r", "lora_dim", "vera_rank"),
        minimum=1,
        only_with={"train_type": adapters_with("lora_rank"), "adapters": None},
        common=tuple(t for t in EVERY_TASK if t != "pt"),
    )
    lora_alpha: float = option(
        32.0,
        "Scaling numerator: adapter outputs are multiplied by alpha / r",
        above=0,
        only_with={"train_type": adapters_with("lora_alpha"), "adapters": None},
        common=tuple(t for t in DATASETS if t != "pt"),
    )
    lora_dropout: float = option(
        0.0,
        "Dropout on adapter inputs",
        aliases=("boft_dropout", "vera_dropout"),
        minimum=0,
        below=1,
        only_with={"train_type": adapters_with("lora_dropout")},
    )
    init_weights: str = option(
        "true",
        "First A and B: true, false, gaussian, pissa, pissa_niter_N, olora or loftq",
        aliases=("init_lora_weights",),
        spellings={"true": "true", "false": "false"},
        metavar="METHOD",
        only_with={"train_type": LORAS, "adapters": None},
        neutral=("true",),
    )
    use_rslora: bool = option(
        False,
        "Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA, arXiv:2312.03732)",
        only_with={"train_type": adapters_with("use_rslora"), "adapters": None},
    )
    use_dora: bool = option(
        False,
        "Train magnitudes separately from directions (DoRA, arXiv:2402.09353)",
        only_with={"train_type": adapters_with("use_dora"), "adapters": None},
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Modules to adapt; names (Hugging Face, Megatron), regexes, or all-linear",
        aliases=("target_regex",),
        only_with={"train_type": but_not("full"), "adapters": None},
        common=("sft",),
    )
    target_parameters: tuple[str, ...] = option(
        (),
        "Fused expert parameters to adapt (gpt_oss), by their PEFT names",
        only_with={"train_type": adapters_with("target_parameters"), "adapters": None},
    )
    modules_to_save: tuple[str, ...] = option(
        (),
        "Modules to train fully alongside the adapters, such as lm_head",
        only_with={"train_type": but_not("full"), "adapters": None},
    )
    adapters: str | None = option(
        None,
        "PEFT adapter folder to continue from; default: new adapters",
        aliases=("adapter_name_or_path", "resume_lora"),
        metavar="DIR",
        only_with={"train_type": but_not("full")},
    )
    merge_lora: bool = option(
        False, "Also write output_dir/hf, the model with the adapters merged", only_with={"train_type": but_not("full")}
    )
