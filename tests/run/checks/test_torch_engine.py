"""What options of the torch engine need of a machine, told before a process group exists."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.run.checks import torch_engine
from megaswift.run.checks.torch_engine import torch_engine_machine_problems
from tests.parity.models import build
from tests.run.checks.test_preflight import problems
from tests.trainers.inputs import write_model

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"optimizer": "paged_adamw_8bit"}, ["there is no CUDA device; say --optimizer adamw_8bit"]),
    ({"optimizer": "paged_adamw"}, ["say --optimizer adam"]),
    ({"attn_impl": "flash"}, ["has no kernel for a CPU; say --attn_impl sdpa"]),
    ({"attn_impl": "flash_attn3"}, ["has no kernel for a CPU; say --attn_impl sdpa"]),
    ({"attn_impl": "flex"}, ["has no backward pass on a CPU"]),
    ({"use_liger": True}, ["needs the package liger_kernel", "its kernels need a GPU"]),
    ({"optimizer": "adamw_8bit"}, []),
    ({"torch_compile": True}, []),
    ({"attn_impl": "eager"}, []),
    ({"optimizer": "adafactor"}, []),
]


@pytest.mark.parametrize(("options", "said"), CASES)
def test_a_machine_without_a_gpu(options: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_gpu", lambda: False)
    monkeypatch.setattr(
        torch_engine,
        "find_spec",
        lambda name: None if name in ("flash_attn", "liger_kernel") else object(),
    )
    found = [str(p) for p in torch_engine_machine_problems(SwiftConfig(engine="ddp", **options))]
    assert len(found) == len(said)
    for text, part in zip(found, said, strict=True):
        name = next(iter(options))
        assert text.startswith(f"--{name} ") and part in text.replace("\n    try: ", "; say "), text


def test_a_machine_with_one_and_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_gpu", lambda: True)
    for options, said in CASES:
        monkeypatch.setattr(torch_engine, "find_spec", lambda name: object())
        assert torch_engine_machine_problems(SwiftConfig(engine="ddp", **options)) == []
        monkeypatch.setattr(torch_engine, "find_spec", lambda name: None)
        found = [str(p) for p in torch_engine_machine_problems(SwiftConfig(engine="ddp", **options))]
        needs = [s for s in said if "package" in s] or {"adamw_8bit": ["bitsandbytes"]}.get(
            str(options.get("optimizer")), []
        )
        assert len(found) >= len(needs) and all("install" in text for text in found)


def test_packages_of_attention_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: None)
    for name, part in (
        ("flash_attention_2", "run pip install flash-attn"),
        ("flash_attention_3", "install it from the folder hopper of FlashAttention's repository"),
        ("flex_attention", ""),
        ("sdpa", ""),
    ):
        found = [str(p) for p in torch_engine_machine_problems(SwiftConfig(engine="ddp", attn_impl=name))]
        assert len(found) == bool(part) and all(part in text for text in found)


def test_butterflies_that_peft_would_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    two = SwiftConfig(engine="ddp", train_type="boft", boft_n_butterfly_factor=2)
    monkeypatch.setattr("shutil.which", lambda name: name)
    rule = "would be 1: more needs PEFT's CUDA extension (a GPU, nvcc and ninja)"
    for gpu, said in ((False, [f"--boft_n_butterfly_factor 2: {rule}\n    try: leave it out"]), (True, [])):
        monkeypatch.setattr(torch_engine, "has_gpu", lambda gpu=gpu: gpu)
        assert [str(p).split(": PEFT")[0] for p in torch_engine_machine_problems(two)] == said
        assert torch_engine_machine_problems(SwiftConfig(engine="ddp", train_type="boft")) == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert len(torch_engine_machine_problems(two)) == 1


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_gpu", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "aot_eager" in str(torch_engine_machine_problems(SwiftConfig(engine="ddp", torch_compile=True))[0])
    assert (
        torch_engine_machine_problems(SwiftConfig(engine="ddp", torch_compile=True, torch_compile_backend="aot_eager"))
        == []
    )


def test_losses_of_routers_need_routers(tmp_path: Path) -> None:
    dense, moe = write_model(tmp_path / "dense"), build("mixtral", tmp_path / "moe")
    shutil.copy(dense / "tokenizer.json", moe)
    options: dict[str, Any] = {
        "task": "sft",
        "dataset": "d",
        "engine": "ddp",
        "moe_z_loss_coeff": 0.1,
        "output_dir": str(tmp_path / "out"),
    }
    assert ["applies only to MoE models" in text for text in problems(SwiftConfig(model=str(dense), **options), 2)] == [
        True
    ]
    assert problems(SwiftConfig(model=str(moe), **options), 2) == []


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("", ""),
        ("libaio", "the library libaio with its header libaio.h was not found"),
        ("ninja", "the program ninja is not on PATH"),
        ("compiler", "there is no C++ compiler"),
    ],
)
def test_shards_on_a_drive_need_libaio(
    missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler stands in that finds the library or does not; one message per section that needs it."""
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n! {'true' if missing == 'libaio' else 'false'}\n")
    compiler.chmod(0o755)
    programs = {"g++": missing != "compiler", "ninja": missing != "ninja"}
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: name if programs.get(name) else None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "ds.json"
    for device in ("nvme", "cpu"):
        section = {"device": device, "nvme_path": str(tmp_path)}
        file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": section}}))
        found = [str(p) for p in torch_engine_machine_problems(SwiftConfig(deepspeed=str(file)))]
        assert len(found) == (device == "nvme" and bool(said))
        assert all(said in text and "apt-get install libaio-dev" in text for text in found)


def test_an_extension_that_came_with_deepspeed_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert torch_engine.missing_for_async_io() != ""
    (tmp_path / "ops" / "aio").mkdir(parents=True)
    (tmp_path / "ops" / "aio" / "async_io_op.cpython-311-x86_64-linux-gnu.so").touch()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: spec)
    assert torch_engine.missing_for_async_io() == ""
