"""A transformers model's tensors under the names, and in the pieces and dtypes, that folders of its family have.

For any architecture that transformers knows; the families' own tables are not asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.export import folder_has_weights
from megaswift.bridge.hf.source import TensorMeta
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES, HfWriter
from megaswift.bridge.weight_source import open_weights
from megaswift.models.family import read_config_json
from megaswift.models.quantization import unreadable_quantization_problem


class WholeShapes:
    """A transformers model whose parameters have their whole shapes, also where a rank holds parts of them (ZeRO-3).

    Conversions of transformers that transpose only what has another shape than the parameter ask for these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> Tensor:
        """Return a parameter, or a tensor without memory of its shape."""
        parameter = self._model.get_parameter(target)
        shape = getattr(parameter, "ds_shape", None)
        return parameter if shape is None else torch.empty(shape, device="meta")


def tensors_by_disk_name(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's whole tensors by the names, and in the pieces, that checkpoints of its family have."""
    from transformers.core_model_loading import revert_weight_conversion

    untied = {name: tensor for name, tensor in state.items() if name not in tied_tensor_names(model)}
    return dict(revert_weight_conversion(cast(Any, WholeShapes(model)), untied))


def tied_tensor_names(model: nn.Module) -> set[str]:
    """Return the names under which a tensor appears a second time."""
    return set(tied_tensors(model))


def tied_tensors(model: nn.Module) -> dict[str, str]:
    """Return the tensors that appear a second time, each with its first name."""
    names: dict[int, str] = {}
    first = {name: names.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: own for name, own in first.items() if name != own}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds besides parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}


def folder_tensor_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in a Hugging Face folder; empty where it has no weights, or in a form that only
    transformers reads."""
    if not folder_has_weights(folder) or unreadable_quantization_problem(read_config_json(folder)):
        return {}
    source = open_weights(folder)
    return {name: source.dtype(name) for name in source.names()}


def folder_config_dtype(folder: Path) -> torch.dtype:
    """Return the dtype in config.json, float32 where it has none."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return getattr(torch, name, torch.float32)


def tensor_metas_with_source_dtypes(tensors: Mapping[str, Tensor], source: Path) -> dict[str, TensorMeta]:
    """Return the shape of each tensor by disk name, and the dtype that it has in `source`."""
    stored = folder_tensor_dtypes(source)
    default = folder_config_dtype(source)
    return {
        name: TensorMeta(tuple(t.shape), stored.get(name, default if t.is_floating_point() else t.dtype))
        for name, t in tensors.items()
    }


def write_transformers_folder(
    folder: Path,
    weights: Mapping[str, Tensor],
    source: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = True,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face folder of these tensors by disk name, each in the dtype that it has in `source`, whose other
    files it takes.

    config.json too, unless `config` is another.
    """
    with HfWriter(folder, tensor_metas_with_source_dtypes(weights, source), max_shard_bytes, overwrite) as writer:
        for name, tensor in weights.items():
            writer.add(name, tensor)
        writer.close(source, config)
