"""Weights with PEFT adapters merged in, for rollouts, while training of the adapters continues.

The model itself is not touched. Its adapted layers exist a second time without memory; when weights are read, one
layer after the other gets its whole tensors, and PEFT merges it. bitsandbytes would quantize the sum again, so a layer
in few bits is made plain here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.model_folder import persistent_buffers
from megaswift.engine.torch import quantized_weights
from megaswift.engine.torch.adapters.peft_names import (
    PREFIX,
    name_without_adapters,
    wrapped_name_without_adapters,
)
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.errors import ConfigError, Problem

OWN = f"{PREFIX}base_model.model."
"""Prefix of the names of the model's own parameters under PEFT."""
KEPT = ".original_module."
"""Part of the names of modules of which a copy trains in their place."""


@dataclass(frozen=True)
class AdaptedLayer:
    """PEFT's layer around one or more of the model's parameters."""

    layer: Any
    """Its parameters have no storage."""
    places: Mapping[str, str]
    """Its parameters -> where the engine has them: one that layers share has one name there."""
    own: Mapping[str, str]
    """Those of the layer inside it -> the names that they have without adapters."""

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's own parameters by the names that they have without adapters, from all whole tensors by their
        names here."""
        values = {
            id(p): nn.Parameter(tensors[name].detach().float().clone(), False)
            for name, p in self.layer.named_parameters()
        }
        layer = _copied(self.layer, values).to(next(iter(tensors.values())).device)
        for part in filter(_adapts, layer.modules()):
            part.merge()
        return {self.own[name]: p.data for name, p in layer.get_base_layer().named_parameters()}


@dataclass(frozen=True)
class QuantizedWeightWithAdapter:
    """A weight in few bits, whole on every rank, with the adapter around it where there is one."""

    module: Any
    adapter: Any = None

    def merged(self) -> Tensor:
        """Float32: what the forward pass multiplies by, without rounding the sum."""
        weight = quantized_weights.dequantized_weight(self.module)
        for name in self.adapter.active_adapters if self.adapter is not None else ():
            weight = weight + self.adapter.get_delta_weight(name).float()
        return weight


@dataclass
class MergedAdapterWeights:
    """The merged weights of a model, by the names that its parameters have without adapters."""

    plain: dict[str, str] = field(default_factory=dict)
    """Those that no adapter changes -> where the engine has them."""
    adapted: dict[str, AdaptedLayer] = field(default_factory=dict)
    packed: dict[str, QuantizedWeightWithAdapter] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    """PEFT's, outermost ones only, by their names in the module that is wrapped."""

    def needed(self, names: Iterable[str]) -> list[str]:
        """Return where the engine has the parameters of which these weights are made, in the order in which `reader`
        takes them."""
        places: list[str] = []
        begun: set[str] = set()
        for name in names:
            if name in self.plain:
                places.append(self.plain[name])
            elif name in self.adapted and name not in begun:
                layer = self.adapted[name]
                places += layer.places.values()
                begun |= {*layer.own.values()}
        return places

    def reader(self, tensors: Iterator[Tensor]) -> Callable[[str], Tensor]:
        """Return a function that makes a weight from the whole tensors that `needed` names. It is called once for each
        name, in the order given there."""
        ready: dict[str, Tensor] = {}

        def read(name: str) -> Tensor:
            if name in self.plain:
                return next(tensors)
            if name in self.packed:
                return self.packed[name].merged()
            if name not in ready:
                layer = self.adapted[name]
                ready.update(layer.merged({own: next(tensors) for own in layer.places}))
            return ready.pop(name)

        return read

    @property
    def names(self) -> list[str]:
        """The names of all parameters."""
        return [*self.plain, *self.packed, *self.adapted]

    def buffers(self, bare: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a checkpoint that belong neither to an adapter nor to quantized weights."""
        own_buffers = {name for name, _ in bare.named_buffers()}
        return {
            name_without_adapters(name): tensor
            for name, tensor in persistent_buffers(bare).items()
            if name in own_buffers and KEPT not in name and _inside(OWN + name, self.layers) is None
        }


def collect_merged_adapter_weights(fields: LossFieldsModel) -> MergedAdapterWeights:
    """Before the model is wrapped: later its tensors may be parts, and hooks hang on its layers."""
    merging = MergedAdapterWeights()
    first = {id(p): name for name, p in fields.named_parameters()}
    for name, module in fields.named_modules():
        if _adapts(module) and _inside(name, merging.layers) is None:
            merging.layers[name] = module
            if not quantized_weights.is_bitsandbytes_quantized(module.get_base_layer()):
                layer = _adapted(name, module, first)
                merging.adapted |= dict.fromkeys(layer.own.values(), layer)
    for name, _ in fields.named_parameters():
        place = wrapped_name_without_adapters(name)
        wrapped = _inside(name, merging.layers)
        if (
            not name.startswith(OWN)
            or KEPT in name
            or wrapped is not None
            and not name.startswith(f"{wrapped}.base_layer.")
        ):
            continue
        # layers in layers have such names too
        if wrapped is not None and not quantized_weights.is_bitsandbytes_quantized(
            merging.layers[wrapped].get_base_layer()
        ):
            continue
        module = fields.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and quantized_weights.is_bitsandbytes_quantized(module):
            adapter = merging.layers.get(wrapped or "")
            if getattr(adapter, "lora_variant", None):  # DoRA's in a folder of adapters: of new ones the options tell
                raise ConfigError(
                    Problem(
                        "--adapters",
                        "is not plain LoRA, the only kind that can be merged into quantized weights",
                        "use the unquantized model",
                    )
                )
            merging.packed[place] = QuantizedWeightWithAdapter(module, adapter)
        else:
            merging.plain[place] = name
    return merging


def _adapted(name: str, module: Any, first: Mapping[int, str]) -> AdaptedLayer:
    empty_parameters = {
        id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), False) for p in module.parameters()
    }
    places = {own: first[id(p)] for own, p in module.named_parameters()}
    return AdaptedLayer(
        _copied(module, empty_parameters),
        places,
        {n: wrapped_name_without_adapters(f"{name}.{n}") for n, _ in module.get_base_layer().named_parameters()},
    )


def _copied(module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> Any:
    """A module with other parameters, by the `id` of those that they replace, and the same buffers."""
    return copy.deepcopy(module, {**parameters, **{id(b): b for b in module.buffers()}})


def _adapts(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _inside(name: str, layers: Mapping[str, Any]) -> str | None:
    """The layer that a name lies in."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return None
