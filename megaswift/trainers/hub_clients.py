"""Clients of the two model hubs, Hugging Face and ModelScope, behind one interface: create a repository, send a folder.

Owns the calls of each client, the classes of its errors, and their messages, without the token. The server's address, a
stored token and offline mode are the clients' own environment variables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any, Protocol

from megaswift.base.plain_files import files_below, refuse_links_outside
from megaswift.base.redaction import MASK
from megaswift.errors import ConfigError, Problem, first_line

HTTP_CLIENTS = {"httpx": "HTTPError", "httpx2": "HTTPError", "requests": "RequestException"}
"""Packages that the clients send with, and the base of what they raise without a network."""
WRONG_CARD = "Invalid metadata in README.md."
"""huggingface_hub's error for a model card that the hub refuses, such as PEFT's with the path of a base model."""


class HubClient(Protocol):
    """A hub. Where it does not answer as asked, methods raise one of `client_failures()`."""

    login: str
    """Other sources of the token, for messages."""
    command: str
    """Uploads a folder from a shell."""

    def create(self, name: str, private: bool) -> str:
        """Create the repository unless it exists, and return its full name."""

    def send(self, repository: str, folder: Path, message: str, place: str = "") -> None:
        """Upload all files of the folder, in a commit, to the repository's folder `place`."""


class HuggingFaceHub:
    """By huggingface_hub."""

    login = "HF_TOKEN, or hf auth login"
    command = "hf upload"

    def __init__(self, token: str | None, branch: str | None = None) -> None:
        self.token = token
        self.branch = branch

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(token=self.token)

    def create(self, name: str, private: bool) -> str:
        """Create the repository and its branch; without a given visibility the organization's default applies."""
        repository = str(self._api().create_repo(name, private=private or None, exist_ok=True).repo_id)
        if self.branch is not None:
            self._api().create_branch(repository, branch=self.branch, exist_ok=True)
        return repository

    def send(self, repository: str, folder: Path, message: str, place: str = "") -> None:
        """Upload the files in one commit."""
        self._api().upload_folder(
            repo_id=repository,
            folder_path=folder,
            path_in_repo=place or None,
            commit_message=message,
            revision=self.branch,
        )


class ModelScopeHub:
    """By modelscope-hub."""

    login = "MODELSCOPE_API_TOKEN, or ms login"
    command = "ms upload"

    def __init__(self, token: str | None) -> None:
        self.token = token

    def _api(self) -> Any:
        from modelscope_hub import HubApi, HubConfig

        return HubApi(token=self.token, config=HubConfig())

    def create(self, name: str, private: bool) -> str:
        """Create the repository; a name without an owner belongs to the token's user."""
        from modelscope_hub.errors import AlreadyExistsError

        api = self._api()
        user = api.whoami().username  # also shows a wrong token
        repository = name if "/" in name else f"{user}/{name}"
        try:
            api.create_repo(repository, "model", visibility="private" if private else "public")
        except AlreadyExistsError:
            api.get_repo(repository, "model")  # the client takes "does not exist" of an owner for it too
        return repository

    def send(self, repository: str, folder: Path, message: str, place: str = "") -> None:
        """Upload the files in one commit, or in several for many files. A repository deleted meanwhile fails: the
        client would create a public one. Its report is not printed."""
        api = self._api()
        api.get_repo(repository, "model")
        with contextlib.redirect_stdout(io.StringIO()):
            options = {"commit_message": message, "path_in_repo": place, "disable_tqdm": True, "use_cache": False}
            api.upload_folder(repository, "model", folder, **options)


def hub_client(use_hf: bool, token: str | None, branch: str | None = None) -> HubClient:
    """Returns a client of the hub that --use_hf selects; `branch` is one of Hugging Face's repository."""
    return HuggingFaceHub(token, branch) if use_hf else ModelScopeHub(token)


def client_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that the clients raise: no access, no network, a name that the hub does not accept."""
    loaded = [getattr(sys.modules[name], kind) for name, kind in HTTP_CLIENTS.items() if name in sys.modules]
    if errors := sys.modules.get("modelscope_hub.errors"):
        loaded.append(errors.HubError)
    return (OSError, ValueError, RuntimeError, *loaded)


class HubRepository:
    """A model repository. Created before anything expensive, so that a wrong token or name shows then."""

    def __init__(self, client: HubClient, token: str | None, name: str) -> None:
        self.client = client
        self.token = token
        self.name = name
        """As given; once it is created, its full name."""

    def create(self, private: bool) -> str:
        """Create the repository unless it exists, and return its full name. Raises ConfigError where the hub gives no
        access."""
        try:
            self.name = self.client.create(self.name, private)
        except client_failures() as error:
            rule = f"the hub does not give access to {self.name}: {self.reason(error)}"
            fix = f"check --hub_model_id and --hub_token (or {self.client.login})"
            raise ConfigError(Problem("--push_to_hub true", rule, fix)) from None
        return self.name

    def reason(self, error: BaseException) -> str:
        """Return a client's error in one line."""
        text = " ".join(str(error).split()) if str(error).startswith(WRONG_CARD) else first_line(error)
        return text.replace(self.token, MASK) if self.token else text

    def send(self, folder: Path, message: str, place: str = "") -> str:
        """Upload a folder and return a line about it; raises one of `client_failures()`, and WeightsError for a link
        out of the folder: clients upload what it leads to."""
        refuse_links_outside(folder, files_below(folder))
        self.client.send(self.name, folder, message, place)
        return f"uploaded {folder} to {self.name}" + (f", {place}" if place else "")

    def send_or_explain(self, folder: Path, message: str) -> str:
        """Upload a folder; where that fails, raise ConfigError with the command that uploads it later."""
        try:
            return self.send(folder, message)
        except client_failures() as error:
            reason = self.reason(error)
            rule = f"the upload to {self.name} failed: {reason}"
            first = f"correct {folder / 'README.md'}, then " if reason.startswith(WRONG_CARD) else ""
            fix = f"{first}{self.client.command} {self.name} {folder}"
            raise ConfigError(Problem("--push_to_hub true", rule, fix)) from None


def hub_client_problems(push_to_hub: bool, use_hf: bool) -> list[Problem]:
    """Report an upload to ModelScope without its client."""
    if not push_to_hub or use_hf or importlib.util.find_spec("modelscope_hub") is not None:
        return []
    rule = "use_hf false uploads to ModelScope, whose client modelscope-hub is not installed"
    return [Problem("--push_to_hub true", rule, "run pip install modelscope-hub")]
