"""The peers of `bench_gpu.py`: a plain PyTorch loop over a transformers model, with PEFT's adapters and bitsandbytes's
NF4 weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_benchmark.cases import BenchmarkCase
from megaswift.losses.contract import Batch
from megaswift.trainers.flops import StepFlopFormula

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
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, fused=True)
        self.forward: Any = torch.compile(model) if case.contender == "hf_compile" else model

    @property
    def settings(self) -> str:
        """For the results, after a step."""
        how = "with gradient checkpointing (out of memory without)" if self.recomputes else "no gradient checkpointing"
        return f"{how}, AdamW(fused=True)"

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


def _flops_of(model: Any) -> StepFlopFormula:
    """The FLOP rule of `megaswift.trainers.flops`; a token goes through some of the experts."""
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
