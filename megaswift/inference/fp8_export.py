"""`megaswift export --quant_method fp8`: the linear layers of a language model in FP8, without calibration data.

Owns which weights are quantized. The head, routers, a vision encoder with its aligner, and matrices that are not made
of whole blocks keep their dtype; config.json names them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.convert import hf_output
from megaswift.bridge.convert.hf_output import HfFolderPlan
from megaswift.bridge.convert.job import BLOCK, file_change_stamps, read_tensor_blocks
from megaswift.bridge.hf.model_folder import tensors_by_disk_name
from megaswift.bridge.hf.source import TensorMeta, WeightSource
from megaswift.bridge.weight_source import open_checkpoint_weight_source, open_weights
from megaswift.engine.torch.vision_parts import LLM, VisionModelPartNames, model_has_tower
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.folders.checkpoint import find_intact_checkpoint
from megaswift.inference.model import load_config_tokenizer_and_processor, model_without_weights
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.models.family import read_config_json
from megaswift.models.quantization import FIELD

ROUTERS = ("gate", "router", "shared_expert_gate")
EXPERTS = "experts"
"""Name of transformers' module that holds the experts of a layer."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that vLLM joins to one product: all are quantized, or none."""
METHOD = "--quant_method fp8"
WITHOUT = "--quant_method gptq --quant_bits 4 --dataset FILE"


def export_fp8_folder(weights: ModelLoadingOptions, target: Path, max_shard_bytes: int) -> Path:
    """`target`: the model with its linear layers in FP8; whole or not at all."""
    prepared = load_config_tokenizer_and_processor(weights, None)
    folder = prepared.folder
    raw = read_config_json(folder)
    checkpoint = find_intact_checkpoint(folder)
    if checkpoint is None and FIELD in raw:
        raise ConfigError(
            Problem(METHOD, f"--model {weights.model}: the weights are already quantized", "leave it out")
        )
    source = open_weights(folder) if checkpoint is None else open_checkpoint_weight_source(checkpoint)
    quantized, skipped = choose_fp8_weights(model_without_weights(prepared), source)
    plan = HfFolderPlan(
        target,
        fp8_folder_tensors(source, quantized),
        raw,
        folder,
        max_shard_bytes,
        overwrite=False,
        quantization={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [SIDE, SIDE],
            "modules_to_not_convert": skipped,
        },
    )
    made_from = {"fp8": file_change_stamps([p for p in folder.iterdir() if p.is_file()], folder)}
    blocks = functools.partial(fp8_tensor_blocks, source, quantized)
    return hf_output.write_hf_folder_resumably(plan, blocks, made_from)


def choose_fp8_weights(model: nn.Module, source: WeightSource) -> tuple[set[str], list[str]]:
    """(names of the tensors on disk that are quantized, transformers' modules with weights that are not)."""
    names = {*source.names()}
    chosen = {}
    skipped = []
    for name, tensors in _candidates(model):
        parts = tensors_by_disk_name(model, tensors)
        if any(part in names and len(source.shape(part)) > 2 for part in parts):
            rule = f"needs a matrix for each expert; the model has all experts of a layer in one tensor ({name})"
            raise ConfigError(Problem(METHOD, rule, WITHOUT))
        if _is_kept(model, name) or not all(part in names and fits_fp8_blocks(source.shape(part)) for part in parts):
            skipped.append(name)
        else:
            chosen[name] = parts
    for name in list(chosen):
        parent, _, leaf = name.rpartition(".")
        joined = next((group for group in TOGETHER if leaf in group), ())
        if any(f"{parent}.{other}" in skipped for other in joined):
            skipped.append(name)
            del chosen[name]
    if not chosen:
        rule = f"finds no linear layer whose input and output sizes are multiples of {SIDE}"
        raise WeightsError(Problem(METHOD, rule, "--quant_method bnb --quantization_bit 4"))
    return {part for parts in chosen.values() for part in parts}, sorted(skipped)


def _candidates(model: nn.Module) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Modules that transformers replaces in a model with FP8 weights, each with its matrices."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == EXPERTS:
            yield name, {f"{name}.{n}": p for n, p in module.named_parameters() if p.dim() > 2}
        elif type(module) is nn.Linear and f".{EXPERTS}." not in f".{name}":
            yield name, {f"{name}.weight": module.weight}


def _is_kept(model: Any, name: str) -> bool:
    """Whether a module keeps its dtype whatever its sizes."""
    if name.rpartition(".")[2] in ROUTERS or model.get_submodule(name) is model.get_output_embeddings():
        return True
    return model_has_tower(model) and VisionModelPartNames(model).of(name) != LLM


# Weights in FP8 with a scale for each block of 128 x 128, the layout of DeepSeek-V3 (arXiv 2412.19437) that
# transformers and vLLM read: float8 e4m3 W [n, m] beside float32 W_scale_inv [n / 128, m / 128].
#
# Owns the arithmetic and the tensors of such a folder. A few rows of blocks are held at a time.

SIDE = 128
"""Rows and columns that share a scale."""
SCALE = "_scale_inv"
DTYPE = torch.float8_e4m3fn
LARGEST = float(torch.finfo(DTYPE).max)


def fits_fp8_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of whole blocks; transformers reads no others."""
    return len(shape) == 2 and shape[0] % SIDE == 0 and shape[1] % SIDE == 0


def quantize_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [n, m], float32 scales [n / 128, m / 128]) of a matrix [n, m]: the largest value of a block becomes 448.

    The order of operations is that of transformers' own quantization, which gives the same bits.
    """
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // SIDE, SIDE, columns // SIDE, SIDE)
    largest = blocks.abs().amax(dim=(1, 3))
    factors = torch.where(largest > 0, LARGEST / largest.where(largest > 0, 1.0), 1.0)
    stored = (blocks * factors[:, None, :, None]).clamp(-LARGEST, LARGEST).to(DTYPE)
    return stored.reshape(rows, columns), 1.0 / factors


def fp8_folder_tensors(source: WeightSource, quantized: Collection[str]) -> dict[str, TensorMeta]:
    """Every tensor of the folder: these in FP8, each before its scales, and the others as they are."""
    metas: dict[str, TensorMeta] = {}
    for name in source.names():
        shape = source.shape(name)
        metas[name] = TensorMeta(shape, DTYPE if name in quantized else source.dtype(name))
        if name in quantized:
            metas[name + SCALE] = TensorMeta((shape[0] // SIDE, shape[1] // SIDE), torch.float32)
    return metas


def fp8_tensor_blocks(source: WeightSource, quantized: Collection[str], name: str) -> Iterator[Tensor]:
    """A tensor of the folder in row-major order; scales are computed from the weights again."""
    weight = name.removesuffix(SCALE)
    if name not in quantized and weight not in quantized:
        yield from read_tensor_blocks(source, name)
        return
    rows, columns = source.shape(weight)
    band = SIDE * max(1, BLOCK // (SIDE * columns * torch.float32.itemsize))
    for first in range(0, rows, band):
        part = source.slice(weight, (slice(first, min(first + band, rows)), slice(0, columns)))
        yield quantize_fp8_blocks(part)[0 if name in quantized else 1]
