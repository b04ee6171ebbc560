"""The name of the base model that adapters and checkpoints carry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.run.plan import RunPlan


def base_of(model: str, folder: Path, out: Path) -> str:
    cfg = load_config("sft", ["--model", model, "--dataset", "d", "--train_type", "lora"], environ={})
    outputs: Any = SimpleNamespace(root=out)
    unused: Any = None
    return RunPlan(cfg, unused, folder, unused, outputs).base


def test_a_hub_id_stays_one(tmp_path: Path) -> None:
    """PEFT and servers find the model there."""
    snapshot = tmp_path / "cache" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert base_of("org/name", snapshot, tmp_path / "out") == "org/name"


def test_a_hub_id_whose_model_the_run_changed(tmp_path: Path) -> None:
    """New rows of the embedding, another rotary scaling or other initial weights are in OUT alone."""
    changed = tmp_path / "out" / "base_model"
    changed.mkdir(parents=True)
    assert base_of("org/name", changed, tmp_path / "out") == str(changed.resolve())


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its whole path; one that looks like a hub ID too."""
    model = tmp_path / "org" / "name"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_of("org/name", Path("org/name"), tmp_path / "out") == str(model.resolve())
    assert base_of(str(model), model, tmp_path / "out") == str(model.resolve())
