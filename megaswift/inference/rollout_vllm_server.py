"""A client of `vllm serve`: tokens in, tokens and log-probabilities out, new weights through a folder. vLLM is not needed here.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --logprobs-mode processed_logprobs

Its endpoints are those of vLLM's documentation and sources; no real server has been asked by our tests. One process updates weights, any
number may generate. Servers have devices of their own, so `sleep` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import ConfigError, Problem
from megaswift.inference.rollout import Completion, SamplerOptions, Sampling
from megaswift.inference.server_client import Server, ServerError, Servers, WeightFolder, checked, loopback, unusable, version_of

OLDEST = (0, 22)
PORT = 8000
ADAPTER = "megaswift-policy"
"""The name of the adapters of a run that trains adapters; every process asks for it."""
MODE = "processed_logprobs"


def missing(options: SamplerOptions) -> list[Problem]:
    """What the options lack; servers are asked later."""
    return unusable(options, "vllm_server")


def build(folder: Path, options: SamplerOptions) -> VllmServerSampler:
    """The client, once every server has said that it is fit."""
    return VllmServerSampler(folder, options)


class VllmServerSampler:
    """Completions of one or more vLLM servers."""

    shared = True

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.options = options
        self.takes_adapters = options.lora_rank > 0
        flags = f" --enable-lora --max-lora-rank {options.lora_rank}" if options.lora_rank else ""
        variables = "VLLM_SERVER_DEV_MODE=1" + (" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if options.lora_rank else "")
        start = f"{variables} vllm serve {folder} --logprobs-mode {MODE}{flags}"
        made = [Server(url, options.timeout, "vLLM", start) for url in loopback(options, PORT)]
        self.servers = Servers(made, options.batch_size)
        self.weights = None if options.sync_folder is None else WeightFolder(options.sync_folder, folder)
        names = self.servers.each(self._fit)
        self.names = dict(zip(made, names, strict=True))

    def _fit(self, server: Server) -> str:
        """The name of the model that a server has; errors for one that cannot be used."""
        server.reach(self.options.wait)
        version_of((server.get("/version") or {}).get("version"), OLDEST, server)
        info = server.get("/server_info?config_format=json") or {}
        mode = info.get("vllm_config", {}).get("model_config", {}).get("logprobs_mode")
        if mode != MODE:
            raise ConfigError(Problem(server.base_url, f"tells {mode}, which are not those of the tokens that it draws", server.start))
        card = ((server.get("/v1/models") or {}).get("data") or [{}])[0]
        room, wanted = card.get("max_model_len"), self.options.max_length
        if wanted is not None and room is not None and room < wanted:
            raise ConfigError(Problem(server.base_url, f"takes {room} tokens of prompt and completion, and {wanted} may come",
                                      f"{server.start} --max-model-len {wanted}"))
        return str(card.get("id"))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One request a prompt, each with its seed."""
        assert len(prompts) == len(seeds)
        body = {
            "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty, "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only the tokens above stop
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False}

        def ask(server: Server, i: int) -> Completion:
            name = ADAPTER if self.takes_adapters else self.names[server]
            answer = server.post("/v1/completions", {**body, "model": name, "prompt": list(prompts[i]), "seed": seeds[i]})
            return self._completion(answer, sampling)

        return self.servers.complete(ask, len(prompts))

    def _completion(self, answer: Any, sampling: Sampling) -> Completion:
        try:
            [choice] = answer["choices"]
            tokens, logprobs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            raise ServerError(Problem("a completion of vLLM", "has no token_ids, logprobs or finish_reason",
                                      "a version of the server that this client was written for")) from None
        if reason == "stop" and (not tokens or tokens[-1] not in sampling.stop_token_ids):
            raise ServerError(Problem("a completion of vLLM", "stops without one of the run's stop tokens at its end",
                                      "a server without stop strings of its own"))
        return checked(tokens, logprobs, reason == "stop", sampling)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes them as a folder and has every server load it; what servers remember of prompts is dropped."""
        assert self.weights is not None, "missing() asks for sync_folder"
        folder = self.weights.write(weights)

        def load(server: Server) -> None:
            server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}})
            server.post("/reset_prefix_cache")

        self.servers.each(load)
        self.weights.taken(folder)

    def update_adapter(self, folder: Path) -> None:
        """Has every server load the adapters in place of those before."""
        body = {"lora_name": ADAPTER, "lora_path": str(folder.absolute()), "load_inplace": True}

        def load(server: Server) -> None:
            server.post("/v1/load_lora_adapter", body)
            server.post("/reset_prefix_cache")

        self.servers.each(load)

    def sleep(self) -> None:
        """Nothing: the memory is not this machine's."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Removes the files; servers go on."""
        if self.weights is not None:
            self.weights.close()
