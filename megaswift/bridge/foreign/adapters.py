"""LoRA of ms-swift and of Megatron-Bridge as a PEFT folder.

Both have one A and one B for each Megatron layer, which joins several Hugging Face modules: each of these gets the
same A and its own rows of B. Which rows these are follows from the pieces of the base weight's rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.adapters.folder import write_peft_folder
from megaswift.bridge.adapters.plan import AdapterHyperparameters, AdapterPlan, ModuleAdapterSpec
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.foreign.keys import EXPERTS, LAYER, NOT_WEIGHTS, without_prefix
from megaswift.bridge.foreign.rows import family_with_rows
from megaswift.bridge.foreign.settings import AdapterOptions, adapter_options
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.plan import FLOATS, SHOWN, WeightPlan
from megaswift.errors import CheckpointError, Problem
from megaswift.families import family_of, load_spec
from megaswift.folders.foreign import ForeignFolder
from megaswift.models.targets import Projection, projections
from megaswift.models.weights.rules import TensorParallelShard

_SWIFT = re.compile(r"(?P<module>.*)\.lora_(?P<half>[AB])\.default\.weight")
_BRIDGE = re.compile(r"(?P<module>.*)\.adapter\.linear_(?P<half>in|out)\.weight")
_ANY = re.compile(r".*\.(lora_[AB]|lora_embedding_[AB]|adapter(_\w+)?|modules_to_save)\..*")
_HALVES = {"A": "A", "B": "B", "in": "A", "out": "B"}


@dataclass(frozen=True)
class _Stored:
    """A or B of a Megatron layer."""

    key: str
    at: tuple[int, ...]
    """Leading indices: the layer of a stack, the expert."""


def holds_adapters(stored: TorchDistSource) -> bool:
    """Return whether a checkpoint has adapters."""
    return any(_ANY.fullmatch(key) and not NOT_WEIGHTS.fullmatch(key) for key in stored.keys())  # noqa: SIM118 (a method)


def convert_adapters(
    folder: ForeignFolder, stored: TorchDistSource, target: Path, hf_config: Path, dtype: torch.dtype | None = None
) -> Path:
    """Write the adapters of a checkpoint as a PEFT folder.

    Raises:
        CheckpointError: A tensor is left over, or does not fit the model.
    """
    spec = load_spec(hf_config)
    names, twice = without_prefix({key: stored.shape(key) for key in stored.keys()})  # noqa: SIM118 (a method)
    bridge = any(".adapter." in name for name in names)
    weights = WeightPlan(family_with_rows(family_of(spec.hf_config), not bridge), spec)
    halves = _halves(_BRIDGE if bridge else _SWIFT, names)
    options = adapter_options(folder, bridge)
    chosen: list[Projection] = []
    tensors: dict[str, tuple[_Stored, _Stored]] = {}
    used: set[str] = set()
    for projection in projections(weights.family, spec):
        pair = [_find(projection, half, halves, stored, spec.num_layers) for half in ("A", "B")]
        if pair[0] is not None and pair[1] is not None and not projection.stack:
            chosen.append(projection)
            tensors[projection.module] = pair[0], pair[1]
            used |= {pair[0].key, pair[1].key}
    left = sorted([*twice, *(name for name in names.values() if name not in used)])
    rule = "is not an adapter of a layer of this model, with a partner"
    problems = [Problem(f"{folder.tensors}, tensor {name}", rule) for name in left]
    if not problems:
        settings = _settings(options, {m: stored.shape(pair[0].key)[-2] for m, pair in tensors.items()})
        plan = AdapterPlan(weights, chosen, settings)
        problems = [*_wrong(plan, tensors, stored, options)]
    if problems:
        more = [Problem(str(folder.tensors), f"and {len(problems) - SHOWN} more tensors like these")]
        raise CheckpointError(problems[:SHOWN] + (more if len(problems) > SHOWN else []))
    if target.exists():
        raise CheckpointError(Problem(str(target), "exists already", "give a new folder"))
    found = {name: t if dtype is None else t.to(dtype) for name, t in _tensors(plan, tensors, stored, options)}
    return write_peft_folder(target, plan, found.items(), str(hf_config))


def _settings(options: AdapterOptions, ranks: dict[str, int]) -> AdapterHyperparameters:
    own = {module: rank for module, rank in ranks.items() if rank != options.rank}
    return AdapterHyperparameters(options.rank, options.alpha, options.rslora, options.dropout, False, own)


def _halves(pattern: re.Pattern[str], names: dict[str, str]) -> dict[tuple[str, str], str]:
    """(module, A or B) -> stored tensor."""
    matches = ((pattern.fullmatch(name), key) for name, key in names.items())
    return {(match["module"], _HALVES[match["half"]]): key for match, key in matches if match is not None}


def _find(
    projection: Projection,
    half: str,
    halves: dict[tuple[str, str], str],
    stored: TorchDistSource,
    layers: int,
) -> _Stored | None:
    """Find A or B of a projection's layer; None if it is not stored."""
    module = projection.megatron
    expert: tuple[int, ...] = ()
    if (match := re.search(r"mlp\.experts\.(\d+)\.", module)) is not None:
        module = module.replace(match[0], EXPERTS)
        expert = (int(match[1]),)
    if (key := halves.get((module, half))) is not None:
        return _Stored(key, expert)
    layer = LAYER.fullmatch(module)
    if layer is None or (key := halves.get((f"{layer['head']}{layer['rest']}", half))) is None:
        return None
    if stored.shape(key)[0] != layers:
        rule = f"has shape {list(stored.shape(key))}, but config.json requires {layers} layers in the first dimension"
        raise CheckpointError(Problem(f"{stored.file(key)}, tensor {key}", rule))
    return _Stored(key, (int(layer["layer"]), *expert))


def _wrong(
    plan: AdapterPlan,
    tensors: dict[str, tuple[_Stored, _Stored]],
    stored: TorchDistSource,
    options: AdapterOptions,
) -> Iterator[Problem]:
    """Tensors of another shape or dtype, or that are incomplete."""
    seen: set[str] = set()
    for adapter in plan.adapters:
        width = adapter.shape("A")[1]
        rows = adapter.entry.shard_shape(1)[0]
        for half, wanted in zip(tensors[adapter.module], ((adapter.rank, width), (rows, adapter.rank)), strict=True):
            if half.key in seen:
                continue
            seen.add(half.key)
            what = f"{stored.file(half.key)}, tensor {half.key}"
            shape = stored.shape(half.key)
            name = DTYPE_NAMES.get(stored.dtype(half.key), "another")
            if len(shape) != len(half.at) + 2 or shape[-2:] != wanted:
                yield Problem(what, f"has shape {list(shape)}, but the model requires {list(wanted)} for each layer")
            elif stored.missing(half.key):
                yield Problem(what, f"is incomplete: {stored.missing(half.key)} elements are not in any file")
            elif name not in FLOATS:
                yield Problem(what, f"has dtype {name}; adapters must be F32, BF16 or F16")
        b = tensors[adapter.module][1]
        parts = stored.parts_along(b.key, -2)
        if _rank_by_rank(adapter, options) and parts != options.tp:
            rule = f"says tensor_model_parallel_size {options.tp}, but tensor {b.key} is stored in {parts} parts"
            yield Problem(str(options.file), rule)
            return


def _rank_by_rank(adapter: ModuleAdapterSpec, options: AdapterOptions) -> bool:
    """Return whether the ranks' rows of B lie one after the other, in another order than on one rank."""
    return options.tp > 1 and adapter.entry.expert is None and adapter.entry.shard == "column"


def _tensors(
    plan: AdapterPlan,
    tensors: dict[str, tuple[_Stored, _Stored]],
    stored: TorchDistSource,
    options: AdapterOptions,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder by its name."""
    for adapter in plan.adapters:
        a, b = (_whole(stored, each) for each in tensors[adapter.module])
        own = b.new_empty(adapter.shape("B"))
        count = options.tp if _rank_by_rank(adapter, options) else 1
        row = 0
        for rank in range(count):
            for piece in adapter.entry.pieces(TensorParallelShard(count, rank)):
                if adapter.entry.shard != "column":
                    own.copy_(b)
                elif piece.source == adapter.projection.source:
                    own[piece.start : piece.stop] = b[row : row + piece.length]
                row += piece.length
        yield adapter.name("A"), a.clone()
        yield adapter.name("B"), own


def _whole(stored: TorchDistSource, half: _Stored) -> Tensor:
    shape: Sequence[int] = stored.shape(half.key)[len(half.at) :]
    lead = len(half.at)
    return stored.region(half.key, [*half.at, *(0 for _ in shape)], [*(1 for _ in half.at), *shape])[(0,) * lead]
