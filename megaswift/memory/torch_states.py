"""Bytes that a rank holds throughout a run on a torch engine: DDP, FSDP2 and DeepSpeed's ZeRO.

Owns what each keeps of a parameter of n elements on R ranks; the model is float32 (under ZeRO weights are w = 2 bytes
in half precision):

    engine      weights        gradients       optimizer
    ddp         4 n            4 n             s(n)
    fsdp2       4 shard        4 shard         s(shard)       shard: rows of the first of R equal parts (torch.chunk)
    zero0       w n            4 n             s(n)           ZeRO's states are float32 main weights and moments,
    zero1       w n            4 n             12 n / R       in one flat tensor with and one without weight decay,
    zero2       w n            4 n / R         12 n / R       each a multiple of 2 R elements
    zero3       w n / R        4 n / R         12 n / R

s: Adam 8 bytes an element, SGD with momentum 4, Lion 4; of bitsandbytes' 8-bit optimizers half of an eighth of it and a
float32 scale for 256 elements, from 4,096 elements on; Adafactor 4 for each row and column of a matrix. Frozen weights
have neither gradients nor states. Offloaded states and shards are in host memory. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.optimizer import GALORE, LIONS, MUON, OF_BITSANDBYTES, PLUGIN_OPTIMIZERS, OptimConfig
from megaswift.engine.options.zero_file import KINDS
from megaswift.memory.rank_parameters import TrainedParts
from megaswift.memory.state_bytes import HALF, HeldBytes
from megaswift.models.family import family_of
from megaswift.models.spec import ModelSpec
from megaswift.models.weights.table import expand_weight_table, format_rule_name

BLOCK = 256
"""Elements of bitsandbytes' 8-bit states that share a scale."""
SMALLEST = 4096
"""Elements from which on a parameter has such states."""


@dataclass(frozen=True)
class TorchParameter:
    """A parameter of the transformers model, whole."""

    shape: tuple[int, ...]
    trains: bool
    decays: bool
    """Whether weight decay applies: not to vectors."""

    @property
    def elements(self) -> int:
        """In all."""
        return math.prod(self.shape)


def torch_parameters(spec: ModelSpec, parts: TrainedParts) -> list[TorchParameter]:
    """Yield the parameters of a model of a supported family with its adapters; experts that transformers stacks count
    one by one."""
    found: dict[str, TorchParameter] = {}
    for rule, layer, expert in expand_weight_table(family_of(spec.hf_config).weights, spec):
        if rule.buffer:
            continue
        for name, shape in zip((format_rule_name(n, layer, expert) for n in rule.hf), rule.shapes(spec), strict=True):
            found[name] = TorchParameter(shape, parts.trains([name]), len(shape) > 1)
    adapters = [
        TorchParameter(shape, True, True)
        for projections in parts.adapters.values()
        for p in projections
        for shape in ((parts.rank, p.shape[1]), (p.shape[0], parts.rank))
    ]
    return [*found.values(), *adapters]


def torch_engine_bytes(
    kind: str,
    optim: OptimConfig,
    dtype: str,
    ranks: int,
    parameters: Iterable[TorchParameter],
    offload: bool = False,
) -> HeldBytes:
    """Bytes of the first rank, which never holds less than another.

    Args:
        kind: The engine's name.
        ranks: Under FSDP2 with a strategy that replicates, the ranks of one replica.
        offload: Whether FSDP2 keeps its shards in host memory.
    """
    if kind in ZERO:
        return _zero_bytes(kind, dtype, ranks, list(parameters), state_bytes(optim, (1,)))
    total = HeldBytes()
    for p in parameters:
        shape = (math.ceil(p.shape[0] / ranks), *p.shape[1:]) if kind == "fsdp2" else p.shape
        n = math.prod(shape)
        states = state_bytes(optim, p.shape) * n // p.elements
        total += HeldBytes(4 * n, 4 * n, moments=states) if p.trains else HeldBytes(4 * n)
    return HeldBytes(host=total.device) if kind == "fsdp2" and offload else total


def state_bytes(o: OptimConfig, shape: tuple[int, ...]) -> int:
    """Return the bytes of a parameter's optimizer states, whole (`engine/torch/optim/states.py`). Not GaLore's and
    Muon's."""
    n = math.prod(shape)
    assert o.optimizer not in (*GALORE, MUON), "its states follow from which matrices are chosen"
    if (plugin := PLUGIN_OPTIMIZERS.get(o.optimizer)) is not None:
        return 4 * len(plugin.states) * n
    if o.optimizer == "sgd":
        return 4 * n if o.sgd_momentum else 0
    if o.optimizer == "adafactor":
        return 4 * n if len(shape) < 2 else 4 * (n // shape[-1] + n // shape[-2])
    states = 1 if o.optimizer in LIONS else 2
    if o.optimizer in OF_BITSANDBYTES and o.optimizer.endswith("8bit") and n >= SMALLEST:
        return states * (n + 4 * math.ceil(n / BLOCK))
    return states * 4 * n


def _zero_bytes(kind: str, dtype: str, ranks: int, parameters: list[TorchParameter], states: int) -> HeldBytes:
    """`states`: bytes of the optimizer's states for an element."""
    stage, offload, offload_weights = KINDS[kind]
    width = 2 if dtype in HALF else 4
    elements = sum(p.elements for p in parameters)
    trained = sum(p.elements for p in parameters if p.trains)
    if stage == 0:
        return HeldBytes(width * elements, 4 * trained, moments=states * trained)
    shard = sum(_flat_shards(parameters, stage, ranks))
    weights = width * (elements if stage < 3 else sum(math.ceil(p.elements / ranks) for p in parameters))
    gradients = 4 * (trained if stage == 1 else shard)
    if offload:
        host = (4 + states) * shard + gradients + (weights if offload_weights else 0)
        return HeldBytes(0 if offload_weights else weights, host=host)
    return HeldBytes(weights, gradients, main_weights=4 * shard, moments=states * shard)


def _flat_shards(parameters: list[TorchParameter], stage: int, ranks: int) -> Iterator[int]:
    """Elements of a rank's part of the trained parameters with weight decay, and of those without."""
    for decays in (True, False):
        mine = [p.elements for p in parameters if p.trains and p.decays == decays]
        if stage == 3:
            yield sum(math.ceil(n / ranks) for n in mine)
        else:
            yield math.ceil(sum(mine) / (2 * ranks)) * 2
