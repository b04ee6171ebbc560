"""The choice between Transformer Engine's modules and torch's for a run, with its reasons.

Products (with norms and experts) and attention are chosen apart: Transformer Engine multiplies for every family, and
attention is ours only where its own does not compute what the model or the layout needs. Building the layers is
`spec.py`'s.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megaswift.engine.options.te import ATTENTION, PRODUCTS, install_command
from megaswift.errors import ConfigError, Problem
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.te_attention import te_unsupported_attention_features

TRANSFORMER_ENGINE = "transformer_engine"
TORCH = "torch"


def fp8_blockwise_sp_hidden_size_problems(recipe: str, hidden_size: int, layout: Layout) -> list[Problem]:
    """Sequence-parallel ranks gather quantized blocks of 128 x 128, whole ones only (Transformer Engine's
    `Float8BlockQuantizer.is_quantizable`)."""
    if recipe != "blockwise" or not layout.sequence_parallel or hidden_size % 128 == 0:
        return []
    rule = f"needs a hidden size divisible by 128 with sequence parallelism; this model's is {hidden_size}"
    return [Problem("--fp8_recipe blockwise", rule, "--fp8_recipe tensorwise")]


def fp8_width_problems(recipe: str, spec: ModelSpec, layout: Layout) -> list[Problem]:
    """FP8 products take widths of a rank that are multiples of 16 (Transformer Engine's `assert_dim_for_fp8_exec`),
    those of MXFP8 multiples of its blocks of 32 (`MXFP8Quantizer.make_empty`)."""
    unit = 32 if recipe == "mxfp8" else 16
    shape = ModelShape.of(spec)
    widths = {"hidden size": (spec.hidden_size, 1)}
    if not spec.transformer.get("multi_latent_attention"):
        widths["width of all heads"] = (shape.heads * shape.head_dim, layout.tp)
        widths["width of queries, keys and values"] = ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, layout.tp)
    if not shape.experts or not all(map(shape.is_moe, range(shape.num_layers))):
        widths["MLP width"] = (shape.ffn, layout.tp)
    if shape.experts:
        widths["width of an expert"] = (shape.expert_ffn, layout.etp)
    problems = []
    for name, (width, ranks) in widths.items():
        if width % ranks == 0 and width // ranks % unit:
            share = f"{width} / {ranks} ranks = {width // ranks}" if ranks > 1 else str(width)
            rule = f"needs a {name} on each rank that is divisible by {unit}; here it is {share}"
            fix = f"fewer {'expert-' if 'expert' in name else ''}tensor-parallel ranks, or no --fp8_format"
            problems.append(Problem(f"--fp8_recipe {recipe}", rule, fix))
    return problems


@dataclass(frozen=True)
class LayerImplementationChoice:
    """The choice of a run's modules, `transformer_engine` or `torch`, and its reason."""

    linear: str
    """Products, norms, experts."""
    attention: str
    reason: str
    """The reason for the choice of `linear`."""
    own: tuple[str, ...] = ()
    """Why attention is torch's where products are Transformer Engine's."""

    def torch_parts(self) -> dict[str, str]:
        """Return the parts that use torch's modules, with the reason: `products`, `attention`."""
        parts = {PRODUCTS: self.reason} if self.linear == TORCH else {}
        if self.attention == TORCH:
            parts[ATTENTION] = ", ".join(self.own) or self.reason
        return parts

    def __str__(self) -> str:
        """For the first screen."""
        if self.linear == self.attention:
            return f"{self.linear} ({self.reason})"
        own = f" ({', '.join(self.own)})" if self.own else ""
        return f"{self.linear} ({self.reason}), attention: {self.attention}{own}"


def transformer_engine_unusable_reason() -> str:
    """Why Transformer Engine's kernels cannot run in this process; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    installed = importlib.util.find_spec("transformer_engine") is not None
    return "" if installed else f"Transformer Engine is not installed: {install_command(torch.version.cuda)}"


def choose_layer_implementation(
    spec: ModelSpec, model: ModelConfig, cp_comm_type: str | None, shares_rows: bool
) -> LayerImplementationChoice:
    """The choice for `--transformer_impl` and `--attn_impl`, this model and this layout.

    Args:
        cp_comm_type: How context-parallel ranks exchange keys and values; None without context parallelism.
        shares_rows: Whether a row holds several documents.

    Raises:
        ConfigError: Transformer Engine was requested and cannot run.
    """
    asked = model.transformer_impl
    lack = transformer_engine_unusable_reason()
    if asked == TORCH:
        return LayerImplementationChoice(TORCH, TORCH, "asked for")
    if lack:
        if asked == TRANSFORMER_ENGINE:
            raise ConfigError(Problem("--transformer_impl transformer_engine", lack, "--transformer_impl torch"))
        return LayerImplementationChoice(TORCH, TORCH, lack)
    reason = "asked for" if asked == TRANSFORMER_ENGINE else "CUDA and Transformer Engine are available"
    own = te_unsupported_attention_features(spec, cp_comm_type, shares_rows)
    if model.attn_impl == "sdpa":
        own.append("--attn_impl sdpa")
    attention = TORCH if own else TRANSFORMER_ENGINE
    if model.train_type == "qlora":
        return LayerImplementationChoice(TORCH, attention, "weights in NF4", tuple(own))
    return LayerImplementationChoice(TRANSFORMER_ENGINE, attention, reason, tuple(own))
