"""The interface of a data-parallel strategy (DDP, FSDP2, ZeRO), and what several of them share: parameter groups, AdamW
or SGD, learning rates, gradient clipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.objective import ReadNumbers
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.protocol import Receivers
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale
from megaswift.engine.torch.vision_parts import ALIGNER, VIT

WEIGHT = "weight"
GRADIENT = "gradient"


class DataParallelStrategy(Protocol):
    """A wrapped model with its optimizer. Parameters go by their names in the model that was wrapped."""

    kind: str
    module: nn.Module
    """What is called."""

    def begin_microbatch(self, last: bool) -> None:
        """A forward pass comes whose gradients are wanted; `last` as for `backward`."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Gradients of the sum of `loss` over ranks and calls; `last` on the last micro-batch of a step."""

    def step(self, lr: float, optim: OptimConfig, read: ReadNumbers) -> tuple[float, bool]:
        """(gradient norm before clipping, each parameter once; whether the step was taken). Gradients are gone after
        it. `read` is called once, with what the step needs of the device."""

    def zero_grad(self) -> None:
        """Forgets gradients."""

    def states(self, name: str) -> dict[str, TensorMeta]:
        """The optimizer's tensors for a parameter that trains, whole."""

    def whole(self, wanted: Sequence[tuple[str, str]], to: Receivers) -> Iterator[Tensor]:
        """Yield the whole tensor of each (parameter, kind) on receivers, nothing on other ranks: WEIGHT and GRADIENT in
        float32, or one of `states`. All are gathered together. Collective: every rank iterates to the end."""

    def put(self, name: str, kind: str, tensor: Tensor) -> None:
        """The inverse of `whole`; every rank passes the whole tensor. Collective."""

    def trained(self) -> Iterator[str]:
        """Names of the parameters that train."""

    def live(self, names: Iterable[str]) -> list[Tensor]:
        """This rank's parts of these weights, as the next forward pass reads them: to be written in place."""

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """This rank's states and float32 main weights."""

    def sizes(self) -> tuple[int, int, int, int]:
        """(parameters, bytes of weights, of gradients, of optimizer states) of this rank."""

    steps: int
    """Optimizer steps taken."""
    exchanged: bool
    """The weights are a reference's, or the optimizer is offloaded: `whole` then gives the weights that a forward pass
    reads, and not float32 copies that an optimizer keeps."""
    loss_scale: DynamicLossScale | None
    """In float16; None in other precisions."""


def whole_tensor(strategy: DataParallelStrategy, name: str, kind: str) -> Tensor:
    """Return one whole tensor on every rank. Collective."""
    (tensor,) = strategy.whole([(name, kind)], "all")
    return tensor


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the states that an optimizer keeps, as they lie on this rank."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value.to_local() if isinstance(value, DTensor) else value


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to norms and biases (of stacked experts: 2-D)."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # of ZeRO-3's partitioned ones nothing else is left
    return len(shape) > 1 and not name.endswith("bias")


EMBEDDING_ADAPTER_RATE = 1e-6
"""Peak learning rate of adapters on embeddings under LoRA+: PEFT's `loraplus_lr_embedding`."""


def lr_multiplier(name: str, parameter: Tensor, optim: OptimConfig) -> float:
    """Return the factor of the learning rate: 1, but under LoRA+ (arXiv:2402.12354) for B, vectors and adapters on
    embeddings, as PEFT's `create_loraplus_optimizer` groups them, and for parts of a vision-language model that have a
    rate of their own."""
    own = {VIT: optim.vit_lr, ALIGNER: optim.aligner_lr}.get(getattr(parameter, "vision_part", ""))
    if own is not None:
        return own / optim.learning_rate
    if optim.lorap_lr_ratio is None:
        return 1.0
    if "lora_embedding_" in name:
        return EMBEDDING_ADAPTER_RATE / optim.learning_rate
    vector = len(getattr(parameter, "ds_shape", parameter.shape)) == 1
    return optim.lorap_lr_ratio if "lora_B" in name or vector else 1.0


def param_groups_of(named: list[tuple[str, nn.Parameter]], optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameters with weight decay, and those without; apart where their learning rates differ."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in named:
            if has_weight_decay(name, parameter) == decays:
                groups.setdefault((lr_multiplier(name, parameter, optim), decays), []).append(parameter)
    return [{"params": params, "decays": decays, "lr_mult": mult} for (mult, decays), params in groups.items()]


def make_adamw_or_sgd(named: list[tuple[str, nn.Parameter]], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW, or SGD, in groups: with weight decay and without."""
    groups = param_groups_of(named, optim)
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.sgd_momentum)
    return torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_epsilon
    )


def set_param_groups_lr_and_weight_decay(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Learning rate and weight decay of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def clip_grads_with_norm(gradients: Iterable[Tensor], norm: float, limit: float) -> None:
    """Scales gradients of global norm `norm`, finite, down to `limit`, in place; 0: no clipping."""
    if limit > 0 and norm + 1e-6 > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
