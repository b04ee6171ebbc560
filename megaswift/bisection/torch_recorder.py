"""Records one optimizer step of a torch engine on a rank, under the names of Megatron's modules: a product of several
Hugging Face modules is their outputs, joined in the order in which Megatron has the rows of its weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bisection.placement import FUSED_NORMS, Placement, plan_entry
from megaswift.bisection.reference import INPUT_OF
from megaswift.bisection.trace_folder import (
    BACKWARD,
    CLIPPED,
    GRADIENT,
    LOSS,
    OUTPUT,
    RECOMPUTED,
    WEIGHT,
    Entry,
    RankTrace,
)
from megaswift.bridge.plan import WeightPlan
from megaswift.engine.torch.engine import TorchEngine
from megaswift.families import family_of
from megaswift.losses.contract import Batch, Loss

READ_BY = {reader: read for read, reader in INPUT_OF.items()}
"""A product -> the output, of no module's own, that it reads."""
HEAD = "head"


class TorchStepRecorder:
    """Hooks on the modules of a rank; `trace` fills up while a step runs."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.trace = RankTrace(engine.rank)
        plan = WeightPlan(family_of(engine.spec.hf_config), engine.spec)
        self.placement = Placement(plan, engine.spec, engine.layout)
        self.place = engine.layout.coordinates(engine.rank)
        self.model: Any = engine.fields.model
        self._number = 0
        """Of the present micro-batch."""
        self._rows = torch.Size((0, 0))
        """Its [b, s]."""
        self._factor = 1.0
        """What the strategy multiplies the loss by."""

    def record_step(self, microbatches: Sequence[Batch], loss: Loss, lr: float) -> None:
        """Take one optimizer step and record it. Collective."""
        self.trace.add_inputs(microbatches)
        with self._recording():
            result = self.engine.train_batch(microbatches, loss, lr)
        for number, part in enumerate(result.parts):
            self.trace.add(Entry(LOSS, "loss", number), torch.tensor([part.loss]))
        self._keep_parameters(WEIGHT, dict(self.engine.hf_weights()))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        strategy: Any = self.engine.strategy
        backward = strategy.backward

        def with_factor(loss: Tensor, last: bool) -> None:
            loss.register_hook(self._take_factor)
            backward(loss, last)

        def with_gradients(kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                self._keep_parameters(kind, dict(self.engine.hf_gradients()))
                return step(*given)

            return run

        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            strategy.backward = with_factor
            stack.callback(delattr, strategy, "backward")
            for kind, owner in ((GRADIENT, strategy), (CLIPPED, getattr(strategy, "optimizer", None))):
                if owner is not None:  # DeepSpeed clips within its own step
                    owner.step = with_gradients(kind, owner.step)
                    stack.callback(delattr, owner, "step")
            yield

    def _take_factor(self, gradient: Tensor) -> None:
        self._factor = float(gradient)

    def _hooks(self) -> Iterator[Any]:
        """Hook everything that has a name in Megatron."""
        yield self.engine.fields.register_forward_pre_hook(self._on_rows)
        layers = self.model.get_decoder().layers
        yield layers[0].register_forward_pre_hook(self._on_input("embedding"), with_kwargs=True)
        for number, layer in enumerate(layers):
            prefix = f"layers.{number}"
            yield layer.register_forward_hook(self._on_output(prefix))
            router = plan_entry(self.placement.plan, f"{prefix}.mlp.router.weight")
            if router is not None:
                yield layer.mlp.register_forward_hook(self._on_output(f"{prefix}.mlp"))
                for module in self._routers(layer.mlp, router.hf[0].removesuffix(".weight")):
                    yield module.register_forward_hook(partial(self._on_router, f"{prefix}.mlp.router"))
        for name, modules in self._named_modules():
            parts: dict[int, Tensor] = {}
            for place, module in enumerate(modules):
                yield module.register_forward_hook(partial(self._on_part, name, parts, place, len(modules)))
            stem, _, last = name.rpartition(".")
            if last in READ_BY:
                hook = self._on_input(f"{stem}.{READ_BY[last]}")
                yield modules[0].register_forward_pre_hook(hook, with_kwargs=True)
        yield self.engine.fields.register_forward_hook(self._on_fields)

    def _routers(self, mixture: Any, path: str) -> list[nn.Module]:
        """Modules of which one may be the router: the one with its weight, or the one around it."""
        around = path.rpartition(".")[0]
        found = [_submodule(self.model, path), _submodule(self.model, around)]
        found += [getattr(mixture, "gate", None), getattr(mixture, "router", None)]
        return [module for module in dict.fromkeys(found) if module is not None]

    def _named_modules(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """Products and norms: Megatron's name, and the Hugging Face modules that it joins."""
        norms = {fused: norm for norm, fused in FUSED_NORMS.items()}
        for full, entry in self.placement.plan.by_megatron.items():
            name = full.removeprefix("decoder.")
            for fused, norm in norms.items():
                name = name.removesuffix(fused) + f"{norm}.weight" if name.endswith(fused) else name
            if not name.endswith(".weight") or ".experts." in name or name.endswith("router.weight"):
                continue
            if name.startswith(("embedding", "output_layer", "mtp.")):
                continue
            modules = [_submodule(self.model, hf.removesuffix(".weight")) for hf in entry.hf]
            found = [module for module in modules if module is not None]
            if len(found) == len(entry.hf) == len(modules):
                yield name.removesuffix(".weight"), found

    def _on_rows(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._rows = args[0].shape

    def _on_output(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            self._keep(name, out[0] if isinstance(out, tuple) else out)

        return hook

    def _on_input(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"])

        return hook

    def _on_part(
        self, name: str, parts: dict[int, Tensor], place: int, count: int, _module: nn.Module, _args: Any, out: Tensor
    ) -> None:
        """One of the modules whose joined outputs are Megatron's."""
        parts[place] = out
        if len(parts) == count:
            self._keep(name, *(parts[i] for i in range(count)))
            parts.clear()

    def _on_router(self, name: str, _module: nn.Module, _args: Any, out: Any) -> None:
        """(logits [t, E], weights [t, k], experts [t, k]); recorded are the weights of all experts, 0 of the others."""
        if not isinstance(out, tuple) or len(out) < 3:
            return  # a module around the router, or within it
        logits, weights, *_ = out
        chosen = out[-1]

        def dense(of_chosen: Sequence[Tensor]) -> Tensor:
            (values,) = of_chosen
            whole = torch.zeros_like(logits, dtype=values.dtype).scatter(-1, chosen, values)
            return self._arranged(name, [whole.view(*self._rows, -1)])

        self._keep(name, weights, arranged=dense if weights.shape == chosen.shape else None)

    def _on_fields(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        """The fields of the loss, [f, b, s], which end a forward pass."""
        needs = self.engine.fields.needs
        rows = [i for i, name in enumerate(needs.names) if name in needs.differentiable]

        def arranged(fields: Tensor) -> Tensor:
            return fields[rows].permute(2, 1, 0).reshape(-1, len(rows))

        self.trace.add(Entry(OUTPUT, HEAD, self._number), arranged(out))
        if out.requires_grad:
            entry = Entry(BACKWARD, HEAD, self._number)
            out.register_hook(lambda gradient: self.trace.add(entry, arranged(gradient / self._factor)))
        self._number += 1

    def _keep(self, name: str, *parts: Tensor, arranged: Callable[[Sequence[Tensor]], Tensor] | None = None) -> None:
        """Parts [b, s, ...] of a module's output, and their gradients; `arranged` brings others to [s x b, columns]."""
        arranged = arranged or partial(self._arranged, name)
        number = self._number
        again = torch._C._current_graph_task_id() != -1  # a recomputation, in the backward pass that needs it
        if again:
            number -= 1
        entry = Entry(OUTPUT, name, number)
        output = arranged([part.detach() for part in parts])
        if again and not torch.equal(output.cpu(), self.trace.tensors[entry]):
            self.trace.add(Entry(RECOMPUTED, name, number), output)
        self.trace.add(entry, output)
        if not torch.is_grad_enabled():
            return
        gradients: dict[int, Tensor] = {}

        def take(place: int, gradient: Tensor) -> None:
            gradients[place] = gradient / self._factor
            if len(gradients) == len(parts):
                joined = arranged([gradients[i] for i in range(len(parts))])
                self.trace.add(Entry(BACKWARD, name, number), joined)

        for place, part in enumerate(parts):
            if part.requires_grad:
                part.register_hook(partial(take, place))

    def _arranged(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """[b, s, ...], [b, heads, s, d] or [b x s, ...] to [s x b, columns] in Megatron's order."""
        b, s = self._rows
        heads_first = [part.dim() == 4 and part.shape[1] != s == part.shape[2] for part in parts]
        rows = [part.transpose(1, 2) if turn else part for part, turn in zip(parts, heads_first, strict=True)]
        joined = torch.cat([part.reshape(b, s, -1).transpose(0, 1).flatten(0, 1) for part in rows], -1)
        columns = self.placement.columns(name, joined.shape[1], joined.shape[1], self.place)
        return joined if columns is None else joined[:, columns]

    def _keep_parameters(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Whole tensors by their Hugging Face names, on rank 0, as Megatron's parameters."""
        for full, planned in self.placement.plan.by_megatron.items() if tensors else ():
            entry = Entry(kind, full.removeprefix("decoder."))
            part = self.placement.cut_parameter(tensors, entry, sys.maxsize, self.place)
            if part is not None and not planned.rule.buffer:
                self.trace.add(entry, part.float())


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
