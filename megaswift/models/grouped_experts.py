"""Whether a run multiplies all experts of a rank in one grouped product or one after the other. No torch.

Grouped, the numbers of tokens of experts stay on the device and a layer launches a few kernels; one after the other it
launches as many as there are experts.
"""

from __future__ import annotations

from megaswift.errors import Problem
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec

ROW_BYTES = 16
"""What rows of a grouped product's operands are a multiple of (torch: "strides should be multiple of 16 bytes")."""


def torch_multiplies(model: ModelConfig, torch_products: bool) -> bool:
    """Whether experts that are grouped are multiplied by torch; `torch_products`: as all other layers are."""
    return torch_products or model.moe_grouped_gemm_impl == "torch"


def needs_torch_widths(model: ModelConfig, torch_products: bool) -> bool:
    """Whether torch multiplies rows of experts that are grouped, by their weights or by their adapters."""
    return torch_multiplies(model, torch_products) or model.train_type == "lora"


def grouped_width_problems(spec: ModelSpec, etp: int, element_bytes: int, asked: str) -> list[Problem]:
    """Why torch's grouped product cannot multiply a model's experts: widths of a rank, of elements of so many bytes.
    `asked`: what asks for it."""
    unit = ROW_BYTES // element_bytes
    widths = {"hidden size": spec.hidden_size, "width of an expert on each rank": spec.expert_ffn // etp}
    return [
        Problem(
            asked,
            f"needs a {name} that is divisible by {unit}; here it is {width}",
            "--moe_grouped_gemm false",
        )
        for name, width in widths.items()
        if width % unit
    ]


def groups_experts(
    model: ModelConfig, dora: bool, spec: ModelSpec, etp: int, element_bytes: int, torch_products: bool
) -> bool:
    """`--moe_grouped_gemm`, or where it is unset: except with DoRA and NF4, which need each expert's weight by itself,
    and with widths that torch's product does not take."""
    if model.moe_grouped_gemm is not None:
        return model.moe_grouped_gemm
    if dora or model.train_type == "qlora":
        return False
    return not needs_torch_widths(model, torch_products) or not grouped_width_problems(spec, etp, element_bytes, "")
