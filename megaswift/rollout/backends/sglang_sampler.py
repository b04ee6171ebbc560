"""Sampler backend for SGLang servers: token ids in, token ids and log-probabilities out, weight sync through a shared
folder. SGLang does not have to be installed in the trainer's environment.

    python -m sglang.launch_server --model-path DIR --enable-deterministic-inference

Log-probabilities are taken at the sampling temperature, before top-k, top-p and min-p (unless the server sets
SGLANG_RETURN_ORIGINAL_LOGPROB) and after the repetition penalty, which SGLang applies to completion tokens only. Seeds
take effect only with deterministic inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import (
    SamplingServer,
    ServerError,
    check_server_version,
    checked_completion,
    server_option_problems,
)
from megaswift.rollout.server_sampler import ADAPTER, ServerSampler

OLDEST = (0, 5, 9)
"""First release whose seeded sampling follows the probabilities; the hash of earlier releases is far from uniform."""
CONTEXT_MARGIN = 4
"""Tokens by which the context length exceeds `max_req_input_len`, the longest prompt that a server reports."""
UNUSED = 2
"""Last tokens of the context length that a server never uses."""


def missing(options: SamplerOptions) -> list[Problem]:
    """Problems that the options alone show; no server is contacted."""
    return server_option_problems(options, "sglang")


def build(folder: Path, options: SamplerOptions) -> SglangServerSampler:
    """The client, after every server has passed its checks."""
    return SglangServerSampler(folder, options)


class SglangServerSampler(ServerSampler):
    """Completions of one or more SGLang servers."""

    kind = "SGLang"
    port = 30000

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.seeded: list[SamplingServer] = []
        """Servers with deterministic inference."""
        super().__init__(folder, options)

    def command(self) -> str:
        """With adapters, includes the LoRA flags."""
        rank = self.options.lora_rank
        flags = f" --enable-lora --max-lora-rank {rank} --lora-target-modules all" if rank else ""
        return f"python -m sglang.launch_server --model-path {self.folder} --enable-deterministic-inference{flags}"

    def fit(self, server: SamplingServer) -> str:
        """Checks version, context length and adapters; returns the model's path, as a server serves one model."""
        server.reach(self.options.wait)
        try:
            info = server.get("/server_info")
        except ServerError as error:
            if error.status != 404:
                raise
            info = server.get("/get_server_info")  # its name in older releases
        info = info or {}
        check_server_version(info.get("version"), OLDEST, server)
        self.check_room(server, info.get("max_req_input_len"))
        if info.get("enable_deterministic_inference"):
            self.seeded.append(server)
        if self.adapts:
            widest = info.get("max_lora_rank") or self.options.lora_rank  # unset: that of the first adapters
            self.check_adapters(server, widest if info.get("enable_lora") else 0, info.get("load_format"))
        return str(info.get("model_path"))

    def check_room(self, server: SamplingServer, prompt: int | None) -> None:
        """ConfigError where the context length is too short: SGLang would truncate a completion without an error and
        report `length`."""
        wanted = self.options.max_length
        if wanted is None or prompt is None or prompt + CONTEXT_MARGIN >= wanted:
            return
        room = prompt + CONTEXT_MARGIN
        raise ConfigError(
            Problem(
                server.base_url,
                f"context length is {room}, but prompt and completion may have {wanted} tokens",
                f"--max_length {room}, or {server.start} --context-length {wanted + UNUSED}",
            )
        )

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """`ignore_eos` only without stop tokens: SGLang would ignore the run's stop tokens too."""
        if sampling.min_p and self.seeded:
            rule = f"is not supported with deterministic inference, which {self.seeded[0].base_url} uses"
            raise ConfigError(
                Problem(
                    f"--min_p {sampling.min_p}",
                    rule,
                    "leave it out, or omit --enable-deterministic-inference (seeds then have no effect)",
                )
            )
        return {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "ignore_eos": not sampling.stop_token_ids,
        }

    def ask(self, server: SamplingServer, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """SGLang selects an adapter by the `lora_path` field."""
        more = {"lora_path": ADAPTER} if self.adapts else {}
        return server.post(
            "/generate",
            {
                "input_ids": prompt,
                "return_logprob": True,
                "stream": False,
                **more,
                "sampling_params": {**common, "sampling_seed": seed},
            },
        )

    def completion(self, answer: Any, sampling: SamplingParams) -> Completion:
        """Reads `output_token_logprobs`: [[log-probability, token id, text], ...]."""
        try:
            entries = answer["meta_info"]["output_token_logprobs"]
            reason = answer["meta_info"]["finish_reason"]["type"]
            tokens = [entry[1] for entry in entries]
            logprobs = [entry[0] for entry in entries]
        except (KeyError, TypeError, IndexError):
            raise ServerError(
                Problem(
                    "a completion of SGLang",
                    "lacks output_token_logprobs or finish_reason",
                    f"install SGLang {'.'.join(map(str, OLDEST))} or later",
                )
            ) from None
        if reason not in ("stop", "length"):
            raise ServerError(
                Problem(
                    "a completion of SGLang",
                    f"finish_reason is {reason!r}; stop or length expected",
                    "see the server's log",
                )
            )
        return checked_completion(tokens, logprobs, reason == "stop", sampling)

    def load(self, server: SamplingServer, folder: Path) -> None:
        """Loads weights from disk with SGLang's own loader, also where the server started with dummy weights."""
        _take(
            server,
            "/update_weights_from_disk",
            {"model_path": str(folder), "load_format": "auto", "flush_cache": True},
            folder,
        )

    def load_adapter(self, server: SamplingServer, folder: Path) -> None:
        """Unloads the previous adapter first; an interrupted run may have left one too."""
        try:
            server.post("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if error.status != 400:  # there were none
                raise
        _take(server, "/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}, folder)
        server.post("/flush_cache")


def _take(server: SamplingServer, path: str, body: Mapping[str, Any], folder: Path) -> None:
    """Posts a request to load files. SGLang takes a folder that it cannot see for a hub model name, so the fix names
    the folder."""
    fix = f"see the server's log; {folder} must be the same folder on its machine (--rollout_sync_folder)"
    try:
        answer = server.post(path, body)
    except ServerError as error:
        if error.status != 400:
            raise
        [problem] = error.problems
        raise ServerError(Problem(problem.what, problem.rule, fix), error.status) from None
    if not isinstance(answer, dict) or not answer.get("success"):  # success is in the body, not in the status
        message = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
        raise ServerError(Problem(server.base_url, f"did not load the new weights: {message}", fix))
