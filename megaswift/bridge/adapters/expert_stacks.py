"""Stacks of experts in PEFT's folders, taken apart: A [experts x r, in] and B [out, r x experts] for a parameter that
holds all experts.

Owns which experts' projections a stack is about and what part of it each one's A and B are. `plan` puts a stack
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from megaswift.bridge.adapters.plan import HALVES, deinterleave_gate_up
from megaswift.models.targets import Projection

TensorReader = Callable[[], Tensor]


def module_names_of_stacked_expert_lora_keys(names: Iterable[str]) -> list[str]:
    """Returns the part before `.lora_A.weight` in the names of stacked tensors: PEFT's wrapped modules of experts."""
    return sorted(
        {n.rsplit(".lora_", 1)[0] for n in names if ".experts.lora_" in n or ".experts.base_layer.lora_" in n}
    )


def per_expert_lora_readers(
    stack: str, a: TensorReader, b: TensorReader, known: Mapping[str, Projection]
) -> Iterator[tuple[str, TensorReader]]:
    """Yield the name and a reader of A and B for each expert's module; nothing where the stack fits none of the
    model's.

    The module's name does not say which of its parameters a stack is for; shapes do: [2 f, h] is never [h, f]. Where
    gate and up are two modules here, both get a copy of the A that they share in this form.
    """
    rows_a, width = a().shape
    out, columns_b = b().shape
    layers: dict[str, list[Projection]] = {}
    for module, projection in known.items():
        if module.startswith(_on_disk(stack.removesuffix(".base_layer"), known) + "."):
            layers.setdefault(projection.megatron, []).append(projection)
    fitting = [
        members
        for members in layers.values()
        if (sum(p.shape[0] for p in members), members[0].shape[1]) == (out, width)
    ]
    if not fitting or rows_a != columns_b or rows_a % len(fitting):
        return
    for expert, members in enumerate(fitting):
        first = 0
        for p in members:
            rows = slice(first, first + p.shape[0])
            first = rows.stop
            yield f"{p.module}.lora_{HALVES[0]}.weight", partial(_expert_a, a, len(fitting), expert)
            yield (
                f"{p.module}.lora_{HALVES[1]}.weight",
                partial(_expert_b, b, (len(fitting), expert), rows, p.alternating),
            )


def _expert_a(read: TensorReader, experts: int, expert: int) -> Tensor:
    return read().unflatten(0, (experts, -1))[expert]


def _expert_b(read: TensorReader, which: tuple[int, int], rows: slice, alternating: int) -> Tensor:
    experts, expert = which
    return deinterleave_gate_up(read().unflatten(1, (-1, experts))[rows, :, expert], alternating)


def target_parameter_of_expert_module(module: str) -> str:
    """Convert `mlp.experts.3.up_proj` to the parameter that PEFT's patterns name: `mlp.experts.gate_up_proj`.

    transformers calls Mixtral's block `mlp` in memory and `block_sparse_moe` on disk.
    """
    experts, _, leaf = module.rpartition(".")
    home = experts.rpartition(".")[0].replace(".block_sparse_moe.", ".mlp.")
    return f"{home}.{'down_proj' if leaf in ('down_proj', 'w2') else 'gate_up_proj'}"


def _on_disk(experts: str, known: Mapping[str, Projection]) -> str:
    """transformers calls Mixtral's block `mlp` in memory and `block_sparse_moe` on disk."""
    other = experts.replace(".mlp.", ".block_sparse_moe.")
    return experts if any(m.startswith(experts + ".") for m in known) else other
