"""A server on this machine that answers as ModelScope does to what modelscope-hub 0.5 sends for an upload: user,
repository, LFS objects, commit."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.hub_server import USER, Hub, hub_server

PRIVATE = 1
OWNERS = (USER, "org")


@dataclass
class ModelScope(Hub):
    """What was uploaded."""

    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        path = path.partition("?")[0]
        self.requests.append(f"{method} {path}")
        if method == "PUT":
            self.objects[path.rsplit("/", 1)[-1]] = body
            return 200, {}
        if (method, path) == ("GET", "/openapi/v1/users/me"):
            return 200, {"success": True, "data": {"username": USER}}
        if method == "GET" and path.startswith("/openapi/v1/models/"):
            name = path.removeprefix("/openapi/v1/models/")
            owner, _, short = name.partition("/")
            known = {"success": True, "data": {"owner": owner, "name": short}}
            return (200, known) if name in self.private else (404, {"success": False, "message": "model not found"})
        asked = json.loads(body) if body else {}
        if (method, path) == ("POST", "/api/v1/models"):
            return self.create(asked)
        name = "/".join(path.split("/")[5:7])
        if path == f"/api/v1/repos/models/{name}/info/lfs/objects/batch":
            upload = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in asked["objects"]]
            return 200, {"Code": 200, "Success": True, "Data": {"objects": upload}}
        if path == f"/api/v1/repos/models/{name}/commit/master":
            return self.commit(name, asked)
        return 404, {"Code": 404, "Message": f"no {path}"}

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """A model repository, once."""
        name = f"{asked['Path']}/{asked['Name']}"
        if asked["Path"] not in OWNERS:
            return 400, {"Code": 10010100001, "Success": False, "Message": "The organization does not exist"}
        if name in self.private:
            return 400, {"Code": 10010101001, "Success": False, "Message": "The model name already exists"}
        self.private[name], self.files[name] = asked["Visibility"] == PRIVATE, {}
        return 200, {"Code": 200, "Success": True, "Data": {"Path": asked["Path"], "Name": asked["Name"]}}

    def commit(self, name: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """Contents in the request, or objects sent before."""
        for action in asked["actions"]:
            if action["type"] == "lfs":
                content = self.objects[action["sha256"]]
                assert hashlib.sha256(content).hexdigest() == action["sha256"]
            else:
                content = base64.b64decode(action["content"])
            assert len(content) == action["size"]
            self.files[name][action["path"]] = content
        self.commits.append((name, asked["commit_message"]))
        return 200, {"Code": 200, "Success": True, "Data": {"oid": f"{len(self.commits):040x}"}}


def modelscope_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelScope]:
    """A fixture: a running server, which the client is pointed to; no token is stored."""
    server = ModelScope()
    with hub_server(server):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        yield server
