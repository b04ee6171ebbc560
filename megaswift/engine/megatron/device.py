"""Megatron-Core on a CPU: every place where it calls CUDA by name, and what stands there instead.

Owns all changes to others' code, one row each: symbol, versions, reason. `install()` applies them once, and only where there
is no CUDA device; a test fails when an installed Megatron-Core no longer has a symbol. Nothing here is on the hot path: string
constants are replaced in the code objects themselves, so that no call is intercepted.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BOTH = "0.16-0.19"


@dataclass(frozen=True)
class Constants:
    """String constants of one function, `"cuda"` to `"cpu"` and `torch.cuda.XTensor` to `torch.XTensor`."""

    symbol: str
    reason: str
    versions: str = BOTH


@dataclass(frozen=True)
class Replacement:
    """One attribute replaced by another object."""

    symbol: str
    value: Any
    reason: str
    versions: str = BOTH


_CORE = "megatron.core."
_FACTORY = "creates a tensor with device='cuda'"
_SELF = "gloo copies whole gradient buffers to send them to itself: 6% of a step of 20 M parameters on one rank"
_TYPE = "compares Tensor.type() with the names of CUDA tensor classes"

CONSTANTS = (
    Constants(_CORE + "pipeline_parallel.schedules:forward_backward_no_pipelining", _FACTORY),
    Constants(_CORE + "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving", _FACTORY),
    Constants(_CORE + "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving", _FACTORY),
    Constants(_CORE + "optimizer.grad_scaler:MegatronGradScaler.__init__", _FACTORY),
    Constants(_CORE + "optimizer.grad_scaler:DynamicGradScaler.__init__", _FACTORY),
    Constants(_CORE + "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups", _TYPE),
    Constants(_CORE + "optimizer.distrib_optimizer:DistributedOptimizer.__init__", _TYPE),
    Constants(_CORE + "optimizer.optimizer:MixedPrecisionOptimizer.__init__", _FACTORY),
    Constants(_CORE + "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__", _TYPE),
    Constants(_CORE + "optimizer.optimizer:FP32Optimizer.__init__", _FACTORY),
    Constants(_CORE + "optimizer.clip_grads:get_grad_norm_fp32", _FACTORY),
    Constants(_CORE + "optimizer.clip_grads:clip_grad_by_total_norm_fp32", _TYPE),
    Constants(_CORE + "optimizer.clip_grads:count_zeros_fp32", _FACTORY),
    Constants(_CORE + "utils:local_multi_tensor_l2_norm", _FACTORY),
    Constants(_CORE + "dist_checkpointing.strategies.state_dict_saver:verify_global_md_reuse", _FACTORY),
    Constants(_CORE + "dist_checkpointing.exchange_utils:_get_empty_tensor_for_exchange", _FACTORY),
    Constants(_CORE + "dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_rounds", _FACTORY),
)


class _Stream:
    """A CUDA stream where there are none: everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has already happened."""
        return event or _Event()


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Happened."""

    def wait(self, *_: Any) -> None:
        """Happened."""

    def synchronize(self) -> None:
        """Happened."""

    def query(self) -> bool:
        """Happened."""
        return True


@contextlib.contextmanager
def _stream_context(_: Any = None):  # noqa: ANN202
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _same(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _get_rng(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


_all_to_all_single = dist.all_to_all_single
_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter
_coalescing_manager = dist._coalescing_manager


def _sizes(sizes: Any) -> list[int] | None:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_to_all(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
                group: Any = None, async_op: bool = False) -> Any:
    return _all_to_all_single(output, input.contiguous(), _sizes(output_split_sizes), _sizes(input_split_sizes), group, async_op)


def _gather_uneven(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    rows = [o.shape[0] for o in outputs] if outputs[0].dim() else [1]
    if len(set(rows)) == 1:
        return _all_gather(outputs, tensor.contiguous(), group, async_op)
    longest = max(rows)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    full = [torch.empty_like(padded) for _ in outputs]
    _all_gather(full, padded, group)
    for output, got in zip(outputs, full, strict=True):
        output.copy_(got[: output.shape[0]])
    return None


def _reduce_scatter_uneven(output: torch.Tensor, inputs: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
                           async_op: bool = False) -> Any:
    rows = [i.shape[0] for i in inputs]
    if len(set(rows)) == 1:
        return _reduce_scatter(output, [i.contiguous() for i in inputs], op, group, async_op)
    total = torch.cat(list(inputs))
    dist.all_reduce(total, op, group)
    start = sum(rows[: dist.get_rank(group)])
    output.copy_(total[start : start + output.shape[0]])
    return None


class _Done:
    """The handle of a collective that needed no message."""

    def wait(self) -> None:
        """Done."""


@contextlib.contextmanager
def _coalesce(group: Any, async_ops: bool = False, **kwargs: Any):  # noqa: ANN202
    if group.size() == 1:
        yield _Done()
    else:
        with _coalescing_manager(group, async_ops=async_ops, **kwargs) as manager:
            yield manager


def _alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective(output, input, group=...)` that sends nothing where the group is this rank alone."""

    def run(output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is None or group.size() > 1:
            return collective(output, input, *args, group=group, **kwargs)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return _Done()

    return run


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: torch._dynamo refuses one object under two names of torch."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return replaced


def _identity_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


REPLACEMENTS = (
    Replacement("torch.cuda:current_device", lambda: torch.device("cpu"), "names the device of most factory calls"),
    Replacement("torch.cuda:set_device", _own(_nothing), "called by parallel_state and the checkpoint writer"),
    Replacement("torch.cuda:synchronize", _own(_nothing), "called by DDP, schedules, checkpoints"),
    Replacement("torch.cuda:empty_cache", _own(_nothing), "called by DDP"),
    Replacement("torch.cuda:Stream", _Stream, "side streams of DDP, pipeline and dispatcher"),
    Replacement("torch.cuda:Event", _Event, "side streams of DDP, pipeline and dispatcher"),
    Replacement("torch.cuda:current_stream", _own(_Stream), "side streams of DDP, pipeline and dispatcher"),
    Replacement("torch.cuda:default_stream", _own(_Stream), "DDP waits for it"),
    Replacement("torch.cuda:stream", _stream_context, "side streams of DDP, pipeline and dispatcher"),
    Replacement("torch.cuda.nvtx:range_push", _own(_nothing), "profiling marks"),
    Replacement("torch.cuda.nvtx:range_pop", _own(_nothing), "profiling marks"),
    Replacement("torch.cuda:manual_seed", _own(torch.manual_seed), "the RNG tracker seeds its states with it"),
    Replacement("torch.cuda:get_rng_state", _own(_get_rng), "activation recompute keeps the device's RNG state"),
    Replacement("torch.cuda:set_rng_state", _own(_set_rng), "activation recompute keeps the device's RNG state"),
    Replacement("torch.cuda.random:get_rng_state", _own(_get_rng), "activation recompute keeps the device's RNG state"),
    Replacement("torch:Tensor.cuda", _own(_same), "moves parameters and gradients"),
    Replacement("torch.nn:Module.cuda", _own(_same), "moves modules"),
    Replacement("torch.distributed:all_to_all_single", _all_to_all, "gloo wants split sizes as lists of ints; the MoE dispatcher passes tensors"),
    Replacement("torch.distributed:all_gather", _gather_uneven, "gloo refuses uneven sizes; the MoE dispatcher with ETP > 1 needs them"),
    Replacement("torch.distributed:reduce_scatter", _reduce_scatter_uneven, "gloo refuses uneven sizes; the MoE dispatcher with ETP > 1 needs them"),
    Replacement(_CORE + "distributed.param_and_grad_buffer:_coalescing_manager", _coalesce, _SELF),
    Replacement(_CORE + "distributed.param_and_grad_buffer:dist_reduce_scatter_func", _alone(dist.reduce_scatter_tensor), _SELF),
    Replacement(_CORE + "distributed.param_and_grad_buffer:dist_all_gather_func", _alone(dist.all_gather_into_tensor), _SELF),
    Replacement(_CORE + "tensor_parallel.random:_get_cuda_rng_state", _own(_get_rng), "the RNG tracker reads the device's state"),
    Replacement(_CORE + "tensor_parallel.random:_set_cuda_rng_state", _own(_set_rng), "the RNG tracker sets the device's state"),
)

_installed = False


def on_cpu() -> bool:
    """True where Megatron-Core has to run without CUDA."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())


def resolve(symbol: str) -> tuple[Any, str, Any]:
    """(owner, attribute, value) of `module:dotted.name`; AttributeError when it is gone."""
    module, _, path = symbol.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def _cpu_constant(value: Any) -> Any:
    if isinstance(value, str):
        if value == "cuda":
            return "cpu"
        return value.replace("torch.cuda.", "torch.") if value.startswith("torch.cuda.") and value.endswith("Tensor") else value
    if isinstance(value, tuple):
        return tuple(_cpu_constant(v) for v in value)
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_cpu_constant(value.co_consts))
    return value


def innermost(function: Any) -> types.FunctionType:
    """The plain function below decorators such as `torch.no_grad`."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function)


def _import_without_compiler() -> None:
    """Import Megatron-Core while `torch.compile` does nothing: its `jit_fuser` is bound then.

    Compiling its small elementwise functions costs minutes on a CPU and changes digits.
    """
    compiler = torch.compile
    torch.compile = _identity_decorator  # type: ignore[assignment]
    try:
        importlib.import_module(_CORE + "jit")
    finally:
        torch.compile = compiler


def install() -> None:
    """Make Megatron-Core run on this machine. Does nothing where CUDA is available, or a second time."""
    global _installed
    if _installed or not on_cpu():
        return
    _installed = True
    assert "megatron.core" not in sys.modules, "megaswift.engine.megatron has to be imported before megatron.core"
    _import_without_compiler()
    for row in CONSTANTS:
        function = innermost(resolve(row.symbol)[2])
        function.__code__ = _cpu_constant(function.__code__)
    for row in REPLACEMENTS:
        owner, name, _ = resolve(row.symbol)
        setattr(owner, name, row.value)
    _without_transformer_engine()


def _without_transformer_engine() -> None:
    """0.16 without Transformer Engine: names that its guarded imports leave undefined."""
    moe = importlib.import_module(_CORE + "transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None  # router_gating_linear reads it: NameError otherwise
