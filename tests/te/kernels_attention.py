"""cuDNN's fused attention, forward and backward, over rows and packed documents, and the choice of a backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.te.registry import ENUMERATIONS, around_python_function, kernel

LAYOUT, MASK, SOFTMAX = (ENUMERATIONS[f"NVTE_{name}"] for name in ("QKV_Layout", "Mask_Type", "Softmax_Type"))
_COMMON = "layout bias_type mask softmax window bottom_right"
_NAMES = {
    "forward": f"max_q max_kv training scale dropout zero_fill {_COMMON} cu_q cu_kv q k v dtype cu_q_padded "
    "cu_kv_padded "
    "pages_k pages_v s_quantizer o_quantizer bias sinks generator elements max_logit graph",
    "backward": f"max_q max_kv scale dropout zero_fill {_COMMON} deterministic cu_q cu_kv q k v o d_o dtype d_dtype "
    "saved "
    "cu_q_padded cu_kv_padded s_quantizer dp_quantizer dqkv_quantizer graph",
}
_NEWER = {
    "forward": _NAMES["forward"].replace("layout", "layout o_format scale_format"),
    "backward": _NAMES["backward"]
    .replace("layout", "layout o_format d_o_format d_layout scale_format d_o_scale_format")
    .replace("d_dtype ", ""),
}
"""Arguments by position: 2.12's, and those of 2.20."""


def arguments(direction: str, given: tuple[Any, ...]) -> Any:
    """The arguments by name, as the installed release passes them."""
    newer = sys.modules["transformer_engine_torch"].__release__ != "2.12.0"
    names = (_NEWER if newer else _NAMES)[direction].split()
    assert len(names) == len(given), f"fused attention's {direction} pass got {len(given)} arguments, not {len(names)}"
    return type("Arguments", (), dict(zip(names, given, strict=True)))()


@dataclass(frozen=True)
class Sequence:
    """One sequence: views [s, h, d] of a tensor with all of them, by queries' and by keys' places."""

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    statistics: Callable[[Tensor], Tensor]


def _packed(name: str) -> bool:
    return "THD" in name


def _sequences(a: Any) -> Iterator[Sequence]:
    """Each sequence of a micro-batch; statistics are views [h, s]."""
    name = LAYOUT(int(a.layout)).name
    if not _packed(name):
        axis = 1 if "SBHD" in name else 0
        for i in range(a.q.shape[axis]):
            view = lambda t, i=i: t.select(axis, i)  # noqa: E731
            lengths = [int(c[i + 1] - c[i]) for c in (a.cu_q, a.cu_kv)] if "PADDING" in MASK(int(a.mask)).name else None
            if lengths is None:
                yield Sequence(view, view, lambda t, i=i: t[i, :, :, 0])
                continue
            n, m = lengths
            yield Sequence(
                lambda t, i=i, n=n: t.select(axis, i)[:n],
                lambda t, i=i, m=m: t.select(axis, i)[:m],
                lambda t, i=i, n=n: t[i, :, :n, 0],
            )
        return
    cu_q, cu_kv = a.cu_q.tolist(), a.cu_kv.tolist()
    at_q = cu_q if a.cu_q_padded is None else a.cu_q_padded.tolist()
    at_kv = cu_kv if a.cu_kv_padded is None else a.cu_kv_padded.tolist()
    for i in range(len(cu_q) - 1):
        rows, columns = (at_q[i], cu_q[i + 1] - cu_q[i]), (at_kv[i], cu_kv[i + 1] - cu_kv[i])
        if rows[1] > 0:
            yield Sequence(
                lambda t, r=rows: t[r[0] : r[0] + r[1]],
                lambda t, r=columns: t[r[0] : r[0] + r[1]],
                lambda t, r=rows: t[r[0] : r[0] + r[1], :, 0].t(),
            )


def _statistics_shape(a: Any) -> tuple[int, ...]:
    """[tokens, h, 1] of packed rows, [b, h, s, 1] of others."""
    name, heads = LAYOUT(int(a.layout)).name, a.q.shape[-2]
    if _packed(name):
        return a.q.shape[0], heads, 1
    s, b = a.q.shape[:2] if "SBHD" in name else a.q.shape[1::-1]
    return b, heads, s, 1


def _scores(a: Any, q: Tensor, k: Tensor) -> Tensor:
    """[h, queries, keys], hidden places -inf."""
    wide = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("shd,thd->hst", q.float(), wide) * a.scale
    name, (left, right) = MASK(int(a.mask)).name, a.window
    n, m = scores.shape[1:]
    rows, columns = torch.arange(n)[:, None], torch.arange(m)[None]
    if a.bottom_right or "BOTTOM_RIGHT" in name:
        rows = rows + m - n
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if "CAUSAL" in name:
        hidden |= columns > rows
    if left >= 0:
        hidden |= columns < rows - left
    if right >= 0:
        hidden |= columns > rows + right
    return scores.masked_fill(hidden, float("-inf"))


def _sinks(a: Any, heads: int, given: Tensor | None) -> Tensor | None:
    """The softmax's extra logit [h] of each head, where there is one."""
    if SOFTMAX(int(a.softmax)) == SOFTMAX["NVTE_OFF_BY_ONE_SOFTMAX"]:
        return torch.zeros(heads)
    return None if given is None else given.float().view(-1)


@kernel
def fused_attn_fwd(*given: Any) -> list[Tensor]:
    """[output, logsumexp of the scores, state of the random generator]; dropout must be 0."""
    a = arguments("forward", given)
    assert a.dropout == 0.0 or not a.training, "the test device's fused attention has no dropout"
    heads = a.q.shape[-2]
    out = a.q.new_zeros(*a.q.shape[:-1], a.v.shape[-1])
    lse = torch.zeros(_statistics_shape(a))
    sinks = _sinks(a, heads, a.sinks)
    for one in _sequences(a):
        scores = _scores(a, one.queries(a.q), one.keys(a.k))
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None].expand_as(total))
        v = one.keys(a.v).float().repeat_interleave(heads // a.v.shape[-2], 1)
        one.queries(out).copy_(torch.einsum("hst,thd->shd", (scores - total[..., None]).exp().nan_to_num(0.0), v))
        one.statistics(lse).copy_(total)
    saved = [lse, torch.zeros(2, dtype=torch.int64)]
    return [out, *saved, a.sinks] if a.sinks is not None else [out, *saved]


@kernel
def fused_attn_bwd(*given: Any) -> list[Tensor | None]:
    """[dq, dk, dv, dbias, dsinks]."""
    a = arguments("backward", given)
    heads, groups = a.q.shape[-2], a.k.shape[-2]
    grads = [torch.zeros_like(t) for t in (a.q, a.k, a.v)]
    offsets = a.saved[-1] if SOFTMAX(int(a.softmax)) == SOFTMAX["NVTE_LEARNABLE_SOFTMAX"] else None
    sinks = _sinks(a, heads, offsets)
    d_sinks, lse = torch.zeros(heads), a.saved[0].reshape(_statistics_shape(a))
    for one in _sequences(a):
        q, k, v = one.queries(a.q).float(), one.keys(a.k).float(), one.keys(a.v).float()
        wide_k, wide_v = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // v.shape[1], 1)
        total = one.statistics(lse)
        p = (_scores(a, one.queries(a.q), one.keys(a.k)) - total[..., None]).exp().nan_to_num(0.0)
        d_out = one.queries(a.d_o).float()
        delta = (d_out * one.queries(a.o).float()).sum(-1).t()
        d_scores = p * (torch.einsum("shd,thd->hst", d_out, wide_v) - delta[..., None]) * a.scale
        one.queries(grads[0]).copy_(torch.einsum("hst,thd->shd", d_scores, wide_k))
        d_k = torch.einsum("hst,shd->thd", d_scores, q)
        d_v = torch.einsum("hst,shd->thd", p, d_out)
        one.keys(grads[1]).copy_(d_k.unflatten(1, (groups, -1)).sum(2))
        one.keys(grads[2]).copy_(d_v.unflatten(1, (v.shape[1], -1)).sum(2))
        if sinks is not None:
            d_sinks -= ((sinks[:, None] - total).exp() * delta).sum(-1)
    if sinks is None:
        return [*grads, None, None]
    return [*grads, None, d_sinks.view(1, heads, 1, 1)]


@around_python_function("transformer_engine.pytorch.attention.dot_product_attention.utils:get_attention_backend")
def get_attention_backend(original: Callable[..., Any], params: Any, *more: Any) -> Any:
    """Transformer Engine's own choice, for float32 that of bfloat16: its fused kernels take 16 bits only."""
    wide = params.qkv_dtype == torch.float32
    return original(replace(params, qkv_dtype=torch.bfloat16) if wide else params, *more)


@kernel
def get_fused_attn_backend(*_: Any) -> Any:
    """cuDNN's kernels for 16 bits and any length: what a Hopper GPU takes. 2.20 asks for the reason of a refusal
    too."""
    compiled = sys.modules["transformer_engine_torch"]
    backend = compiled.NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen"]
    return (backend, "") if compiled.__release__ != "2.12.0" else backend


@kernel
def get_cudnn_version() -> int:
    """9.13.0."""
    return 91300
