"""LoRA's reference numbers: the Hugging Face model with W + scale x B A in place of W, in plain torch, and adapter
folders to start from.

One trick serves every projection, experts in fused tensors included: the changed weights are a differentiable function
of A and B, and `torch.func.functional_call` runs the model on them. `test_lora.py` holds it against PEFT itself where
PEFT has the layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from megaswift.bisection.precision import Widened
from megaswift.bridge.initial_weights import initial_lora_a
from megaswift.losses.contract import Batch
from tests.parity.models import by_disk_name, disk_tensors
from tests.parity.oracle import Oracle, Recipe, Reference, adamw

RANK, ALPHA = 4, 6.0
PREFIX = "base_model.model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def adapted(shapes: Mapping[str, Sequence[int]], leaves: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(module, [out, in]) of every matrix whose module's name ends in one of `leaves`."""
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if any(module.endswith("." + leaf) for leaf in leaves) and name.endswith(".weight") and len(shape) == 2:
            yield module, (shape[0], shape[1])


@torch.no_grad()
def draw_lora_a(model: Any, seed: int) -> None:
    """Every A of a PEFT model, as our engines draw it."""
    for name, p in model.named_parameters():
        if ".lora_A.default.weight" in name:
            own = name.removeprefix("base_model.model.").replace(".default", "")
            p.copy_(initial_lora_a(own, tuple(p.shape), seed))


def disk_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face folder with its shape."""
    return {
        name: tuple(t.shape) for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()
    }


def make_adapter(
    model: Path, folder: Path, leaves: Sequence[str], saved: Sequence[str] = (), seed: int = 5, **config: Any
) -> Path:
    """A PEFT folder with random A and B, neither zero: a wrong scale, shard or order of rows moves every number."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (out, width) in adapted(disk_shapes(model), leaves):
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) / width**0.5
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.2
        if config.get("use_dora"):
            lengths = disk_tensors(model)[module + ".weight"].float().norm(dim=1)
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths * (
                0.75 + 0.5 * torch.rand(out, generator=generator)
            )
    for name in saved:
        tensors[PREFIX + name] = torch.randn(disk_shapes(model)[name], generator=generator) * 0.15
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    whole = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(leaves),
        "bias": "none",
        "modules_to_save": [name.removesuffix(".weight") for name in saved] or None,
        "base_model_name_or_path": str(model),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Its tensors by name without PEFT's prefix."""
    return {name.removeprefix(PREFIX): t for name, t in load_file(folder / "adapter_model.safetensors").items()}


class Adapted:
    """A Hugging Face model whose weights carry adapters; stands where the model itself would."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], scale: float) -> None:
        self.inner, self.config, self.scale = model.requires_grad_(False), model.config, scale
        self.tensors = {name: t.clone().requires_grad_() for name, t in tensors.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """What trains."""
        return list(self.tensors.items())

    def weight(self, name: str, base: Tensor) -> Tensor:
        """The weight of this name on disk, changed or not."""
        module = name.removesuffix(".weight")
        if name in self.tensors:
            return self.tensors[name]
        a, b = (self.tensors.get(f"{module}.lora_{half}.weight") for half in "AB")
        if a is None or b is None:
            return base
        changed, m = base + self.scale * (b @ a), self.tensors.get(f"{module}.lora_magnitude_vector")
        # DoRA, section 4.3: the length is constant
        return changed if m is None else changed * (m / changed.detach().norm(dim=1))[:, None]

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by its name in memory: experts joined again in the order in which `by_disk_name` takes them
        apart."""
        by_parameter: dict[str, list[Tensor]] = {}
        for memory, parameter in self.inner.named_parameters():
            one = _Only(self.inner.config, memory, parameter)
            by_parameter[memory] = [self.weight(disk, base) for disk, base in by_disk_name(one, lambda p: p)]
        found = {}
        for memory, parameter in self.inner.named_parameters():
            parts = by_parameter[memory]
            if len(parts) == 1:
                found[memory] = parts[0]
            elif memory.endswith("gate_up_proj"):
                found[memory] = torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)])
            else:
                found[memory] = torch.stack(parts)
            assert found[memory].shape == parameter.shape
        return found

    def __call__(self, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.inner, self.weights(), args=(), kwargs=kwargs)


@dataclass(frozen=True)
class _Only:
    """A model that has one parameter, for `by_disk_name`."""

    config: Any
    name: str
    parameter: Tensor

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """That one."""
        return [(self.name, self.parameter)]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """None."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """That parameter."""
        return {self.name: self.parameter}


class LoraOracle(Oracle):
    """The oracle with adapters: gradients and weights are theirs.

    In float64: the gradient of A through that of the whole product is rounded more in float32 (4e-6 for experts with
    few tokens) than the limits leave room for.
    """

    dtype = torch.float64

    def __init__(self, folder: Path, recipe: Recipe, adapter: Path) -> None:
        super().__init__(folder, recipe)
        config = json.loads((adapter / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        self.model.set_experts_implementation("eager")  # grouped products have no float64
        tensors = {n: t.to(self.dtype) for n, t in read_adapter(adapter).items()}
        self.model = Adapted(self.model.to(self.dtype), tensors, scale)
        self.optimizer = adamw(self.model.tensors.items(), recipe)

    def gradients(self) -> dict[str, Tensor]:
        """By name in the adapter's folder."""
        return {
            n: torch.zeros_like(t).float() if t.grad is None else t.grad.float().clone()  # clipping scales in place
            for n, t in self.model.tensors.items()
        }

    def weights(self) -> dict[str, Tensor]:
        """By name in the adapter's folder."""
        return {n: t.detach().float().clone() for n, t in self.model.tensors.items()}


class Float32LoraOracle(LoraOracle):
    """The same in float32: what rounding alone changes."""

    dtype = torch.float32


class AddedLoraOracle(Float32LoraOracle):
    """With the adapters' outputs added to the layers', as PEFT and our engines do, those of experts too."""

    def __init__(self, folder: Path, recipe: Recipe, adapter: Path) -> None:
        super().__init__(folder, recipe, adapter)
        self.added = AddedAdapters(self.model)

    def logits(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[int, int]]]:
        """Per document, as the plain oracle."""
        adapted = self.model
        self.model = adapted.inner
        try:
            with self.added:
                yield from super().logits(batch)
        finally:
            self.model = adapted


class AddedAdapters(TorchFunctionMode):
    """Adds each adapter's output to that of the product that its matrix is in: of a module, or of one expert, whose
    gate and up are one matrix."""

    def __init__(self, model: Adapted) -> None:
        super().__init__()
        self.scale = model.scale
        self.of_matrix: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        for memory, parameter in model.inner.named_parameters():
            matrices = parameter if parameter.dim() == 3 else [parameter]
            starts = [matrix.data_ptr() for matrix in matrices]
            row = parameter.shape[-1] * parameter.element_size()
            for disk, part in by_disk_name(_Only(model.config, memory, parameter), lambda p: p):
                module = disk.removesuffix(".weight")
                a, b = (model.tensors.get(f"{module}.lora_{half}.weight") for half in "AB")
                if a is not None and b is not None:
                    start = max(s for s in starts if s <= part.data_ptr())
                    self.of_matrix.setdefault(start, []).append(((part.data_ptr() - start) // row, a, b))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Products alone are changed."""
        out = func(*args, **(kwargs or {}))
        for first, a, b in self.of_matrix.get(args[1].data_ptr(), ()) if func is F.linear else ():
            change = F.linear(F.linear(args[0], a), b) * self.scale
            out = out + F.pad(change, (first, out.shape[-1] - first - change.shape[-1]))
        return out


class PeftOracle(Oracle):
    """The oracle on PEFT's own layers, in float64 as the other one."""

    dtype = torch.float64

    def __init__(self, folder: Path, recipe: Recipe, adapter: Path) -> None:
        from peft import PeftModel

        super().__init__(folder, recipe)
        self.model.set_experts_implementation("eager")
        self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True).to(self.dtype).train()
        self.tensors = {
            n.removeprefix(PREFIX).replace(".default", "").replace(".modules_to_save", ""): p
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }
        self.optimizer = adamw(self.tensors.items(), recipe)

    def gradients(self) -> dict[str, Tensor]:
        """By name in the adapter's folder."""
        return {n: torch.zeros_like(t).float() if t.grad is None else t.grad.float() for n, t in self.tensors.items()}

    def weights(self) -> dict[str, Tensor]:
        """By name in the adapter's folder."""
        return {n: t.detach().float() for n, t in self.tensors.items()}


def made_by_peft(model: Path, folder: Path, **options: Any) -> Any:
    """PEFT's own model with random adapters, saved by PEFT."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(8)
    for p in made.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator) * 0.1
    made.save_pretrained(folder)
    return made


def reference(
    folder: Path,
    recipe: Recipe,
    adapter: Path,
    steps: Sequence[Sequence[Batch]],
    kind: type[LoraOracle] | type[PeftOracle] = LoraOracle,
    wide: bool = False,
) -> Reference:
    """What the model with the adapters computes; `wide`: what it computes in float32 whatever its dtype in float64."""
    oracle = kind(folder, recipe, adapter)
    with Widened() if wide else nullcontext():
        return oracle.trajectory(steps)
