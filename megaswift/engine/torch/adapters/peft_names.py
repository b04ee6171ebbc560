"""Names of weights within PEFT's wrappers, the base model inside them, and writing a PEFT folder."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.folders.adapter import TENSORS

PREFIX = "model."
"""The prefix of the transformers model within the module that is wrapped."""
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
"""What PEFT puts into the name of a weight of the base model."""


def name_without_adapters(name: str) -> str:
    """The name that a weight of the transformers model has without adapters."""
    return _WRAPPED.sub("", name)


def wrapped_name_without_adapters(name: str) -> str:
    """The same, from its name in the module that is wrapped."""
    return name_without_adapters(name.removeprefix(PREFIX).removeprefix("base_model.model."))


def unwrap_peft_model(model: nn.Module) -> Any:
    """The transformers model inside PEFT's wrapper, or itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def write_adapter_folder(model: Any, state: dict[str, Tensor], folder: Path, base_name: str) -> None:
    """Adapters and fully trained modules as PEFT saves them, in float32. On one rank."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {name.removeprefix(PREFIX): tensor.contiguous() for name, tensor in state.items()}
    # VB-LoRA's bank has a name in every layer
    shared = {id(p): named[name] for name, p in model.named_parameters() if name in named}
    named |= {name: shared[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in shared}
    tensors = get_peft_model_state_dict(model, state_dict=named)
    file = folder / TENSORS
    with safetensors_errors_as_oserror(file):
        save_file({name: t.clone() for name, t in tensors.items()}, file, metadata={"format": "pt"})
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    config.save_pretrained(folder)
