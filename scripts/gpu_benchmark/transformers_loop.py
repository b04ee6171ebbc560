"""The peers of `bench_gpu.py`: a plain PyTorch loop over a transformers model, with PEFT's adapters and bitsandbytes's
NF4 weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gpu_benchmark.cases import BenchmarkCase
from megaswift.losses.contract import Batch
from megaswift.models.flops import StepFlopFormula

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Parameters of transformers' experts, which are no linear layers: PEFT adapts them by name, gate and up as one with
twice the rank, and routers too."""


class TransformersLoop:
    """bf16 weights, gradients and moments with PyTorch's fused AdamW: the fastest that is common, with less precision
    than megaswift's float32 main weights. Recomputes layers only once a step has needed too much memory without."""

    def __init__(self, case: BenchmarkCase, folder: Path, lr: float, rank: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.packed = case.rows == "packed"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(self.device):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder),
                dtype=torch.bfloat16 if self.device == "cuda" else torch.float32,
                attn_implementation="sdpa",
            )
        if case.method == "qlora":
            _to_nf4(model)
        if case.method in ("lora", "qlora"):
            from peft import LoraConfig, get_peft_model

            experts = [name for name in EXPERTS if any(n.endswith(name) for n, _ in model.named_parameters())]
            options = LoraConfig(r=rank, target_modules="all-linear", target_parameters=experts or None)
            model = get_peft_model(model, options)
        model.train()
        self.model, self.recomputes = model, False
        self.flops = _flops_of(model)
        self.compiles = case.contender == "hf_compile"
        if self.compiles:
            _register_expert_adapters(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, fused=True)
        self.forward: Any = torch.compile(model) if self.compiles else model

    @property
    def settings(self) -> str:
        """For the results, after a step."""
        how = "with gradient checkpointing (out of memory without)" if self.recomputes else "no gradient checkpointing"
        return f"{how}, AdamW(fused=True)" + (f", {_compilation()}" if self.compiles else "")

    def step(self, batches: Sequence[Batch]) -> float:
        """The loss; with gradient checkpointing from the first step on that runs out of memory."""
        loss = self._unless_out_of_memory(lambda: self._step(batches))
        if loss is not None:
            return loss
        self.recomputes = True  # here, not where the error is caught, whose frames hold tensors
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return self._step(batches)

    def _unless_out_of_memory(self, work: Callable[[], float]) -> float | None:
        try:
            return work()
        except torch.OutOfMemoryError:
            if self.recomputes:
                raise
            return None

    def _step(self, batches: Sequence[Batch]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            ids: Tensor = batch.input_ids.to(self.device, non_blocking=True)
            fields = {"input_ids": ids, "labels": ids}
            if self.packed:  # positions that begin again make transformers' mask one of documents
                positions = batch.positions.to(self.device, non_blocking=True)
                fields |= {"position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
            loss = self.forward(**fields, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return float(total)


def _to_nf4(model: Any) -> None:
    """Linear layers of the decoder layers, a scale for 64 weights, as megaswift's."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            device, dtype, kind = module.weight.device, module.weight.dtype, {"quant_type": "nf4"}
            four = Linear4bit(
                module.in_features, module.out_features, False, dtype, compress_statistics=False, device="meta", **kind
            )
            four.weight = Params4bit(
                module.weight.data, requires_grad=False, blocksize=64, compress_statistics=False, **kind
            )
            four.weight = four.weight.to(device)
            model.set_submodule(name, four)
    model.is_loaded_in_4bit = True


class _AddedAdapter(nn.Module):
    """A parameter plus its adapter, `W + scaling * B A`, `[e, o, i]` of experts or `[o, i]`."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        (name,) = wrapper.active_adapters
        self.lora_A, self.lora_B, self.scaling = wrapper.lora_A[name], wrapper.lora_B[name], wrapper.scaling[name]
        self.experts = wrapper.num_experts

    def forward(self, weight: Tensor) -> Tensor:
        """PEFT's layout: A's rows are those of expert after expert, B's columns those of rank after rank."""
        a, b = self.lora_A.weight, self.lora_B.weight  # [e * r, i], [o, r * e], float32 beside bf16 weights
        if self.experts == 1:
            return weight + (b @ a * self.scaling).to(weight.dtype)
        a = a.unflatten(0, (self.experts, -1)).to(weight.dtype)
        b = b.unflatten(1, (-1, self.experts)).permute(2, 0, 1).to(weight.dtype)
        return torch.baddbmm(weight, b, a, alpha=self.scaling)


def _register_expert_adapters(model: Any) -> None:
    """Registers the adapters of parameters (experts, routers) once. PEFT's own wrapper does it anew in each call, with
    a new class each time, for which torch.compile compiles again until it gives up and runs the layer eagerly."""
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
    for name, outermost in wrappers.items():  # one around the other where a module has several such parameters
        if name.rpartition(".")[0] not in wrappers:
            wrapper: Any = outermost
            while isinstance(wrapper, ParamWrapper):
                added, parameter = _AddedAdapter(wrapper), wrapper.parameter_name
                parametrize.register_parametrization(wrapper.get_base_layer(), parameter, added)
                wrapper = wrapper.base_layer
            model.set_submodule(name, wrapper)


def uncompilable_reason() -> str | None:
    """Why torch.compile cannot generate code on this machine: on a CPU it is C++, on a GPU Triton."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if torch.cuda.is_available():
        return None
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on a CPU (set CXX to its command)"
    return None


def _compilation() -> str:
    """What torch.compile has made of the model so far."""
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return f"torch.compile (graphs: {graphs}, graph breaks: {breaks})"


def _flops_of(model: Any) -> StepFlopFormula:
    """The FLOP rule of `megaswift.engine.flops`; a token goes through some of the experts."""
    config = model.config
    counted = {id(p): (name, p) for name, p in model.named_parameters()}
    if not config.tie_word_embeddings:
        counted.pop(id(model.get_input_embeddings().weight))
    experts, active = getattr(config, "num_experts", 1), getattr(config, "num_experts_per_tok", 1)
    trained = frozen = 0
    for name, p in counted.values():
        elements = _elements(p) * active // experts if ".experts." in name else _elements(p)
        trained, frozen = trained + elements * p.requires_grad, frozen + elements * (not p.requires_grad)
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return StepFlopFormula(trained + frozen * 2 // 3, attention)


def _elements(parameter: Any) -> int:
    """Two of NF4 lie in a byte."""
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())
