"""Uploads by ModelScope's own client to a server on this machine. The Hugging Face client: test_hub_upload.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.trainers.hub_clients import hub_client_problems
from megaswift.trainers.hub_upload import HubUpload
from tests.sources import ROOT
from tests.trainers.hub_server import TOKEN, USER
from tests.trainers.inputs import write_inputs
from tests.trainers.modelscope_server import ModelScope, modelscope_server

site = pytest.fixture(modelscope_server)


def upload_of(tmp_path: Path, token: str = TOKEN, **options: object) -> HubUpload:
    out = str(tmp_path / "my-model")
    cfg = SwiftConfig(model="m", push_to_hub=True, hub_token=token, output_dir=out, **options)
    return HubUpload(cfg.hub, cfg.checkpoint.output_dir, use_hf=False)


def write_folder(folder: Path) -> dict[str, bytes]:
    files = {"config.json": b"{}", "sub/notes.txt": b"x", "model.safetensors": bytes(range(256)) * 5000}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


@pytest.mark.parametrize("private", [False, True])
def test_a_new_repository_and_one_that_exists(site: ModelScope, tmp_path: Path, private: bool) -> None:
    """Of the token's user, private as asked, and with every file whole; the local folder is left as it is."""
    files, name = write_folder(tmp_path / "hf"), f"{USER}/my-model"
    upload_of(tmp_path, hub_private_repo=private).at_end(tmp_path / "hf", 2)
    assert site.private == {name: private} and site.files == {name: files}
    assert [message.partition(" (")[0] for _, message in site.commits] == ["step 2"]
    assert {p for p in (tmp_path / "hf").rglob("*") if p.is_file()} == {tmp_path / "hf" / f for f in files}
    assert upload_of(tmp_path, hub_private_repo=not private).repository.name == name
    assert site.private == {name: private}


def test_checkpoints_of_an_organization_s_repository(site: ModelScope, tmp_path: Path) -> None:
    upload = upload_of(tmp_path, hub_model_id="org/m", hub_strategy="every_save", save_only_model=True)
    files = write_folder(tmp_path / "step-1" / "hf")
    upload.after_save(tmp_path / "step-1", 1)
    assert site.files == {"org/m": files}


@pytest.mark.parametrize(("token", "name"), [("ms-wrongwrong", "org/m"), (TOKEN, "nobody/m")])
def test_no_access(site: ModelScope, tmp_path: Path, token: str, name: str) -> None:
    """A wrong token; an owner that does not exist."""
    with pytest.raises(ConfigError, match=f"the hub does not give access to {name}") as caught:
        upload_of(tmp_path, token, hub_model_id=name)
    assert token not in str(caught.value) and "MODELSCOPE_API_TOKEN" in str(caught.value)
    assert site.private == {}


def test_a_repository_deleted_meanwhile_is_not_made_again(site: ModelScope, tmp_path: Path) -> None:
    upload = upload_of(tmp_path, hub_private_repo=True)
    write_folder(tmp_path / "hf")
    site.private.clear()
    with pytest.raises(ConfigError, match="ms upload somebody/my-model"):
        upload.at_end(tmp_path / "hf", 2)
    assert site.private == {}


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = hub_client_problems(push_to_hub=True, use_hf=False)
    assert [p.fix for p in found] == ["run pip install modelscope-hub"]
    assert hub_client_problems(push_to_hub=True, use_hf=True) == []


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("token", "code"), [(TOKEN, 0), ("ms-wrongwrong", 2)])
def test_a_run(site: ModelScope, tmp_path: Path, token: str, code: int) -> None:
    """Uploads its export; a wrong token ends it before training. The token is not shown or written."""
    out, name = tmp_path / "my-model", f"{USER}/my-model"
    words = [
        *write_inputs(tmp_path),
        "--output_dir",
        str(out),
        "--push_to_hub",
        "--use_hf",
        "false",
        "--max_steps",
        "2",
    ]
    command = [sys.executable, "-m", "megaswift", "sft", *words, "--hub_token", token, "--report_to", "none"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=240)
    assert done.returncode == code, done.stderr[-2000:]
    written = {p.relative_to(out / "hf").as_posix(): p.read_bytes() for p in (out / "hf").rglob("*") if p.is_file()}
    assert site.files == ({name: written} if code == 0 else {}) and (code == 2) != bool(written)
    assert token not in done.stdout + done.stderr
    assert all(token.encode() not in p.read_bytes() for p in out.rglob("*") if p.is_file())
