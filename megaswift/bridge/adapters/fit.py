"""Whether an adapter folder belongs to a transformers model, and has all tensors of its adapters.

PEFT stops at a size with a list of torch's, and initializes what is missing, with a warning at most.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megaswift import log
from megaswift.errors import Problem, WeightsError, first_line
from megaswift.folders.adapter import (
    adapter_folder_tensor_shapes,
    base_model_name_or_empty,
    resized_vocabulary_problem,
)

LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
WHOLE = re.compile(r"base_model\.model\.(?P<module>.+?)(?P<base>\.base_layer)?\.weight")
LAYER = re.compile(r"(?:.*\.)?layers\.(?P<number>\d+)\.")
NAMED = 12


def check_adapter_sizes(skeleton: Any, folder: Path, model: str) -> None:
    """Check LoRA tensors against the layers of `skeleton`, whose weights need no memory; `model`: what the user calls
    it."""
    modules = dict(skeleton.named_modules())
    depth = getattr(skeleton.config.get_text_config(), "num_hidden_layers", None)
    for name, shape in adapter_folder_tensor_shapes(folder).items():
        stored = WHOLE.fullmatch(name)
        whole = modules.get(stored["module"]) if stored is not None else None
        if whole is not None and _is_embedding(skeleton, whole) and shape[0] != whole.weight.shape[0]:
            raise WeightsError(resized_vocabulary_problem(f"--adapters {folder}", shape[0], whole.weight.shape[0]))
        # A sharded engine builds the model of placeholders, which take no values.
        if stored is not None and whole is not None and stored["base"] and 0 in whole.weight.stride():
            rule = f"stores weights under its adapter on {stored['module']}, which sharded engines do not load"
            raise WeightsError(Problem(f"--adapters {folder}", rule, "--engine ddp, or merge it into the model first"))
        match = LORA.fullmatch(name)
        if match is None:
            continue
        module = modules.get(match["module"])
        half = match["half"]
        layer = LAYER.match(match["module"])
        wrong = ""
        if isinstance(module, torch.nn.Linear):
            side, ours = ("inputs", module.in_features) if half == "A" else ("outputs", module.out_features)
            theirs = shape[-1 if half == "A" else 0]
            wrong = f"{match['module']} has {theirs} {side} there and {ours} in this model" if theirs != ours else ""
        elif module is None and layer is not None and depth is not None and int(layer["number"]) >= depth:
            wrong = f"it has {match['module']}, but this model has {log.count_text(depth, 'layer')}"
        if wrong:
            base = base_model_name_or_empty(folder)
            other = f"another model ({base})" if base else "another model"
            rule = f"was trained on {other}: {wrong}"
            raise WeightsError(
                Problem(f"--adapters {folder}", rule, f"use --model {base or 'BASE'}, or adapters of {model}")
            )


def _is_embedding(model: Any, module: torch.nn.Module) -> bool:
    return module is model.get_input_embeddings() or module is model.get_output_embeddings()


def load_whole_adapter(model: Any, folder: Path, **how: Any) -> Any:
    """Load the adapter of a folder into PEFT's model; WeightsError where tensors are missing or PEFT refuses it."""
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(model, str(folder), **how)
    except KeyError as error:  # of modules that are saved whole, and of rows of embeddings
        raise WeightsError(Problem(f"{folder}, tensor {error.args[0]}", "is missing")) from None
    except torch.OutOfMemoryError:  # a RuntimeError that others know what to say about
        raise
    except (ValueError, RuntimeError) as error:
        raise WeightsError(Problem(f"--adapters {folder}", f"PEFT cannot load it: {first_line(error)}")) from None
    check_adapter_is_whole(adapted, folder)
    return adapted


def check_adapter_is_whole(adapted: Any, folder: Path, name: str = "default") -> None:
    """Raise WeightsError where the folder lacks tensors of the adapter that PEFT has loaded from it as `name`."""
    from peft import get_peft_model_state_dict

    stored = adapter_folder_tensor_shapes(folder)
    own = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    problems = [Problem(f"{folder}, tensor {key}", "is missing") for key in own if key not in stored]
    if stored and problems:
        raise WeightsError(problems[:NAMED])
