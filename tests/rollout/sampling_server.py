"""A real HTTP server that speaks what vLLM's and SGLang's servers document, over our own sampler in this process.

It refuses fields that those servers do not know, and takes weights from the folder that it is told.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load_file
from torch import Tensor

from megaswift.rollout.backends.transformers_sampler import TransformersSampler
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.weight_transfer.vllm_servers import EXTENSION
from megaswift.rollout.weight_transfer.vllm_worker_extension import WeightSyncExtension
from tests.loopback_http import serve_loopback

VLLM_FIELDS = {
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "seed",
}
SGLANG_FIELDS = {"input_ids", "return_logprob", "stream", "sampling_params", "lora_path"}
SGLANG_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "skip_special_tokens",
    "no_stop_trim",
    "ignore_eos",
    "sampling_seed",
}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


GETS = {"/health", "/version", "/server_info", "/get_server_info", "/v1/models"}


class Backend:
    """What both kinds do; `calls` are the paths that were asked, in order.

    With `rank` it takes adapters of so much, onto the weights in `folder`.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.sampler, self.rank = TransformersSampler(folder, SamplerOptions(lora_rank=rank)), rank
        self.lock = threading.Lock()
        self.calls: list[tuple[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.told: dict[str, Any] = {}
        """Answers that a test sets, by path."""

    def answer(self, path: str, body: Any) -> Any:
        with self.lock:
            self.calls.append((path, body))
            if path in self.told:
                said = self.told[path]
                if isinstance(said, Refused):
                    raise said
                return said
            route: Callable[[Any], Any] | None = self.routes().get(path)
            if route is None:
                raise Refused(404, "Not Found")
            if body is None and path not in GETS:
                raise Refused(405, "Method Not Allowed")
            return route(body)

    def routes(self) -> dict[str, Callable[[Any], Any]]:
        raise NotImplementedError

    def load(self, path: str) -> None:
        """As a server loads a folder: its index says where each tensor lies."""
        folder = Path(path)
        assert (folder / "config.json").is_file()
        where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: load_file(folder / name) for name in sorted(set(where.values()))}
        self.sampler.update_weights((name, files[file][name]) for name, file in where.items())

    def adapt(self, name: str, path: str) -> None:
        """As a server loads adapters: there is one set at a time, by which all prompts are answered."""
        self.sampler.update_adapter(Path(path))
        self.adapters = {name: path}

    def sample(self, prompt: list[int], sampling: SamplingParams, seed: int) -> Completion:
        return self.sampler.generate([prompt], sampling, [seed])[0]


def known(body: dict[str, Any], fields: set[str]) -> None:
    if not body.keys() <= fields:
        raise Refused(400, f"unknown fields {body.keys() - fields}")


class Vllm(Backend):
    """`vllm serve`."""

    def routes(self) -> dict[str, Callable[[Any], Any]]:
        lora = {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload} if self.rank else {}
        return {
            "/health": lambda _: None,
            "/version": lambda _: {"version": "0.26.1+cu129"},
            "/server_info": lambda _: self.info(),
            "/v1/models": lambda _: {
                "object": "list",
                "data": [
                    {"id": "served", "max_model_len": 96},
                    *({"id": name, "max_model_len": None} for name in self.adapters),
                ],
            },
            "/v1/completions": self.completions,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": lambda _: {"success": True},
            **lora,
        }

    def info(self) -> dict[str, Any]:
        return {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "load_config": {"load_format": "auto"},
                "lora_config": {"max_lora_rank": self.rank, "max_loras": 1} if self.rank else None,
            }
        }

    def completions(self, body: dict[str, Any]) -> Any:
        known(body, VLLM_FIELDS)
        if body["model"] not in {"served", *self.adapters}:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0
        sampling = SamplingParams(
            body["max_tokens"],
            body["temperature"],
            body["top_k"],
            body["top_p"],
            body["min_p"],
            body["repetition_penalty"],
            tuple(body["stop_token_ids"]),
        )
        made = self.sample(
            body["prompt"], sampling, body.get("seed", len(self.calls))
        )  # without one, another each time
        told = {
            "tokens": [f"token_id:{t}" for t in made.token_ids],
            "token_logprobs": list(made.logprobs),
            "top_logprobs": None,
        }
        return {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "token_ids": list(made.token_ids),
                    "prompt_token_ids": body["prompt"],
                    "logprobs": told,
                    "finish_reason": "stop" if made.finished else "length",
                }
            ]
        }

    def rpc(self, body: dict[str, Any]) -> Any:
        """Its loader of files; that of `--load-format dummy` reads none."""
        assert body["method"] == "reload_weights" and body["kwargs"].keys() == {"weights_path"}
        self.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def load_adapter(self, body: dict[str, Any]) -> Any:
        assert not body.get("load_inplace"), "it would read the folder again before every token"
        if body["lora_name"] in self.adapters:
            raise Refused(400, "has already been loaded")
        self.adapt(body["lora_name"], body["lora_path"])
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def unload(self, body: dict[str, Any]) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(404, "cannot be found")
        return f"Success: LoRA adapter '{body['lora_name']}' removed successfully."


class Sglang(Backend):
    """`sglang.launch_server`."""

    def routes(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "/health": lambda _: None,
            "/get_server_info": lambda _: self.info(),
            "/generate": self.generate,
            "/flush_cache": lambda _: None,
            "/update_weights_from_disk": self.update,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload,
        }

    def info(self) -> dict[str, Any]:
        return {
            "version": "0.5.9",
            "model_path": "DIR",
            "load_format": "auto",
            "enable_lora": self.rank > 0 or None,
            "max_lora_rank": self.rank or None,
            "max_req_input_len": 90,
            "enable_deterministic_inference": False,
        }

    def generate(self, body: dict[str, Any]) -> Any:
        known(body, SGLANG_FIELDS)
        how = body["sampling_params"]
        known(how, SGLANG_SAMPLING)
        if body.get("lora_path") not in {None, *self.adapters}:
            raise Refused(400, "adapter not loaded")
        assert how["ignore_eos"] == (not how["stop_token_ids"]), "it would ignore the stop tokens too"
        sampling = SamplingParams(
            how["max_new_tokens"],
            how["temperature"],
            max(how["top_k"], 0),
            how["top_p"],
            how["min_p"],
            how["repetition_penalty"],
            tuple(how["stop_token_ids"]),
        )
        made = self.sample(body["input_ids"], sampling, how["sampling_seed"])
        reason = (
            {"type": "stop", "matched": made.token_ids[-1]}
            if made.finished
            else {"type": "length", "length": len(made.token_ids)}
        )
        told = [[value, token, None] for value, token in zip(made.logprobs, made.token_ids, strict=True)]
        return {
            "text": "",
            "output_ids": list(made.token_ids),
            "meta_info": {"finish_reason": reason, "output_token_logprobs": told},
        }

    def update(self, body: dict[str, Any]) -> Any:
        assert body["load_format"] == "auto", "it would load nothing where it was started with dummy weights"
        self.load(body["model_path"])
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def load_adapter(self, body: dict[str, Any]) -> Any:
        if body["lora_name"] in self.adapters:
            raise Refused(400, "already loaded")
        self.adapt(body["lora_name"], body["lora_path"])
        return {"success": True}

    def unload(self, body: dict[str, Any]) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(400, "not loaded")
        return {"success": True}


@contextmanager
def serving(backend: Backend, token: str | None = None, port: int = 0) -> Iterator[str]:
    """The address of the server for the length of a block; any free port, or this one."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

        def _reply(self, body: Any) -> None:
            status = 200
            try:
                if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                    raise Refused(401, "Unauthorized")
                said = backend.answer(urlsplit(self.path).path, body)
            except Refused as error:
                status, said = error.status, {"error": str(error)}
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    with serve_loopback(Handler, port) as address:
        yield address


class Worker(WeightSyncExtension):
    """A vLLM worker of a server of two, as far as the extension sees it."""

    device = "cpu"

    def __init__(self, rank: int, load: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
        )
        self.load = load

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.load(list(weights_iterator))


class VllmWithExtension(Vllm):
    """Two workers with the extension for weight sync; what both have got answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.state: list[dict[str, Tensor]] = [{}, {}]
        self.workers = [Worker(rank, lambda got, rank=rank: self.state[rank].update(got)) for rank in (0, 1)]

    def info(self) -> dict[str, Any]:
        said = super().info()
        said["vllm_config"]["parallel_config"] = {"worker_extension_cls": EXTENSION}
        return said

    def rpc(self, body: dict[str, Any]) -> Any:
        assert body.keys() == {"method", "args"} and all(isinstance(given, str) for given in body["args"])
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda worker: getattr(worker, body["method"])(*body["args"]), self.workers))
        if body["method"] == "megaswift_receive":
            one, two = self.state
            assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
            self.sampler.update_weights(one.items())
        return {"results": results}
