"""Uploads by huggingface_hub's own client to a server on this machine that answers as the hub does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.trainers.hub_clients import HubRepository, HuggingFaceHub
from megaswift.trainers.hub_upload import HubUpload
from tests.sources import ROOT
from tests.trainers.hub_server import TOKEN, USER, Hub, hub_server
from tests.trainers.inputs import write_inputs


def test_the_token_is_neither_shown_nor_written() -> None:
    """Neither the configuration, nor its file, nor a message has it."""
    cfg = SwiftConfig(model="m", push_to_hub=True, hub_token=TOKEN)
    assert cfg.hub.hub_token == TOKEN
    assert TOKEN not in repr(cfg) and TOKEN not in cfg.to_yaml() and "hub_token" not in cfg.to_yaml()
    line = load_config("sft", ["--hub_token", TOKEN, "--model", "m"], environ={})
    assert TOKEN not in "\n".join(line.notices) and any("--hub_token ***" in n for n in line.notices)
    assert all(TOKEN not in typed.label for typed in line.typed.values())


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One message at the start; a warning for a checkpoint, after which training goes on."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it tries again, later and later
    with pytest.raises(ConfigError, match="the hub does not give access to out"):
        given = SwiftConfig(model="m", output_dir=str(tmp_path / "out"), push_to_hub=True, hub_token=TOKEN)
        HubUpload(given.hub, given.checkpoint.output_dir, given.model.use_hf)
    upload = HubUpload.__new__(HubUpload)
    upload.strategy, upload.repository = "every_save", HubRepository(HuggingFaceHub(TOKEN), TOKEN, "u/m")
    (tmp_path / "step-1" / "hf").mkdir(parents=True)
    (tmp_path / "step-1" / "hf" / "x").write_text("1")
    upload.after_save(tmp_path / "step-1", 1)


def train(hub: Hub, inputs: list[str], out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own: the client reads its server's address when it is imported."""
    environ = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HF_HUB_OFFLINE")} | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(out.parent / "home"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    words = [*inputs, "--output_dir", str(out), "--push_to_hub", "true", "--report_to", "none", *options]
    command = [sys.executable, "-m", "megaswift", "sft", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=240)


def local(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.process
@pytest.mark.slow
def test_a_run_uploads_its_export(tmp_path: Path) -> None:
    """To a repository of the output directory's name; the token is in no file and on no screen."""
    inputs, out = write_inputs(tmp_path), tmp_path / "my-model"
    with hub_server() as hub:
        done = train(hub, inputs, out, "--max_steps", "2", "--hub_token", TOKEN, "--hub_private_repo", "true")
        assert done.returncode == 0, done.stderr[-2000:]
        name = f"{USER}/my-model"
        assert hub.private == {name: True} and hub.commits == [(name, "step 2")]
        assert hub.files[name] == local(out / "hf") and f"uploaded {out / 'hf'} to {name}" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert all(TOKEN.encode() not in p.read_bytes() for p in out.rglob("*") if p.is_file())


@pytest.mark.process
@pytest.mark.slow
def test_every_checkpoint_s_adapters(tmp_path: Path) -> None:
    inputs, out = write_inputs(tmp_path), tmp_path / "out"
    options = ("--train_type", "lora", "--max_steps", "2", "--save_steps", "1", "--hub_strategy", "every_save")
    with hub_server() as hub:
        done = train(hub, inputs, out, *options, "--hub_token", TOKEN, "--hub_model_id", "org/adapters")
        assert done.returncode == 0, done.stderr[-2000:]
        assert hub.commits == [("org/adapters", f"step {n}") for n in (1, 2, 2)]
        assert hub.files["org/adapters"] == local(out / "adapter")


@pytest.mark.process
@pytest.mark.slow
def test_a_wrong_token_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    inputs, out = write_inputs(tmp_path), tmp_path / "out"
    with hub_server() as hub:
        done = train(hub, inputs, out, "--hub_token", "hf_wrongwrongwrong", "--max_steps", "2")
    assert done.returncode == 2 and "the hub does not give access to out" in done.stderr
    assert "hf_wrong" not in done.stderr and not (out / "metrics.jsonl").exists()


def upload_of(folder: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, **options: object) -> HubUpload:
    """An upload of this process to a server of this machine."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.url, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    given = {"push_to_hub": True, "hub_token": TOKEN, "hub_model_id": "org/m", "output_dir": str(folder), **options}
    cfg = SwiftConfig(model="m", dataset=["d"], **given)
    return HubUpload(cfg.hub, cfg.checkpoint.output_dir, cfg.model.use_hf)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "places"),
    [("checkpoint", {"last-checkpoint"}), ("all_checkpoints", {"step-1", "step-2"}), ("end", set())],
)
def test_whole_checkpoints(strategy: str, places: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its states, in a folder of the repository; beside them the weights of those that have them."""
    with hub_server() as hub:
        upload = upload_of(tmp_path, monkeypatch, hub, hub_strategy=strategy, hub_revision="trial")
        upload_of(tmp_path, monkeypatch, hub, hub_strategy=strategy, hub_revision="trial")  # a branch that exists
        for n in (1, 2):
            step = tmp_path / f"step-{n}"
            (step / "engine").mkdir(parents=True)
            (step / "adapter").mkdir()
            (step / "engine" / "engine.json").write_text(str(n))
            (step / "adapter" / "adapter_config.json").write_text("{}")
            (tmp_path / "rollouts").mkdir(exist_ok=True)
            (tmp_path / "rollouts" / f"{n}.safetensors").write_text("saved by --save_rollouts")
            upload.after_save(step, n)
        upload.at_end(tmp_path / "step-2" / "adapter", 2)
    assert hub.branches == [("org/m", "trial")] and set(hub.revisions) <= {"trial"}
    files = hub.files["org/m"]
    assert {name.partition("/")[0] for name in files if "engine" in name} == places
    assert "adapter_config.json" in files and not any("rollouts" in name for name in files)
    newest = sorted(places)[-1:]
    assert all(files[f"{place}/engine/engine.json"] == b"2" for place in newest)
