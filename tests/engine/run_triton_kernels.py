"""Runs the Triton kernels of the vocabulary head in Triton's interpreter: `TRITON_INTERPRET=1 python -m
tests.engine.run_triton_kernels` prints, for each case, what was compared, the largest error and its limit. With the
word `compile`, and without the variable, compiles them for a GPU (which it does not need) and prints the sizes."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from megaswift.engine import logit_fields, logit_fields_triton
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import FIELDS
from tests.engine.megatron.layers.test_head import reference

ROWS, WIDTH, REAL, FIRST = 5, 80, 75, 10
"""Columns of a shard, those that are no padding, and the first one's id."""


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the largest value, or to 1."""
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1.0))


def run(dtype: torch.dtype, cap: float | None, differentiable: tuple[str, ...], first: int) -> tuple[float, float]:
    """(error of the fields or of the statistics, error of the gradient); labels lie in [0, REAL), the shard begins at
    `first`."""
    torch.manual_seed(0)
    products = torch.full((ROWS, WIDTH), float("nan"))
    products[:, :REAL] = 4 * torch.randn(ROWS, REAL)
    products, labels = products.to(dtype), torch.tensor([0, 20, 37, 74, 60])
    shard = VocabularyHeadShardSpec(first, REAL, None, 0.7, FIELDS, differentiable, 0.5, cap)
    mix = torch.randn(len(FIELDS), ROWS)
    kernels = logit_fields.row_statistics(products, labels, shard)
    with torch_alone():
        plain = logit_fields.row_statistics(products, labels, shard)
    rows = logit_fields.join_shards(kernels, labels, WIDTH, shard)
    coefficients = logit_fields.gradient_coefficients(mix, rows, WIDTH, shard)
    out = products.clone()
    logit_fields.write_gradient(out, labels, coefficients, shard, out)
    assert not out[:, REAL:].any()
    if first:  # some labels lie on no rank: the other path is the oracle
        with torch_alone():
            want = torch.empty_like(products)
            logit_fields.write_gradient(products, labels, coefficients, shard, want)
        return error(kernels, plain.double()), error(out[:, :REAL], want[:, :REAL].double())
    exact = products[:, :REAL].double().requires_grad_()
    values = reference(
        exact,
        torch.eye(REAL, dtype=torch.float64),
        labels,
        REAL,
        0.7,
        lambda x: x * 0.5 if cap is None else cap * torch.tanh(x * 0.5 / cap),
    )
    sum((values[n] * mix[i]).sum() for i, n in enumerate(FIELDS) if n in differentiable).backward()
    fields = max(error(rows.fields[i], values[n].detach()) for i, n in enumerate(FIELDS) if n != "correct")
    return fields, error(out[:, :REAL], exact.grad)


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """For the length of a block the kernels are not chosen."""
    kept, logit_fields._triton_kernels = (
        logit_fields._triton_kernels,
        lambda products: None,
    )
    yield
    logit_fields._triton_kernels = kept


def main() -> None:
    """All cases, with blocks of 32 columns."""
    logit_fields._triton_kernels = lambda products: logit_fields_triton
    logit_fields_triton.STATISTICS_BLOCK = logit_fields_triton.GRADIENT_BLOCK = 32
    every = tuple(f for f in FIELDS if f != "correct")
    for dtype, cap, names, first in itertools.product(
        (torch.float32, torch.bfloat16), (None, 3.0), (("logprobs",), every, ("entropy",)), (0, FIRST)
    ):
        if first and cap:
            continue
        fields, gradient = run(dtype, cap, names, first)
        case = f"{str(dtype)[6:]},cap={cap},{len(names)},first={first}"
        print(f"fields,{case}", fields, 2e-6)
        print(f"gradient,{case}", gradient, 2e-6 if dtype == torch.float32 else 2**-7)  # the interpreter cuts off


def compile_for_hopper() -> None:
    """Every kind of product, with no field but log-probabilities and with all."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    parts = {"labels": ("*i64", "*i1"), "factors": ("fp32",) * 3, "flags": "constexpr", "block": "constexpr"}
    for dtype, flags in itertools.product(("*bf16", "*fp16", "*fp32"), (0, 15)):
        rows = {"rows": (dtype, "i32", "i32")}
        for kernel, own, block in (
            (logit_fields_triton._logit_statistics_kernel, {"stats": ("*fp32", "i32")}, 4096),
            (
                logit_fields_triton._logit_gradient_kernel,
                {"gradients": (dtype, "i32", "*fp32", "i32")},
                2048,
            ),
        ):
            order = ["rows", "labels", *own, "factors", "flags", "block"]
            signature = {name: (rows | own | parts)[name] for name in order}
            source = ASTSource(kernel, signature, {"flags": flags, "block": block})
            print(dtype, flags, len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))


if __name__ == "__main__":
    compile_for_hopper() if "compile" in sys.argv else main()
