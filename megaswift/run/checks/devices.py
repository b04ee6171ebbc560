"""Checks of options by this machine's device and environment, before a process group exists.

torch is imported only where an option depends on a device.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaswift import log
from megaswift.config import SwiftConfig
from megaswift.engine.options.cuda_graphs import cuda_graph_environment_problems, uses_cuda_graphs
from megaswift.engine.options.engine import ZERO, EngineBackendConfig
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.errors import Problem


def device_dependent_option_problems(cfg: SwiftConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Report options that need a GPU, and those that this GPU or its allocator's settings rule out."""
    half = cfg.model.torch_dtype == "float16" and requested_engine(cfg) in ZERO
    asked = (cfg.optim.optimizer_cpu_offload, half, cfg.engine.ddp_backend, uses_cuda_graphs(cfg), cfg.model.jit_fuser)
    if not any(asked):
        return []
    import torch

    if torch.cuda.is_available():
        return _problems_with_cuda(cfg.engine) + cuda_graph_environment_problems(cfg, environ)
    return _problems_without_cuda(cfg, half)


def _problems_with_cuda(engine: EngineBackendConfig) -> list[Problem]:
    if engine.ddp_backend != "gloo":
        return []
    rule = "is for CPUs: GPUs communicate through NCCL"
    return [Problem("--ddp_backend gloo", rule, "--ddp_backend nccl")]


def _problems_without_cuda(cfg: SwiftConfig, half: bool) -> list[Problem]:
    """`half`: ZeRO is to train in float16, which DeepSpeed does on few CPUs."""
    import torch

    if cfg.engine.ddp_backend == "nccl":
        log.info("--ddp_backend nccl has no effect: there is no CUDA device, so processes communicate through gloo")
    problems = []
    if cfg.optim.optimizer_cpu_offload:
        rule = "there is no CUDA device, so the optimizer state is in host memory anyway"
        problems.append(Problem("--optimizer_cpu_offload true", rule, "--optimizer_cpu_offload false"))
    if uses_cuda_graphs(cfg):
        what = f"--cuda_graph_impl {cfg.model.cuda_graph_impl}"
        problems.append(Problem(what, "there is no CUDA device", "--cuda_graph_impl none"))
    if cfg.model.jit_fuser:
        rule = "there is no CUDA device; on a CPU compilation takes minutes and changes digits"
        problems.append(Problem("--jit_fuser true", rule, "--jit_fuser false"))
    if half and not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # what DeepSpeed asks
        rule = "DeepSpeed supports float16 on CPUs with AVX512-FP16 only, and there is no CUDA device"
        problems.append(Problem("--torch_dtype float16", rule, "--engine fsdp2, or --torch_dtype bfloat16"))
    return problems
