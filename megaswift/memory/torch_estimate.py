"""The memory of a run on a torch engine, and the runs that the formulas cover."""

from __future__ import annotations

from collections.abc import Iterator

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.memory.estimate import MemoryEstimate, TrainedModel
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels, MicrobatchSetup
from megaswift.memory.state_bytes import HeldBytes
from megaswift.memory.step_options import StepOptions
from megaswift.memory.torch_activations import FAMILIES, TorchSetup, torch_activation_bytes
from megaswift.memory.torch_states import TorchParameter, torch_engine_bytes, torch_parameters
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import LANGUAGE
from megaswift.parallel.layout import Layout

KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Engines that plans compare with the native one."""


def uncovered_torch_runs(
    task: str, model: ModelConfig, lora: LoraConfig, optim: OptimConfig, spec: ModelSpec
) -> Iterator[str]:
    """Name what of a run on a torch engine the formulas do not describe; empty where they do."""
    found: dict[str, object] = {
        f"task {task}": task not in LANGUAGE,
        f"the family {spec.family}": spec.family not in FAMILIES,
        f"--train_type {model.train_type}": model.train_type not in ("full", "lora"),
        "--use_dora": lora.use_dora,
        "--adapters": lora.adapters if model.train_type != "full" else None,
        "--modules_to_save": lora.modules_to_save if model.train_type != "full" else (),
        "--freeze_parameters": model.freeze_parameters,
        f"--optimizer {optim.optimizer}": optim.optimizer != "adam",
        "--fp8_format": model.fp8_format,
        "--torch_compile": model.torch_compile,
        "--use_liger": model.use_liger,
        f"--cuda_graph_impl {model.cuda_graph_impl}": model.uses_cuda_graphs,
        f"--attn_impl {model.attn_impl}": model.attn_impl not in ("auto", "sdpa", "flash", "flash_3"),
        f"--recompute_granularity {model.recompute_granularity}": model.recompute_granularity == "selective",
    }
    yield from (name for name, present in found.items() if present)


class TorchRun:
    """A model on the ranks of a torch engine."""

    def __init__(self, model: TrainedModel, kind: str, ranks: int) -> None:
        self.kind = kind
        self.layout = Layout(ranks)
        self.spec = model.spec
        self.parts = model.parts
        self.kernels = ComputeKernels(TORCH, TORCH, model.kernels.dtype, model.kernels.cuda)
        self.parameters: list[TorchParameter] = torch_parameters(model.spec, model.parts)

    def setup(self, options: StepOptions) -> TorchSetup:
        """One micro-batch under these options."""
        return TorchSetup(MicrobatchSetup(options, self.spec, self.layout, self.kernels, self.parts), self.kind)

    def estimate(self, options: StepOptions) -> MemoryEstimate:
        """Under these options; all ranks need the same. DDP adds the gradients of several micro-batches up outside of
        its buckets, and copies the sums into them."""
        ranks = self.layout.world_size
        held = torch_engine_bytes(self.kind, options.optim, self.kernels.dtype, ranks, self.parameters)
        if self.kind == "ddp" and ranks > 1 and options.passes > 1:
            held += HeldBytes(gradients=held.gradients)
        return MemoryEstimate(0, held, torch_activation_bytes(self.setup(options), options.passes))

    @property
    def elements(self) -> tuple[int, int]:
        """(of all parameters, of those that train)."""
        every = sum(p.elements for p in self.parameters)
        return every, sum(p.elements for p in self.parameters if p.trains)
