"""The choice between Transformer Engine's layers and torch's for a run, with its reason.

Owns what Transformer Engine's layers, as Megatron-Core puts them together, do not compute, or have not been seen to
compute: a run that needs it takes the torch layers and says so. Building the layers is layer_spec.py's.
"""

from __future__ import annotations

import importlib.util

import megatron.core
import torch

from megaswift.errors import ConfigError, Problem
from megaswift.families.model_spec import Features, ModelSpec

IN_LAYERS = ("residual_scale", "attention_softcap", "pre_norm", "post_norm", "qk_norm_width", "rope_local")


FP8_NEEDS = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Recipe -> the least compute capability with which Transformer Engine computes it (`check_fp8_support` and its
neighbours)."""
FP8_NAMES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def fp8_problems(recipe: str, capability: tuple[int, int]) -> list[Problem]:
    """Why a GPU of this compute capability cannot run an FP8 recipe; Transformer Engine itself would say so in the
    first step."""
    least = FP8_NEEDS[recipe]
    if capability >= least:
        return []
    fits = [name for name, needed in FP8_NEEDS.items() if capability >= needed]
    rule = (
        f"needs compute capability {least[0]}.{least[1]} ({FP8_NAMES[least]}) or newer; this GPU has "
        f"{capability[0]}.{capability[1]}"
    )
    return [
        Problem(
            f"--fp8_recipe {recipe}",
            rule,
            " or ".join(f"--fp8_recipe {name}" for name in reversed(fits)) or "--fp8_format none",
        )
    ]


def torch_only_features(spec: ModelSpec) -> list[str]:
    """What of a model the torch layers alone compute, under every layout.

    Sinks: Transformer Engine has them from 2.8 on, for some attention backends, and not for packed rows with each of
    them.
    """
    plain = Features()
    differing = [name for name in IN_LAYERS if getattr(spec.features, name) != getattr(plain, name)]
    return differing + (["attention sinks"] if spec.transformer.get("softmax_type", "vanilla") != "vanilla" else [])


def torch_only_reasons(spec: ModelSpec, cp_comm_type: str | None, packing: bool) -> list[str]:
    """What the torch layers alone compute under this run's layout; `cp_comm_type` None is no context parallelism.

    Source: the combinations that Transformer Engine's own attention tests leave out, and Megatron-Core 0.16's latent
    attention, which has no packed rows of unequal key and value widths.
    """
    latent, cp = bool(spec.transformer.get("multi_latent_attention")), cp_comm_type is not None
    unsupported = []
    if cp and spec.transformer.get("window_size") and cp_comm_type != "a2a":
        unsupported.append(f"sliding windows with --cp_comm_type {cp_comm_type} (supported with a2a)")
    if cp and packing and cp_comm_type in ("all_gather", "a2a+p2p"):
        unsupported.append(f"packed rows with --cp_comm_type {cp_comm_type} (supported with p2p)")
    if cp and latent and cp_comm_type != "p2p":
        unsupported.append(f"latent attention with --cp_comm_type {cp_comm_type} (supported with p2p)")
    if latent and packing and tuple(map(int, megatron.core.__version__.split(".")[:2])) < (0, 17):
        unsupported.append("packed latent attention in this version of Megatron-Core")
    return unsupported


def transformer_engine_lack() -> str:
    """Why Transformer Engine's kernels cannot run in this process; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    installed = importlib.util.find_spec("transformer_engine") is not None
    return "" if installed else "Transformer Engine is not installed"


def choose_layer_impl(implementation: str, attention: str = "auto", lacking: str = "") -> tuple[str, str]:
    """(`transformer_engine` or `torch`, why) for `--transformer_impl` and `--attn_impl`; `lacking` is what only torch
    layers do."""
    if lacking and implementation == "transformer_engine":
        raise ConfigError(
            Problem(
                "--transformer_impl transformer_engine",
                f"its layers do not support {lacking}, which this model needs",
                "--transformer_impl torch",
            )
        )
    if lacking and implementation == "auto":
        return "torch", f"Transformer Engine's layers do not support {lacking}, which this model needs"
    lack = transformer_engine_lack()
    if implementation == "torch":
        return "torch", "asked for"
    if implementation == "transformer_engine":
        if lack:
            raise ConfigError(Problem("--transformer_impl transformer_engine", lack, "--transformer_impl torch"))
        return "transformer_engine", "asked for"
    if attention == "sdpa":
        return "torch", "--attn_impl sdpa needs it"
    if lack:
        return "torch", lack
    return "transformer_engine", "CUDA and Transformer Engine are available"
