"""Matrix products: cuBLAS' generic and grouped ones, of FP8 operands too: these are multiplied in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.te.kernels_overlap import after_product, before_product
from tests.te.kernels_quantize import matrix
from tests.te.registry import kernel, torch_dtype


def product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """op(b) op(a) in float32, as row-major matrices: [m, k] for weights a [n, k] and inputs b [.., k] of layout TN."""
    x, y = matrix(a, columnwise=not transa), matrix(b, columnwise=transb)
    return (y.t() if transb else y) @ (x.t() if transa else x)


@kernel
def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, Tensor | None]:
    """(product, bias gradient, -, `extra_output`): with `grad`, `bias` asks for the sum of b over its rows."""
    assert not gelu, "the test device has no fused GELU"
    before_product(comm_overlap, comm_type)
    y, bias_grad = product(a, transa, b, transb) * alpha, None
    if bias is not None and grad:
        bias_grad = matrix(b, columnwise=transb).sum(0).to(torch_dtype(bias_dtype))
    elif bias is not None:
        y = y + bias.float()
    if not transb:
        y = y.view(*b.size()[:-1], y.shape[-1])
    after_product(comm_overlap, comm_type, y, extra_output, bulk_overlap)
    if out is not None:
        y = y.view(out.shape)
        if accumulate:
            y = y + out.float() * (1.0 if beta is None else beta)
        out.copy_(y)
        return out, bias_grad, None, extra_output
    y = y.to(torch_dtype(out_dtype) if out_dtype is not None else b.dtype)
    return (y if quantizer is None else quantizer(y)), bias_grad, None, extra_output


@kernel
def te_general_grouped_gemm(
    a: list[Any],
    transa: bool,
    b: list[Any],
    transb: bool,
    out: list[Tensor],
    out_dtype: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    pre_gelu: list[Tensor],
    grad: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """One product a group, written to the rows of one output, or to one output each; the biases, or their gradients."""
    targets = list(out[0].view(-1, out[0].shape[-1]).split(list(m_splits))) if single_output else out
    for i, target in enumerate(targets):
        if math.prod(b[i].size()) == 0:
            if not accumulate:
                target.zero_()
            if grad and bias[i].numel():
                bias[i].zero_()
            continue
        y = product(a[i], transa, b[i], transb)
        if bias[i].numel() and grad:
            bias[i].copy_(matrix(b[i], columnwise=transb).sum(0))
        elif bias[i].numel():
            y = y + bias[i].float()
        y = y.view(target.shape)
        target.copy_(y + target.float() if accumulate else y)
    return bias


@kernel
def get_num_cublas_streams() -> int:
    """Of grouped products."""
    return 4


@kernel
def get_cublasLt_version() -> int:  # noqa: N802
    """One that has every recipe of FP8."""
    return 130000


def empty_workspace(*_: Any) -> Tensor:
    """No kernel needs scratch space."""
    return torch.empty(0, dtype=torch.uint8)
