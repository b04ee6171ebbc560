"""Records one optimizer step of the native engine on a rank: outputs of modules and their gradients, the loss, reduced
and clipped gradients, and main weights after the step.

A hook sees a module's output as [tokens of this rank, columns of this rank]. Which tokens and columns these are follows
from the layout (`placement.py`), so nothing about it is recorded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bisection.placement import adapter_parameter
from megaswift.bisection.trace_folder import (
    BACKWARD,
    CLIPPED,
    GATHERED,
    GRADIENT,
    LOSS,
    OUTPUT,
    RECOMPUTED,
    WEIGHT,
    Entry,
    RankTrace,
)
from megaswift.engine.megatron.checkpoint.optimizer_states import main_weights
from megaswift.engine.megatron.engine import MegatronEngine
from megaswift.engine.megatron.layers.post_norm import ScaledPostNormProjection
from megaswift.engine.megatron.model import SwiftGPT, finish_weight_gathers
from megaswift.engine.megatron.optim.optimizer import optimizer_parts
from megaswift.engine.megatron.weights import canonical_parameter_name
from megaswift.losses.contract import Batch, Loss

LAYER = re.compile(r"layers\.\d+|mtp\.layers\.\d+\.transformer_layer")
UNCOUNTED = re.compile(r"\.experts\.|^embedding|^output_layer")
"""Modules with weights whose outputs have no counterpart, or that are never called."""
CORE = ".core_attention"
ACTIVATION = re.compile(r"(.*mlp(?:\.shared_experts)?)\.linear_fc2")
"""A product whose input is recorded too: the output of the activation function, which is no module."""
HEAD = "head"
EMBEDDING = "embedding"
ROTATED = ("query", "key")
"""Inputs of attention that are recorded: after norms and rotation, before context parallelism joins keys."""


@dataclass(frozen=True)
class TrainedPart:
    """Elements of a parameter that the optimizer of this rank changes, flat."""

    name: str
    start: int
    """The first of them in this rank's shard of the parameter."""
    gradient: Tensor
    main: Tensor
    clipped: Tensor | None


class StepRecorder:
    """Hooks on the modules of a rank; `tensors` fills up while a step runs."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self.trace = RankTrace(engine.rank)
        self._forwards: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block."""
        with ExitStack() as hooks:
            for chunk in self.engine.plain:
                for name, module in self._modules(chunk):
                    hook = module.register_forward_hook(self._hook(name))
                    hooks.callback(hook.remove)
                    if match := ACTIVATION.fullmatch(name):
                        record = _with_input(self._hook(f"{match[1]}.activation"))
                        hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
                    if name.endswith(CORE) and not self.engine.config.multi_latent_attention:
                        hooks.callback(module.register_forward_pre_hook(self._rotated_hook(name)).remove)
                hooks.callback(chunk.register_forward_hook(self._head_hook(chunk)).remove)
                for layer in chunk.decoder.layers[:1]:
                    read = EMBEDDING if layer.layer_number == 1 else f"layers.{layer.layer_number - 2}"
                    record = _with_input(self._hook(read))
                    hooks.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
            yield

    def _modules(self, chunk: SwiftGPT) -> Iterator[tuple[str, nn.Module]]:
        """Modules of a chunk whose outputs are recorded, by their names in the whole model."""
        engine = self.engine
        weights = engine.plan.by_megatron
        gated = getattr(engine.config, "attention_output_gate", False)
        for local, module in chunk.named_modules():
            name = canonical_parameter_name(f"{local}.", chunk, engine.spec, engine.context)[:-1]
            short = _short(name)
            has_weight = f"{name}.weight" in weights and not UNCOUNTED.search(name)
            layer = LAYER.fullmatch(short) is not None
            mixture = hasattr(module, "router")
            core = name.endswith(CORE) and not gated
            own = has_weight and not _does_more_than_hugging_faces(module)
            if layer or mixture or core or own:
                yield short, module

    def _number(self, name: str) -> int:
        """The micro-batch of a module's present call. A call with gradients that follows one without is a
        recomputation: both come in the order of micro-batches."""
        counter = self._recomputed if torch.is_grad_enabled() else self._forwards
        counter[name] += 1
        return counter[name] - 1

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, _: Any, out: Any) -> None:
            value, bias = (*out, None)[:2] if isinstance(out, tuple) else (out, None)
            whole = isinstance(bias, Tensor) and bias.shape == value.shape[-1:]
            # Megatron's products hand their bias on, to be added later
            by_head = name.endswith(("q_layernorm", "k_layernorm"))
            columns = value.shape[-2:].numel() if by_head else value.shape[-1]
            self._keep(name, value, columns, value + bias if whole else value)

        return record

    def _rotated_hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            for part, value in zip(ROTATED, args, strict=False):
                self._keep(f"{name}.{part}", value, value.shape[-2:].numel())

        return record

    def _keep(self, name: str, value: Tensor, columns: int, shown: Tensor | None = None) -> None:
        number = self._number(name)
        output = (value if shown is None else shown).detach().reshape(-1, columns)
        forward = self.trace.tensors.get(Entry(OUTPUT, name, number))
        self.trace.add(Entry(OUTPUT, name, number), output)
        if forward is not None and torch.is_grad_enabled() and not torch.equal(output.cpu(), forward):
            self.trace.add(Entry(RECOMPUTED, name, number), output)
        if value.requires_grad and torch.is_grad_enabled():
            entry = Entry(BACKWARD, name, number)
            value.register_hook(lambda gradient: self.trace.add(entry, gradient.reshape(-1, columns)))

    def _head_hook(self, chunk: SwiftGPT) -> Callable[..., None]:
        """The differentiable fields of the last stage, [f, b, s]."""

        def record(module: nn.Module, _: Any, out: Tensor) -> None:
            if not chunk.post_process:
                return
            needs = chunk.needs
            number = self._number(HEAD)
            fields = {HEAD: [i for i, name in enumerate(needs.names) if name in needs.differentiable]}
            fields |= {f"mtp.layers.{n}.{HEAD}": [len(needs.names) + n] for n in range(needs.ahead)}
            for name, rows in fields.items():
                self.trace.add(Entry(OUTPUT, name, number), _tokens_first(out)[:, rows])
                if out.requires_grad:
                    out.register_hook(partial(keep_gradient, Entry(BACKWARD, name, number), rows))

        def keep_gradient(entry: Entry, rows: list[int], gradient: Tensor) -> None:
            self.trace.add(entry, _tokens_first(gradient)[:, rows])

        return record

    def record_step(self, microbatches: Sequence[Batch], loss: Loss, lr: float) -> None:
        """Take one optimizer step and record it. Collective."""
        engine = self.engine
        self.trace.add_inputs(microbatches)
        with self.recording(), self._reduced_gradients():
            result = engine.train_batch(microbatches, loss, lr)
        for number, part in enumerate(result.parts):
            self.trace.add(Entry(LOSS, "loss", number), torch.tensor([part.loss]))
        for own in self._trained():
            if own.clipped is not None:
                self.trace.add(Entry(CLIPPED, own.name, None, own.start), own.clipped.float())
            self.trace.add(Entry(WEIGHT, own.name, None, own.start), own.main.float())
        finish_weight_gathers(engine.chunks)
        trained = engine.weights.placed if engine.lora is None else engine.lora.saved
        for placed in trained:
            weight = placed.held
            assert isinstance(weight, Tensor), "quantized weights do not train"
            self.trace.add(Entry(GATHERED, _short(placed.entry.megatron)), weight.reshape(-1))
        for one in engine.lora.placed if engine.lora is not None else ():
            self.trace.add(Entry(GATHERED, adapter_parameter(one.adapter, one.half)), one.tensor.reshape(-1))

    @contextmanager
    def _reduced_gradients(self) -> Iterator[None]:
        """Record gradients of the whole batch when the optimizer takes them over."""
        parts = optimizer_parts(self.engine.optimizer)
        seen: list[int] = []

        def recorded(prepare: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                if not seen:
                    seen.append(1)
                    for own in self._trained():
                        self.trace.add(Entry(GRADIENT, own.name, None, own.start), own.gradient.float())
                return prepare()

            return run

        for part in parts:
            part.prepare_grads = recorded(part.prepare_grads)
        try:
            yield
        finally:
            for part in parts:
                del part.prepare_grads

    def _trained(self) -> Iterator[TrainedPart]:
        """Yield what the optimizer of this rank changes; adapters of experts that share a parameter, one by one."""
        places = self._places()
        for weight, start, main in main_weights(self.engine.optimizer):
            gradient = weight.main_grad.reshape(-1)  # type: ignore[attr-defined]
            for name, first, count in places.get(id(weight), ()):
                begin = max(first, start)
                end = min(first + count, start + main.numel())
                if begin < end:
                    here = slice(begin - start, end - start)
                    clipped = None if main.grad is None else main.grad.reshape(-1)[here]
                    yield TrainedPart(name, begin - first, gradient[begin:end], main.reshape(-1)[here], clipped)

    def _places(self) -> dict[int, list[tuple[str, int, int]]]:
        """(Name, first element, number of elements) of what a parameter holds, by its identity."""
        places: dict[int, list[tuple[str, int, int]]] = {}
        for placed in self.engine.weights.placed:
            weight = placed.held
            if isinstance(weight, Tensor):
                places[id(weight)] = [(_short(placed.entry.megatron), 0, weight.numel())]
        for one in self.engine.lora.placed if self.engine.lora is not None else ():
            own = one.tensor
            first = int(own.storage_offset() - one.parameter.storage_offset())
            name = adapter_parameter(one.adapter, one.half)
            places.setdefault(id(one.parameter), []).append((name, first, own.numel()))
        return places


def _short(name: str) -> str:
    """A canonical name as traces have it."""
    return name.removeprefix("decoder.")


def _does_more_than_hugging_faces(module: nn.Module) -> bool:
    """Return whether a norm or a factor follows the product in the same module."""
    return isinstance(module, ScaledPostNormProjection) and (module.post_layernorm is not None or module.scale != 1.0)


def _with_input(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook for outputs, as one for a module's first input."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook(module, args, args[0] if args else kwargs["hidden_states"])

    return record


def _tokens_first(fields: Tensor) -> Tensor:
    """[f, b, s] to [s x b, f]."""
    return fields.permute(2, 1, 0).reshape(-1, fields.shape[0])
