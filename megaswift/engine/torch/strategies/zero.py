"""DeepSpeed ZeRO as a strategy of the torch engine: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload.

Owns one backward pass, one step and the proof that the stage asked for is the stage that runs. DeepSpeed shards; the
numbers are the engine's: gradients are summed over ranks and micro-batches, the norm is over all parameters once, a
step with a gradient that is not finite leaves weights and moments as they were. Faults of DeepSpeed 0.19.8 that are
gone round here:

- Stage 2 with offload in bfloat16: a skipped step keeps the gradient buffer, with what was not finite in it, and every
  later step is then skipped too. It is dropped here.
- Stage 3, and offload at any stage: a parameter that takes no part in a step is stepped with its gradient of the step
  before. The buffers are zeroed after each step.
- Offload: a parameter that takes no part in the *last* micro-batch of a step loses its gradient of the others;
  `backward` completes the gradients itself.
- Half precision: weights are rounded before the fp32 masters are made from them. What that loses is written back into
  the masters.
- float16: the loss scale changes between the check of the gradients and their division by it, so that a step on which
  it grows takes half a gradient. The scale is the strategy's, and changes after the step.
- Stage 0 computes no gradient norm unless it clips, never checks it, and keeps it nowhere; `step` does it.

At stages 2 and 3 DeepSpeed reduces gradients while the backward pass runs, in the order in which they come. So every
trained parameter must take part on every rank alike; a rank without a label still runs the backward pass of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.objective import ReadNumbers
from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS, OptimConfig
from megaswift.engine.options.zero_file import KINDS, matching_deepspeed_preset, offloads_optimizer_and_weights
from megaswift.engine.options.zero_keys import offload_parts_on_a_drive
from megaswift.engine.protocol import Receivers
from megaswift.engine.squared_norm import sum_of_squares
from megaswift.engine.torch.meta_init import allocate_storage, is_unallocated
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale
from megaswift.engine.torch.optim.states import torch_engine_optimizer_class
from megaswift.engine.torch.strategies import zero_config, zero_drive
from megaswift.engine.torch.strategies.parts import is_receiver
from megaswift.engine.torch.strategies.strategy import (
    GRADIENT,
    WEIGHT,
    clip_grads_with_norm,
    set_param_groups_lr_and_weight_decay,
    state_tensors,
)
from megaswift.engine.torch.strategies.zero_tensors import (
    MOMENTS,
    ZeroWholeTensorAccess,
    get_optimizer_step_count,
    initialize_missing_states,
    set_optimizer_step_count,
    tensors_stepped_on_this_rank,
)
from megaswift.engine.torch.vision_parts import note_parts_with_own_learning_rates
from megaswift.errors import ConfigError, Problem

_OPTIMIZERS = {
    1: ("DeepSpeedZeroOptimizer", "BF16_Optimizer"),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}


class ZeroStrategy:
    """A module, its gradients and its optimizer under DeepSpeed. torch.distributed is initialized, over the world,
    before.

    `config`: a DeepSpeed configuration without "auto" (`megaswift.engine.options.zero_file.fill_deepspeed_auto`).
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimConfig,
        config: Mapping[str, Any],
        device: torch.device,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        # Settings, from the options and from DeepSpeed's configuration.
        plugin = PLUGIN_OPTIMIZERS.get(optim.optimizer)
        if optim.optimizer != "adam" and (plugin is None or not plugin.elementwise):
            raise ConfigError(
                Problem(
                    f"--optimizer {optim.optimizer}", "ZeRO supports AdamW and elementwise plugins", "--optimizer adam"
                )
            )
        self.kind = matching_deepspeed_preset(config) or ""
        self._device = device
        self.stage = KINDS[self.kind][0]
        self._offload, self._offload_weights = offloads_optimizer_and_weights(config)
        self._world = dist.get_world_size()
        self._names = dict(module.named_parameters())
        self.loss_scale = loss_scale
        half = zero_config.half_dtype(config)
        # Weights finer than the half precision of the run are put back at the end.
        exact = _finer_than(half, module) if half is not None and self.stage else {}
        deepspeed = zero_config.load_deepspeed(device.type)
        settings = zero_config.deepspeed_config_with_engine_overrides(config, self._world, device.type)
        # Buffers and folders for weights on a drive.
        sizes = [math.prod(p.shape) for p in self._names.values()]
        zero_drive.fit_weight_buffers(settings["zero_optimization"], sizes, self._world)
        zero_drive.give_own_folders(settings["zero_optimization"], self)
        on_drive = "param" in offload_parts_on_a_drive(config)
        # Stage 3 partitions the parameters before they have storage.
        if self.stage == 3 and (on_drive or any(is_unallocated(p) for p in self._names.values())):
            zero_config.partition_meta_parameters(module, settings, device)
        allocate_storage(self._names.values(), device)
        # The optimizer, and DeepSpeed's engine over model and optimizer.
        note_parts_with_own_learning_rates(module, optim)
        trained = [(n, p) for n, p in self._names.items() if p.requires_grad]
        optimizer = torch_engine_optimizer_class(optim.optimizer)(trained, optim).inner
        self._moments, self._counter = (plugin.states, plugin.step) if plugin else (MOMENTS, "step")
        self.module, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self._inner = optimizer
        self._zero = self.module.optimizer
        # DeepSpeed may average gradients over ranks; ours are sums, so the factor is undone.
        self._undo = float(self._world) if self.module.gradient_average else 1.0
        self._micro = self._taken = 0
        self.exchanged = False
        # Adjust DeepSpeed's engine: loss scale, gradients in memory, states that exist before the first step.
        self._check()
        self._own_loss_scale()
        zero_drive.keep_gradients_in_memory(self._zero)
        initialize_missing_states(self._zero, optimizer, self._moments, self._counter)
        self._tensors = ZeroWholeTensorAccess(deepspeed, self.module, optimizer, device)
        for name, tensor in exact.items():
            self.put(name, WEIGHT, tensor)

    def _check(self) -> None:
        """DeepSpeed falls back silently in places: check that what runs is what was requested."""
        name = type(self._zero).__name__
        stage = int(self.module.zero_optimization_stage())
        assert stage == self.stage, f"ZeRO stage {stage} runs, {self.stage} was requested"
        assert self._zero is self._inner if stage == 0 else name in _OPTIMIZERS[stage], f"{name} at stage {stage}"
        offload = getattr(self._zero, "offload_optimizer", getattr(self._zero, "cpu_offload", False))
        offloaded = (bool(offload), bool(getattr(self._zero, "offload_param", False)))
        assert offloaded == (self._offload, self._offload_weights), f"(optimizer, weights) offloaded: {offloaded}"
        if name == "DeepSpeedZeroOptimizer":
            assert self._zero.partition_gradients == (stage == 2), "gradients are partitioned at stage 2 only"
        if stage:
            elements = sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in self._names.values() if p.requires_grad)
            sharded = sum(s.numel() for s in tensors_stepped_on_this_rank(self._zero))
            slack = 64 * len(self._names)
            assert sharded <= elements / self._world + slack, (
                f"a shard of {sharded} of {elements} parameters on {self._world} ranks"
            )

    def _own_loss_scale(self) -> None:
        """DeepSpeed multiplies by the scale of this strategy, and never changes it."""
        if self.loss_scale is None:
            return
        if self.stage == 0:
            self.module.torch_autocast_z0_gradscaler = None
        else:
            self._zero.loss_scaler.update_scale = _keep_scale
            self._zero.loss_scaler.cur_scale = self.loss_scale.value

    def begin_microbatch(self, last: bool) -> None:
        """DeepSpeed needs no notice."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradients of `loss`, a scalar that is already divided by the global count. `last`: they are summed
        over ranks."""
        if self.loss_scale is not None and self.stage == 0:
            loss = loss * self.loss_scale.value
        elif self.loss_scale is not None and self._micro == 0:
            self._zero.loss_scaler.cur_scale = self.loss_scale.value
        finish = last and self._offload and self._micro > 0
        self.module.set_gradient_accumulation_boundary(last and not finish)
        self.module.backward(loss * self._undo, scale_wrt_gas=False)
        if finish:
            self._zero.finalize_gradient_accumulation_boundary()
            self.module.set_gradient_accumulation_boundary(True)
        if last and self.loss_scale is not None and self.stage == 0:
            self.loss_scale.unscale(p.grad for p in self._names.values() if p.grad is not None)
        self._micro += 1

    def step(self, lr: float, optim: OptimConfig, read: ReadNumbers) -> tuple[float, bool]:
        """(gradient norm before clipping, whether the step was taken). Gradients are gone afterwards. DeepSpeed reads
        its norm itself."""
        read([])
        norm, stepped = self._step(lr, optim)
        self._taken += stepped
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=not stepped)
        return norm, stepped

    @torch.no_grad()
    def _step(self, lr: float, optim: OptimConfig) -> tuple[float, bool]:
        self._micro = 0
        set_param_groups_lr_and_weight_decay(self._zero, lr, optim.weight_decay)
        norm = self._clip_whole(optim.max_grad_norm) if self.stage == 0 else 0.0
        if not math.isfinite(norm):
            self.module.zero_grad()
            return norm, False
        if self.stage:
            self._zero.clip_grad = optim.max_grad_norm
        if self.stage == 3:
            zero_drive.give_gradients(self._zero)
            zero_drive.forget_shards_read_ahead(self.module.module)
        self.module.step()
        if self.stage == 0:
            return norm, True
        stepped = bool(self.module.was_step_applied())
        self._forget(stepped)
        return float(self.module.get_global_grad_norm()), stepped

    def _clip_whole(self, clip: float) -> float:
        gradients = [p.grad for p in self._names.values() if p.grad is not None]
        norm = float(sum_of_squares(gradients, self._device).sqrt())
        if math.isfinite(norm):
            clip_grads_with_norm(gradients, norm, clip)
        return norm

    def _forget(self, stepped: bool) -> None:
        """Drops what DeepSpeed would add to the next step's gradients."""
        if self.stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
            zero_drive.forget_gradients(self._zero)
        if self._offload:
            sums = getattr(self._zero, "accumulated_grads_in_cpu", {}).values()
            for gradient in (*sums, *(s.grad for s in tensors_stepped_on_this_rank(self._zero) if s.grad is not None)):
                gradient.zero_()
        if not stepped and hasattr(self._zero, "all_grad_tensors"):
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = self._zero.all_grad_tensors[group] = None

    def zero_grad(self) -> None:
        """Forgets gradients, of a backward pass that no step followed too."""
        self.module.zero_grad()
        if self.stage and self._micro:
            self._zero.zero_grad()
            self._forget(stepped=False)
            if hasattr(self._zero, "all_grad_tensors"):
                self._zero.micro_step_id = -1  # as at the start: the next micro-batch is the first
            if self._offload:
                self._zero.reset_cpu_buffers()
        self._micro = 0

    def states(self, name: str) -> dict[str, TensorMeta]:
        """The optimizer's tensors for a parameter, whole."""
        parameter = self._names[name]
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return {moment: TensorMeta(shape, torch.float32) for moment in self._moments}

    def trained(self) -> Iterator[str]:
        """Names of the parameters that train."""
        return (name for name, p in self._names.items() if p.requires_grad)

    def live(self, names: Iterable[str]) -> list[Tensor]:
        """This rank's parts of these weights; stage 3 keeps small ones whole: freed, or a forward pass would go on with
        them."""
        tensors = []
        for name in names:
            parameter: Any = self._names[name]
            part = getattr(parameter, "ds_tensor", None)
            if part is not None and parameter.ds_status.name == "AVAILABLE":
                parameter.partition()
            tensors.append(parameter.data if part is None else part)
        return tensors

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """This rank's states and float32 main weights."""
        yield from state_tensors(self._inner)
        yield from (shard.data for shard in tensors_stepped_on_this_rank(self._zero))

    def whole(self, wanted: Sequence[tuple[str, str]], to: Receivers) -> Iterator[Tensor]:
        """Yield the whole float32 tensors on receivers: weights, gradients (after the last backward of a step), or
        states. Collective."""
        tensors = self._tensors.get([(self._names[name], kind) for name, kind in wanted], to, self.exchanged)
        scaled = self.loss_scale.value if self.loss_scale and self.stage else 1.0
        for (_, kind), tensor in zip(wanted, tensors, strict=is_receiver(to)):
            yield tensor / scaled if kind == GRADIENT else tensor

    def put(self, name: str, kind: str, tensor: Tensor) -> None:
        """The inverse of `whole` for weights and moments; every rank passes the full tensor. Collective."""
        self._tensors.put(self._names[name], kind, tensor)

    def sizes(self) -> tuple[int, int, int, int]:
        """(parameters, bytes of weights, of gradients, of moments and fp32 masters) of this rank, from its own
        buffers."""
        return self._tensors.sizes(self.module.module)

    @property
    def steps(self) -> int:
        """The optimizer's step count; the strategy's where it has none."""
        if self._counter is None:
            return self._taken
        return get_optimizer_step_count(self._zero, self._inner, self._counter)

    @steps.setter
    def steps(self, value: int) -> None:
        self._taken = value
        if self._counter is not None:
            set_optimizer_step_count(self._zero, self._inner, self._counter, value)

    def close(self) -> None:
        """Removes DeepSpeed's hooks from the module."""
        self.module.destroy()


def _keep_scale(overflow: bool) -> None:
    """Replace DeepSpeed's update of the loss scale: the strategy sets it."""


def _finer_than(half: torch.dtype, module: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of trained weights that `half` cannot hold: none of a checkpoint in it, or of a partitioned
    model."""
    trained = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad and not hasattr(p, "ds_tensor")}
    return {
        n: p.cpu().clone()
        for n, p in trained.items()
        if p.dtype == torch.float32 and not torch.equal(p, p.to(half).float())
    }
