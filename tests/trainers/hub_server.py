"""A server on this machine that answers as the Hugging Face Hub does where models are uploaded: repositories, the mode
of each file, git-LFS objects, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback_http import serve_loopback

USER, TOKEN = "somebody", "hf_secretsecretsecret"


@dataclass
class Hub:
    """What was uploaded."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    """By repository."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    """Repository and message."""
    branches: list[tuple[str, str]] = field(default_factory=list)
    """Repository and branch, as they were made."""
    revisions: list[str] = field(default_factory=list)
    """Of each commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Of git-LFS, by SHA-256."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        path = path.partition("?")[0]
        if method == "PUT":
            self.objects[path.rsplit("/", 1)[-1]] = body
            return 200, {}
        if path == "/api/validate-yaml":
            return self.card(json.loads(body)["content"])
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            known = name in self.private
            self.private.setdefault(name, asked.get("visibility") == "private" or bool(asked.get("private")))
            self.files.setdefault(name, {})
            return (409 if known else 200), {"url": f"{self.url}/{name}", "id": name, "name": name}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if "/branch/" in path:
            branch = (name, path.rpartition("/branch/")[2])
            known = branch in self.branches
            self.branches += [] if known else [branch]
            return (409 if known else 200), {}
        if "/commit/" in path:
            self.revisions.append(path.rpartition("/commit/")[2])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.commits.append((name, value["summary"]))
                elif line["key"] == "file":
                    self.files[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    content = self.objects[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"] and len(content) == value["size"]
                    self.files[name][value["path"]] = content
            oid = f"{len(self.commits):040x}"
            return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}
        return 404, {"error": f"no {path}"}

    @staticmethod
    def card(content: str) -> tuple[int, Any]:
        """Of a README.md: a base model by its path is refused."""
        base = re.search(r"^base_model: (/.*)$", content, re.MULTILINE)
        if base is None:
            return 200, {"errors": [], "warnings": []}
        text = f'"base_model" with value "{base[1]}" is not valid. Use a model id from https://hf.co/models.'
        return 400, {"error": text, "errors": [{"message": text}], "warnings": []}


@contextmanager
def hub_server(hub: Hub | None = None) -> Iterator[Hub]:
    """A running server; requests without TOKEN get 401."""
    hub = hub or Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.command == "PUT"
            status, value = hub.answer(self.command, self.path, body) if known else (401, {"error": "Invalid token."})
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_HEAD = reply  # noqa: N815

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with serve_loopback(Handler) as hub.url:
        yield hub
