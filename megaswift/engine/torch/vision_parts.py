"""The parts of a vision-language model by its module names: vision encoder, aligner, language model; which of them are
trained.

Owns `--freeze_vit`, `--freeze_aligner` and `--freeze_llm`. transformers says which modules the tower and the language
model are; what is neither, and the merger that Qwen's towers end in, aligns the two. So every weight belongs to one
part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.errors import ConfigError, Problem
from megaswift.models.options.model import ModelConfig

VIT = "vit"
ALIGNER = "aligner"
LLM = "llm"
MERGERS = re.compile(r"(^|\.)(merger|deepstack_merger_list|multi_modal_projector|projector|connector)(\.|$)")
"""Modules that align, inside a tower too."""
DEFAULTS = {VIT: True, ALIGNER: True, LLM: False}
"""What is frozen unless it is said: as in ms-swift."""


def model_has_tower(model: nn.Module) -> bool:
    """Whether the model looks at images."""
    return getattr(getattr(model, "config", None), "vision_config", None) is not None


def trains_encoder_or_aligner(model: Any) -> bool:
    """Whether anything beside the language model trains."""
    if not model_has_tower(model):
        return False
    language = _names(model, model.get_decoder()) + _names(model, model.get_output_embeddings())
    return any(p.requires_grad and not _below(name, language) for name, p in model.named_parameters())


class VisionModelPartNames:
    """Which part of a model each name belongs to."""

    def __init__(self, model: Any, wrapped: nn.Module | None = None) -> None:
        """`wrapped`: what holds the model, if names are those in it."""
        root = wrapped or model
        self._tower = _names(root, model.get_encoder(modality="image"))
        self._language = _names(root, model.get_decoder())
        self._language += _names(root, model.get_output_embeddings()) if self._language else []
        if not self._tower or not self._language:
            raise ConfigError(
                Problem(
                    "--freeze_vit, --freeze_aligner, --freeze_llm",
                    f"transformers does not identify the module of {type(model).__name__} that is the "
                    + ("language model" if self._tower else "vision encoder"),
                    (
                        "--freeze_vit false --freeze_aligner false, and --freeze_parameters PATTERN for the frozen "
                        "weights"
                    ),
                )
            )

    def of(self, name: str) -> str:
        """The part of a parameter."""
        if _below(name, self._language):
            return LLM
        return VIT if _below(name, self._tower) and not MERGERS.search(name) else ALIGNER


def _names(model: nn.Module, module: Any) -> list[str]:
    """Names of a module in the model; none of the model itself."""
    return [name for name, m in model.named_modules() if m is module and name]


def _below(name: str, modules: list[str]) -> bool:
    return any(name == m or name.startswith(m + ".") for m in modules)


def frozen_vision_model_parts(model: nn.Module, cfg: ModelConfig) -> set[str]:
    """The parts that do not train; none of a model that reads text only."""
    if not model_has_tower(model):
        return set()
    choices = {VIT: cfg.freeze_vit, ALIGNER: cfg.freeze_aligner, LLM: cfg.freeze_llm}
    return {part for part, value in choices.items() if (DEFAULTS[part] if value is None else value)}


def freeze_vision_model_parts(model: nn.Module, cfg: ModelConfig) -> None:
    """Weights of frozen parts do not train."""
    if frozen := frozen_vision_model_parts(model, cfg):
        parts = VisionModelPartNames(model)
        for name, parameter in model.named_parameters():
            if parts.of(name) in frozen:
                parameter.requires_grad_(False)


def recompute_layers(model: Any, cfg: ModelConfig) -> None:
    """Layers that the options name are computed again in the backward pass: all, or with `vit_gradient_checkpointing`
    those of the vision encoder alone, or all others."""
    whole = cfg.recompute_granularity == "full"
    encoder = cfg.vit_gradient_checkpointing
    if not whole and not encoder:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if encoder is None or encoder == whole:
        return
    tower = {*model.get_encoder(modality="image").modules()}
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing") and (module in tower) != encoder:
            module.gradient_checkpointing = False


def note_parts_with_own_learning_rates(wrapped: nn.Module, optim: OptimConfig) -> None:
    """Sets `vision_part` of each parameter where `vit_lr` or `aligner_lr` is given, for its group in the optimizer.
    ConfigError for a model without a vision encoder."""
    given = [f"--{name}" for name in ("vit_lr", "aligner_lr") if getattr(optim, name) is not None]
    if not given:
        return
    model = next((m for m in wrapped.modules() if isinstance(m, PreTrainedModel)), None)
    if model is None or not model_has_tower(model):
        raise ConfigError(Problem(" and ".join(given), "this model has no vision encoder", "leave it out"))
    parts = VisionModelPartNames(model, wrapped)
    for name, parameter in wrapped.named_parameters():
        parameter.vision_part = parts.of(name)  # type: ignore[attr-defined]


def frozen_modules_pattern(model: nn.Module, cfg: ModelConfig) -> str | None:
    """A pattern of whole names, of the modules of frozen parts: they get no adapters."""
    frozen = frozen_vision_model_parts(model, cfg)
    names = list(_whole("", model, VisionModelPartNames(model), frozen)) if frozen else []
    return f"(?:{'|'.join(map(re.escape, names))})(?:\\..*)?" if names else None


def _whole(name: str, module: nn.Module, parts: VisionModelPartNames, frozen: set[str]) -> Iterator[str]:
    """The uppermost modules all of whose weights are frozen."""
    parts_of_module = {parts.of(f"{name}.{p}" if name else p) for p, _ in module.named_parameters()}
    if name and parts_of_module and parts_of_module <= frozen:
        yield name
    elif parts_of_module & frozen:
        for child, inner in module.named_children():
            yield from _whole(f"{name}.{child}" if name else child, inner, parts, frozen)
