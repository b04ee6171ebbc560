"""DeepSpeed's configuration, and how it is imported: the engine sums gradients and divides once, so DeepSpeed must
divide nothing.

Owns every setting that the numbers of a step depend on, and the preparation of DeepSpeed for a CPU.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megaswift.engine.options.zero_keys import READ_AHEAD_ON_A_DRIVE, offload_parts_on_a_drive
from megaswift.engine.torch.meta_init import allocate_storage

_LOCAL_RANK = "LOCAL_RANK"


def load_deepspeed(device_type: str) -> Any:
    """The deepspeed module, on `device_type` (cpu or cuda). The first call in a process decides.

    On a CPU DeepSpeed 0.19.8 compiles a shared-memory all-reduce when its communication starts, which only inference
    uses; it needs a compiler on the machine, so it is marked as not to be had (`deepspeed.ops.__compatible_ops__`,
    filled by the first look at it).
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault(_LOCAL_RANK, "0")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    device = deepspeed.get_accelerator().device_name()
    fix = f"set DS_ACCELERATOR={device_type} before deepspeed is imported"
    assert device == device_type, f"DeepSpeed runs on {device}, the engine on {device_type}: {fix}"
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def half_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The half precision of a configuration; None: float32."""
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for section, dtype in named.items() if (config.get(section) or {}).get("enabled")), None)


def deepspeed_config_with_engine_overrides(config: Mapping[str, Any], world: int, device_type: str) -> dict[str, Any]:
    """The configuration that DeepSpeed gets for a resolved one (`config.facts.zero_file.fill_deepspeed_auto`).

    - Batch sizes are one row a process: a loss comes divided by the global count, so DeepSpeed must not divide by
      micro-batches.
    - Ranks are summed (`gradient_allreduce_op`), not averaged. ZeRO-3 can only average, which the strategy undoes.
    - Clipping is set on the optimizer at each step, and done by the strategy at stage 0, where DeepSpeed keeps no norm.
    - Weights on a drive: READ_AHEAD_ON_A_DRIVE.
    - Half precision: fp32 accumulation and communication of gradients. Stage 0 cannot do that in DeepSpeed's sections
      bf16 and fp16 (weights and gradients would be halves throughout), so it computes under autocast from fp32 weights.
    """
    completed = copy.deepcopy(dict(config))
    zero = completed.setdefault("zero_optimization", {"stage": 0})
    stage = int(zero.get("stage", 0))
    completed |= {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
    completed |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    completed.setdefault("steps_per_print", 2**31)
    completed.setdefault("communication_data_type", "fp32")
    completed["data_types"] = {"grad_accum_dtype": "fp32", **completed.get("data_types", {})}
    if stage < 3:
        completed["gradient_allreduce_op"] = "sum"
    if "param" in offload_parts_on_a_drive(completed):
        zero |= dict.fromkeys(READ_AHEAD_ON_A_DRIVE, 0)
    half = half_dtype(completed)
    if half is not None and stage == 0:
        completed = {key: section for key, section in completed.items() if key not in ("bf16", "fp16")}
        completed["torch_autocast"] = {"enabled": True, "dtype": str(half).removeprefix("torch.")}
    elif half == torch.bfloat16:
        completed["bf16"]["check_grad_overflow"] = True
    if device_type == "cpu":
        for section in (zero.get("offload_optimizer"), zero.get("offload_param")):
            if section:
                section["pin_memory"] = False
    return completed


class _OneByOne(nn.Module):
    """Shows DeepSpeed a module's parameters one after the other, each real and in the dtype of the shards only when its
    turn has come."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._dtype = dtype
        self._device = device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As `nn.Module` gives them."""
        for parameter in self.module.parameters(recurse):
            allocate_storage([parameter], self._device)
            parameter.data = parameter.data.to(self._dtype)
            yield parameter


def partition_meta_parameters(module: nn.Module, settings: Mapping[str, Any], device: torch.device) -> None:
    """Stage 3: every parameter of a meta module becomes this rank's shard, before `deepspeed.initialize` would take
    them all at once.

    What is in the shards is given later. `settings` are those of `deepspeed_config_with_engine_overrides`; buffers,
    which DeepSpeed leaves where they are, move."""
    deepspeed = load_deepspeed(device.type)
    deepspeed.init_distributed()  # before the configuration is read, which else takes the world to be one process
    dtype = half_dtype(settings) or torch.float32
    # the dtype of its files comes from the settings: one that is named counts only where the device has float16
    deepspeed.zero.Init(module=_OneByOne(module, dtype, device), config_dict_or_path=dict(settings))
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
