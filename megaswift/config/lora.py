"""Section `lora`: what low-rank adapters are put where, and what becomes of them. What a name matches is in
`families.projections`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option


@dataclass(frozen=True)
class LoraConfig:
    """LoRA

    With --train_type lora only adapters train. They are written as a PEFT folder: OUT/adapter.
    """

    lora_rank: int = option(8, "Rank r of the adapters", aliases=("lora_r", "lora_dim", "vera_rank"), minimum=1)
    lora_alpha: float = option(32.0, "An adapter's output is scaled by alpha / r", above=0)
    lora_dropout: float = option(
        0.0, "Dropout on the adapters' input", aliases=("boft_dropout", "vera_dropout"), minimum=0, below=1
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (arXiv:2312.03732)")
    use_dora: bool = option(False, "Train magnitudes apart from directions (DoRA, arXiv:2402.09353)")
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Where: all-linear, Hugging Face or Megatron names, regular expressions",
        aliases=("target_regex",),
    )
    target_parameters: tuple[str, ...] = option(
        (), "Where among experts that share one parameter (gpt_oss), by PEFT's names"
    )
    modules_to_save: tuple[str, ...] = option((), "Modules that train fully beside the adapters, as lm_head")
    adapters: str | None = option(
        None,
        "A PEFT folder to go on from, in place of new adapters",
        aliases=("adapter_name_or_path", "resume_lora"),
        metavar="DIR",
    )
    merge_lora: bool = option(False, "Write output_dir/hf too: the model with the adapters merged in")
