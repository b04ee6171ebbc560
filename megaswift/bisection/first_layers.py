"""A model folder cut down to its first layers, so that a large model's step fits a machine without its GPUs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megaswift.bridge.weight_source import open_weights
from megaswift.errors import Problem, UserError
from megaswift.models.family import read_config_json

LAYER = re.compile(r"\blayers\.(\d+)\.")
COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
WEIGHTS = "*.safetensors*"


def write_first_layers(source: Path, target: Path, layers: int, weights: bool = True) -> Path:
    """Write the model in `source` with its first layers only, and return the new folder.

    Args:
        source: A Hugging Face folder.
        target: The folder to write.
        layers: How many layers stay.
        weights: False for a model whose weights are drawn.

    Raises:
        UserError: The model has fewer layers, or its configuration does not say how many.
    """
    config = read_config_json(source)
    name = next((key for key in COUNTS if key in config), None)
    if name is None or not 0 < layers <= config[name]:
        has = "does not say how many layers the model has" if name is None else f"has {name} {config[name]}"
        raise UserError(
            Problem(f"--layers {layers}", f"{source}/config.json {has}", "give fewer layers, or leave it out")
        )
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.match(WEIGHTS) and file.suffix not in (".bin", ".pt", ".pth"):
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(_first(config, config[name], name, layers), indent=2))
    if weights:
        stored = open_weights(source)
        index = {}
        for number, key in enumerate(stored.names()):
            kept = _kept(key, config[name], layers)
            if kept is not None:
                index[kept] = f"model-{number:05}.safetensors"
                save_file({kept: stored.slice(key).contiguous()}, target / index[kept], metadata={"format": "pt"})
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return target


def _kept(key: str, whole: int, layers: int) -> str | None:
    """The name of a tensor in the smaller model; None for a layer that is left out. Layers for multi-token prediction
    are numbered after the others."""
    match = LAYER.search(key)
    if match is None or key.startswith("mtp.") or int(match[1]) < layers:
        return key
    number = int(match[1]) - whole + layers
    return None if number < layers else key[: match.start(1)] + str(number) + key[match.end(1) :]


def _first(config: dict[str, Any], whole: int, name: str, layers: int) -> dict[str, Any]:
    """The configuration with lists that have an entry for each layer cut too."""
    cut = {key: v[:layers] if isinstance(v, list) and len(v) == whole else v for key, v in config.items()}
    for key in ("first_k_dense_replace", "max_window_layers", "moe_layer_end_index"):
        if isinstance(cut.get(key), int):
            cut[key] = min(cut[key], layers)
    if isinstance(cut.get("mlp_only_layers"), list):
        cut["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers]
    return {**cut, name: layers}
