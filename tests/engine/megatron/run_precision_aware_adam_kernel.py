"""Runs the Triton kernel of the precision-aware update in Triton's interpreter: `TRITON_INTERPRET=1 python -m
tests.engine.megatron.run_precision_aware_adam_kernel` prints, for each case and tensor, how many elements have other
bits than plain torch gives, and how many steps changed it. With the word `compile`, and without the variable, compiles
it for a GPU (which it does not need) and prints the bytes and how many loads of one element it has."""

from __future__ import annotations

import itertools
import re
import sys

import torch
from torch import Tensor

import megaswift.engine.megatron
from megaswift.engine.megatron.optim import adam_update as plain
from megaswift.engine.megatron.optim import adam_update_triton as kernels
from tests.engine.megatron.precision_aware_parameters import KINDS, clones, drawn, numbers

SIZES = 0, 1, 7, 96, 553
"""Of parameters: less than a block, whole ones, a chunk (of 512) and part of another."""
BITS = {2: torch.int16, 4: torch.int32}


def cut_off(p: plain.AdamTensors, step: Tensor, rule: plain.AdamRule) -> None:
    """`update_by_torch` with the interpreter's bfloat16, which cuts bits off. The update is the same in float32: only
    what is stored differs."""
    wide = plain.AdamTensors(*(t.float() if t is not None and t.dtype == torch.bfloat16 else t for t in p))
    whole = p if p.main is not None and p.main.dtype == torch.int16 else None
    if whole is not None:
        wide = wide._replace(weight=p.weight, main=p.main)
    plain.update_by_torch(wide, step, rule)
    for held, value in zip(p, wide, strict=True):
        if held is not None and value is not None and held.dtype == torch.bfloat16 != value.dtype:
            held.copy_((value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16))


def main() -> None:
    """Each kind of parameters: a skipped step, a step, a skipped one."""
    kernels.BLOCK = 32
    torch.manual_seed(0)
    for kind in KINDS:
        mine = [drawn(kind, n) for n in SIZES]
        theirs, rule = clones(mine), plain.AdamRule(*map(plain._float32, (1e-2, 0.9, 0.95, 1e-8, 0.1)))
        changed, tables = [0] * 5, {}
        for skip in (1, 0, 1, 0):
            before = clones(mine)
            kernels.update_by_triton(mine, numbers(skip, 0.37, 3, rule), rule, tables)
            for p in theirs:
                cut_off(p, numbers(skip, 0.37, 3, rule), rule)
            changed = [n + (differ(mine, before, at) > 0) for at, n in enumerate(changed)]
        for at, name in enumerate(plain.AdamTensors._fields):
            print(kind.name, name, differ(mine, theirs, at), changed[at])


def differ(some: list[plain.AdamTensors], others: list[plain.AdamTensors], at: int) -> int:
    """Elements with other bits."""
    pairs = [(a[at], b[at]) for a, b in zip(some, others, strict=True)]
    bits = [[t.view(BITS[t.element_size()]) for t in pair if t is not None] for pair in pairs]
    return sum(int((pair[0] != pair[1]).sum()) for pair in bits if pair)


def compile_for_hopper() -> None:
    """Some kinds of parameters, with addresses of any value and with aligned ones."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int16: "*i16"}
    for kind, aligned in itertools.product(KINDS[::5], (0, kernels.ALIGNED)):
        tensors, flags = kernels.operands(drawn(kind, 16))
        signature = {
            "tables": ("*i64", "*i64"),
            "numbers": "*fp32",
            "rule": ("fp32",) * 5,
            "like": tuple(names[t.dtype] for t in tensors),
            "flags": "constexpr",
            "block": "constexpr",
        }
        constants = {"flags": flags & ~kernels.ALIGNED | aligned, "block": kernels.BLOCK}
        source = ASTSource(kernels._adam_update_kernel, signature, constants)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
        single = re.findall(r"(?:ld|st)\.global\.b(?:16|32)", made.asm["ptx"])
        print(kind.name, aligned, len(made.asm["cubin"]), len(single))


if __name__ == "__main__":
    assert megaswift.engine.megatron
    compile_for_hopper() if "compile" in sys.argv else main()
