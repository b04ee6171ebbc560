"""Delayed FP8 scaling in checkpoints: the scales and amax histories of Transformer Engine's modules, one file a rank.

Transformer Engine's own form of them (`_extra_state`) is a pickle, which no checkpoint of megaswift is read from.
Amaxes are reduced over tensor-, context- and data-parallel ranks, so under another layout a module's history is that of
any rank which had the module; one that is in no file, or for another number of experts, starts empty. Other recipes
have no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from megaswift.engine.megatron.state import EngineState
from megaswift.engine.megatron.weights import canonical_parameter_name
from megaswift.errors import Problem

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS_A_GEMM = 3
"""Tensors with a scale in the forward pass: input, weight and output."""
Histories = dict[str, Tensor]
"""`<module>/<direction>/scale` and `.../amax_history`, by the checkpoint's names of modules."""


def fp8_history_file(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"fp8-{rank:05d}.safetensors"


def uses_delayed_scaling(engine: EngineState) -> bool:
    """Whether the engine has such histories."""
    return bool(engine.config.fp8) and engine.config.fp8_recipe == "delayed"


def _modules(engine: EngineState) -> Iterator[tuple[str, nn.Module]]:
    """Transformer Engine's linear modules of this rank by the checkpoint's names."""
    for chunk in engine.plain:
        for name, module in chunk.named_modules():
            if hasattr(module, "init_fp8_meta_tensors") and any(True for _ in module.parameters(recurse=False)):
                yield canonical_parameter_name(name + ".", chunk, engine.spec, engine.context).removesuffix("."), module


def fp8_histories_file_content(engine: EngineState) -> bytes:
    """What the file of this rank's histories holds."""
    found: Histories = {}
    for name, module in _modules(engine):
        meta: Any = module.fp8_meta
        for direction in DIRECTIONS:
            if direction in meta:  # made by the first forward pass
                found[f"{name}/{direction}/scale"] = meta[direction].scale.cpu()
                found[f"{name}/{direction}/amax_history"] = meta[direction].amax_history.cpu()
    return save(found)


def read_fp8_histories(engine: EngineState, directory: Path, same_layout: bool) -> Histories | Problem:
    """What this rank's modules take: its own file's, or under another layout those of the first ranks that have them.
    Empty for a checkpoint of a run without delayed scaling."""
    own = fp8_history_file(directory, engine.rank)
    files = sorted(directory.glob("fp8-*.safetensors"))
    if same_layout and files:
        if own not in files:
            return Problem(str(own), "is missing: the checkpoint is incomplete")
        files = [own]
    wanted = {name for name, _ in _modules(engine)}
    found = Histories()
    for file in files:
        try:
            with safetensors.safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a mapping)
                    if key.partition("/")[0] in wanted and key not in found:
                        found[key] = opened.get_tensor(key)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            return Problem(str(file), f"cannot be read ({error})")
    return found


def restore_fp8_histories(engine: EngineState, found: Histories) -> int:
    """Sets the histories of this rank's modules; returns how many modules start with empty ones."""
    from megatron.core.fp8_utils import get_fp8_recipe

    recipe = get_fp8_recipe(engine.config)
    empty = 0
    for name, module in _modules(engine):
        owner: Any = module
        scale = found.get(f"{name}/{DIRECTIONS[0]}/scale")
        if scale is None:
            empty += 1
            continue
        if DIRECTIONS[0] not in owner.fp8_meta:
            owner.fp8_meta["num_gemms"] = scale.numel() // TENSORS_A_GEMM
            owner.init_fp8_meta_tensors(recipe)
        states = [(key, owner.fp8_meta[key]) for key in DIRECTIONS]
        saved = {key: (found[f"{name}/{key}/scale"], found[f"{name}/{key}/amax_history"]) for key in DIRECTIONS}
        if any(saved[key][1].shape != state.amax_history.shape for key, state in states):
            empty += 1
            continue
        with torch.no_grad():
            for key, state in states:
                state.scale.copy_(saved[key][0])
                state.amax_history.copy_(saved[key][1])
    return empty
