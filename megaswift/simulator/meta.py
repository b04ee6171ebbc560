"""Tensors without memory in the place of a GPU: what the host reads of them, what kernels would allocate, live bytes.

Everything here changes the process for good: a simulated rank is run in a process that does nothing else.
"""

from __future__ import annotations

import types
import weakref
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_aten = torch.ops.aten


class MetaDevice(TorchDispatchMode):
    """Supplies what the host reads of tensors that have no values: ones. Counts the bytes of live tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.seen: set[int] = set()
        self._forms = KnownForms()

    def take(self) -> tuple[int, int]:
        """Return the live bytes, and the most since the last call."""
        peak = self.peak
        self.peak = self.live
        return self.live, peak

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _one(args[0].dtype)
        if func is _aten._to_copy.default and args[0].is_meta and _leaves(kwargs.get("device")):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0].fill_(1)
        if func is _aten.is_pinned.default:
            return True
        if func in IN_PLACE and args[0].is_meta:
            return args[0]
        out = self._forms.compute(func, args, kwargs)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


class KnownForms:
    """Remembers what operations return, by the shapes, strides and dtypes of what they get: torch computes it in
    Python, which takes most of the time, and micro-batches repeat it."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Form, ...]] = {}

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` returns."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        key = (func, _key_of(args), _key_of(tuple(kwargs.items())))
        known = self._known.get(key)
        if known is not None:
            made = [torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in known]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        out = func(*args, **kwargs)
        outs = out if isinstance(out, tuple) else (out,)
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if all(isinstance(t, Tensor) and t.is_meta and t.untyped_storage()._cdata not in given for t in outs):
            self._known[key] = tuple((t.shape, t.stride(), t.dtype) for t in outs)
        return out


Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


@cache
def _makes_tensors(func: Any) -> bool:
    """Return whether an operation has results of its own, and nothing else."""
    returns = func._schema.returns
    tensors = bool(returns) and all(str(r.type) == "Tensor" and r.alias_info is None for r in returns)
    return tensors and not func._schema.is_mutable


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, tuple | list):
        return tuple(map(_key_of, value))
    return type(value), value


IN_PLACE = {
    getattr(_aten, name).default
    for name in ("copy_", "zero_", "exp_", "tanh_", "square_", "neg_", "sqrt_", "masked_fill_")
    if hasattr(getattr(_aten, name), "default")
} | {
    overload
    for name in ("add_", "sub_", "mul_", "div_", "fill_", "masked_fill_", "addcmul_", "clamp_", "scatter_")
    for overload in (getattr(getattr(_aten, name), kind, None) for kind in ("Tensor", "Scalar", "default"))
    if overload is not None
}
"""Operations that change nothing but values."""


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _leaves(device: Any) -> bool:
    return device is not None and torch.device(device).type != "meta"


class _Attention(torch.autograd.Function):
    """Attention that keeps and returns what flash attention does: the output and a float32 for each query of each
    head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output [b, heads, s, d] of values, as kernels lay it out: heads of a token together."""
        b, heads, s, _ = query.shape
        out = query.new_empty(b, s, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(b, heads, s, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the shapes of queries, keys and values."""
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Attention.apply(query, key, value)


def _stacked(layer: Any) -> Tensor:
    """The weights of experts, which follow one another in memory."""
    first = layer.weights()[0].detach()
    return first.as_strided((layer.experts, layer.outputs, layer.inputs), (first.numel(), layer.inputs, 1), 0)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _norm(chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    return torch.empty(1, device=META), None


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that Adam, or SGD with momentum, has from its first step on."""
    for group in optimizer.param_groups:
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if "betas" not in group:
            names = ("momentum_buffer",) if group["momentum"] else ()
        for p in group["params"]:
            optimizer.state[p] |= {name: torch.zeros_like(p) for name in names}


def even_counts(routing_map: Tensor, topk: int) -> Tensor:
    """Return how many tokens of a map [t, experts] go to each expert where they choose evenly, int64 [experts] on the
    host."""
    tokens, experts = routing_map.shape
    chosen = tokens * topk
    return torch.tensor([chosen // experts + (e < chosen % experts) for e in range(experts)])


def _choose_evenly() -> None:
    """Give token dispatchers the numbers that the host would read: each expert gets as many tokens."""
    from megaswift.engine.megatron.layers.moe.dispatcher import LocalTokenDispatcher, MoEAlltoAllTokenDispatcher

    exchanges = MoEAlltoAllTokenDispatcher.preprocess
    local = LocalTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        exchanges(self, routing_map)
        counts = even_counts(routing_map, self.config.moe_router_topk)
        per_rank = counts.view(self.ep_size, self.num_local_experts)
        first = self.local_expert_indices[0]
        own = counts[first : first + self.num_local_experts]
        everyone = own.expand(self.tp_size, self.ep_size, -1)
        self.input_splits = per_rank.sum(1).numpy()
        self.output_splits = everyone[0].sum(1).numpy()
        self.output_splits_tp = everyone.sum((1, 2)).numpy()
        self.num_global_tokens_per_local_expert = everyone.reshape(-1, self.num_local_experts)
        return everyone.sum((0, 1))

    def local_preprocess(self: Any, routing_map: Tensor) -> Tensor:
        local(self, routing_map)
        return even_counts(routing_map, self.config.moe_router_topk)

    MoEAlltoAllTokenDispatcher.preprocess = preprocess
    LocalTokenDispatcher.preprocess = local_preprocess  # type: ignore[method-assign]


def compute_on_meta() -> None:
    """Let the engine compute on the meta device, for the rest of the process."""
    from megaswift.engine import logit_fields
    from megaswift.engine.megatron import engine
    from megaswift.engine.megatron.cpu import patches
    from megaswift.engine.megatron.layers import head
    from megaswift.engine.megatron.layers.moe.experts import GroupedExpertLinear
    from megaswift.engine.megatron.optim.optimizer import clip_grads
    from megaswift.parallel import head_memory

    for row in patches.CONSTANTS:
        function = patches.unwrap_decorators(patches.resolve_symbol(row.symbol)[2])
        function.__code__ = _on_meta(function.__code__)
    head_memory.CHUNK_SIZES["cpu"] = head_memory.CHUNK_SIZES["cuda"]
    build = engine.build_model_chunks

    def build_on_meta(*values: Any) -> Any:
        with META:  # a parameter that is moved there loses its marks
            return build(*values)

    kernels = types.SimpleNamespace(write_row_statistics_by_triton=_nothing, write_logit_gradient_by_triton=_nothing)
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", _device),
        (patches, "compute_device", _device),
        (engine, "build_model_chunks", build_on_meta),
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
        (GroupedExpertLinear, "stacked_weights", _stacked),
        (logit_fields, "_triton_kernels", lambda products: kernels),
        (head, "_add_product", _nothing),
        (clip_grads, "l2_norm_impl", _norm),
        (torch.optim.Adam, "step", _nothing),
        (torch.optim.AdamW, "step", _nothing),
        (torch.optim.SGD, "step", _nothing),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _choose_evenly()


def _device() -> torch.device:
    return META


def _on_meta(value: Any) -> Any:
    if isinstance(value, str):
        if value == "cpu":
            return "meta"
        if value.startswith("torch.") and value.endswith("Tensor"):
            return value.replace("torch.", "torch.meta.")
        return value
    if isinstance(value, tuple):
        return tuple(map(_on_meta, value))
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_on_meta(value.co_consts))
    return value
