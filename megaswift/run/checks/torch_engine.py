"""Checks of options that depend on the machine: packages, compilers, GPU. They run before a process group exists.

torch is imported only to look for a device, and only for an option that needs one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from megaswift.config import SwiftConfig
from megaswift.diagnosis.c_compiler import FIX, missing_for_triton
from megaswift.engine.options.engine import ZERO, EngineBackendConfig
from megaswift.engine.options.optimizer import OF_BITSANDBYTES, PAGED, OptimConfig
from megaswift.engine.options.zero_file import deepspeed_label, read_deepspeed_json
from megaswift.engine.options.zero_keys import offload_parts_on_a_drive
from megaswift.errors import Problem
from megaswift.models.options.model import ModelConfig

_CALLS_LIBAIO = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"


def torch_engine_machine_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report all that a torch engine lacks on this machine."""
    return [
        *bitsandbytes_optimizer_problems(cfg.optim),
        *attention_problems(cfg.model),
        *liger_problems(cfg.model),
        *compiler_problems(cfg.model),
        *boft_extension_problems(cfg),
        *nvme_problems(cfg.engine),
    ]


def missing_package_problem(package: str, wanted: str) -> list[Problem]:
    """Report a package that is not installed."""
    if find_spec(package) is not None:
        return []
    return [
        Problem(
            wanted,
            f"needs the package {package}, which is not installed",
            f"run pip install {package.replace('_', '-')}",
        )
    ]


def has_gpu() -> bool:
    """Return whether CUDA has a device."""
    import torch

    return torch.cuda.is_available()


def bitsandbytes_optimizer_problems(optim: OptimConfig) -> list[Problem]:
    """Report missing bitsandbytes, and a missing GPU for paged states, which bitsandbytes would keep unpaged there."""
    name = optim.optimizer
    if name not in (*OF_BITSANDBYTES, "galore_adamw_8bit"):
        return []
    problems = missing_package_problem("bitsandbytes", f"--optimizer {name}")
    if name in PAGED and not has_gpu():
        rule = "pages optimizer states between GPU and CPU memory, but there is no CUDA device"
        plain = "adam" if name == "paged_adamw_32bit" else name.removeprefix("paged_")
        problems.append(Problem(f"--optimizer {name}", rule, f"--optimizer {plain}"))
    return problems


def attention_problems(model: ModelConfig) -> list[Problem]:
    """Report attention kernels that a CPU lacks, or lacks for training, and on a GPU a missing package."""
    kind = model.attn_impl
    wanted = f"--attn_impl {model.attn_impl}"
    if kind not in ("flash", "flash_3", "flex"):
        return []
    if not has_gpu():
        rule = "has no backward pass on a CPU" if kind == "flex" else "has no kernel for a CPU"
        return [Problem(wanted, rule, "--attn_impl sdpa")]
    if kind == "flash_3" and find_spec("flash_attn_interface") is None:
        rule = "needs FlashAttention 3 (the module flash_attn_interface), which is not installed"
        fix = "install it from the folder hopper of FlashAttention's repository, or --attn_impl flash"
        return [Problem(wanted, rule, fix)]
    return missing_package_problem("flash_attn", wanted) if kind == "flash" else triton_problems(wanted)


def liger_problems(model: ModelConfig) -> list[Problem]:
    """Report what liger-kernel, whose kernels are Triton's, lacks on this machine."""
    if not model.use_liger:
        return []
    problems = missing_package_problem("liger_kernel", "--use_liger true")
    if not has_gpu():
        problems.append(
            Problem("--use_liger true", "its kernels need a GPU, and there is no CUDA device", "--use_liger false")
        )
    return problems or triton_problems("--use_liger true")


def triton_problems(option: str) -> list[Problem]:
    """Report why kernels that an option asks for cannot be launched on the GPU of this machine."""
    missing = missing_for_triton(os.environ)
    fix = "run pip install triton" if "package" in missing else FIX
    return [Problem(option, f"needs Triton kernels, which cannot be launched here: {missing}", fix)] if missing else []


def native_compiler_problems(model: ModelConfig) -> list[Problem]:
    """Report options of the native engine that ask for Triton kernels where there can be none; their defaults are off
    there."""
    asked = [name for name in ("jit_fuser", "moe_permute_fusion") if getattr(model, name)]
    if not asked or not has_gpu():
        return []
    return [problem for name in asked for problem in triton_problems(f"--{name} true")]


def compiler_problems(model: ModelConfig) -> list[Problem]:
    """Report a missing compiler for the inductor, which writes Triton for a GPU and C++ for a CPU."""
    if not model.torch_compile or model.torch_compile_backend != "inductor":
        return []
    if has_gpu():
        return triton_problems("--torch_compile_backend inductor")
    if any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "c++")):
        return []
    return [
        Problem(
            "--torch_compile_backend inductor",
            "compiles C++ on a CPU, but there is no compiler (g++, clang++)",
            "use --torch_compile_backend aot_eager, which is not faster",
        )
    ]


def nvme_problems(engine: EngineBackendConfig) -> list[Problem]:
    """Report what offloading to a drive lacks: DeepSpeed's extension async_io is compiled at its first use."""
    named = engine.deepspeed
    if named is None or named in ZERO:
        return []
    parts = offload_parts_on_a_drive(read_deepspeed_json(named))
    missing = missing_for_async_io() if parts else ""
    fix = 'run apt-get install libaio-dev g++ ninja-build (or yum install libaio-devel gcc-c++ ninja-build), or "cpu"'
    rule = f"needs DeepSpeed's extension async_io, which cannot be compiled here: {missing}"
    return [Problem(f'{deepspeed_label(named)}: "offload_{p}": "device": "nvme"', rule, fix) for p in parts if missing]


def missing_for_async_io() -> str:
    """Return why DeepSpeed's extension async_io cannot be compiled; empty where it can, or has been with DeepSpeed
    itself.

    As DeepSpeed looks for it: a program that calls libaio is compiled and linked, with CFLAGS and LDFLAGS.
    """
    spec = find_spec("deepspeed")
    if spec is not None and spec.origin and list(Path(spec.origin).parent.glob("ops/aio/async_io_op*.so")):
        return ""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "c++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        return "there is no C++ compiler"
    if shutil.which("ninja") is None:
        return "the program ninja is not on PATH"
    flags = (os.environ.get("CFLAGS", "").split(), os.environ.get("LDFLAGS", "").split())
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-x", "c", *flags[0], "-", "-o", str(Path(folder) / "a.out"), *flags[1], "-laio"]
        done = subprocess.run(command, input=_CALLS_LIBAIO, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else "the library libaio with its header libaio.h was not found"


def boft_extension_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report a butterfly factor that needs BOFT's CUDA extension where PEFT cannot compile it. PEFT would use a factor
    of 1 there."""
    factor = cfg.peft.boft_n_butterfly_factor
    tools = shutil.which("ninja") and (shutil.which("nvcc") or os.environ.get("CUDA_HOME"))
    if cfg.model.train_type != "boft" or factor == 1 or (tools and has_gpu()):
        return []
    rule = "would be 1: more needs PEFT's CUDA extension (a GPU, nvcc and ninja)"
    return [Problem(f"--boft_n_butterfly_factor {factor}", rule, "leave it out")]
