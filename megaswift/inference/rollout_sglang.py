"""A client of SGLang's server: tokens in, tokens and log-probabilities out, new weights through a folder. SGLang is not needed here.

    python -m sglang.launch_server --model-path DIR --enable-deterministic-inference

Its endpoints are those of SGLang's documentation; no real server has been asked by our tests. Log-probabilities are at the temperature and
before the filters, unless the server's environment says otherwise (SGLANG_RETURN_ORIGINAL_LOGPROB). Seeds count under deterministic
inference only. One process updates weights, any number may generate. Servers have devices of their own, so `sleep` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import Problem
from megaswift.inference.rollout import Completion, SamplerOptions, Sampling
from megaswift.inference.server_client import Server, ServerError, Servers, WeightFolder, checked, loopback, unusable, version_of

OLDEST = (0, 5)
PORT = 30000
ADAPTER = "megaswift-policy"


def missing(options: SamplerOptions) -> list[Problem]:
    """What the options lack; servers are asked later."""
    return unusable(options, "sglang")


def build(folder: Path, options: SamplerOptions) -> SglangSampler:
    """The client, once every server has answered."""
    return SglangSampler(folder, options)


class SglangSampler:
    """Completions of one or more SGLang servers."""

    shared = True

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.options = options
        self.takes_adapters = options.lora_rank > 0
        flags = f" --enable-lora --max-lora-rank {options.lora_rank} --lora-target-modules all" if options.lora_rank else ""
        start = f"python -m sglang.launch_server --model-path {folder} --enable-deterministic-inference{flags}"
        made = [Server(url, options.timeout, "SGLang", start) for url in loopback(options, PORT)]
        self.servers = Servers(made, options.batch_size)
        self.weights = None if options.sync_folder is None else WeightFolder(options.sync_folder, folder)
        self.adapted = False
        self.servers.each(self._fit)

    def _fit(self, server: Server) -> None:
        server.reach(self.options.wait)
        try:
            info = server.get("/server_info")
        except ServerError as error:
            if error.status != 404:
                raise
            info = server.get("/get_server_info")  # its name in older releases
        version_of((info or {}).get("version"), OLDEST, server)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One request a prompt, each with its seed."""
        assert len(prompts) == len(seeds)
        how: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids), "skip_special_tokens": False, "no_stop_trim": True,
            "ignore_eos": not sampling.stop_token_ids}  # it would ignore stop_token_ids too
        more = {"lora_path": ADAPTER} if self.takes_adapters else {}

        def ask(server: Server, i: int) -> Completion:
            answer = server.post("/generate", {"input_ids": list(prompts[i]), "return_logprob": True, "stream": False, **more,
                                               "sampling_params": {**how, "sampling_seed": seeds[i]}})
            return self._completion(answer, sampling)

        return self.servers.complete(ask, len(prompts))

    def _completion(self, answer: Any, sampling: Sampling) -> Completion:
        try:
            told = answer["meta_info"]["output_token_logprobs"]  # [[log-probability, token, text], ...]
            reason = answer["meta_info"]["finish_reason"]["type"]
            tokens, logprobs = [entry[1] for entry in told], [entry[0] for entry in told]
        except (KeyError, TypeError, IndexError):
            raise ServerError(Problem("a completion of SGLang", "has no output_token_logprobs or finish_reason",
                                      "a version of the server that this client was written for")) from None
        if reason not in ("stop", "length"):
            raise ServerError(Problem("a completion of SGLang", f"ended by {reason!r}", "look at the server's log"))
        return checked(tokens, logprobs, reason == "stop", sampling)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes them as a folder and has every server load it; what servers remember of prompts is dropped."""
        assert self.weights is not None, "missing() asks for sync_folder"
        folder = self.weights.write(weights)
        body = {"model_path": str(folder.absolute()), "flush_cache": True}
        self.servers.each(lambda server: _done(server, server.post("/update_weights_from_disk", body)))
        self.weights.taken(folder)

    def update_adapter(self, folder: Path) -> None:
        """Has every server load the adapters in place of those before."""
        body = {"lora_name": ADAPTER, "lora_path": str(folder.absolute())}

        def load(server: Server) -> None:
            if self.adapted:
                _done(server, server.post("/unload_lora_adapter", {"lora_name": ADAPTER}))
            _done(server, server.post("/load_lora_adapter", body))
            server.post("/flush_cache")

        self.servers.each(load)
        self.adapted = True

    def sleep(self) -> None:
        """Nothing: the memory is not this machine's."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Removes the files; servers go on."""
        if self.weights is not None:
            self.weights.close()


def _done(server: Server, answer: Any) -> None:
    """SGLang says in the body whether it worked."""
    if not isinstance(answer, dict) or not answer.get("success"):
        said = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
        raise ServerError(Problem(server.base_url, f"did not take new weights: {said}", "look at its log"))
