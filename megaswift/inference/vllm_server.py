"""`--infer_backend vllm`: vLLM's own server with the options that have a word there. It is started as a program, never imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from megaswift.config.inference import DeployConfig
from megaswift.errors import Problem

OLDEST = (0, 10)
"""Older releases of vLLM are refused rather than guessed about."""
GENERATION = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")


def missing() -> list[Problem]:
    """What this machine lacks."""
    what = "--infer_backend vllm"
    if util.find_spec("vllm") is None:
        return [Problem(what, "vLLM is not installed here", "pip install vllm (it needs a GPU), or --infer_backend transformers")]
    version = metadata.version("vllm")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        rule = f"needs vLLM {'.'.join(map(str, OLDEST))} or later, and {version} is installed"
        return [Problem(what, rule, "pip install -U vllm, or --infer_backend transformers")]
    return []


def command(cfg: DeployConfig, folder: Path, name: str) -> list[str]:
    """The words that start it."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", name,
             "--host", cfg.server.host, "--port", str(cfg.server.port), "--dtype", cfg.weights.torch_dtype]
    if cfg.weights.trust_remote_code:
        words.append("--trust-remote-code")
    if cfg.server.tensor_parallel_size is not None:
        words += ["--tensor-parallel-size", str(cfg.server.tensor_parallel_size)]
    if cfg.conversation.chat_template is not None:
        words += ["--chat-template", cfg.conversation.chat_template]
    if cfg.placement.quantization_bit is not None:
        words += ["--quantization", "bitsandbytes"]
    if cfg.weights.adapters is not None:  # clients choose adapters by the model's name there
        words += ["--enable-lora", "--lora-modules", f"{name}-adapter={cfg.weights.adapters}"]
    given = {n: v for n in GENERATION if (v := getattr(cfg.generation, n)) is not None}
    return [*words, "--override-generation-config", json.dumps(given)]


def environment(environ: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The token goes where other users of the machine do not see it."""
    return {**environ, **({"VLLM_API_KEY": token} if token is not None else {})}
