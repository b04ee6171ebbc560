"""Adapters of a server: each a model of its own for clients, and PEFT's own answers.

Covers: megaswift/serve/app.py, megaswift/deploy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift import deploy
from megaswift.errors import ConfigError
from tests.inference.models import adapters, plain

pytestmark = pytest.mark.wide
NEW = 8


@pytest.fixture(scope="module")
def folders(model: Path) -> dict[str, Path]:
    return {name: adapters(model.parent / name, model, seed) for name, seed in (("law", 5), ("code", 6))}


@pytest.fixture(scope="module")
def client(model: Path, folders: dict[str, Path]) -> Iterator[TestClient]:
    """The application as `deploy` builds it, without a port."""
    served: list[Any] = []

    class Uvicorn:
        def __init__(self, settings: Any) -> None:
            served.append(settings.app)

        def run(self, sockets: Any) -> None:
            (listener,) = sockets
            with listener:
                self.asked()

        def asked(self) -> None:
            raise NotImplementedError

    named = [f"{name}={folder}" for name, folder in folders.items()]
    words = ["--model", str(model), "--adapters", *named, "--port", "0", "--max_logprobs", "3", "--owned_by", "us"]
    words += ["--served_model_name", "base"]
    patch = pytest.MonkeyPatch()
    patch.setattr("uvicorn.Server", Uvicorn)
    generator = _inside(Uvicorn, served, lambda: deploy.main([*words, "--log_requests", "false"]))
    yield next(generator)
    next(generator, None)
    patch.undo()


def _inside(server: Any, served: list[Any], run: Any) -> Iterator[TestClient]:
    """A client while the server runs in a thread."""
    import threading

    ready, done = threading.Event(), threading.Event()
    server.asked = lambda self: (ready.set(), done.wait(120))
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    with TestClient(served[0], base_url="http://127.0.0.1") as client:
        yield client
    done.set()
    thread.join(60)


def ask(client: TestClient, name: str, **how: Any) -> Any:
    body = {"model": name, "prompt": "1+2?", "max_tokens": NEW, "temperature": 0, **how}
    return client.post("/v1/completions", json=body)


def test_a_request_selects_its_adapter(client: TestClient, model: Path, folders: dict[str, Path]) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(m["id"], m["owned_by"]) for m in listed] == [("base", "us"), ("law", "us"), ("code", "us")]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name in ("code", "base", "law"):
        theirs = AutoModelForCausalLM.from_pretrained(model)
        if name in folders:
            theirs = peft.PeftModel.from_pretrained(theirs, folders[name])
        (want,) = plain(theirs, tokenizer, [tokenizer("1+2?")["input_ids"]], NEW, do_sample=False)
        answer = ask(client, name).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (want, name)
    assert client.get("/v1/models/law").json()["id"] == "law"


def test_unknown_names_and_too_many_logprobs(client: TestClient) -> None:
    missing = ask(client, "medicine")
    assert missing.status_code == 404 and "'law', 'code'" in missing.json()["error"]["message"]
    assert ask(client, "law", logprobs=3).status_code == 200 and ask(client, "law", logprobs=4).status_code == 400


def test_an_adapter_is_not_called_as_the_model(model: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="is also the name of the model itself"):
        deploy.main(["--model", str(model), "--adapters", f"x={folders['law']}", "--served_model_name", "x"])
