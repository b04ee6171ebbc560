"""Clients of vLLM's and SGLang's servers against a small server with their wire format (test_real_*.py: the real ones).

Covers: megaswift/rollout/backends/sglang_sampler.py, megaswift/rollout/backends/vllm_server_sampler.py,
megaswift/rollout/server_client.py, megaswift/rollout/server_sampler.py."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megaswift.errors import ConfigError, UserError
from megaswift.rollout import pieces, server_client, sync_folders, vllm_package
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.pieces import next_piece, with_piece
from megaswift.rollout.sampler import (
    Completion,
    Sampler,
    SamplerOptions,
    SamplingParams,
    make_sampler,
    sampler_backend_names,
    sampler_backend_problems,
)
from tests.inference.models import adapters
from tests.rollout.sampling_server import Backend, Refused, Sglang, Vllm, serving
from tests.rollout.test_transformers import PROMPTS, filled, weights

pytestmark = pytest.mark.wide

KINDS: dict[str, type[Backend]] = {"vllm_server": Vllm, "sglang": Sglang}
SAMPLING = SamplingParams(12, temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, stop_token_ids=(1, 7, 9))
SEEDS = range(40, 46)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def client(kind: str, model: Path, *urls: str, **options: Any) -> Sampler:
    return make_sampler(kind, model, SamplerOptions(base_urls=urls, timeout=300, **options))


def test_two_servers_answer_as_the_sampler_that_they_are_made_of(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, settings, seeds, tokens and log-probabilities arrive; new weights come through the folder, in several
    shards."""
    monkeypatch.setattr(sync_folders, "SHARD_BYTES", 20000)
    alone = filled(model, batch_size=1)  # as the servers here take one prompt at a time
    want = alone.generate(PROMPTS, SAMPLING, SEEDS)
    assert {c.finished for c in want} == {True, False}
    one, two = KINDS[kind](model), KINDS[kind](model)
    with serving(one) as first, serving(two) as second:
        made = client(kind, model, first, second, sync_folder=tmp_path / "sync")
        made.update_weights((n, t + 0.1) for n, t in weights(model))
        assert made.generate(PROMPTS, SAMPLING, SEEDS) != want
        made.update_weights(weights(model))
        assert made.generate(PROMPTS, SAMPLING, SEEDS) == want
        made.sleep()
        made.wake()
        greedy = SamplingParams(5, temperature=0)
        assert made.generate(PROMPTS, greedy, SEEDS) == alone.generate(PROMPTS, greedy, SEEDS)
        [kept] = (tmp_path / "sync").iterdir()
        assert len(list(kept.glob("*.safetensors"))) > 2
        made.close()
        assert not (tmp_path / "sync").exists()
    for backend in (one, two):
        asked = [path for path, _ in backend.calls if path in ("/generate", "/v1/completions")]
        assert len(asked) == 9


def test_interrupted_completions_are_those_of_one_call(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces with seeds of their own, wherever the run stops between them; new weights write what follows."""
    monkeypatch.setattr(pieces, "PIECE", 4)
    nothing = [Completion((), (), False)] * 6
    with serving(KINDS[kind](model)) as url:
        made: Any = client(kind, model, url, sync_folder=tmp_path / "sync", batch_size=2)
        made.update_weights(weights(model))
        want = made.extend(PROMPTS, nothing, SAMPLING, SEEDS, bool)
        assert {c.finished for c in want} == {True, False}
        found = nothing
        calls = 0
        while not all(c.finished or len(c.token_ids) == SAMPLING.max_tokens for c in found):
            calls += 1
            asked = iter(range(99))
            found = made.extend(PROMPTS, found, SAMPLING, SEEDS, lambda asked=asked: next(asked) > 2)  # type: ignore[misc]
        assert found == want and calls > 3
        for mine, theirs in zip(want, made.generate(PROMPTS, SAMPLING, SEEDS), strict=True):
            assert mine.token_ids[:4] == theirs.token_ids[:4], "the first piece has the completion's own seed"
        begun = [Completion(c.token_ids[:4], c.logprobs[:4], c.finished and len(c.token_ids) <= 4) for c in want]
        made.update_weights((n, 1.3 * t) for n, t in weights(model))
        other = made.extend(PROMPTS, begun, SAMPLING, SEEDS, bool)
        assert [c.logprobs[:4] for c in other] == [c.logprobs[:4] for c in want]
        assert all(a.logprobs[4] != b.logprobs[4] for a, b in zip(other, want, strict=True) if len(b.logprobs) > 4)
        made.close()


def test_prompts_one_by_one(kind: str, model: Path, tmp_path: Path) -> None:
    """Those of one number go to one server, and no server has more of them than its limit at a time."""
    alone = filled(model, batch_size=1)
    want = alone.generate(PROMPTS, SAMPLING, SEEDS)
    backends = KINDS[kind](model), KINDS[kind](model)
    under_way = [0, 0]
    most = [0, 0]
    with serving(backends[0]) as first, serving(backends[1]) as second:
        made: Any = client(kind, model, first, second, sync_folder=tmp_path / "sync", batch_size=2)
        made.update_weights(weights(model))
        ask = made.ask

        def counted(server: Any, *arguments: Any) -> Any:
            place = (first, second).index(server.base_url)
            under_way[place] += 1
            most[place] = max(most[place], under_way[place])
            time.sleep(0.05)
            answer = ask(server, *arguments)
            under_way[place] -= 1
            return answer

        made.ask = counted
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            numbers = [0 if i < 4 else 1 for i in range(len(PROMPTS))]
            found = [*pool.map(made.generate_one, PROMPTS, [SAMPLING] * len(PROMPTS), SEEDS, numbers)]
    assert found == want and most[0] == 2 and most[1] <= 2
    asked = [sum(path in ("/generate", "/v1/completions") for path, _ in one.calls) for one in backends]
    assert asked == [4, len(PROMPTS) - 4]


def test_adapters_alone_come_in_place_of_those_before(kind: str, model: Path, tmp_path: Path) -> None:
    """Onto weights that the server has by itself; those of a run that was broken off are in nobody's way. Nothing is
    written."""
    folders = [adapters(tmp_path / name, model, seed) for name, seed in (("one", 5), ("two", 6))]
    alone, backend = build(model, SamplerOptions(lora_rank=4, batch_size=1)), KINDS[kind](model, rank=4)
    found = []
    with serving(backend) as url:
        client(kind, model, url, lora_rank=4).update_adapter(folders[1])
        made = client(kind, model, url, lora_rank=4, sync_folder=tmp_path / "sync")
        for folder in folders:
            made.update_adapter(folder)
            alone.update_adapter(folder)
            found.append(made.generate(PROMPTS, SAMPLING, SEEDS))
            assert found[-1] == alone.generate(PROMPTS, SAMPLING, SEEDS)
        made.close()
    assert found[0] != found[1] and not (tmp_path / "sync").exists()
    asked = {path for path, _ in backend.calls}
    assert not asked & {"/collective_rpc", "/update_weights_from_disk"} and asked & {
        "/reset_prefix_cache",
        "/flush_cache",
    }


def told_of(rank: int, **more: Any) -> dict[str, Any]:
    """What vLLM's server says of itself."""
    return {
        "vllm_config": {
            "lora_config": {"max_lora_rank": rank},
            "model_config": {"logprobs_mode": "processed_logprobs"},
            **more,
        }
    }


START = {
    "vllm_server": (
        "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve .* --enable-lora --max-lora-rank 16"
    ),
    "sglang": "sglang.launch_server .* --enable-lora --max-lora-rank 9 --lora-target-modules all",
}


@pytest.mark.parametrize(
    ("kind", "path", "said", "told"),
    [
        ("vllm_server", None, None, "LoRA is not enabled"),
        ("vllm_server", "/server_info", told_of(8), "maximum LoRA rank is 8; the run's adapters have rank 9"),
        ("vllm_server", "/server_info", told_of(16, load_config={"load_format": "dummy"}), "has dummy weights"),
        ("vllm_server", "/server_info", told_of(16), "does not allow runtime LoRA updates"),
        ("sglang", None, None, "LoRA is not enabled"),
        (
            "sglang",
            "/get_server_info",
            {"version": "0.5.9", "enable_lora": True, "max_lora_rank": 4},
            "maximum LoRA rank is 4",
        ),
        (
            "sglang",
            "/get_server_info",
            {"version": "0.5.9", "enable_lora": True, "load_format": "dummy"},
            "has dummy weights",
        ),
    ],
)
def test_servers_started_without_adapters_are_told_how_to_start(
    kind: str, path: str | None, said: Any, told: str, model: Path
) -> None:
    """With the command that does it, room rounded up to what the server can make; before a prompt is asked."""
    backend = KINDS[kind](model)
    if path is not None:
        backend.told[path] = said
    with serving(backend) as url, pytest.raises(ConfigError, match=f"(?s){told}.*{START[kind]}"):
        client(kind, model, url, lora_rank=9)
    assert not any(body for _, body in backend.calls)


def test_no_server_and_no_folder_are_told(kind: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a folder for weight sync"):
        client(kind, model, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="is not a valid URL"):
        client(kind, model, "127.0.0.1:8000", sync_folder=tmp_path)
    with pytest.raises(
        UserError, match=r"no response from a .* server \(.*refused.*\)\n    try: .*(vllm serve|launch_server)"
    ):
        client(kind, model, "http://127.0.0.1:9", sync_folder=tmp_path)


def test_a_server_that_starts_later_is_waited_for(model: Path, tmp_path: Path) -> None:
    backend = Vllm(model)
    with socket.socket() as held, ThreadPoolExecutor(1) as pool:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server may have the port, nobody else
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        made = pool.submit(client, "vllm_server", model, f"http://127.0.0.1:{port}", sync_folder=tmp_path, wait=30)
        time.sleep(0.3)
        with serving(backend, port=port):
            made.result()
    assert [path for path, _ in backend.calls] == ["/health", "/version", "/server_info", "/v1/models"]


def test_the_token_goes_with_every_request(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(KINDS[kind](model), token="s3cret") as url:
        monkeypatch.delenv(server_client.KEY, raising=False)
        with pytest.raises(UserError, match="401"):
            client(kind, model, url, sync_folder=tmp_path)
        monkeypatch.setenv(server_client.KEY, "s3cret")
        client(kind, model, url, sync_folder=tmp_path)


MODEL = {"model_config": {"logprobs_mode": "raw_logprobs"}}
CHOICE = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1, -0.2]}, "finish_reason": "stop"}
WRONG: list[tuple[str, str, Any, str]] = [
    ("vllm_server", "/version", {"version": "0.21.9"}, "0.22 or later is required"),
    ("vllm_server", "/server_info", Refused(404, "Not Found"), "VLLM_SERVER_DEV_MODE=1 vllm serve"),
    (
        "vllm_server",
        "/server_info",
        {"vllm_config": MODEL},
        "logprobs_mode is raw_logprobs.*\n.*--logprobs-mode processed_logprobs",
    ),
    (
        "vllm_server",
        "/server_info",
        {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "load_config": {"load_format": "dummy"},
            }
        },
        "cannot load weights from files",
    ),
    (
        "vllm_server",
        "/v1/models",
        {"data": [{"id": "m", "max_model_len": 80}]},
        "max_model_len is 80.* 90 tokens.*\n.*--max-model-len 90",
    ),
    ("vllm_server", "/v1/completions", {"choices": [{**CHOICE, "logprobs": None}]}, "lacks token_ids, logprobs"),
    ("vllm_server", "/v1/completions", {"choices": [CHOICE]}, "finished without one of the run's stop tokens"),
    (
        "vllm_server",
        "/v1/completions",
        {"choices": [{**CHOICE, "finish_reason": "length", "token_ids": [5]}]},
        "1 tokens and 2 log",
    ),
    ("vllm_server", "/collective_rpc", Refused(500, "boom"), "responded with 500: .*boom"),
    ("vllm_server", "/reset_prefix_cache", {"success": False}, "prefix cache not reset"),
    (
        "vllm_server",
        "/v1/completions",
        {"choices": [{**CHOICE, "finish_reason": "length"}]},
        "cut off at 2 tokens; the limit is 12",
    ),
    (
        "vllm_server",
        "/v1/completions",
        Refused(401, "Unauthorized"),
        "responded with 401.*\n    try: set MEGASWIFT_ROLLOUT_API_KEY=",
    ),
    ("sglang", "/get_server_info", {"version": "0.5.8.post1"}, "0.5.9 or later is required"),
    (
        "sglang",
        "/get_server_info",
        {"version": "0.5.10", "max_req_input_len": 85},
        "context length is 89.* 90 tokens.*\n.*--max_length 89, or .* --context-length 92",
    ),
    (
        "sglang",
        "/get_server_info",
        {"version": "0.5.10", "enable_deterministic_inference": True},
        "--min_p 0.01: .*deterministic.*\n    try: leave it out",
    ),
    ("sglang", "/generate", {"text": "x", "meta_info": {}}, "lacks output_token_logprobs"),
    (
        "sglang",
        "/generate",
        {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}},
        "finish_reason is 'abort'",
    ),
    (
        "sglang",
        "/update_weights_from_disk",
        {"success": False, "message": "no such file"},
        "did not load the new weights: no such file",
    ),
    (
        "sglang",
        "/update_weights_from_disk",
        Refused(400, "Name or service not known"),
        "responded with 400: .*service not known.*\n    try: .*weights-.* must be the same folder on its machine",
    ),
]


@pytest.mark.parametrize(
    ("kind", "path", "said", "told"), WRONG, ids=[f"{k}{p}-{i}" for i, (k, p, _, _) in enumerate(WRONG)]
)
def test_what_servers_do_wrong_is_told(kind: str, path: str, said: Any, told: str, model: Path, tmp_path: Path) -> None:
    backend = KINDS[kind](model)
    backend.told[path] = said
    with serving(backend) as url, pytest.raises(UserError, match=told):
        made = client(kind, model, url, sync_folder=tmp_path, max_length=90)
        made.update_weights(weights(model))
        made.generate(PROMPTS, SAMPLING, SEEDS)


def test_vllm_in_process_is_refused_where_it_is_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler_backend_names() == ["sglang", "transformers", "vllm", "vllm_server"]
    monkeypatch.setattr(vllm_package.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        make_sampler("vllm", model, SamplerOptions())
    monkeypatch.setattr(vllm_package.util, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm_package.metadata, "version", lambda name: "0.11.2")
    [problem] = sampler_backend_problems("vllm", SamplerOptions())
    assert "0.11.2 is installed" in problem.rule


class Odd(BaseHTTPRequestHandler):
    """A server that does not do as servers should; `said` is its answer, `heard` the tokens it was sent."""

    said: ClassVar[tuple[int, dict[str, str], bytes]]
    heard: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        status, headers, body = self.said
        self.heard.append(str(self.headers["Authorization"]))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@contextlib.contextmanager
def odd() -> Iterator[server_client.SamplingServer]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server_client.SamplingServer(f"http://127.0.0.1:{http.server_port}", 20, "vLLM", "vllm serve")
    finally:
        http.shutdown()
        http.server_close()


def test_the_token_goes_nowhere_else_and_into_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect would take it to another server; some servers repeat what they were sent."""
    monkeypatch.setenv(server_client.KEY, "s3cret-token")
    with odd() as server, serving(Vllm.__new__(Vllm)) as elsewhere:
        for status in (301, 302, 307, 308):
            Odd.said = status, {"Location": f"{elsewhere}/health"}, b""
            with pytest.raises(server_client.ServerError, match=f"the vLLM server responded with {status}"):
                server.get("/health")
        Odd.said = 401, {}, b"bad header: Bearer s3cret-token " + b"x" * 5000
        with pytest.raises(server_client.ServerError) as caught:
            server.get("/health")
        assert "bad header: Bearer ***" in str(caught.value) and "s3cret" not in str(caught.value)
    assert {*Odd.heard} == {"Bearer s3cret-token"}
    urls = ("http://me:s3cret@127.0.0.1:8000", "http://s3cret@127.0.0.1")
    problems = server_client.server_option_problems(SamplerOptions(base_urls=urls, sync_folder=Path()), "vllm_server")
    assert [p.rule.startswith("contains a user name or password") for p in problems] == [True, True]
    assert "s3cret" not in str(problems)


def test_an_answer_has_a_size_and_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "MOST_BYTES", 1 << 20)
    with odd() as server:
        Odd.said = 200, {}, b"[" * (1 << 19)
        assert server.get("/health") is None
        Odd.said = 200, {}, b" " * (1 << 21)
        with pytest.raises(server_client.ServerError, match=r"response is larger than 1\.0 MiB"):
            server.get("/health")


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        ([1, 2], [-0.5, float("nan")]),
        ([1, 2], [-0.5, "x"]),
        ([1, 2], None),
        (None, None),
        ([1, "2"], [-0.5, -0.5]),
        ([1, True], [-0.5, -0.5]),
        ([1, 2], [-0.5, float("-inf")]),
    ],
)
def test_numbers_that_cannot_be_trained_on_are_told(tokens: Any, logprobs: Any) -> None:
    with pytest.raises(server_client.ServerError, match="or some are missing or not finite"):
        server_client.checked_completion(tokens, logprobs, True, SAMPLING)


ODD: tuple[Any, ...] = (None, [], ["x"], {"data": 3}, 7, {"data": [3]}, True)


@pytest.mark.parametrize(
    "said", ["text", {"vllm_config": "a"}, *(pytest.param(o, marks=pytest.mark.slow) for o in ODD)]
)
def test_a_server_of_another_kind_is_told_whatever_it_says(said: Any, kind: str, model: Path, tmp_path: Path) -> None:
    """Also in the middle of a run, where a completion is asked for."""
    for path in ("/version", "/server_info", "/server_info?config_format=json", "/v1/models"):
        backend = KINDS[kind](model)
        backend.told[path] = said
        with serving(backend) as url, contextlib.suppress(UserError):
            client(kind, model, url, sync_folder=tmp_path / "sync", wait=0.0, max_length=50)
    backend = KINDS[kind](model)
    with serving(backend) as url:
        made = client(kind, model, url, sync_folder=tmp_path / "sync")
        for answer in (
            said,
            {"choices": [said]},
            {"choices": [{"token_ids": {"a": 1}, "logprobs": {"token_logprobs": 1}}]},
        ):
            backend.told |= dict.fromkeys(("/generate", "/v1/completions"), answer)
            with pytest.raises(server_client.ServerError):
                made.generate(PROMPTS[:1], SAMPLING, SEEDS[:1])


def test_pieces_of_a_completion_have_seeds_of_their_own() -> None:
    """The first one has the completion's; none is longer than the completion may be."""
    seeds, lengths = [], []
    written = Completion((), (), False)
    while (piece := next_piece([3, 4], written, SamplingParams(150), 11)) is not None:
        assert piece.prompt == [3, 4, *written.token_ids]
        seeds.append(piece.seed)
        lengths.append(piece.sampling.max_tokens)
        more = piece.sampling.max_tokens
        written = with_piece(written, Completion((7,) * more, (-1.0,) * more, False))
    assert lengths == [64, 64, 22] and seeds[0] == 11 and len({*seeds}) == 3
    assert next_piece([3], Completion((1,), (-1.0,), True), SamplingParams(9), 11) is None
