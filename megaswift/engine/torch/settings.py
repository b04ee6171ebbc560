"""What the torch engine reads of a run beside the options of its model, strategy and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaswift.engine.torch.quantized_weights import BaseQuantization

if TYPE_CHECKING:
    from megaswift.engine.torch.strategies.fsdp import FsdpOptions


@dataclass(frozen=True)
class EngineSettings:
    """Values that the builder of a run works out from several options."""

    kind: str
    """The strategy: `ddp`, `fsdp2` or a stage of ZeRO."""
    seed: int
    save_rng: bool
    """Whether checkpoints have the random states of every rank."""
    ddp_timeout: float
    """Seconds that a collective may take."""
    neftune_noise_alpha: float | None
    merges_adapters: bool
    """Whether `hf_weights` gives weights with adapters merged in, as a sampler takes them."""
    shares_rows: bool
    """Whether a row of a batch holds several documents."""
    shares_prefixes: bool
    """Whether documents of a row may share their beginning."""
    max_length: int
    """Tokens of a row, at most."""
    quantization: BaseQuantization | None
    """How frozen weights are quantized; None: they stay as they are."""
    fsdp: FsdpOptions | None
    """With the classes that the user names; None on other engines."""
    deepspeed: Mapping[str, Any] | None
    """DeepSpeed's configuration, complete; None on other engines."""
    trains: bool = True
    """Whether the weights train; False for a teacher, which has neither gradients nor an optimizer."""
