"""`--infer_backend vllm`: vLLM's own server with the options that have a word there. It is started as a program, never imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from megaswift.config.inference import DeployConfig

GENERATION = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")


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
