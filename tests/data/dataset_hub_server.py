"""A server on this machine that answers as both hubs do where data sets are downloaded: Hugging Face's repository
information, file tree and files, and ModelScope's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback_http import serve_loopback

COMMIT = "0123456789" * 4
TOKEN = "secret-token-of-data"
Answer = tuple[int, Any]
"""Status, and JSON or bytes."""


@dataclass
class DatasetHub:
    """Repositories of data sets: id to path to contents; private ones need TOKEN."""

    files: dict[str, dict[str, bytes]]
    private: tuple[str, ...] = ()
    url: str = ""
    requests: list[str] = field(default_factory=list)

    def answer(self, url: str, body: bytes, token: str) -> Answer:
        """To a request with this path and query."""
        parts = urlsplit(url)
        words = unquote(parts.path).strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if words[:3] == ["api", "v1", "datasets"]:
            return self.modelscope("/".join(words[3:5]), words[5:], query, token)
        if words[:2] == ["api", "datasets"]:
            return self.hugging_face("/".join(words[2:4]), words[4:], body, token)
        if words[0] == "datasets" and words[3:4] == ["resolve"]:
            content = self.repository("/".join(words[1:3]), token).get("/".join(words[5:]))
            return (404, {"error": "Entry not found"}) if content is None else (200, content)
        return 404, {"error": f"no {parts.path}"}

    def repository(self, name: str, token: str) -> dict[str, bytes]:
        """Its files; none where it does not exist or the token is not its own."""
        return {} if name in self.private and token != TOKEN else self.files.get(name, {})

    def hugging_face(self, name: str, words: list[str], body: bytes, token: str) -> Answer:
        """Information, the tree and paths of it."""
        files = self.repository(name, token)
        if not files:
            return 401, {"error": "Repository not found"}
        entries = [self.entry(path, content) for path, content in files.items()]
        if words[:1] == ["tree"]:
            under = "/".join(words[2:])
            return 200, [e for e in entries if not under or e["path"].startswith(under + "/")]
        if words[:1] == ["paths-info"]:
            wanted = json.loads(body)["paths"]
            return 200, [e for e in entries if e["path"] in wanted]
        return 200, {
            "id": name,
            "sha": COMMIT,
            "private": name in self.private,
            "disabled": False,
            "gated": False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }

    @staticmethod
    def entry(path: str, content: bytes) -> dict[str, Any]:
        """Of the tree."""
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def modelscope(self, name: str, words: list[str], query: dict[str, str], token: str) -> Answer:
        """The tree, and files."""
        files = self.repository(name, token)
        if not files:
            return 404, {"Code": 10010205001, "Success": False, "Message": f"dataset {name} not found"}
        if words == ["repo", "tree"]:
            entries = [
                {
                    "Path": path,
                    "Name": path.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                    "Revision": COMMIT,
                }
                for path, content in files.items()
            ]
            return 200, {"Code": 200, "Success": True, "Data": {"Files": entries}}
        if words == ["repo"] and query.get("FilePath") in files:
            return 200, files[query["FilePath"]]
        return 200, {"Code": 200, "Success": True, "Data": {"Id": 1, "Name": name}}


@contextmanager
def dataset_hub_server(hub: DatasetHub) -> Iterator[DatasetHub]:
    """The running server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {self.path}")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, value = hub.answer(self.path, body, token)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            whole = len(content)
            if status == 200 and (span := self.headers.get("Range")) and isinstance(value, bytes):
                first, _, last = span.removeprefix("bytes=").partition("-")
                content, status = content[int(first) : int(last or whole) + 1], 206
                self.send_response(status)
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
            else:
                self.send_response(status)
            if isinstance(value, bytes):
                self.send_header("ETag", f'"{hashlib.sha1(value).hexdigest()}"')
                self.send_header("Content-Type", "application/octet-stream")
            else:
                self.send_header("Content-Type", "application/json")
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 401:
                self.send_header("X-Error-Code", "RepoNotFound")
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = reply  # noqa: N815

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with serve_loopback(Handler) as hub.url:
        yield hub
