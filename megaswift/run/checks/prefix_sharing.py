"""Decides whether answers to a prompt share it in training (`--prefix_sharing`).

Owns the default: on where the numbers are those of separate prompts. What is shared is in
`data/batches/prefix_sharing.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.engine.options.extra_kwargs import extra_kwargs_values
from megaswift.errors import Problem
from megaswift.models.any_model import dropout_fields, spec_from_family
from megaswift.models.options.linear import PREFIX_SHARING
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.models.vision import reads_images
from megaswift.options.tasks import PROMPTED, RL
from megaswift.parallel.layout import Layout
from megaswift.trainers.options.batch_sizes import batch_plan

CUDNN = 90700
"""9.7, as its version number."""
DROPOUTS = ("attention_dropout", "hidden_dropout")
ROUTER_FIELDS = ("moe_router_enable_expert_bias", "moe_input_jitter_eps")
"""Megatron-Core's fields by which it matters how often a router sees a token."""


def shares_prefixes(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> bool:
    """Return whether the run's micro-batches have each prompt once."""
    return not _reason_why_not(cfg, spec, layout)


def prefix_sharing_rows(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return the rows of the first screen; none for tasks that have nothing to share."""
    if cfg.task not in PROMPTED:
        return ()
    why = _reason_why_not(cfg, spec, layout)
    text = f"computed for each answer: {why}" if why else "computed once for their answers in a micro-batch"
    return (("prompts", text),)


def _reason_why_not(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> str:
    if cfg.data.prefix_sharing is False:
        return "--prefix_sharing false"
    if cfg.task in RL and batch_plan(cfg.train, layout.dp).per_device == 1:
        return "micro-batches have one completion (--per_device_train_batch_size)"
    why = reason_against_prefix_sharing(cfg, spec, layout.cp)
    if not why and not cfg.data.prefix_sharing:
        why = _why_not_by_default(cfg, spec)
    return f"prefix sharing {why}" if why else ""


def _why_not_by_default(cfg: SwiftConfig, spec: ModelSpec) -> str:
    """Tests hold families to Hugging Face. Any other model is checked when it is loaded, and refused where its numbers
    are not the same: too late for a default."""
    tested = spec_from_family(spec.hf_config) is not None and "auto_map" not in spec.hf_config
    if requested_engine(cfg) == NATIVE or (tested and cfg.critic.critic_model is None):
        return ""
    return "was not tested with this model: --prefix_sharing true checks it"


def prefix_sharing_problems(cfg: SwiftConfig, spec: ModelSpec, cp: int) -> Iterator[Problem]:
    """Report why prompts cannot be shared where the options ask for it."""
    if cfg.data.prefix_sharing and (why := reason_against_prefix_sharing(cfg, spec, cp)):
        yield Problem("--prefix_sharing true", why, "leave it out")


def reason_against_prefix_sharing(cfg: SwiftConfig, spec: ModelSpec, cp: int) -> str:
    """Return why the numbers of a run would differ from those of separate prompts; empty where they do not. `cp`:
    context-parallel ranks."""
    engine = requested_engine(cfg)
    torch_engine = engine != NATIVE
    reasons: tuple[tuple[Any, str], ...] = (
        (
            torch_engine and (not _attends_by_torch(cfg.model, spec) or cfg.model.torch_compile),
            f"is supported on the engine {engine} with --attn_impl sdpa and without --torch_compile",
        ),
        (reads_images(cfg, spec.hf_config), "is not supported with vision-language models"),
        (any(spec.features.linear_layers), PREFIX_SHARING.refused),
        (cfg.data.packing is False, "needs packed rows (--packing true)"),
        (
            _drops_out(cfg, spec),
            "each completion would have the same dropout on its prompt, where separate prompts have their own",
        ),
        (
            cfg.train.neftune_noise_alpha is not None,
            "each completion would have the same noise on its prompt (--neftune_noise_alpha), where separate prompts "
            "have their own",
        ),
        (
            spec.experts and _counts_tokens(cfg.model, spec),
            "router losses, capacity, jitter and bias updates count a prompt once for each completion",
        ),
        (
            cp > 1 and _may_take_transformer_engine(cfg),
            "is supported with context parallelism by torch's attention only (--attn_impl sdpa)",
        ),
        (
            _may_take_transformer_engine(cfg) and not _has_kernel_for_more_keys_than_queries(),
            "needs FlashAttention 2 or cuDNN 9.7 in Transformer Engine's attention (or --attn_impl sdpa)",
        ),
    )
    return next((why for applies, why in reasons if applies), "")


def _attends_by_torch(model: ModelConfig, spec: ModelSpec) -> bool:
    """On the torch engines; without the option config.json may choose. Soft caps and sinks are eager in any case."""
    if model.attn_impl != "auto":
        return model.attn_impl == "sdpa"
    eager = spec.features.attention_softcap is not None or spec.transformer.get("softmax_type") == "learnable"
    chosen = (spec.hf_config.get(name) for name in ("attn_implementation", "_attn_implementation"))
    return all(name in (None, "eager" if eager else "sdpa") for name in chosen)


def _drops_out(cfg: SwiftConfig, spec: ModelSpec) -> bool:
    adapters = cfg.lora.lora_dropout if cfg.model.train_type != "full" else 0.0
    unread = requested_engine(cfg) != NATIVE and dropout_fields(spec.hf_config)
    return bool(adapters or unread or any(spec.transformer.get(name) for name in DROPOUTS))


def _counts_tokens(model: ModelConfig, spec: ModelSpec) -> bool:
    default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
    balances = default if model.moe_aux_loss_coeff is None else model.moe_aux_loss_coeff
    more = {**spec.transformer, **extra_kwargs_values(model.megatron_extra_kwargs)}
    counted = (balances, model.moe_z_loss_coeff, model.moe_expert_capacity_factor, *map(more.get, ROUTER_FIELDS))
    return any(counted)


def _has_kernel_for_more_keys_than_queries() -> bool:
    """Whether there is a kernel for packed documents whose causal mask is aligned at the last of both; without it,
    Transformer Engine falls back on plain products of all documents padded to the longest. Source: its
    `nvte_get_fused_attn_backend`."""
    import torch

    return importlib.util.find_spec("flash_attn") is not None or (torch.backends.cudnn.version() or 0) >= CUDNN


def _may_take_transformer_engine(cfg: SwiftConfig) -> bool:
    import torch

    torch_only = cfg.model.transformer_impl == "torch" or cfg.model.attn_impl == "sdpa"
    return requested_engine(cfg) == NATIVE and torch.cuda.is_available() and not torch_only
