"""`--optimizer muon`: orthogonalized momentum for the matrices of layers (arXiv:2502.16982), AdamW for everything else.

The step of a matrix is torch's Muon, scaled by 0.2 sqrt(max(rows, columns)) so that one learning rate serves both.
Embeddings, the head, vectors and stacked experts are AdamW's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.optim.states import Metas, NamedParameters, TorchEngineOptimizer
from megaswift.engine.torch.strategies.strategy import param_groups_of

MOMENTUM = "momentum_buffer"


class _Matrices(TorchEngineOptimizer):
    """torch's Muon; a momentum for each matrix."""

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """In groups of one learning rate."""
        optim = self.optim
        return torch.optim.Muon(
            param_groups_of(named, optim),
            lr=optim.learning_rate,
            momentum=optim.muon_momentum,
            nesterov=optim.muon_use_nesterov,
            ns_steps=optim.muon_num_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )

    def metas(self, parameter: Tensor) -> Metas:
        """States of the parameter's shape."""
        return {MOMENTUM: TensorMeta(tuple(parameter.shape), torch.float32)}


class _Both:
    """Two optimizers that are asked as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both optimizers; a learning rate that is set here is set there."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The states of both optimizers."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Steps both optimizers."""
        for part in self.parts:
            part.step()


class MuonOptimizer(TorchEngineOptimizer):
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, named: NamedParameters, optim: OptimConfig, module: nn.Module) -> None:
        matrices = muon_matrices(named, module)
        chosen = [n for n in named if n[0] in matrices]
        rest = [n for n in named if n[0] not in matrices]
        parts: list[tuple[TorchEngineOptimizer, NamedParameters]] = []
        parts += [(_Matrices(chosen, optim), chosen)] if chosen else []
        parts += [(TorchEngineOptimizer(rest, optim), rest)] if rest else []
        self.part_of = {parameter: part for part, share in parts for _, parameter in share}
        self.both: Any = _Both([part.inner for part, _ in parts])
        super().__init__(named, optim)

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """Both, as one."""
        return self.both

    def metas(self, parameter: Any) -> Metas:
        """States of the optimizer that steps the parameter."""
        return self.part_of[parameter].metas(parameter)

    def states(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Where they lie."""
        return self.part_of[parameter].states(parameter, steps)

    def count(self, parameter: nn.Parameter, steps: int) -> None:
        """AdamW's alone."""
        self.part_of[parameter].count(parameter, steps)


def muon_matrices(named: NamedParameters, module: nn.Module) -> set[str]:
    """Names of the trained matrices that are neither an embedding's nor the head's."""
    model: Any = unwrap_peft_model(getattr(module, "model", module))
    kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else getattr(model, "score", None)
    kept |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    return {name for name, p in named if p.dim() == 2 and id(p) not in kept and "lora_embedding" not in name}
