"""Layers for multi-token prediction of the parity tests' models, by transformers' `MtpModel`.

Owns which variants have them, their weights, and their names on disk, written here once more and not taken from the
product's tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MTP = {
    "deepseek_v3-mtp": 2,
    "glm4_moe-mtp": 1,
    "glm4_moe_lite-mtp": 1,
    "qwen3_5-mtp": 1,
    "qwen3_5-mtp-tied": 1,
    "qwen3_5_moe-mtp": 1,
    "qwen3_next-mtp": 1,
}
"""Variant -> layers."""
FILE = "mtp.safetensors"
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}


def variants(known: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The models that have the layers, with their number in the field that their config.json has for it."""
    found = {}
    for name, layers in MTP.items():
        base, _, tied = name.partition("-mtp")
        kind, fields = known[base]
        if kind.startswith("qwen"):  # transformers takes the class of norms from the last layer
            more = {"mtp_num_hidden_layers": layers, "layer_types": [*3 * ["linear_attention"], "full_attention"]}
        else:
            more = {"num_nextn_predict_layers": layers}
        if tied:
            more |= {"tie_word_embeddings": True, "pad_token_id": 7}
        found[name] = (kind, fields | more)
    return found


def heads(model: Any, folder: Path | None, layers: int) -> Any:
    """transformers' layers of a model, which share its embedding and head, with the folder's weights."""
    from safetensors.numpy import load_file  # torch's reads by types that the oracle in float64 replaces
    from transformers.modeling_layers import MtpModel

    config = model.config.get_text_config()
    config.num_mtp_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"] * layers
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"] * layers
    made = MtpModel(model, layers)
    made.train()
    if folder is not None:
        stored = load_file(folder / FILE)
        with torch.no_grad():
            for name, tensor in heads_by_disk_name(made, model.config, lambda p: p):
                tensor.copy_(torch.from_numpy(stored[name]))
    return made


def heads_by_disk_name(made: Any, config: Any, value: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`value` of every parameter and saved buffer of the layers, as (disk name, tensor), experts one by one."""
    saved = made.layers.state_dict().keys()
    buffers = ((name, b) for name, b in made.layers.named_buffers() if name in saved)
    for name, parameter in [*made.layers.named_parameters(), *buffers]:
        tensor = value(parameter)
        disk = _disk_name(name, config)
        if disk.endswith("mlp.experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                first, second = both.chunk(2, dim=0)
                yield disk.replace("gate_up_proj", f"{e}.gate_proj.weight"), first
                yield disk.replace("gate_up_proj", f"{e}.up_proj.weight"), second
        elif disk.endswith("mlp.experts.down_proj"):
            for e, one in enumerate(tensor):
                yield disk.replace("down_proj", f"{e}.down_proj.weight"), one
        else:
            yield disk, tensor


def _disk_name(name: str, config: Any) -> str:
    """`0.enorm.weight`, `0.mtp_block.mlp.gate.weight` and so on by the names of published folders."""
    number, part, rest = re.fullmatch(r"(\d+)\.(\w+)\.(.+)", name).groups()  # type: ignore[union-attr]
    if config.model_type.startswith("qwen"):
        return f"{QWEN[part]}.{rest}" if part in QWEN else f"mtp.layers.{number}.{rest}"
    home = f"model.layers.{config.num_hidden_layers + int(number)}."
    if part == "post_norm":
        return f"{home}shared_head.norm.{rest}"
    return home + (rest if part == "mtp_block" else f"{part}.{rest}")


def drawn_layers(model: Any, layers: int) -> dict[str, Tensor]:
    """Layers with drawn weights by disk name."""
    from tests.parity.models import randomize

    made = heads(model, None, layers)
    for shared in ("embed_tokens", "shared_head", "rotary_emb"):
        delattr(made, shared)
    made.config = model.config.get_text_config()
    randomize(made, 29)
    return {n: t.detach().clone().contiguous() for n, t in heads_by_disk_name(made, model.config, lambda p: p)}


def add_to_folder(folder: Path, model: Any, layers: int) -> None:
    """Writes layers into a folder that transformers has saved, in a file of their own; DeepSeek's and GLM's folders
    repeat the embedding and the head in each layer."""
    from safetensors.torch import save_file

    tensors = drawn_layers(model, layers)
    if not model.config.model_type.startswith("qwen"):
        for n in range(layers):
            home = f"model.layers.{model.config.num_hidden_layers + n}."
            tensors[home + "embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
            tensors[home + "shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, folder / FILE, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] |= dict.fromkeys(tensors, FILE)
    index.write_text(json.dumps(table))
