"""The reference's adapters: PEFT's own on the Hugging Face model, by the names of the adapter's folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.bridge.adapters.expert_stacks import target_parameter_of_expert_module
from megaswift.bridge.adapters.plan import HALVES, AdapterPlan, ModuleAdapterSpec, deinterleave_gate_up
from megaswift.errors import Problem, UserError, first_line
from megaswift.models.targets import WEIGHT

BASE = ".base_layer"
SAVED = ".modules_to_save.default."
"""In the names of weights that train whole."""


class AdaptedModel:
    """A model that has got adapters from a folder; from then on only they train, and modules that are saved whole.

    Args:
        model: The Hugging Face model, which is changed.
        folder: The adapter's folder.
        plan: Its adapters.

    Raises:
        UserError: PEFT has no adapter where the folder has one.
    """

    def __init__(self, model: Any, folder: Path, plan: AdapterPlan) -> None:
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer

        try:
            with warnings.catch_warnings():
                # PEFT 0.21 warns of ranks and alphas of parameters, which it does use.
                warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
                PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        except (ValueError, RuntimeError) as error:
            rule = f"has no reference: PEFT says {first_line(error)}"
            raise UserError(Problem("the run's adapter", rule, "adapt all experts of a layer, or none")) from None
        model.enable_input_require_grads()  # so that outputs before the first adapter have gradients, as in the engine
        by_target: dict[str, list[ModuleAdapterSpec]] = {}
        for one in plan.adapters:
            by_target.setdefault(_target(one), []).append(one)
        self.homes: dict[str, list[ModuleAdapterSpec]] = {}
        """A path in the model -> the adapters whose matrices PEFT has there, joined: of all experts, of gate and up."""
        for path, module in model.named_modules():
            if isinstance(module, LoraLayer):
                parameter = getattr(module, "parameter_name", None)
                name = path if parameter is None else f"{path.replace(BASE, '')}.{parameter}"
                self.homes[path] = by_target.pop(name.removesuffix(WEIGHT), [])
        for target in by_target:
            fix = "leave the module out of --target_modules"
            raise UserError(Problem(f"the adapter on {target}", "has no counterpart in PEFT", fix))

    def by_disk_name(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' part of tensors by the names of their folder, each expert's and module's by itself."""
        for path, adapters in self.homes.items():
            a, b = (tensors.get(f"{path}.lora_{half}.default{WEIGHT}") for half in HALVES)
            if a is not None and b is not None and adapters:
                yield from _apart(adapters, a, b)
            m = tensors.get(f"{path}.lora_magnitude_vector.default{WEIGHT}")
            if m is not None and adapters:
                yield adapters[0].name("M"), m

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of weights that train whole, by their names without adapters."""
        return {name.replace(SAVED, "."): tensor for name, tensor in tensors.items() if SAVED in name}


def _target(adapter: ModuleAdapterSpec) -> str:
    """The module or parameter of transformers that an adapter changes."""
    expert = adapter.entry.expert is not None
    return adapter.projection.stack or (target_parameter_of_expert_module(adapter.module) if expert else adapter.module)


def _apart(adapters: Sequence[ModuleAdapterSpec], a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A [experts x ranks, in] and B [outputs, ranks x experts], where an expert's modules have their own ranks and
    outputs."""
    experts = [list(group) for _, group in groupby(adapters, lambda one: one.entry.expert)]
    for number, modules in enumerate(experts):
        own_a = a.unflatten(0, (len(experts), -1))[number]
        own_b = b.unflatten(1, (-1, len(experts)))[..., number]
        first = 0
        row = 0
        for one in modules:
            out, rank = one.shape("B")
            yield one.name("A"), own_a[first : first + rank]
            rows = own_b[row : row + out, first : first + rank]
            yield one.name("B"), deinterleave_gate_up(rows, one.projection.alternating)
            first += rank
            row += out
