"""The table of substitutions: every change that this package makes to torch's and Megatron-Core's own objects.

One row each: symbol, versions, reason. `install_cpu_patches()` applies them once, all but `HIDDEN_PACKAGES`,
`UNDEFINED_NAMES` and `HOST_WAITS` only where there is no CUDA device. A test fails when an installed Megatron-Core no
longer has a symbol. The functions and classes that are put in place are in the other modules of this folder. Nothing
here is on the hot path: string constants are replaced in the code objects themselves, so that no call is intercepted.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megaswift.engine.jit_fuser import fuses_pointwise_functions
from megaswift.engine.megatron.cpu import collectives, cuda_stubs
from megaswift.engine.megatron.layers.moe.permutation import unsynced_permute
from megaswift.engine.triton_support import triton_launches

BOTH = "0.16-0.19"


@dataclass(frozen=True)
class DeviceConstantPatch:
    """String constants of one function, `"cuda"` to `"cpu"` and `torch.cuda.XTensor` to `torch.XTensor`."""

    symbol: str
    reason: str
    versions: str = BOTH


@dataclass(frozen=True)
class AttributePatch:
    """One attribute replaced by another object."""

    symbol: str
    value: Any
    reason: str
    versions: str = BOTH
    missing_only: bool = False
    """Set the attribute only where the module lacks it."""


@dataclass(frozen=True)
class MutedLogRecordFilter:
    """Records of a logger that contain `text` are dropped."""

    logger: str
    text: str
    reason: str
    versions: str = BOTH

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the logger keeps the record (the protocol of `Logger.addFilter`)."""
        return self.text not in record.getMessage()


@dataclass(frozen=True)
class HiddenPackage:
    """A package that cannot be imported while Megatron-Core is imported, which does without it."""

    name: str
    reason: str
    versions: str = BOTH


_CORE = "megatron.core."
_FACTORY = "creates a tensor with device='cuda'"
_RING = "gloo's ring wakes every rank n times, and copies whole gradient buffers to send them to itself"
_SPLITS = "gloo takes split sizes as lists of ints; the MoE dispatcher passes tensors"
_UNEVEN = "gloo does not support uneven sizes, which the MoE dispatcher needs with ETP > 1"
_TRACKER = "the RNG tracker keeps the device's random state"
_TYPE = "compares Tensor.type() with the names of CUDA tensor classes"

CONSTANTS = (
    DeviceConstantPatch(_CORE + "pipeline_parallel.schedules:forward_backward_no_pipelining", _FACTORY),
    DeviceConstantPatch(_CORE + "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving", _FACTORY),
    DeviceConstantPatch(
        _CORE + "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving", _FACTORY
    ),
    DeviceConstantPatch(_CORE + "optimizer.grad_scaler:MegatronGradScaler.__init__", _FACTORY),
    DeviceConstantPatch(_CORE + "optimizer.grad_scaler:DynamicGradScaler.__init__", _FACTORY),
    DeviceConstantPatch(
        _CORE + "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups", _TYPE
    ),
    DeviceConstantPatch(_CORE + "optimizer.distrib_optimizer:DistributedOptimizer.__init__", _TYPE),
    DeviceConstantPatch(_CORE + "optimizer.optimizer:MixedPrecisionOptimizer.__init__", _FACTORY),
    DeviceConstantPatch(_CORE + "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__", _TYPE),
    DeviceConstantPatch(_CORE + "optimizer.optimizer:FP32Optimizer.__init__", _FACTORY),
    DeviceConstantPatch(_CORE + "optimizer.clip_grads:get_grad_norm_fp32", _FACTORY),
    DeviceConstantPatch(_CORE + "optimizer.clip_grads:clip_grad_by_total_norm_fp32", _TYPE),
    DeviceConstantPatch(_CORE + "optimizer.clip_grads:count_zeros_fp32", _FACTORY),
    DeviceConstantPatch(_CORE + "dist_checkpointing.strategies.state_dict_saver:verify_global_md_reuse", _FACTORY),
    DeviceConstantPatch(_CORE + "dist_checkpointing.exchange_utils:_get_empty_tensor_for_exchange", _FACTORY),
    DeviceConstantPatch(_CORE + "dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_rounds", _FACTORY),
)


REPLACEMENTS = (
    AttributePatch("torch.cuda:current_device", lambda: torch.device("cpu"), "names the device of most factory calls"),
    AttributePatch(
        "torch.cuda:set_device",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op),
        "called by parallel_state and the checkpoint writer",
    ),
    AttributePatch(
        "torch.cuda:synchronize",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op),
        "called by DDP, schedules, checkpoints",
    ),
    AttributePatch("torch.cuda:empty_cache", cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op), "called by DDP"),
    AttributePatch("torch.cuda:Stream", cuda_stubs.Stream, "side streams of DDP, pipeline and dispatcher"),
    AttributePatch("torch.cuda:Event", cuda_stubs.Event, "side streams of DDP, pipeline and dispatcher"),
    AttributePatch(
        "torch.cuda:current_stream",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.Stream),
        "side streams of DDP, pipeline and dispatcher",
    ),
    AttributePatch(
        "torch.cuda:default_stream", cuda_stubs.wrap_as_distinct_function(cuda_stubs.Stream), "DDP waits for it"
    ),
    AttributePatch("torch.cuda:stream", cuda_stubs.stream_context, "side streams of DDP, pipeline and dispatcher"),
    AttributePatch(
        "torch.cuda.nvtx:range_push", cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op), "profiling marks"
    ),
    AttributePatch(
        "torch.cuda.nvtx:range_pop", cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op), "profiling marks"
    ),
    AttributePatch(
        "torch.cuda:manual_seed",
        cuda_stubs.wrap_as_distinct_function(torch.manual_seed),
        "the RNG tracker seeds its states with it",
    ),
    AttributePatch(
        "torch.cuda:get_rng_state",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.get_cpu_rng_state),
        "activation recompute keeps the device's RNG state",
    ),
    AttributePatch(
        "torch.cuda:set_rng_state",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.set_cpu_rng_state),
        "activation recompute keeps the device's RNG state",
    ),
    AttributePatch(
        "torch.cuda.random:get_rng_state",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.get_cpu_rng_state),
        "activation recompute keeps the device's RNG state",
    ),
    AttributePatch(
        "torch:Tensor.cuda",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.return_self),
        "moves parameters and gradients",
    ),
    AttributePatch(
        "torch:Tensor.record_stream",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op),
        "the combined schedule frees what another stream has read",
    ),
    AttributePatch(
        "torch.nn:Module.cuda", cuda_stubs.wrap_as_distinct_function(cuda_stubs.return_self), "moves modules"
    ),
    AttributePatch("torch.distributed:all_to_all_single", collectives.all_to_all, _SPLITS),
    AttributePatch("torch.distributed:all_gather", collectives.all_gather, _UNEVEN),
    AttributePatch("torch.distributed:reduce_scatter", collectives.reduce_scatter, _UNEVEN),
    AttributePatch("torch.distributed:all_gather_into_tensor", collectives.all_gather_into_tensor, _RING),
    AttributePatch("torch.distributed:reduce_scatter_tensor", collectives.reduce_scatter_tensor, _RING),
    AttributePatch("torch.distributed:all_reduce", collectives.all_reduce, _RING),
    AttributePatch(
        _CORE + "distributed.param_and_grad_buffer:_coalescing_manager",
        cuda_stubs.coalescing,
        "waits for collectives that have ended",
    ),
    AttributePatch(
        _CORE + "optimizer.clip_grads:l2_norm_impl",
        cuda_stubs.multi_tensor_l2_norm,
        "torch.norm loses digits on large CPU tensors, and a different number on each layout",
    ),
    AttributePatch(
        _CORE + "tensor_parallel.random:_get_cuda_rng_state",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.get_cpu_rng_state),
        _TRACKER,
    ),
    AttributePatch(
        _CORE + "tensor_parallel.random:_set_cuda_rng_state",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.set_cpu_rng_state),
        _TRACKER,
    ),
)

DURING_IMPORT = (
    AttributePatch(
        "torch:compile",
        cuda_stubs.identity_decorator,
        "megatron.core.jit binds its jit_fuser when it is imported; compiling its small elementwise functions costs "
        "minutes on a CPU and changes digits",
    ),
)
"""In place while `megatron.core.jit` is imported, and taken back after."""

HIDDEN_PACKAGES = (
    HiddenPackage(
        "wandb", "the inference contexts import it for metrics that nobody logs: half a second of each process's start"
    ),
)
"""Hidden on every machine while `megatron.core` is imported; what is imported already stays."""

UNDEFINED_NAMES = (
    AttributePatch(
        _CORE + "transformer.moe.moe_utils:te_general_gemm",
        None,
        "read by router_gating_linear, left undefined by a guarded import: NameError otherwise",
        "0.16",
        missing_only=True,
    ),
    AttributePatch(
        _CORE + "transformer.multi_latent_attention:HAVE_TE",
        False,
        "True without Transformer Engine, since the import of mocked classes succeeds; isinstance then refuses them",
        "0.16",
    ),
)
"""Names that guarded imports of Transformer Engine leave undefined or wrong, with CUDA too."""

HOST_WAITS = (
    AttributePatch(
        _CORE + "transformer.moe.token_dispatcher:permute",
        unsynced_permute,
        "waits for the device twice in each layer and micro-batch, for counts that it is given",
        "0.16",
    ),
)
"""Called with Megatron-Core's own; with CUDA too. From 0.17 `permute` does not wait, and returns five values."""

CUDA_GRAPH_BUFFERS = (
    AttributePatch(
        _CORE + "transformer.cuda_graphs:TensorReusePool.insert",
        cuda_stubs.wrap_as_distinct_function(cuda_stubs.no_op),
        "a graph's input goes to other graphs although its backward pass reads it: wrong gradients of the first layer",
        "0.16-0.17",
    ),
)
"""Under `--cuda_graph_impl`, with CUDA."""

MUTED_LOG_RECORDS = (
    MutedLogRecordFilter(
        _CORE + "tensor_parallel.random",
        "CPU RNG state changed",
        "the tracker warns when the CPU's generator was used: here it is the device's, used by each dropout",
    ),
)

_installed = False


def runs_without_cuda() -> bool:
    """True where Megatron-Core has to run without CUDA."""
    return not torch.cuda.is_available()


def compute_device() -> torch.device:
    """Return the device on which this process computes."""
    return torch.device("cpu") if runs_without_cuda() else torch.device("cuda", torch.cuda.current_device())


def resolve_symbol(symbol: str) -> tuple[Any, str, Any]:
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
        return (
            value.replace("torch.cuda.", "torch.")
            if value.startswith("torch.cuda.") and value.endswith("Tensor")
            else value
        )
    if isinstance(value, tuple):
        return tuple(_cpu_constant(v) for v in value)
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_cpu_constant(value.co_consts))
    return value


def unwrap_decorators(function: Any) -> types.FunctionType:
    """The plain function below decorators such as `torch.no_grad`."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function)


def _import_core() -> None:
    """Imports `megatron.core` without `HIDDEN_PACKAGES`."""
    hidden = [row.name for row in HIDDEN_PACKAGES if row.name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # None: importing it raises ModuleNotFoundError
    try:
        importlib.import_module("megatron.core")
    finally:
        for name in hidden:
            del sys.modules[name]


def _import_patched() -> None:
    """Imports `megatron.core.jit` under the rows of `DURING_IMPORT`."""
    originals = [resolve_symbol(row.symbol) for row in DURING_IMPORT]
    _replace(DURING_IMPORT)
    try:
        _import_core()
        importlib.import_module(_CORE + "jit")
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _replace(rows: Iterable[AttributePatch]) -> None:
    for row in rows:
        owner, name, _ = resolve_symbol(row.symbol)
        setattr(owner, name, row.value)


def install_cpu_patches() -> None:
    """Makes Megatron-Core run on this machine; a second call does nothing. With CUDA only `HIDDEN_PACKAGES`,
    `UNDEFINED_NAMES` and `HOST_WAITS` apply, and under `--jit_fuser false` `DURING_IMPORT`."""
    global _installed
    if _installed:
        return
    _installed = True
    if not runs_without_cuda():
        if not fuses_pointwise_functions(cuda=True):
            _import_patched()
        _import_core()
        if not triton_launches():
            os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # Transformer Engine compiles functions of its own
        _define_missing_names()
        _remove_host_waits()
        return
    assert "megatron.core" not in sys.modules, "megaswift.engine.megatron has to be imported before megatron.core"
    torch_rows = [row for row in REPLACEMENTS if not row.symbol.startswith(_CORE)]
    _replace(torch_rows)  # before the import: Megatron-Core's modules bind some of these when they are imported
    _import_patched()
    _replace(row for row in REPLACEMENTS if row not in torch_rows)
    for row in CONSTANTS:
        function = unwrap_decorators(resolve_symbol(row.symbol)[2])
        function.__code__ = _cpu_constant(function.__code__)
    for muted in MUTED_LOG_RECORDS:
        logging.getLogger(muted.logger).addFilter(muted)
    _define_missing_names()
    _remove_host_waits()


def install_cuda_graph_patches() -> None:
    """Applies `CUDA_GRAPH_BUFFERS`, which this Megatron-Core needs."""
    _replace(CUDA_GRAPH_BUFFERS)


def _define_missing_names() -> None:
    """Applies `UNDEFINED_NAMES`: missing ones always, wrong ones only without Transformer Engine."""
    without_te = importlib.util.find_spec("transformer_engine") is None
    for row in UNDEFINED_NAMES:
        module, _, name = row.symbol.partition(":")
        owner = importlib.import_module(module)
        if not hasattr(owner, name) if row.missing_only else without_te:
            setattr(owner, name, row.value)


def _remove_host_waits() -> None:
    """Applies `HOST_WAITS` to functions that have the signature of 0.16."""
    for row in HOST_WAITS:
        owner, name, own = resolve_symbol(row.symbol)
        if "tokens_per_expert" not in inspect.signature(own).parameters:
            setattr(owner, name, row.value(own))
