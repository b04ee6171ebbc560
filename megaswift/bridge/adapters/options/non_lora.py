"""Section `peft`: options of adapters other than LoRA, with PEFT's names. `methods.py` lists which
adapter has which."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.bridge.adapters.options.methods import METHODS
from megaswift.options.option import option


@dataclass(frozen=True)
class NonLoraPeftConfig:
    """Other PEFT adapters

    For --train_type adalora, boft, vera and so on, with a torch engine (--engine ddp). Names and defaults follow
    PEFT."""

    init_r: int = option(
        12,
        "AdaLoRA: initial rank of every matrix",
        aliases=("adalora_init_r",),
        minimum=1,
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 12),
    )
    target_r: int = option(
        8,
        "AdaLoRA: average rank at the end",
        aliases=("adalora_target_r",),
        minimum=1,
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 8),
    )
    tinit: int = option(
        0,
        "AdaLoRA: steps before rank reduction starts",
        aliases=("adalora_tinit",),
        minimum=0,
        unit="steps",
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 0),
    )
    tfinal: int = option(
        0,
        "AdaLoRA: final steps with fixed ranks",
        aliases=("adalora_tfinal",),
        minimum=0,
        unit="steps",
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 0),
    )
    deltaT: int = option(
        1,
        "AdaLoRA: steps between rank allocations",
        aliases=("adalora_deltaT",),
        minimum=1,
        unit="steps",
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 1),
    )
    total_step: int | None = option(
        None,
        "AdaLoRA: length of the rank schedule; default: the length of the run",
        aliases=("adalora_total_step",),
        minimum=1,
        unit="steps",
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None,),
    )
    orth_reg_weight: float = option(
        0.5,
        "AdaLoRA: weight of the orthogonality regularization",
        aliases=("adalora_orth_reg_weight",),
        minimum=0,
        only_with={"train_type": "adalora", "adapters": None},
        neutral=(None, 0.5),
    )
    boft_block_size: int = option(
        4,
        "BOFT: size of the orthogonal blocks",
        minimum=1,
        only_with={"train_type": "boft", "adapters": None},
        neutral=(None, 4),
    )
    boft_block_num: int | None = option(
        None,
        "BOFT: number of blocks, instead of boft_block_size",
        minimum=1,
        metavar="N",
        only_with={"train_type": "boft", "adapters": None},
        neutral=(None,),
    )
    boft_n_butterfly_factor: int = option(
        1,
        "BOFT: number of butterfly factors",
        minimum=1,
        only_with={"train_type": "boft", "adapters": None},
        neutral=(None, 1),
    )
    oft_block_size: int = option(
        32,
        "OFT: size of the orthogonal blocks",
        minimum=1,
        only_with={"train_type": "oft", "adapters": None},
        neutral=(None, 32),
    )
    d_initial: float = option(
        0.1,
        "VeRA: initial value of the vector d",
        aliases=("vera_d_initial",),
        only_with={"train_type": "vera", "adapters": None},
        neutral=(None, 0.1),
    )
    projection_prng_key: int = option(
        0,
        "VeRA, RandLoRA: seed of the shared random matrices",
        aliases=("vera_projection_prng_key",),
        minimum=0,
        only_with={"train_type": ("randlora", "vera"), "adapters": None},
        neutral=(None, 0),
    )
    n_frequency: int = option(
        1000,
        "FourierFT: learned coefficients per matrix (WaveFT: 2592 by default)",
        aliases=("fourier_n_frequency",),
        minimum=1,
        only_with={"train_type": ("fourierft", "waveft"), "adapters": None},
        neutral=(None, 1000),
    )
    scaling: float = option(
        150.0,
        "FourierFT: scale of the weight update (WaveFT: 25 by default)",
        aliases=("fourier_scaling",),
        above=0,
        only_with={"train_type": ("fourierft", "waveft"), "adapters": None},
        neutral=(None, 150.0),
    )
    feedforward_modules: tuple[str, ...] = option(
        (),
        "IA3: target_modules whose input is scaled instead of the output",
        only_with={"train_type": "ia3", "adapters": None},
        neutral=(None, ()),
    )
    peft_config: dict[str, str] = option(
        {},
        "Any other field of the adapter's PEFT configuration",
        metavar="NAME=VALUE...",
        example="gralora_k=4",
        only_with={"train_type": tuple(METHODS), "adapters": None},
        neutral=({},),
    )
