"""Loads weights without a full copy of the model on any rank: built on the meta device (`meta_init`), sharded, then
filled one tensor at a time.

Three ways, the first that can be taken:

- From files: one rank reads each tensor and broadcasts it; every rank keeps its part and lets go of the rest. Nothing
  but one piece (a tensor, or those that become one) is ever whole, beside what is read ahead.
- From rank 0, where a model has to exist to be known (random weights, files that transformers must make sense of): it
  is made there and handed out tensor by tensor. The other ranks hold their part.
- By transformers on every rank: where adapters are made from the weights of their base, where weights are quantized, in
  a run of one process, and under strategies that keep weights whole if the files need what transformers makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.bridge.adapters.options.checks import SHARDED
from megaswift.bridge.hf.loading_report import warn_of_unused_weights
from megaswift.bridge.hf.model_folder import persistent_buffers
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.new_head import with_new_head
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.torch import meta_init, quantized_weights
from megaswift.engine.torch import model as torch_model
from megaswift.engine.torch.adapters.peft_names import (
    name_without_adapters,
    unwrap_peft_model,
    wrapped_name_without_adapters,
)
from megaswift.engine.torch.conversions import (
    ConversionGroup,
    conversion_groups,
    converted_parameter_shapes,
    tied_name_map,
    unused_weights,
)
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.torch.shared_reads import read_tensors_once_over_ranks
from megaswift.engine.torch.state import EngineState
from megaswift.engine.torch.strategies.strategy import WEIGHT
from megaswift.errors import Problem, UserError, WeightsError
from megaswift.families import read_config_json
from megaswift.folders.checkpoint import find_checkpoint

Fill = Callable[[EngineState], None]


@dataclass(frozen=True)
class ModelWithWeightFiller:
    """A model that is ready to be wrapped, and what gives the wrapped one its weights."""

    fields: LossFieldsModel
    fill: Fill = lambda engine: None


def prepare_model_and_filler_from_files(directory: Path, engine: EngineState) -> ModelWithWeightFiller:
    """The weights of a Hugging Face folder, or of a checkpoint of either engine."""
    checkpoint = find_checkpoint(directory)
    name = engine.build.model.model
    meta_first = _stays_on_meta(directory, engine)
    shared = engine.kind in SHARDED or engine.layout.world_size > 1
    if checkpoint is None and not (shared and meta_first):
        return ModelWithWeightFiller(_prepare(directory, engine, weights=True))
    if not meta_first:
        rule = (
            "is a checkpoint; adapters initialized from weights, quantized weights and models with custom code need a "
            "Hugging Face folder"
        )
        fix = f"megaswift convert megatron-to-hf {name} DST, then --model DST"
        raise WeightsError(Problem(f"--model {name}", rule, fix))
    fields = _prepare(directory, engine, weights=False, empty=True)
    source = with_new_head(open_weights(directory), engine.spec, engine.settings.seed)
    groups = conversion_groups(unwrap_peft_model(fields.model), source)
    first = tied_name_map(unwrap_peft_model(fields.model))
    problems = _differences(unwrap_peft_model(fields.model), source, groups)
    if not problems:
        if checkpoint is None:
            unused = unused_weights(unwrap_peft_model(fields.model), source, groups)
            warn_of_unused_weights(f"--model {name}", unused, engine.spec.scored)
        return ModelWithWeightFiller(fields, lambda engine: fill_from_files(engine, groups, source, first))
    if checkpoint is not None:
        raise WeightsError(problems)
    if engine.kind not in SHARDED:
        return ModelWithWeightFiller(_prepare(directory, engine, weights=True))
    return _from_first_rank(directory, engine, weights=True)


def prepare_model_and_filler_with_random_weights(directory: Path, engine: EngineState) -> ModelWithWeightFiller:
    """Random weights."""
    if engine.kind not in SHARDED or not _stays_on_meta(directory, engine):
        return ModelWithWeightFiller(_prepare(directory, engine, weights=False))
    return _from_first_rank(directory, engine, weights=False)


def prepare_model_and_filler_without_weights(directory: Path, engine: EngineState) -> ModelWithWeightFiller:
    """No weights: a checkpoint brings them all."""
    empty = _stays_on_meta(directory, engine)
    return ModelWithWeightFiller(_prepare(directory, engine, weights=False, empty=empty))


def _prepare(directory: Path, engine: EngineState, weights: bool, empty: bool = False) -> LossFieldsModel:
    settings = engine.settings
    further = quantized_weights.quantized_from_pretrained_arguments(
        directory, settings.quantization, engine.context.device, engine.dtype
    )
    return torch_model.build_model_for_wrapping(directory, engine.build, weights, engine.spec, further, empty)


def _stays_on_meta(directory: Path, engine: EngineState) -> bool:
    """Whether a model can be built, and adapted, without its weights: adapters that start from weights (DoRA's
    magnitudes) need them."""
    raw = read_config_json(directory)
    model = engine.build.model
    lora = engine.build.lora
    quantizes = engine.settings.quantization is not None
    if (model.trust_remote_code and "auto_map" in raw) or "quantization_config" in raw or quantizes:
        return False
    if model.train_type == "full":
        return True
    if lora.adapters is not None:
        kind = json.loads((Path(lora.adapters) / "adapter_config.json").read_text(encoding="utf-8")).get("peft_type")
        return kind == "LORA"
    return model.train_type == "lora" and not lora.use_dora


def _differences(bare: Any, source: WeightSource, groups: list[ConversionGroup]) -> list[Problem]:
    """Parameters that the files do not have in the model's shape."""
    first = tied_name_map(bare)
    stored = {first.get(name, name): shape for name, shape in converted_parameter_shapes(bare, source, groups).items()}
    adapted = bool(getattr(bare, "peft_config", None)) or any(hasattr(m, "base_layer") for m in bare.modules())
    expected = {
        name_without_adapters(name): p
        for name, p in bare.named_parameters()
        if not adapted or meta_init.is_unallocated(p)
    }
    return [
        Problem(str(source.directory), f"has no {name} of shape {list(p.shape)}, which this model needs")
        for name, p in expected.items()
        if stored.get(name) != tuple(p.shape)
    ][:12]


def fill_from_files(
    engine: EngineState, groups: list[ConversionGroup], source: WeightSource, first: Mapping[str, str]
) -> None:
    """Fills an engine's weights from files, a piece at a time. Collective. `first`: `tied_name_map` before the model
    was wrapped."""
    bare = unwrap_peft_model(engine.fields.model)
    skip = "modules_to_save" if engine.build.lora.adapters is not None else None
    places: dict[str, list[str]] = {}
    for name in engine.shapes:
        if skip is None or skip not in name:  # an adapter's folder brought these
            places.setdefault(
                first.get(wrapped_name_without_adapters(name), wrapped_name_without_adapters(name)), []
            ).append(name)
    model_buffers = {name_without_adapters(name): tensor for name, tensor in persistent_buffers(bare).items()}
    stored = [name for piece in groups for _, name in piece.stored]
    arriving = read_tensors_once_over_ranks(source, stored, engine.context)
    for piece in groups:
        tensors = {name: tensor.float() for name, tensor in islice(arriving, len(piece.stored))}
        for target, tensor in piece.convert(bare, tensors).items():
            assert first.get(target, target) in places or target in model_buffers, f"{target} is not in the model"
            for name in places.get(first.get(target, target), ()):
                engine.strategy.put(name, WEIGHT, tensor)
            if target in model_buffers:
                model_buffers[target].copy_(tensor)
    assert next(arriving, None) is None, "all are placed"  # and ranks agree that all could be read
    source.close()


def _from_first_rank(directory: Path, engine: EngineState, weights: bool) -> ModelWithWeightFiller:
    """Made whole on rank 0, which hands it out."""
    problems: list[Problem] = []
    fields = None
    if engine.rank == 0:
        try:
            fields = _prepare(directory, engine, weights)
        except UserError as error:
            problems = list(error.problems)
    distributed.raise_on_all_ranks(problems, WeightsError)
    if fields is None:
        return ModelWithWeightFiller(
            _prepare(directory, engine, weights=False, empty=True), lambda engine: broadcast_from_rank0(engine, {})
        )
    tensors = meta_init.swap_parameters_for_expanded_zeros(fields)
    return ModelWithWeightFiller(fields, lambda engine: broadcast_from_rank0(engine, tensors))


def broadcast_from_rank0(engine: EngineState, tensors: dict[str, Tensor]) -> None:
    """Fills an engine's weights from those of rank 0, which has let go of each when it is sent. Collective."""
    for name, shape in engine.shapes.items():
        tensor = tensors.pop(name) if engine.rank == 0 else torch.empty(shape)
        if engine.layout.world_size > 1:
            dist.broadcast(tensor, 0)
        engine.strategy.put(name, WEIGHT, tensor)
