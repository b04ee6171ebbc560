"""The precision-aware update: Transformer Engine's numbers, decided on by the device.

Covers: megaswift/engine/megatron/optim/adam_update.py, megaswift/engine/megatron/optim/bf16_remainders.py.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

RULE = 1e-2, 0.9, 0.95, 1e-8, 0.1
"""Rate, betas, epsilon, weight decay."""
N = 3001


def by_transformer_engine(p: Any, step: int) -> None:
    """What its kernels do, at `RULE`."""
    from tests.te.kernels_optimizer import multi_tensor_adam, multi_tensor_adam_param_remainder

    remainders = p.main is not None and p.main.dtype == torch.int16
    kernel = multi_tensor_adam_param_remainder if remainders else multi_tensor_adam
    lr, beta1, beta2, epsilon, decay = RULE
    lists = [p.gradient, p.weight, p.first, p.second, *([] if p.main is None else [p.main])]
    kernel(65536, torch.zeros(1), [[t] for t in lists], lr, beta1, beta2, epsilon, step, 1, 1, decay)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)


def test_it_gives_what_transformer_engine_s_kernels_give(megatron: ModuleType) -> None:
    """Three steps, bit for bit, of every kind of parameters."""
    from megaswift.engine.megatron.optim import adam_update as ours
    from tests.engine.megatron.precision_aware_parameters import KINDS, clones, drawn, numbers

    torch.manual_seed(0)
    rule = ours.AdamRule(*map(ours._float32, RULE))
    for kind in KINDS:
        [mine] = start = [drawn(kind, N)]
        [theirs] = clones(start)
        for step in (1, 2, 3):
            mine.gradient.copy_(torch.randn(N) * 10.0 ** torch.empty(N).uniform_(-6, 1))
            theirs.gradient.copy_(mine.gradient)
            ours.update_by_torch(mine, numbers(0, 1.0, step, rule), rule)
            by_transformer_engine(theirs, step)
            assert same(mine, theirs), (kind.name, step)


class FusedAdam(torch.optim.Optimizer):
    """The states and attributes of Transformer Engine's."""

    adam_w_mode = 1

    def __init__(self, groups: list[dict[str, Any]], remainders: bool, decoupled: bool) -> None:
        super().__init__(groups, {"lr": RULE[0], "betas": RULE[1:3], "eps": RULE[3], "weight_decay": RULE[4]})
        self.store_param_remainders, self.use_decoupled_grad = remainders, decoupled
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    def initialize_state(self, p: Tensor, store_param_remainders: bool) -> None:
        state = self.state[p]
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(p.shape, dtype=torch.bfloat16) for _ in range(2))
        dtype = torch.int16 if store_param_remainders else torch.float32
        state["master_param"] = torch.zeros(p.shape, dtype=dtype)


def test_a_step_reads_its_numbers_on_the_device(megatron: ModuleType) -> None:
    """Skipped steps are not counted and change nothing, whatever the gradients are; a divisor divides them in float32
    and leaves them alone. Each group has its rate and decay; a weight without a gradient stays."""
    from megaswift.engine.megatron.optim import adam_update as ours
    from tests.te.kernels_optimizer import multi_tensor_adam, multi_tensor_adam_param_remainder

    half, whole, still = (
        torch.nn.Parameter(torch.linspace(-1, 1, 50).to(dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    )
    inner = FusedAdam([{"params": [half, still]}, {"params": [whole], "lr": 0.5, "weight_decay": 0.0}], True, True)
    ours.count_steps_on_device(inner)
    oracle: dict[Tensor, list[Tensor]] = {}
    for p, rest in ((half, torch.int16), (whole, None)):
        moments = [torch.zeros(50, dtype=torch.bfloat16) for _ in range(2)]
        oracle[p] = [p.detach().clone(), *moments, *([] if rest is None else [torch.zeros(50, dtype=rest)])]
    for step, (skip, divisor) in enumerate(((1, None), (0, None), (1, 4.0), (0, 4.0), (0, 1.0))):
        good = torch.linspace(3, 5, 50).bfloat16()
        for p in (half, whole):
            p.decoupled_grad = torch.full((50,), math.nan).bfloat16() if skip else good.clone()
        before = [t.clone() for t in (half, whole, still)]
        given = None if divisor is None else torch.tensor(divisor, dtype=torch.float64)
        ours.update(inner, torch.tensor(float(skip)), given)
        taken = (0, 1, 1, 2, 3)[step]
        assert [int(group["step"]) for group in inner.param_groups] == [taken, taken]
        assert torch.equal(still, before[2]) and torch.equal(half, before[0]) == torch.equal(whole, before[1]) == skip
        if skip:
            continue
        assert torch.equal(half.decoupled_grad, good)
        for p, lr, decay in ((half, RULE[0], RULE[4]), (whole, 0.5, 0.0)):
            kernel = multi_tensor_adam_param_remainder if p is half else multi_tensor_adam
            lists = [[t] for t in (good.float() / (divisor or 1.0), *oracle[p])]
            kernel(65536, torch.zeros(1), lists, lr, *RULE[1:4], taken, 1, 1, decay)
            names = "exp_avg", "exp_avg_sq", *(["master_param"] if p is half else [])
            assert all(map(torch.equal, oracle[p], (p.detach(), *(inner.state[p][name] for name in names))))


def test_tables_of_addresses_go_with_the_offloaded_optimizer(megatron: ModuleType) -> None:
    """Their memory is not left on the device while the sampler has it."""
    from megaswift.engine.megatron import offload
    from megaswift.engine.megatron.optim import adam_update as ours

    p = torch.nn.Parameter(torch.ones(3))
    inner, other = (FusedAdam([{"params": [p]}], False, False) for _ in range(2))
    for one in (inner, other):
        ours.count_steps_on_device(one)
        ours.update(one, torch.tensor(1.0), None)
    assert {inner, other} <= {*ours._LAUNCH_TABLES}
    part = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
    offload.EngineOffload([], part).optimizer_and_gradients()
    assert inner not in ours._LAUNCH_TABLES and other in ours._LAUNCH_TABLES


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F807FFF, 0x3F818000, 0xBF808000 - 2**32, 0x7F7F8000, 0])
def test_parts_of_an_updated_weight(megatron: ModuleType, bits: int) -> None:
    """Ties, their neighbours, the sign, the largest exponent: joined they are the float32 again."""
    from megaswift.engine.megatron.optim.bf16_remainders import join_bf16_remainder, split_rounding_ties_up

    main = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    weight, remainder = split_rounding_ties_up(main)
    assert torch.equal(join_bf16_remainder(weight, remainder), main)
    assert int(remainder) == (bits & 0xFFFF) - (0x10000 if bits & 0x8000 else 0)
