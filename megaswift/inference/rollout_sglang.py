"""A client of SGLang's server: tokens in, tokens and log-probabilities out, new weights through a folder. SGLang is not needed here.

    python -m sglang.launch_server --model-path DIR --enable-deterministic-inference

Its endpoints are those of SGLang's documentation; no real server has been asked by our tests. Log-probabilities are at the temperature and
before the filters, unless the server's environment says otherwise (SGLANG_RETURN_ORIGINAL_LOGPROB). Seeds count under deterministic
inference only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import Problem
from megaswift.inference.rollout import Completion, SamplerOptions, Sampling
from megaswift.inference.server_client import Server, ServerError, checked, unusable, version_of
from megaswift.inference.server_sampler import ADAPTER, ServerSampler

OLDEST = (0, 5)


def missing(options: SamplerOptions) -> list[Problem]:
    """What the options lack; servers are asked later."""
    return unusable(options, "sglang")


def build(folder: Path, options: SamplerOptions) -> SglangSampler:
    """The client, once every server has answered."""
    return SglangSampler(folder, options)


class SglangSampler(ServerSampler):
    """Completions of one or more SGLang servers."""

    kind, port = "SGLang", 30000

    def command(self) -> str:
        """With adapters, room for them too."""
        rank = self.options.lora_rank
        flags = f" --enable-lora --max-lora-rank {rank} --lora-target-modules all" if rank else ""
        return f"python -m sglang.launch_server --model-path {self.folder} --enable-deterministic-inference{flags}"

    def fit(self, server: Server) -> str:
        """Version and adapters; a server has one model, whose name nobody asks for."""
        server.reach(self.options.wait)
        try:
            info = server.get("/server_info")
        except ServerError as error:
            if error.status != 404:
                raise
            info = server.get("/get_server_info")  # its name in older releases
        info = info or {}
        version_of(info.get("version"), OLDEST, server)
        if self.adapts:
            widest = info.get("max_lora_rank") or self.options.lora_rank  # unset: that of the first adapters
            self.check_adapters(server, widest if info.get("enable_lora") else 0, info.get("load_format"))
        return str(info.get("model_path"))

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """`ignore_eos` would ignore the run's stop tokens too."""
        return {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids), "skip_special_tokens": False, "no_stop_trim": True,
            "ignore_eos": not sampling.stop_token_ids}

    def ask(self, server: Server, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """Adapters are chosen by a field of their own."""
        more = {"lora_path": ADAPTER} if self.adapts else {}
        return server.post("/generate", {"input_ids": prompt, "return_logprob": True, "stream": False, **more,
                                         "sampling_params": {**common, "sampling_seed": seed}})

    def completion(self, answer: Any, sampling: Sampling) -> Completion:
        """Log-probabilities and tokens stand side by side: [[log-probability, token, text], ...]."""
        try:
            told = answer["meta_info"]["output_token_logprobs"]
            reason = answer["meta_info"]["finish_reason"]["type"]
            tokens, logprobs = [entry[1] for entry in told], [entry[0] for entry in told]
        except (KeyError, TypeError, IndexError):
            raise ServerError(Problem("a completion of SGLang", "has no output_token_logprobs or finish_reason",
                                      "a version of the server that this client was written for")) from None
        if reason not in ("stop", "length"):
            raise ServerError(Problem("a completion of SGLang", f"ended by {reason!r}", "look at the server's log"))
        return checked(tokens, logprobs, reason == "stop", sampling)

    def load(self, server: Server, folder: Path) -> None:
        """By SGLang's own loader."""
        _done(server, server.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True}))

    def load_adapter(self, server: Server, folder: Path) -> None:
        """Those before have to go first; a run that was broken off may have left some too."""
        try:
            server.post("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if error.status != 400:  # there were none
                raise
        _done(server, server.post("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}))
        server.post("/flush_cache")


def _done(server: Server, answer: Any) -> None:
    """SGLang says in the body whether it worked."""
    if not isinstance(answer, dict) or not answer.get("success"):
        said = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
        raise ServerError(Problem(server.base_url, f"did not take new weights: {said}", "look at its log"))
