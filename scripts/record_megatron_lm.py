"""Records a step of plain Megatron-LM code as a trace for `megaswift bisect`; docs/bisect.md shows the calls."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PARTS = r"linear_\w+|[ikpq]\w*_layernorm|core_attention|router|mlp"
TRACED = re.compile(rf"embedding|output_layer|final_layernorm|layers\.\d+(\.(\w+\.)?({PARTS}))?")


class Recorder:
    """Hooks on the model chunks of a rank. `layout`: world_size, tp, pp, vpp, cp, ep, etp and sequence_parallel."""

    def __init__(self, chunks: list[Any], folder: Path, rank: int, layout: dict[str, int]) -> None:
        self.chunks, self.folder, self.rank, self.layout = chunks, folder, rank, layout
        self.tensors, self.calls = {}, Counter()
        for name, module in self.named("named_modules"):
            if TRACED.fullmatch(name):
                module.register_forward_hook(lambda _, __, out, name=name: self.output(name, out))

    def named(self, method: str) -> Any:
        """Modules or parameters by their names in the whole model: layers by their own numbers, without wrappers."""
        for chunk in self.chunks:
            numbers = [one.layer_number - 1 for m in chunk.modules() for one in getattr(m, "layers", [])]
            for name, thing in getattr(chunk, method)():
                short = re.sub(r"^(module\.)*(decoder\.)?", "", name)
                yield re.sub(r"^layers\.(\d+)", lambda m, n=numbers: f"layers.{n[int(m[1])]}", short), thing

    def output(self, name: str, out: Any) -> None:
        """Add an output [tokens, columns] and its gradient; calls come in the order of micro-batches."""
        out = out[0] if isinstance(out, tuple) else out
        self.calls[name, torch.is_grad_enabled()] += 1
        number = self.calls[name, torch.is_grad_enabled()] - 1
        columns = out.shape[-2:].numel() if name.endswith(("q_layernorm", "k_layernorm")) else out.shape[-1]
        self.add("output", name, number, out.reshape(-1, columns))
        if out.requires_grad and torch.is_grad_enabled():
            out.register_hook(lambda g: self.add("output_gradient", name, number, g.reshape(-1, columns)))

    def parameters(self, kind: str, value: Any) -> None:
        """Add `value(parameter)` of all parameters."""
        for name, parameter in self.named("named_parameters"):
            self.add(kind, name, None, value(parameter).float())

    def add(self, kind: str, name: str, microbatch: int | None, tensor: torch.Tensor) -> None:
        """Add a tensor; one that is there already stays, because recomputed outputs come again."""
        self.tensors.setdefault((kind, name, microbatch), tensor.detach().to("cpu", copy=True).contiguous())

    def write(self, dtype: str, lr: float) -> None:
        """Write the files of this rank; all ranks write the same description of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({str(k): t for k, t in self.tensors.items()}, f"{self.folder}/rank-{self.rank}.safetensors")
        rows = [{"key": str(k), "kind": k[0], "name": k[1], "microbatch": k[2]} for k in self.tensors]
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps({"rank": self.rank, "tensors": rows}))
        about = {"format": 1, "program": "Megatron-LM", "layout": self.layout, "dtype": dtype, "lr": lr}
        (self.folder / "trace.json").write_text(json.dumps(about))
