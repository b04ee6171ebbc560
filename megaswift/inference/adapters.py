"""Puts the adapters of --adapters around a loaded model's layers, or merges them into it.

Adapters without names are all active and add up; of adapters with names, `Generator` activates those that a request
selects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megaswift.bridge.adapters.fit import check_adapter_is_whole, check_adapter_sizes
from megaswift.bridge.hf import finite
from megaswift.bridge.untied_head import untie_adapted_modules
from megaswift.errors import Problem, WeightsError
from megaswift.inference import device_placement
from megaswift.inference.device_placement import DeviceMap
from megaswift.inference.load_errors import transformers_errors_as_ours
from megaswift.inference.options.commands import ModelLoadingOptions


def peft_adapter_names(options: ModelLoadingOptions) -> dict[str, str]:
    """PEFT's name of each adapter folder, a part of its parameters' names: `default`, then numbered ones."""
    return {
        folder: "default" if number == 0 else f"adapter_{number}"
        for number, folder in enumerate(options.adapter_folders)
    }


def selectable_adapters(options: ModelLoadingOptions) -> Mapping[str, str]:
    """The adapters that requests select: the user's name to PEFT's; none where all adapters are active."""
    own = peft_adapter_names(options)
    return {name: own[folder] for name, folder in options.named_adapters if name}


def check_adapters_fit(skeleton: Any, options: ModelLoadingOptions) -> None:
    """WeightsError for LoRA adapters that were trained on a model of other sizes, before a weight is read."""
    for folder in options.adapter_folders:
        check_adapter_sizes(skeleton, Path(folder), str(options.model))


def model_with_adapters(model: Any, options: ModelLoadingOptions, placed: DeviceMap) -> Any:
    """The model with the adapters beside its weights, or in them.

    PEFT would take a dispatched model apart and dispatch it again by a map of its own, and write a copy of the weights
    beside the model for those on disk. Layers keep their hooks when adapters are put around them, so nothing of it is
    needed: the map is hidden meanwhile.
    """
    names = peft_adapter_names(options)
    if not names:
        return model
    from peft import PeftModel

    vars(model).pop("hf_device_map", None)
    adapted: Any = None
    for folder, name in names.items():
        with transformers_errors_as_ours(f"--adapters {folder}"):
            how: dict[str, Any] = {"adapter_name": name, "low_cpu_mem_usage": True, "torch_device": "cpu"}
            if adapted is None:
                adapted = PeftModel.from_pretrained(model, folder, **how)
            else:
                adapted.load_adapter(folder, **how)
    if len(names) > 1 and not selectable_adapters(options):
        with transformers_errors_as_ours("--adapters"):
            adapted.base_model.set_adapter([*names.values()])
    model.hf_device_map = placed
    for folder, name in names.items():
        check_adapter_is_whole(adapted, Path(folder), name)
        _onto_devices(adapted, (folder, name), device_placement.execution_device(placed))
        added = ((n, p) for n, p in adapted.named_parameters() if _of_adapter(n, name))
        finite.check_weights_finite(added, f"--adapters {folder}")
    if not options.merge_adapters:
        return adapted
    untie_adapted_modules(adapted)
    return adapted.merge_and_unload()


@contextmanager
def active_adapter(model: Any, selectable: Mapping[str, str], name: str) -> Iterator[None]:
    """The model with the adapter of this name alone, or with none for the empty name. Nothing changes where none is
    `selectable`."""
    if name:
        model.set_adapter(selectable[name])
    with model.disable_adapter() if selectable and not name else nullcontext():
        yield


def _of_adapter(parameter: str, adapter: str) -> bool:
    return adapter in parameter.split(".")


def _onto_devices(adapted: Any, adapter: tuple[str, str], device: torch.device) -> None:
    """The adapter (folder, name) of layers that are offloaded. PEFT puts them where their layer's weights are, and
    those are nowhere between two steps."""
    from peft import load_peft_weights

    folder, own_name = adapter
    homeless = [
        (name, module, own)
        for name, module in adapted.named_modules()
        for own, p in module.named_parameters(recurse=False)
        if p.is_meta and _of_adapter(f"{name}.{own}", own_name)
    ]
    weights = load_peft_weights(folder, device=str(device)) if homeless else {}
    for name, module, own in homeless:
        saved = f"{name}.{own}".replace(f".{own_name}", "")
        if saved not in weights:
            raise WeightsError(
                Problem(
                    f"--adapters {folder}",
                    f"{name} cannot be combined with offloaded weights",
                    "run megaswift export --merge_lora true first, or use a larger --max_memory",
                )
            )
        setattr(module, own, torch.nn.Parameter(weights[saved], requires_grad=False))
