"""Units of fsdp2 by size, as FSDP1's policy chooses them, and when the next unit is gathered.

Covers: megaswift/engine/torch/strategies/fsdp.py, megaswift/engine/torch/strategies/table.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from megaswift.engine.torch.strategies.fsdp import FsdpOptions, set_prefetch, units_by_size

GATHER = FSDPParamGroup.unshard


class Wrapped(nn.Module):
    """What FSDP1's policy wraps a module in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def model() -> nn.Module:
    """A transformers model with an embedding, layers and a head of several sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes))


@pytest.mark.parametrize("smallest", [1, 200, 600, 900, 2000, 3000, 4000, 10**9])
def test_the_modules_of_fsdp1(smallest: int) -> None:
    one, other = model(), model()
    _recursive_wrap(
        other,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=smallest),
        wrapper_cls=Wrapped,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    theirs = {
        name.replace("module.", "").removesuffix(".module")
        for name, module in other.named_modules()
        if isinstance(module, Wrapped)
    }
    names = {module: name for name, module in one.named_modules()}
    ours = [names[m] for m in units_by_size(one, smallest)]
    assert set(ours) == theirs and bool(ours) == (smallest < 10**9)
    assert ours == [name for name in names.values() if name in theirs]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def events(monkeypatch: pytest.MonkeyPatch, options: FsdpOptions) -> list[str]:
    """Gathers and computations of a step, in order. `+2`: unit 2 is gathered; `f2`, `b2`: its passes."""
    parts = [nn.Linear(4, 4) for _ in range(3)]
    whole = nn.Sequential(*parts)
    mesh = init_device_mesh("cpu", (1,))
    for part in (*parts, whole):
        fully_shard(part, mesh=mesh)
    set_prefetch([m for m in whole.modules() if isinstance(m, FSDPModule)], options)
    found: list[str] = []

    def unshard(self: Any, async_op: bool = False) -> None:
        if not self.is_unsharded and self._all_gather_result is None:
            found.append(f"+{next(i for i, p in enumerate(parts) if p in self.modules)}")
        GATHER(self, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", unshard)
    for i, part in enumerate(parts):
        part.register_forward_hook(lambda m, args, out, i=i: found.append(f"f{i}"))
        part.register_full_backward_hook(lambda m, gi, go, i=i: found.append(f"b{i}"))
    whole(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return found


def test_forward_prefetch(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next unit is gathered before this one computes; without it, after."""
    with_it = events(monkeypatch, FsdpOptions(frozenset(), forward_prefetch=True))
    assert with_it.index("+1") < with_it.index("f0") and with_it.index("+2") < with_it.index("f1")
    without = events(monkeypatch, FsdpOptions(frozenset()))
    assert without.index("+1") > without.index("f0") and without.index("+2") > without.index("f1")


def test_no_prefetch_in_the_backward_pass(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, ahead in (
        (FsdpOptions(frozenset()), True),
        (FsdpOptions(frozenset(), backward_prefetch=False), False),
    ):
        found = events(monkeypatch, options)
        backward = found[found.index("f2") + 1 :]
        assert (backward.index("+0") < backward.index("b1")) == ahead, backward
