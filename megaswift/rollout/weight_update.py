"""In-place weight sync into a transformers model, tensor by tensor: checkpoint names to parameters. Adapters too.

Names and conversions (stacked experts, fused projections) are transformers' own, grouped by
`engine/torch/conversions.py`. Tensors that form one parameter together are buffered until all have
arrived; others are copied at once. Adapters are separate PEFT layers and never merged, so the base weights do not
change with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megaswift.bridge.adapters.folder import TENSORS
from megaswift.bridge.adapters.plan import PREFIX
from megaswift.bridge.hf.model_folder import persistent_buffers, tensors_by_disk_name
from megaswift.engine.torch.adapters.peft_names import name_without_adapters
from megaswift.engine.torch.conversions import ConversionGroup, conversion_groups, tied_name_map
from megaswift.errors import Problem, WeightsError

SHOWN = 4
NAME = "policy"
"""PEFT's name of the adapters."""


class _Names:
    """A WeightSource with names only."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def names(self) -> list[str]:
        """The checkpoint's tensor names."""
        return list(self._names)


def _problem(rule: str, names: Sequence[str], fix: str = "") -> WeightsError:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return WeightsError(Problem("weights for the sampler", f"{rule} {', '.join(names[:SHOWN])}{more}", fix))


class InPlaceWeightLoader:
    """Maps checkpoint tensors to parameters. Built once per model; `fill` loads one round of weights.

    Args:
        carried: Yields the tensors that training carries along unchanged, which a round of weights may lack.
    """

    def __init__(self, model: nn.Module, carried: Callable[[], Iterable[tuple[str, Tensor]]] = tuple) -> None:
        self.model = model
        self.carried = carried
        shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in self._targets().items()}
        names = list(tensors_by_disk_name(model, shapes))
        groups = conversion_groups(model, cast(Any, _Names(names)))
        self.first = tied_name_map(model)
        self.of_name: dict[str, ConversionGroup] = {name: group for group in groups for _, name in group.stored}
        tied = {name: first for name, first in self.first.items() if name != first}
        """Other names of tied parameters, which a file may use too."""
        self.of_name |= {
            name: ConversionGroup(((name, name),), first) for name, first in tied.items() if name not in self.of_name
        }
        whole = {name: ConversionGroup(((name, name),), name) for name in shapes if name not in self.of_name}
        """Parameters under the model's own names: folders that store all experts of a layer in one tensor use these."""
        self.of_name |= whole
        self.wanted = {piece.target for piece in self.of_name.values()}

    def _targets(self) -> dict[str, Tensor]:
        parameters = {name_without_adapters(name): p for name, p in self.model.named_parameters(remove_duplicate=False)}
        return {**parameters, **persistent_buffers(self.model)}

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies each tensor into the model; WeightsError for unknown, missing and mismatching tensors."""
        targets = self._targets()
        waiting = dict[str, dict[str, Tensor]]()
        filled: set[str] = set()
        for name, tensor in weights:
            piece = self.of_name.get(name)
            if piece is None:
                raise _problem(
                    "have tensors that the model does not have:",
                    [name],
                    "use the trained model's own folder for the sampler",
                )
            if len(piece.stored) == 1 and piece.conversion is None:
                self._copy(targets, filled, piece.target, tensor)
                continue
            ready = waiting.setdefault(piece.target, {})
            ready[name] = tensor
            if len(ready) == len(piece.stored):
                for target, value in piece.convert(self.model, waiting.pop(piece.target)).items():
                    self._copy(targets, filled, target, value)
                filled.add(piece.target)
        for name, tensor in self.carried():
            if name in self.of_name and self.of_name[name].target not in filled:
                self._copy(targets, filled, self.of_name[name].target, tensor)
        missing = [
            name
            for name, piece in self.of_name.items()
            if piece.target not in filled and self.first.get(name, name) == name
        ]
        if missing:
            raise _problem(f"lack {len(missing)} of {len(self.of_name)} tensors:", sorted(missing))

    def _copy(self, targets: dict[str, Tensor], filled: set[str], name: str, tensor: Tensor) -> None:
        target = targets[name]
        if target.shape != tensor.shape:
            raise _problem(f"have shape {list(tensor.shape)}, the model has {list(target.shape)}:", [name])
        if name in filled and not torch.equal(target, tensor.to(target)):
            raise _problem("have two different values for a tied parameter:", [name])
        target.copy_(tensor)
        filled.add(name)


class InPlaceAdapterLoader:
    """Maps the tensors of a PEFT LoRA folder to the model's adapter parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own: dict[str, nn.Parameter] = {}
        """Adapter parameters by their names in the folder; empty until the first folder, which defines the modules."""

    @torch.no_grad()
    def fill(self, folder: Path) -> None:
        """Loads the adapter in `folder`; WeightsError where its tensors are not exactly those of the model's
        adapters."""
        if not self.own:
            self._add(folder)
        tensors = load_file(folder / TENSORS)
        if other := sorted(tensors.keys() ^ self.own.keys()):
            raise _problem(
                f"{'lack' if other[0] in self.own else 'have additional'} adapters:", other, "--rollout_lora false"
            )
        for name, tensor in tensors.items():
            self.own[name].copy_(tensor)

    def _add(self, folder: Path) -> None:
        """Injects PEFT layers into the modules that the folder's configuration names, in their dtype and device."""
        from peft import LoraConfig, inject_adapter_in_model

        with torch.random.fork_rng():  # PEFT draws what `fill` overwrites
            inject_adapter_in_model(LoraConfig.from_pretrained(folder), self.model, NAME)
        self.model.eval().requires_grad_(False)
        self.own = {
            PREFIX + name.replace(f".{NAME}.", "."): p
            for name, p in self.model.named_parameters()
            if f".{NAME}." in name
        }
