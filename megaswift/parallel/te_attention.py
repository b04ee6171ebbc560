"""What of a model's attention Transformer Engine's kernels do not compute. No torch."""

from __future__ import annotations

from importlib import metadata

from megaswift.models.spec import ModelSpec


def te_unsupported_attention_features(
    spec: ModelSpec, cp_comm_type: str | None = None, packing: bool = False
) -> list[str]:
    """What of a model's attention Transformer Engine's kernels do not compute, under this layout; `cp_comm_type` None
    is no context parallelism.

    Source: the combinations that Transformer Engine's own attention tests leave out, and Megatron-Core 0.16's latent
    attention, which has no packed rows of unequal key and value widths.
    """
    cp = cp_comm_type is not None
    found = []
    if spec.features.attention_softcap is not None:
        found.append("soft caps on attention scores")
    if spec.features.rope_local is not None:
        found.append("a second rotary embedding")
    if spec.transformer.get("softmax_type", "vanilla") != "vanilla" and (cp or packing):
        found.append(f"attention sinks with {'context parallelism' if cp else 'packed rows'}")
    latent = bool(spec.transformer.get("multi_latent_attention"))
    if cp and spec.transformer.get("window_size") and cp_comm_type != "a2a":
        found.append(f"sliding windows with --cp_comm_type {cp_comm_type} (supported with a2a)")
    if cp and packing and cp_comm_type in ("all_gather", "a2a+p2p"):
        found.append(f"packed rows with --cp_comm_type {cp_comm_type} (supported with p2p)")
    if cp and latent and cp_comm_type != "p2p":
        found.append(f"latent attention with --cp_comm_type {cp_comm_type} (supported with p2p)")
    if latent and packing and not megatron_version_at_least("0.17"):
        found.append("packed latent attention in this version of Megatron-Core")
    return found


def megatron_version_at_least(version: str) -> bool:
    """Whether Megatron-Core is of this release, `major.minor`, or newer."""
    have, wanted = (tuple(map(int, v.split(".")[:2])) for v in (metadata.version("megatron-core"), version))
    return have >= wanted
