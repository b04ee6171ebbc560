"""Section `peft`: what adapters other than LoRA take, under PEFT's own names. Which adapter takes what:
`peft_methods.py`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option


@dataclass(frozen=True)
class PeftConfig:
    """Other adapters

    For --train_type adalora, boft, vera and so on, with an engine of torch (--engine ddp). Names and defaults are
    PEFT's."""

    init_r: int = option(12, "AdaLoRA: rank of every matrix at the start", aliases=("adalora_init_r",), minimum=1)
    target_r: int = option(8, "AdaLoRA: average rank at the end", aliases=("adalora_target_r",), minimum=1)
    tinit: int = option(0, "AdaLoRA: steps before ranks shrink", aliases=("adalora_tinit",), minimum=0, unit="steps")
    tfinal: int = option(
        0, "AdaLoRA: steps at the end with fixed ranks", aliases=("adalora_tfinal",), minimum=0, unit="steps"
    )
    deltaT: int = option(
        1, "AdaLoRA: steps between two allocations of ranks", aliases=("adalora_deltaT",), minimum=1, unit="steps"
    )
    total_step: int | None = option(
        None,
        "AdaLoRA: steps that the schedule of ranks spans; unset: the run's",
        aliases=("adalora_total_step",),
        minimum=1,
        unit="steps",
    )
    orth_reg_weight: float = option(
        0.5,
        "AdaLoRA: weight of the term that keeps A and B orthogonal",
        aliases=("adalora_orth_reg_weight",),
        minimum=0,
    )
    boft_block_size: int = option(4, "BOFT: size of the orthogonal blocks", minimum=1)
    boft_block_num: int | None = option(None, "BOFT: number of blocks, in place of their size", minimum=1, metavar="N")
    boft_n_butterfly_factor: int = option(1, "BOFT: butterfly factors", minimum=1)
    oft_block_size: int = option(32, "OFT: size of the orthogonal blocks", minimum=1)
    d_initial: float = option(0.1, "VeRA: what its vector d starts from", aliases=("vera_d_initial",))
    projection_prng_key: int = option(
        0, "VeRA, RandLoRA: seed of the shared random matrices", aliases=("vera_projection_prng_key",), minimum=0
    )
    n_frequency: int = option(
        1000, "FourierFT (WaveFT: 2592): coefficients of a matrix", aliases=("fourier_n_frequency",), minimum=1
    )
    scaling: float = option(
        150.0, "FourierFT (WaveFT: 25): scale of what it adds", aliases=("fourier_scaling",), above=0
    )
    feedforward_modules: tuple[str, ...] = option(
        (), "IA3: those of target_modules whose input is scaled, not the output"
    )
    peft_config: dict[str, str] = option(
        {}, "Any other field of the adapter's configuration in PEFT", metavar="NAME=VALUE..."
    )
