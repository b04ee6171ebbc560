"""LoRA checkpoints with the names and shards of ms-swift's and Megatron-Bridge's, saved by Megatron-Core.

The values are A [r, in] and B [out, r] of each Megatron layer, on two tensor-parallel ranks. ms-swift has the rows of
B one rank after the other; Megatron-Bridge splits those of a gated layer into gate and up first.
"""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bridge.foreign.megatron_writer import Job, _stand_in_for_cuda, models, sharded_strategy, start

LAYERS = 4
RANK = 4
COLUMN = ("self_attention.linear_qkv", "mlp.linear_fc1")
ROW = ("self_attention.linear_proj", "mlp.linear_fc2")


@dataclass(frozen=True)
class AdapterJob:
    """One checkpoint."""

    target: str
    bridge: bool
    values: tuple[tuple[str, Tensor, Tensor], ...]
    """(module, A, B of one rank in Megatron's order) of each layer."""


def run(rank: int, world: int, job: AdapterJob) -> None:
    """Save this rank's parts. Collective."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    _stand_in_for_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    state: dict[str, Any] = {}
    for number, (module, a, b) in enumerate(job.values):
        layer = number // (len(COLUMN) + len(ROW))
        column = module in COLUMN
        names = ("adapter.linear_in.weight", "adapter.linear_out.weight")
        if not job.bridge:
            names = ("lora_A.default.weight", "lora_B.default.weight")
        put = partial(_put, state, module, layer, rank, world)
        put(names[0], a if column else a.chunk(world, 1)[rank], None if column else 1)
        if not column:
            put(names[1], b, None)
        elif module.endswith("fc1") and job.bridge:
            for half, rows in enumerate(b.chunk(2)):
                put(names[1], rows.chunk(world)[rank], 0, 2 * world, half * world + rank)
        elif module.endswith("fc1"):
            put(names[1], torch.cat([rows.chunk(world)[rank] for rows in b.chunk(2)]), 0)
        else:
            put(names[1], b.chunk(world)[rank], 0)
    Path(job.target).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, job.target, sharded_strategy())
    dist.barrier()
    dist.destroy_process_group()


def _put(
    state: dict[str, Any],
    module: str,
    layer: int,
    rank: int,
    world: int,
    name: str,
    tensor: Tensor,
    cut: int | None,
    parts: int | None = None,
    at: int | None = None,
) -> None:
    """A tensor of one layer in the stack of all, cut along `cut`."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    offsets = [(0, layer, LAYERS)]
    if cut is not None:
        offsets.append((cut + 1, rank if at is None else at, parts or world))
    key = f"decoder.layers.{module}.{name}"
    replica = (0, 0 if cut is not None else rank, 0)
    state[f"{key} {layer} {at}"] = ShardedTensor.from_rank_offsets(
        key, tensor.contiguous(), *offsets, replica_id=replica, prepend_axis_num=1
    )


@dataclass(frozen=True)
class BridgeJob:
    """A checkpoint of Megatron-Bridge's own LoRA on a model of Megatron-Core with Transformer Engine's layers."""

    package: str
    """The folder in which the package `megatron` with Megatron-Bridge lies."""
    model: Job
    values: tuple[tuple[str, Tensor, Tensor], ...]


@torch.no_grad()
def run_bridge(rank: int, world: int, job: BridgeJob) -> None:
    """Save this rank's adapters. Collective."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    start(rank, world, job.model)
    package = types.ModuleType("megatron.bridge")  # without its __init__, which imports all models
    package.__path__ = [f"{job.package}/megatron/bridge"]
    sys.modules[package.__name__] = package
    from megatron.bridge.peft.lora import LoRA

    [chunk] = models(job.model)
    chunk = LoRA(dim=RANK, alpha=RANK)(chunk, training=True)
    parameters = dict(chunk.named_parameters())
    for number, (module, a, b) in enumerate(job.values):
        name = f"decoder.layers.{number // (len(COLUMN) + len(ROW))}.{module}.adapter"
        if module == COLUMN[1]:  # each rank's gates, then its ups
            b = torch.cat([torch.cat(parts) for parts in zip(*(rows.chunk(world) for rows in b.chunk(2)), strict=True)])
        for end, whole in (("linear_in", a), ("linear_out", b)):
            parameter = parameters[f"{name}.{end}.weight"]
            cut = next((dim for dim in (0, 1) if parameter.shape[dim] != whole.shape[dim]), None)
            parameter.copy_(whole if cut is None else whole.chunk(world, cut)[rank])
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
    state = {k: v for k, v in chunk.sharded_state_dict(metadata=metadata).items() if ".adapter." in k}
    Path(job.model.target).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({"model": state}, job.model.target, sharded_strategy())
    dist.barrier()
    dist.destroy_process_group()


def values(hf: dict[str, Any], seed: int) -> tuple[tuple[str, Tensor, Tensor], ...]:
    """Random adapters of all layers."""
    generator = torch.Generator().manual_seed(seed)
    h, ffn, d = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    shapes = {
        COLUMN[0]: (h, (heads + 2 * groups) * d),
        COLUMN[1]: (h, 2 * ffn),
        ROW[0]: (heads * d, h),
        ROW[1]: (ffn, h),
    }
    return tuple(
        (module, torch.randn(RANK, width, generator=generator), torch.randn(out, RANK, generator=generator))
        for _ in range(LAYERS)
        for module, (width, out) in shapes.items()
    )


def changes(hf: dict[str, Any], adapters: tuple[tuple[str, Tensor, Tensor], ...], scale: float) -> dict[str, Tensor]:
    """scale x B A of every Hugging Face weight, from Megatron's order of rows."""
    found = {}
    d, heads, groups = hf["head_dim"], hf["num_attention_heads"], hf["num_key_value_heads"]
    for number, (module, a, b) in enumerate(adapters):
        layer = f"model.layers.{number // (len(COLUMN) + len(ROW))}."
        change = scale * (b @ a)
        if module == COLUMN[0]:
            grouped = change.view(groups, heads // groups + 2, d, -1)
            parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            for name, part in zip("qkv", parts, strict=True):
                found[f"{layer}self_attn.{name}_proj.weight"] = part.reshape(-1, change.shape[1])
        elif module == COLUMN[1]:
            for name, part in zip(("gate", "up"), change.chunk(2), strict=True):
                found[f"{layer}mlp.{name}_proj.weight"] = part
        else:
            name = "self_attn.o_proj" if module == ROW[0] else "mlp.down_proj"
            found[f"{layer}{name}.weight"] = change
    return found


def write_options(root: Path, bridge: bool, alpha: float, tp: int) -> Path:
    """Write the options that lie beside such a checkpoint. A reader that calls the objects of Megatron-Bridge's file
    makes the folder `called`."""
    if bridge:
        path = root / "iter_0000007" / "run_config.yaml"
        text = (
            "_target_: tests.bridge.foreign.missing.Container\n"
            f"model:\n  _target_: os.mkdir\n  _call_: true\n  path: {root / 'called'}\n"
            f"peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: {RANK}\n  alpha: {alpha}\n"
        )
        path.write_text(text)
        return path
    path = root / "args.json"
    options = {"lora_rank": RANK, "lora_alpha": alpha, "use_rslora": False, "tensor_model_parallel_size": tp}
    path.write_text(json.dumps(options))
    return path
