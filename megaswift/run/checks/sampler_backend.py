"""Chooses the sampler of a reinforcement learning run that names none: vLLM where it can run on this machine's GPU."""

from __future__ import annotations

import re

from megaswift import log
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, UserError
from megaswift.folders.source import locate_model
from megaswift.models.family import read_config_json
from megaswift.models.options.model import ModelConfig
from megaswift.models.vision import has_vision_tower
from megaswift.options.tasks import RL

OPTION = "rollout_backend"


def resolve_sampler_backend(cfg: SwiftConfig, tell: bool = True) -> SwiftConfig:
    """Select `rollout_backend vllm` where the user named no backend, a GPU is there, a build of vLLM for it is
    installed, and no other option forbids it. `tell`: says so, or why not."""
    if cfg.task not in RL or OPTION in cfg.given or OPTION in cfg.typed:
        return cfg
    import torch

    if not torch.cuda.is_available():
        return cfg
    if _reads_images(cfg.model):
        if tell:
            log.info("rollout_backend transformers: only it gets the images of prompts")
        return cfg
    from megaswift.rollout.backends import vllm_sampler
    from megaswift.rollout.sampler import SamplerOptions
    from megaswift.rollout.vllm_package import is_cpu_build

    lacking = [problem.rule for problem in vllm_sampler.missing(SamplerOptions())]
    if not lacking and is_cpu_build():
        lacking = ["the installed vLLM is a CPU build"]
    if not lacking:
        chosen, kept = _with_vllm(cfg)
        if chosen is not None and not kept:
            if tell:
                log.info("rollout_backend vllm: it is installed, and this machine has a GPU")
            return chosen
        lacking = [f"{', '.join(kept)} cannot be combined with it"]
    if tell:
        log.info(f"rollout_backend transformers, which generates much more slowly than vLLM: {'; '.join(lacking)}")
    return cfg


def _reads_images(model: ModelConfig) -> bool:
    """Whether the model is a vision-language model; False where it cannot be read, which is reported later."""
    try:
        return has_vision_tower(read_config_json(locate_model(model, weights=False)))
    except UserError:
        return False


def _with_vllm(cfg: SwiftConfig) -> tuple[SwiftConfig | None, list[str]]:
    """The configuration with vLLM, None where rules forbid it; the user's options that it would override."""
    try:
        chosen = cfg.replace(rollout_backend="vllm")
    except ConfigError as error:
        return None, [re.split("[ =]", problem.what.removeprefix("--"))[0] for problem in error.problems]
    return chosen, [name for name in sorted(cfg.given) if chosen.value(name) != cfg.value(name)]
