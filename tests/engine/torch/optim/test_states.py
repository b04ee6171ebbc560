"""Optimizers beside Adam: what they keep for a parameter, told beforehand, and what GaLore projects.

Covers: megaswift/engine/torch/optim/galore.py, megaswift/engine/torch/optim/muon.py,
megaswift/engine/torch/optim/table.py, megaswift/engine/torch/strategies/strategy.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaswift.config import SwiftConfig
from megaswift.engine.options.optimizer import OPTIMIZERS, OptimConfig
from megaswift.engine.torch.optim.muon import muon_matrices
from megaswift.engine.torch.optim.table import make_torch_optimizer
from megaswift.engine.torch.strategies.strategy import set_param_groups_lr_and_weight_decay
from megaswift.errors import ConfigError

RANK, GAP, SCALE = 12, 2, 0.5
GALORE: dict[str, Any] = {"galore_rank": RANK, "galore_update_proj_gap": GAP, "galore_scale": SCALE}


class Block(nn.Module):
    """Every kind of parameter: an embedding, a matrix, stacked experts, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.norm, self.head = (
            nn.Embedding(70, 64),
            nn.Linear(64, 96),
            nn.LayerNorm(96),
            nn.Linear(96, 70, bias=False),
        )
        self.experts = nn.Parameter(0.1 * torch.randn(3, 96, 80))

    @property
    def model(self) -> Block:
        """As the transformers model lies in the module that is wrapped."""
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self) -> Tensor:
        x = torch.einsum("bm,emn,bn->b", self.norm(self.up(self.embed.weight)), self.experts, torch.ones(70, 80))
        return x.square().sum() + self.head(self.up(self.embed.weight)).square().sum()


def optim(name: str, **more: Any) -> OptimConfig:
    return SwiftConfig(engine="ddp", optimizer=name, **(GALORE if "galore" in name else {}), **more).optim


def held(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the library really keeps, without counters and code tables."""
    target = getattr(optimizer, "targets", {}).get(parameter)
    stepped = target.stand_in if target else getattr(optimizer, "parts", {}).get(parameter, parameter)
    state = optimizer.inner.state[stepped]
    found = {k: t for k, t in state.items() if isinstance(t, Tensor) and k not in ("step", "RMS", "qmap1", "qmap2")}
    return found | (target.sides if target else {})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_what_is_promised(name: str) -> None:
    """Shapes, dtypes and bytes, told before the first step, are those of the library after it; states made early go on
    as if stepped."""
    made = []
    for early in (False, True):
        module = Block()
        optimizer = make_torch_optimizer(module, optim(name))
        promised = {n: optimizer.metas(p) for n, p in module.named_parameters()}
        for p in module.parameters() if early else ():
            assert {k: (tuple(t.shape), t.dtype) for k, t in optimizer.states(p, 0).items()} == optimizer.metas(p)
            optimizer.count(p, 0)
        for _ in range(3):
            module.zero_grad()
            module().backward()
            optimizer.step()
        for n, p in module.named_parameters():
            found = held(optimizer, p)
            assert {k: (tuple(t.shape), t.dtype) for k, t in found.items()} == promised[n], n
            assert sum(t.nbytes for t in found.values()) == optimizer.nbytes(p)
        made.append(module.state_dict())
    assert all(torch.equal(t, made[1][n]) for n, t in made[0].items())
    assert not torch.equal(made[0]["head.weight"], Block().head.weight)


def test_what_galore_projects() -> None:
    module = Block()
    optimizer: Any = make_torch_optimizer(module, optim("galore_adamw"))
    assert {n for n, p in module.named_parameters() if p in optimizer.targets} == {"up.weight", "experts"}
    assert optimizer.metas(module.experts)["exp_avg"].shape == (3, 96, RANK)
    assert optimizer.nbytes(module.up.weight) == 4 * (2 * 96 * RANK + RANK * 64)
    only: Any = make_torch_optimizer(module, optim("galore_adamw", galore_target_modules=["head"]))
    assert {n for n, p in module.named_parameters() if p in only.targets} == {"head.weight"}
    with pytest.raises(ConfigError, match="match no trained matrix"):
        make_torch_optimizer(module, optim("galore_adamw", galore_target_modules=["norm"]))


class PlainGaLore:
    """The paper's algorithm 2 for each matrix of a model, in so many words; `inner` steps what is left."""

    def __init__(
        self, matrices: list[nn.Parameter], every: Iterable[nn.Parameter], inner: Any, more: dict[str, Any]
    ) -> None:
        self.matrices, self.inner, self.kind = matrices, inner, more.get("galore_proj_type", "std")
        self.gap, self.low, self.sides, self.t = more["galore_update_proj_gap"], {}, {}, 0
        self.rest = inner([p for p in every if all(p is not m for m in matrices)])
        self.lr, self.decay = self.rest.param_groups[0]["lr"], max(g["weight_decay"] for g in self.rest.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        for p in [*self.matrices, *(p for g in self.rest.param_groups for p in g["params"])]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Project, step, project back."""
        for p in self.matrices:
            m, n = p.shape
            kind = {"std": "right" if m >= n else "left", "reverse_std": "left" if m >= n else "right"}.get(
                self.kind, self.kind
            )
            if self.t % self.gap == 0:
                u, _, vt = torch.linalg.svd(p.grad, full_matrices=False)
                self.sides[p] = (
                    u[:, :RANK] if kind != "right" else torch.eye(m),
                    vt[:RANK] if kind != "left" else torch.eye(n),
                )
            u, vt = self.sides[p]
            if p not in self.low:
                low = torch.zeros(u.shape[1], vt.shape[0], requires_grad=True)
                self.low[p] = (low, self.inner([low]))
            low, stepped = self.low[p]
            low.zero_()
            low.grad = u.T @ p.grad @ vt.T
            stepped.step()
            p.mul_(1 - self.lr * self.decay).add_(SCALE * (u @ low @ vt))
        self.rest.step()
        self.t += 1


class PlainMuon:
    """Moonlight's algorithm (arXiv:2502.16982) for matrices, in so many words, and AdamW for what is left."""

    def __init__(self, matrices: list[nn.Parameter], rest: torch.optim.Optimizer, lr: float, decay: float) -> None:
        self.matrices, self.rest, self.lr, self.decay = matrices, rest, lr, decay
        self.moments = [torch.zeros_like(p) for p in matrices]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        for p in [*self.matrices, *(p for g in self.rest.param_groups for p in g["params"])]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Nesterov momentum, its polar factor by Newton-Schulz in bfloat16, decoupled decay."""
        for p, moment in zip(self.matrices, self.moments, strict=True):
            moment.lerp_(p.grad, 0.05)
            x = p.grad.lerp(moment, 0.95).bfloat16()
            x = x.T if x.shape[0] > x.shape[1] else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                square = x @ x.T
                polynomial = torch.addmm(square, square, square, beta=-4.775, alpha=2.0315)  # one rounding, as in torch
                x = torch.addmm(x, polynomial, x, beta=3.4445)
            update = x.T if p.shape[0] > p.shape[1] else x
            p.mul_(1 - self.lr * self.decay).sub_(self.lr * 0.2 * max(p.shape) ** 0.5 * update)
        self.rest.step()


def test_muon_is_moonlights() -> None:
    """Five steps; embedding, head, vectors and stacked experts are AdamW's."""
    ours, theirs = Block(), Block()
    optimizer: Any = make_torch_optimizer(ours, optim("muon", adam_epsilon=1e-6))
    matrices = muon_matrices([*ours.named_parameters()], ours)
    assert matrices == {"up.weight"}
    rest = [p for n, p in theirs.named_parameters() if n not in matrices]
    groups = [{"params": [p for p in rest if (p.dim() > 1) == m], "weight_decay": 0.1 * m} for m in (True, False)]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    plain = PlainMuon([theirs.up.weight], adam, 1e-2, 0.1)
    set_param_groups_lr_and_weight_decay(optimizer.inner, 1e-2, 0.1)
    for _ in range(5):  # gradients of full rank: of others the iteration enlarges rounding
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        plain.step()
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        digits = 1e-3 if n in matrices else 1e-5  # bfloat16's
        assert float((a - b).detach().abs().max()) < digits * float(b.detach().abs().max()), n


def five_steps(*sides: tuple[torch.nn.Module, Any]) -> None:
    """Each module, whose call is its loss, by its optimizer."""
    for _ in range(5):
        for module, optimizer in sides:
            module.zero_grad()
            module().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
def test_galore_is_the_papers(kind: str) -> None:
    """Five steps, with new directions in the third and the fifth, and with weight decay."""
    ours, theirs = Block(), Block()
    optimizer = make_torch_optimizer(
        ours, optim("galore_adamw", galore_proj_type=kind, galore_target_modules=["up", "head"], adam_epsilon=1e-6)
    )

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) == m], "weight_decay": 0.1 * m} for m in (True, False)
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-6)

    plain = PlainGaLore(
        [theirs.up.weight, theirs.head.weight], theirs.parameters(), adam, GALORE | {"galore_proj_type": kind}
    )
    set_param_groups_lr_and_weight_decay(optimizer.inner, 1e-3, 0.1)
    five_steps((ours, optimizer), (theirs, plain))
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-5 * float(b.detach().abs().max()), n


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
@pytest.mark.parametrize("inner", ["adamw", "adafactor"])
def test_galore_is_the_package(kind: str, inner: str) -> None:
    """galore-torch 1.0 on the same gradients: its Adam adds epsilon before the bias correction, and decays after the
    step."""
    package = pytest.importorskip("galore_torch")
    ours, theirs = Block(), Block()
    optimizer = make_torch_optimizer(
        ours,
        optim(
            f"galore_{inner}",
            galore_proj_type=kind,
            galore_target_modules=["up", "head"],
            **({"adam_epsilon": 1e-12} if inner == "adamw" else {}),
        ),
    )
    chosen = [theirs.up.weight, theirs.head.weight]
    groups = [
        {"params": [p for p in theirs.parameters() if all(p is not c for c in chosen)]},
        {"params": chosen, "rank": RANK, "update_proj_gap": GAP, "scale": SCALE, "proj_type": kind},
    ]
    plain = (
        package.GaLoreAdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-12, no_deprecation_warning=True)
        if inner == "adamw"
        else package.GaLoreAdafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False)
    )
    for group in optimizer.inner.param_groups:
        group["lr"], group["weight_decay"] = 1e-3, 0.0
    five_steps((ours, optimizer), (theirs, plain))
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-4 * float(b.abs().max()), n
    assert math.isfinite(float(ours().detach()))


def test_rates_under_lora_plus_are_peft_s() -> None:
    """B and vectors (DoRA's too) learn faster, adapters on embeddings slowly, what is saved whole like A."""
    import peft
    from peft.optimizers import create_loraplus_optimizer

    config = peft.LoraConfig(
        target_modules=["embed", "up"], modules_to_save=["head", "norm"], use_dora=True, init_lora_weights=False
    )
    model: Any = peft.get_peft_model(Block(), config)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=3e-4, loraplus_lr_ratio=16.0)
    ours = make_torch_optimizer(model, optim("adam", train_type="lora", lorap_lr_ratio=16, lr=3e-4)).inner
    set_param_groups_lr_and_weight_decay(ours, 3e-4, 0.1)

    def rates(optimizer: Any) -> dict[str, float]:
        by_parameter = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        return {n: by_parameter[id(p)] for n, p in model.named_parameters() if p.requires_grad}

    assert rates(ours) == pytest.approx(rates(theirs)) and len({*rates(ours).values()}) == 3
    set_param_groups_lr_and_weight_decay(ours, 1.5e-4, 0.1)
    assert rates(ours) == pytest.approx({name: rate / 2 for name, rate in rates(theirs).items()})
    assert {(g["decays"], g["weight_decay"]) for g in ours.param_groups} == {(True, 0.1), (False, 0.0)}
