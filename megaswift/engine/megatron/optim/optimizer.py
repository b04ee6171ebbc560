"""Megatron's optimizers, and one step of them that can be skipped.

Owns the optimizer's configuration, where Adam runs, learning rate and weight decay per group, the gradient norm and the
step.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from contextlib import ExitStack
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaswift.engine.megatron.optim.clipping import (
    clipping_by,
    clips_in_update,
    decided_on_device,
    device_decides,
    let_device_decide,
)
from megaswift.engine.megatron.optim.host_adam import HostAdam, materialize_host_adam_state
from megaswift.engine.objective import StepNumbers
from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS, OptimConfig, PluginOptimizerParts

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of main gradients and moments, by Megatron-LM's names."""
_PLUGIN_OF: WeakKeyDictionary[torch.optim.Optimizer, PluginOptimizerParts] = WeakKeyDictionary()
CLIP_EPSILON = 1e-6
"""Megatron-Core's: gradients are multiplied by the limit over (norm + this), where that is below 1."""
NORM_GRADIENTS = next(
    name for name in ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm") if hasattr(MegatronOptimizer, name)
)
"""Megatron-Core's method for the gradients that count in the norm; the second name is 0.16's."""
LORA_B = re.compile(r"\.lora\.B\d+$")
"""Names of B in a layer's adapters (`lora.layers`)."""


def build_optimizer(
    chunks: list[DistributedDataParallel], config: TransformerConfig, o: OptimConfig
) -> MegatronOptimizer:
    """The optimizer over this rank's chunks."""
    # Megatron's options. A plugin's optimizer takes the place of a plain SGD below.
    plugin = PLUGIN_OPTIMIZERS.get(o.optimizer)
    options = OptimizerConfig(
        optimizer="sgd" if plugin else o.optimizer,
        lr=o.learning_rate,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_epsilon,
        sgd_momentum=o.sgd_momentum,
        clip_grad=o.max_grad_norm,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        use_precision_aware_optimizer=o.precision_aware_optimizer,
        main_grads_dtype=STATE_DTYPES[o.main_grads_dtype],
        exp_avg_dtype=STATE_DTYPES[o.exp_avg_dtype],
        exp_avg_sq_dtype=STATE_DTYPES[o.exp_avg_sq_dtype],
        store_param_remainders=o.store_param_remainders,
        initial_loss_scale=o.initial_loss_scale,
        min_loss_scale=o.min_loss_scale,
        loss_scale_window=o.loss_scale_window,
        hysteresis=o.hysteresis,
        fp8_recipe=config.fp8_recipe if config.fp8_param else None,
    )
    # Megatron-Core makes Gloo groups unless it is told not to; some releases lack the argument.
    extra: dict[str, Any] = (
        {"use_gloo_process_groups": False}
        if "use_gloo_process_groups" in inspect.signature(get_megatron_optimizer).parameters
        else {}
    )
    if o.lorap_lr_ratio is not None:
        extra["config_overrides"] = loraplus_overrides(options, o.lorap_lr_ratio)
    optimizer = get_megatron_optimizer(options, chunks, **extra)
    # Replace or fuse the inner optimizer of each part.
    for part in optimizer_parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            _correct_places_in_groups(part)
        if plugin is not None:
            part.optimizer = _of_plugin(plugin, part.optimizer, o)
        elif o.optimizer_cpu_offload:
            part.optimizer = HostAdam.instead_of(part.optimizer, o.optimizer_offload_fraction)
            part.init_state_fn = materialize_host_adam_state
        else:
            _fuse(part)
    # All parts share one loss scale (float16). Overflow and clipping are decided on the device, except with a plugin.
    share_loss_scaler(optimizer)
    if plugin is None:
        let_device_decide(optimizer_parts(optimizer))
    return optimizer


def _correct_places_in_groups(part: DistributedOptimizer) -> None:
    """Number the weights of each group as the inner optimizer has them: float32 ones first.

    Megatron-Core (0.16 to 0.19) numbers them in the order of its buffers, so in a group with weights of both precisions
    some would be given the states of others.
    """
    for number, weights in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for place, weight in enumerate(chain(*weights)):
            part.model_param_group_index_map[weight] = (number, place)


def _of_plugin(plugin: PluginOptimizerParts, fresh: torch.optim.Optimizer, o: OptimConfig) -> torch.optim.Optimizer:
    """A plugin's optimizer over the groups of a fresh one of Megatron-Core's."""
    made: torch.optim.Optimizer = plugin.make(_groups_without_settings(fresh), o)
    _PLUGIN_OF[made] = plugin
    return made


def _groups_without_settings(fresh: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups of one of Megatron-Core's without its own settings, for another optimizer."""
    return [{k: v for k, v in group.items() if k not in fresh.defaults} for group in fresh.param_groups]


def plugin_of_part(part: MegatronOptimizer) -> PluginOptimizerParts | None:
    """What a plugin has registered of the optimizer inside."""
    return _PLUGIN_OF.get(part.optimizer)


def loraplus_overrides(options: OptimizerConfig, ratio: float) -> dict[ParamKey, Any]:
    """Megatron's own overrides, and LoRA+ (arXiv:2402.12354): B and vectors learn `ratio` times as fast as A, as PEFT's
    `create_loraplus_optimizer` groups them."""
    fast = ParamWithNamePredicate("loraplus", lambda p, name: len(p.shape) == 1 or LORA_B.search(name) is not None)
    return {**get_standard_config_overrides(options), ParamKey(with_name_predicate=fast): {"lr_mult": ratio}}


def _fuse(part: MegatronOptimizer) -> None:
    """Let torch's Adam run as one kernel a parameter; without Transformer Engine, Megatron takes torch's plain loop.
    SGD is torch's in any case: Transformer Engine's has no divisor of gradients on the device."""
    base = part.optimizer
    if part.config.optimizer == "sgd" and type(base) is not torch.optim.SGD:
        common = {name: base.defaults[name] for name in ("lr", "momentum", "weight_decay")}
        part.optimizer = base = torch.optim.SGD(_groups_without_settings(base), **common)
    if isinstance(base, torch.optim.Adam | torch.optim.SGD):
        for group in base.param_groups:
            group["fused"] = True
            group["foreach"] = False


def set_lr_and_weight_decay(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Learning rate and weight decay of every group: biases and norms (1-D parameters) do not decay."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_mult", 1.0)
        if isinstance(group["lr"], Tensor):  # of a kernel that reads it on the device
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a chained one is made of (dense and expert parameters), without empty stubs."""
    return [o for o in _chained(optimizer) if not getattr(o, "is_stub_optimizer", False)]


def _chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def uses_precision_aware_optimizer(part: MegatronOptimizer) -> bool:
    """Whether the inner optimizer, Transformer Engine's FusedAdam, has the main weights, and reads `decoupled_grad`."""
    return bool(getattr(part.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def get_loss_scale(optimizer: MegatronOptimizer) -> float | None:
    """The loss scale (float16); None in other precisions."""
    scaler = _shared_scaler(optimizer)
    return None if scaler is None else float(scaler.on_host.scale)


def can_lower_loss_scale(optimizer: MegatronOptimizer) -> bool:
    """Whether a loss scale (float16) is above its minimum."""
    shared = _shared_scaler(optimizer)
    scaler = None if shared is None else shared.on_host
    return scaler is not None and float(scaler.scale) > float(getattr(scaler, "min_scale", scaler.scale))


class SharedLossScaler:
    """One loss scale for all parts of an optimizer.

    Megatron-Core gives dense and expert parameters a scaler each, lowers only the one whose gradients overflowed, and
    scales the loss by the first: the other part's gradients would then be divided by a scale that they do not have.
    """

    def __init__(self, scaler: MegatronGradScaler) -> None:
        self.scaler = scaler
        self.on_host = _copy_on_host(scaler)
        """The same with its scale in host memory, where it is read in every step."""

    def __getattr__(self, name: str) -> Any:
        """Scale, bounds and state are the scaler's."""
        return getattr(self.scaler, name)

    def update(self, found_inf: bool) -> None:
        """For the next step, once a step, by whether a part of any rank overflowed."""
        self.scaler.update(found_inf)
        self.on_host.update(found_inf)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Scale and counters of a checkpoint."""
        self.scaler.load_state_dict(state)
        self.on_host = _copy_on_host(self.scaler)


def _copy_on_host(scaler: MegatronGradScaler) -> MegatronGradScaler:
    made = copy.copy(scaler)
    vars(made).update({name: v.cpu().clone() for name, v in vars(scaler).items() if isinstance(v, Tensor)})
    return made


def share_loss_scaler(optimizer: MegatronOptimizer) -> None:
    """Gives all parts the first one's scaler (float16)."""
    scaled = _scaled(optimizer)
    if scaled:
        shared = SharedLossScaler(scaled[0].grad_scaler)
        for part in scaled:
            part.grad_scaler = shared


def _scaled(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return [o for o in _chained(optimizer) if getattr(o, "grad_scaler", None) is not None]


def _shared_scaler(optimizer: MegatronOptimizer) -> SharedLossScaler | None:
    """What `share_loss_scaler` has set; None without a loss scale."""
    return next((part.grad_scaler for part in _scaled(optimizer)), None)


@torch.no_grad()
def optimizer_step(
    optimizer: MegatronOptimizer, clip: float, device: torch.device, numbers: StepNumbers
) -> tuple[float, bool]:
    """(gradient norm before clipping, whether the step was taken). Not taken where a gradient is not finite; the norm
    is then NaN in float16 where a gradient of any rank overflowed, which lowers the loss scale of later steps.

    The device is read once for `numbers`: after the update is launched where the device decides on it, before it where
    the host has to (`reason_for_host_decision`).
    """
    _prepare_gradients(optimizer)
    squares = numbers.reduce(*_launch_squared_norms(optimizer, device))
    decided = _launch_then_read if device_decides(optimizer_parts(optimizer)) else _read_then_launch
    norm, stepped = decided(optimizer, clip, squares, numbers)
    scaler = _shared_scaler(optimizer)
    if scaler is not None:
        scaler.update(math.isnan(norm))
    return norm, stepped


def _prepare_gradients(optimizer: MegatronOptimizer) -> None:
    """Main gradients, divided by the loss scale: Megatron-Core's `prepare_grads` without its reads. Whether a part's
    gradients on this rank overflowed stays in its `found_inf`, on the device."""
    for part in optimizer_parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is None:
            part.prepare_grads()
            continue
        part.grad_scaler = None
        part.prepare_grads()
        part.grad_scaler = scaler
        gradients = part._collect_main_grad_data_for_unscaling()
        part.found_inf.fill_(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, part.found_inf, scaler.inv_scale)


def _read_then_launch(
    optimizer: MegatronOptimizer, clip: float, squares: list[Tensor], numbers: StepNumbers
) -> tuple[float, bool]:
    """`optimizer_step` by a decision of the host. `squares` [] add up to the square of all gradients."""
    norm = math.sqrt(sum(numbers.start_read(squares)()))
    if not math.isfinite(norm):
        return norm, False
    with ExitStack() as updates:
        for part in optimizer_parts(optimizer) if clip > 0 else ():
            if clips_in_update(part):
                updates.enter_context(clipping_by(part, (norm + CLIP_EPSILON) / clip))
            elif parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=clip, total_norm=norm, use_decoupled_grad=uses_precision_aware_optimizer(part)
                )
        return norm, bool(optimizer.step_with_ready_grads())


def _launch_then_read(
    optimizer: MegatronOptimizer, clip: float, squares: list[Tensor], numbers: StepNumbers
) -> tuple[float, bool]:
    """`optimizer_step` without a decision of the host. `squares` [] add up to the square of all gradients."""
    norm = torch.stack([square.double() for square in squares]).sum().sqrt()
    wait = numbers.start_read([norm])
    skip = 1 - norm.isfinite().float()
    divisor = ((norm + CLIP_EPSILON) / clip).clamp(min=1) if clip > 0 else None
    with ExitStack() as updates:
        for part in optimizer_parts(optimizer):
            updates.enter_context(decided_on_device(part, skip, divisor))
        optimizer.step_with_ready_grads()
    [value] = wait()
    return value, math.isfinite(value)


def _launch_squared_norms(optimizer: MegatronOptimizer, device: torch.device) -> tuple[list[Tensor], list[Any]]:
    """Squared gradient norms [] of this rank, and the groups over which they are to be added up, also those of parts
    without parameters here: together the square of all gradients, NaN where a scaled one overflowed, even one that is
    counted on another rank. Megatron-Core's `get_grad_norm` without its reads."""
    parts = _chained(optimizer)
    groups = [part.get_grad_stats_parallel_group() for part in parts]
    gradients = [getattr(part, NORM_GRADIENTS)() for part in parts]
    found = [[part.found_inf] if getattr(part, "grad_scaler", None) is not None else [] for part in parts]
    if all(group == groups[0] for group in groups):
        groups = groups[:1]
        gradients = [sum(gradients, [])]
        found = [sum(found, [])]
    squares = []
    for some, overflowed in zip(gradients, found, strict=True):
        square = torch.zeros(1, dtype=torch.float32, device=device)
        if some:
            no_overflow = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, no_overflow, [some], False)
            square = norm**2
        if overflowed:
            square = torch.where(torch.cat(overflowed).amax() > 0, math.nan, square)
        squares.append(square.reshape(()))
    return squares, groups
