"""New weights for a transformers model, tensor by tensor: names of its files to parameters, filled in place. Adapters
too.

Names and conversions (stacked experts, fused projections) are transformers' own, cut into pieces by the engine for such
models. Tensors that become one parameter together are kept until all of them are there; others are copied at once.
Adapters stand beside the weights, in PEFT's layers, and are never added to them: weights stay as they were read,
however often adapters change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megaswift.bridge.adapters import PREFIX
from megaswift.bridge.peft_folder import TENSORS
from megaswift.bridge.transformers_weights import disk_names, saved_buffers
from megaswift.engine.torch.adapters import unwrap_adapters
from megaswift.engine.torch.conversions import ConversionGroup, conversion_groups, first_names
from megaswift.errors import Problem, WeightsError

SHOWN = 4
NAME = "policy"
"""PEFT's name of the adapters."""


class _Names:
    """A source of weights of which names are known and nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def names(self) -> list[str]:
        """As `WeightSource` has it."""
        return list(self._names)


def _problem(rule: str, names: Sequence[str], fix: str = "") -> WeightsError:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return WeightsError(Problem("weights for the sampler", f"{rule} {', '.join(names[:SHOWN])}{more}", fix))


class WeightUpdate:
    """Where each tensor of the model's files goes. Made once for a model; `fill` for each round of weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in self._targets().items()}
        names = list(disk_names(model, shapes))
        found = conversion_groups(model, cast(Any, _Names(names)))
        self.first = first_names(model)
        self.of_name: dict[str, ConversionGroup] = {name: piece for piece in found for _, name in piece.stored}
        tied = {name: first for name, first in self.first.items() if name != first}
        """A tied parameter's other names, by which a file may also hold it."""
        self.of_name |= {
            name: ConversionGroup(((name, name),), first) for name, first in tied.items() if name not in self.of_name
        }
        self.wanted = {piece.target for piece in self.of_name.values()}

    def _targets(self) -> dict[str, Tensor]:
        parameters = {unwrap_adapters(name): p for name, p in self.model.named_parameters(remove_duplicate=False)}
        return {**parameters, **saved_buffers(self.model)}

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies each tensor into the model; WeightsError for names that it does not have, and for those that did not
        come."""
        targets, waiting = self._targets(), dict[str, dict[str, Tensor]]()
        filled: set[str] = set()
        for name, tensor in weights:
            piece = self.of_name.get(name)
            if piece is None:
                raise _problem(
                    "the model has no", [name], "the folder of the model that is trained, for the sampler too"
                )
            if len(piece.stored) == 1 and piece.conversion is None:
                self._copy(targets, filled, piece.target, tensor)
                continue
            ready = waiting.setdefault(piece.target, {})
            ready[name] = tensor
            if len(ready) == len(piece.stored):
                for target, made in piece.convert(self.model, waiting.pop(piece.target)).items():
                    self._copy(targets, filled, target, made)
                filled.add(piece.target)
        lacking = [
            name
            for name, piece in self.of_name.items()
            if piece.target not in filled and self.first.get(name, name) == name
        ]
        if lacking:
            raise _problem(f"lack {len(lacking)} of {len(self.of_name)} tensors:", sorted(lacking))

    def _copy(self, targets: dict[str, Tensor], filled: set[str], name: str, tensor: Tensor) -> None:
        target = targets[name]
        if target.shape != tensor.shape:
            raise _problem(
                f"have another shape than the model ({list(tensor.shape)}, not {list(target.shape)}):", [name]
            )
        if name in filled and not torch.equal(target, tensor.to(target)):
            raise _problem("bring two values for a parameter that the model ties:", [name])
        target.copy_(tensor)
        filled.add(name)


class AdapterUpdate:
    """Where each tensor of a PEFT folder of LoRA goes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own: dict[str, nn.Parameter] = {}
        """By the folder's names; empty until the first folder has told which modules carry adapters."""

    @torch.no_grad()
    def fill(self, folder: Path) -> None:
        """The adapters in `folder` in place of those before; WeightsError where they are not exactly the model's."""
        if not self.own:
            self._add(folder)
        tensors = load_file(folder / TENSORS)
        if other := sorted(tensors.keys() ^ self.own.keys()):
            raise _problem(
                f"{'lack' if other[0] in self.own else 'bring too much:'} adapters", other, "--rollout_lora false"
            )
        for name, tensor in tensors.items():
            self.own[name].copy_(tensor)

    def _add(self, folder: Path) -> None:
        """PEFT's layers around the modules that the folder's configuration names, in the dtype and place of their
        weights."""
        from peft import LoraConfig, inject_adapter_in_model

        with torch.random.fork_rng():  # PEFT draws what `fill` overwrites
            inject_adapter_in_model(LoraConfig.from_pretrained(folder), self.model, NAME)
        self.model.eval().requires_grad_(False)
        self.own = {
            PREFIX + name.replace(f".{NAME}.", "."): p
            for name, p in self.model.named_parameters()
            if f".{NAME}." in name
        }
