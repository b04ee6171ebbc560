"""A client of SGLang's server: tokens in, tokens and log-probabilities out, new weights through a folder. SGLang is not
needed here.

    python -m sglang.launch_server --model-path DIR --enable-deterministic-inference

Log-probabilities are at the temperature and before the filters, unless the server's environment says otherwise
(SGLANG_RETURN_ORIGINAL_LOGPROB), but after a repetition penalty, which is on a completion's own tokens only. Seeds
count under deterministic inference only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import Server, ServerError, checked_completion, unusable, version_of
from megaswift.rollout.server_sampler import ADAPTER, ServerSampler

OLDEST = (0, 5, 9)
"""Draws by seeds as the probabilities say; releases before have a hash for it that is far from even."""
HIDDEN = 4
"""How many more tokens prompt and completion may have together than the longest prompt that a server tells."""


def missing(options: SamplerOptions) -> list[Problem]:
    """What the options lack; servers are asked later."""
    return unusable(options, "sglang")


def build(folder: Path, options: SamplerOptions) -> SglangSampler:
    """The client, once every server has answered."""
    return SglangSampler(folder, options)


class SglangSampler(ServerSampler):
    """Completions of one or more SGLang servers."""

    kind, port = "SGLang", 30000

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.seeded: list[Server] = []
        """Those with deterministic inference."""
        super().__init__(folder, options)

    def command(self) -> str:
        """With adapters, room for them too."""
        rank = self.options.lora_rank
        flags = f" --enable-lora --max-lora-rank {rank} --lora-target-modules all" if rank else ""
        return f"python -m sglang.launch_server --model-path {self.folder} --enable-deterministic-inference{flags}"

    def fit(self, server: Server) -> str:
        """Version, room and adapters; a server has one model, whose name nobody asks for."""
        server.reach(self.options.wait)
        try:
            info = server.get("/server_info")
        except ServerError as error:
            if error.status != 404:
                raise
            info = server.get("/get_server_info")  # its name in older releases
        info = info or {}
        version_of(info.get("version"), OLDEST, server)
        self.check_room(server, info.get("max_req_input_len"))
        if info.get("enable_deterministic_inference"):
            self.seeded.append(server)
        if self.adapts:
            widest = info.get("max_lora_rank") or self.options.lora_rank  # unset: that of the first adapters
            self.check_adapters(server, widest if info.get("enable_lora") else 0, info.get("load_format"))
        return str(info.get("model_path"))

    def check_room(self, server: Server, prompt: int | None) -> None:
        """ConfigError where a completion could be cut: the server does so by itself, and says that it was as long as
        allowed."""
        wanted = self.options.max_length
        if wanted is None or prompt is None or prompt + HIDDEN >= wanted:
            return
        room = prompt + HIDDEN
        raise ConfigError(
            Problem(
                server.base_url,
                f"takes {room} tokens of prompt and completion, and {wanted} may come",
                f"--max_length {room}, or {server.start} --context-length {wanted + 2}",
            )
        )

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """`ignore_eos` would ignore the run's stop tokens too."""
        if sampling.min_p and self.seeded:
            rule = f"ends {self.seeded[0].base_url}, which runs with deterministic inference"
            raise ConfigError(
                Problem(
                    f"--min_p {sampling.min_p}",
                    rule,
                    "leave it out, or start servers without --enable-deterministic-inference: seeds do not count then",
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

    def ask(self, server: Server, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """Adapters are chosen by a field of their own."""
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
        """Log-probabilities and tokens stand side by side: [[log-probability, token, text], ...]."""
        try:
            told = answer["meta_info"]["output_token_logprobs"]
            reason = answer["meta_info"]["finish_reason"]["type"]
            tokens, logprobs = [entry[1] for entry in told], [entry[0] for entry in told]
        except (KeyError, TypeError, IndexError):
            raise ServerError(
                Problem(
                    "a completion of SGLang",
                    "has no output_token_logprobs or finish_reason",
                    "a version of the server that this client was written for",
                )
            ) from None
        if reason not in ("stop", "length"):
            raise ServerError(Problem("a completion of SGLang", f"ended by {reason!r}", "look at the server's log"))
        return checked_completion(tokens, logprobs, reason == "stop", sampling)

    def load(self, server: Server, folder: Path) -> None:
        """By SGLang's own loader of files, also where the server began with made-up weights."""
        _take(
            server,
            "/update_weights_from_disk",
            {"model_path": str(folder), "load_format": "auto", "flush_cache": True},
            folder,
        )

    def load_adapter(self, server: Server, folder: Path) -> None:
        """Those before have to go first; a run that was broken off may have left some too."""
        try:
            server.post("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if error.status != 400:  # there were none
                raise
        _take(server, "/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}, folder)
        server.post("/flush_cache")


def _take(server: Server, path: str, body: Mapping[str, Any], folder: Path) -> None:
    """Asks for files to be read. A folder that it does not have a server takes for a model's name on the internet, and
    says so."""
    fix = f"look at its log; and {folder} has to be the same folder on its machine (--rollout_sync_folder)"
    try:
        answer = server.post(path, body)
    except ServerError as error:
        if error.status != 400:
            raise
        [told] = error.problems
        raise ServerError(Problem(told.what, told.rule, fix), error.status) from None
    if not isinstance(answer, dict) or not answer.get("success"):  # the body says whether it worked
        said = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
        raise ServerError(Problem(server.base_url, f"did not take new weights: {said}", fix))
