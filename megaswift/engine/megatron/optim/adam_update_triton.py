"""The Triton kernel of `adam_update`: one launch for all parameters of the same dtypes.

Not run on a GPU: compared with plain torch in Triton's interpreter, and compiled
(`tests/engine/megatron/optim/test_adam_update_triton.py`). Nothing imports this module without the package
triton."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.megatron.adam_tensors import AdamRule, AdamTensors, LaunchTables
from megaswift.engine.megatron.optim.bf16_remainders import REMAINDER_DTYPE

BLOCK = 2048
"""Elements that a program updates at a time."""
BLOCKS = 16
"""Blocks that a program updates; the kernel, which reads no variables of a module, has this number too."""
WARPS = 8
"""Warps of a program."""
ALIGN = 16
"""Bytes of an address, and elements of a tensor, of which multiples let the kernel load several elements at once."""
# Bits of the kernel's `flags`.
REMAINDER = 1
"""Main weights are kept as the weights and their bfloat16 remainders."""
FLOAT32_MAIN = 2
"""Main weights are kept in float32."""
ALIGNED = 4
"""Addresses and sizes are multiples of `ALIGN`."""


@triton.jit
def _adam_update_kernel(
    tables: tl.tuple, numbers: tl.tensor, rule: tl.tuple, like: tl.tuple, flags: tl.constexpr, block: tl.constexpr
) -> None:
    """A chunk of a parameter a program. `tables`: int64 addresses and sizes of parameters, and each program's parameter
    and chunk; `numbers`: skip, factor of gradients, bias corrections; `like`: tensors whose dtypes the addresses
    have."""
    lr, beta1, beta2, eps, decay = rule
    place = tables[1] + 2 * tl.program_id(0).to(tl.int64)
    row = tables[0] + 6 * tl.load(place)
    gradients = tl.load(row).to(like[0].dtype)
    weights = tl.load(row + 1).to(like[1].dtype)
    mains = tl.load(row + 2).to(like[2].dtype)
    firsts = tl.load(row + 3).to(like[3].dtype)
    seconds = tl.load(row + 4).to(like[4].dtype)
    end = tl.where(tl.load(numbers) == 0, tl.load(row + 5), 0)
    if flags & 4:  # aligned
        gradients = tl.multiple_of(gradients, 16)
        weights = tl.multiple_of(weights, 16)
        mains = tl.multiple_of(mains, 16)
        firsts = tl.multiple_of(firsts, 16)
        seconds = tl.multiple_of(seconds, 16)
        end = tl.multiple_of(end, 16)
    factor = tl.load(numbers + 1)
    bias1 = tl.load(numbers + 2)
    bias2 = tl.load(numbers + 3)
    begin = tl.load(place + 1) * (16 * block)
    for start in range(begin, tl.minimum(begin + 16 * block, end), block):
        i = start + tl.arange(0, block)
        real = i < end
        g = tl.load(gradients + i, mask=real, other=0.0).to(tl.float32) * factor
        m = tl.load(firsts + i, mask=real, other=0.0).to(tl.float32)
        v = tl.load(seconds + i, mask=real, other=0.0).to(tl.float32)
        if flags & 1:  # remainders
            bits = tl.load(weights + i, mask=real, other=0).to(tl.int32) << 16
            bits += tl.load(mains + i, mask=real, other=0).to(tl.int32)
            w = bits.to(tl.float32, bitcast=True)
        else:
            w = tl.load((mains if flags & 2 else weights) + i, mask=real, other=0.0).to(tl.float32)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        update = tl.div_rn(tl.div_rn(m, bias1), tl.sqrt_rn(tl.div_rn(v, bias2)) + eps)
        w = w - lr * (update + decay * w)
        tl.store(firsts + i, m.to(firsts.dtype.element_ty), mask=real)
        tl.store(seconds + i, v.to(seconds.dtype.element_ty), mask=real)
        if flags & 1:
            bits = w.to(tl.int32, bitcast=True)
            high = (bits + 0x8000) >> 16
            tl.store(weights + i, high.to(tl.int16), mask=real)
            tl.store(mains + i, (bits - (high << 16)).to(tl.int16), mask=real)
        else:
            tl.store(weights + i, w.to(weights.dtype.element_ty), mask=real)
            if flags & 2:
                tl.store(mains + i, w, mask=real)


def update_by_triton(parameters: Sequence[AdamTensors], numbers: Tensor, rule: AdamRule, tables: LaunchTables) -> None:
    """As `update_by_torch`, for all parameters. `tables`: of their last update, to keep for the next one."""
    launches: dict[tuple[int, tuple[torch.dtype, ...]], list[tuple[Tensor, ...]]] = defaultdict(list)
    for p in parameters:
        tensors, flags = operands(p)
        if p.weight.numel():
            launches[flags, tuple(t.dtype for t in tensors)].append(tensors)
    for (flags, dtypes), some in launches.items():
        rows = [(*(t.data_ptr() for t in tensors), tensors[0].numel()) for tensors in some]
        on_device = _table_of(rows, tables, (flags, dtypes), numbers.device)
        _adam_update_kernel[(len(on_device[1]),)](
            on_device, numbers, tuple(rule), some[0], flags, BLOCK, num_warps=WARPS
        )


def operands(p: AdamTensors) -> tuple[tuple[Tensor, ...], int]:
    """(gradient, weight, main weight, moments as the kernel takes them, its flags)."""
    weight = p.weight
    main = p.main
    flags = 0
    if main is None:
        main = weight
    elif main.dtype == REMAINDER_DTYPE:
        weight = weight.view(REMAINDER_DTYPE)
        flags = REMAINDER
    else:
        flags = FLOAT32_MAIN
    tensors = p.gradient, weight, main, p.first, p.second
    aligned = all(t.data_ptr() % ALIGN == 0 for t in tensors) and weight.numel() % ALIGN == 0
    return tensors, flags | (ALIGNED if aligned else 0)


def _table_of(
    rows: list[tuple[int, ...]], tables: LaunchTables, key: object, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The one of the last update where the addresses are the same, as they are from step to step: gradients lie in one
    buffer."""
    if key not in tables or tables[key][0] != rows:
        tables[key] = rows, _made_table(rows, BLOCK * BLOCKS, device)
    return tables[key][1]


def _made_table(rows: list[tuple[int, ...]], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Addresses and sizes [parameters, 6], and each program's parameter and chunk [programs, 2], on the device."""
    sizes = torch.tensor([row[-1] for row in rows])
    chunks = (sizes + chunk - 1) // chunk
    owners = torch.arange(len(rows)).repeat_interleave(chunks)
    within = torch.arange(len(owners)) - (chunks.cumsum(0) - chunks).repeat_interleave(chunks)
    places = torch.stack([owners, within], 1)
    return copy_to_device_async(torch.tensor(rows), device), copy_to_device_async(places, device)
