"""Which engine steps which optimizer, and which options belong to which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.engine.options.optimizer import OPTIMIZERS, PLUGIN_OPTIMIZERS, SPELLINGS, PluginOptimizerParts
from megaswift.engine.options.optimizer_checks import OPTIMIZER_CLASHES, uses_distributed_optimizer
from megaswift.options.option import PLUGIN_CHOICES
from megaswift.run.checks.engine_choice import resolve_engine
from tests.config.refusals import assert_idle, problems
from tests.trainers.inputs import write_model

CLASHING = [
    "--vit_lr 1e-6 --freeze_vit false --engine ddp --optim galore_adamw",
    "--aligner_lr 1e-6 --freeze_aligner false --engine ddp --optim galore_adamw",
    "--vit_lr 1e-6 --freeze_vit false --engine ddp --train_type lora --lorap_lr_ratio 4",
    "--aligner_lr 1e-6 --freeze_aligner false --engine ddp --train_type lora --lorap_lr_ratio 4",
    "--precision_aware_optimizer --exp_avg_dtype fp16",
    "--precision_aware_optimizer --exp_avg_sq_dtype fp8",
    "--precision_aware_optimizer --main_grads_dtype bf16 --torch_dtype float16",
    "--engine zero1 --optim whole",
    "--deepspeed {drive} --optim parts",
    "--optim adafactor --engine megatron",
    "--engine zero1 --optim adamw_8bit",
    "--engine fsdp2 --optim adafactor",
    "--fsdp offload --optim paged_adamw",
    "--engine ddp --optim galore_adamw --train_type lora",
    "--precision_aware_optimizer --distributed_optimizer false",
]
IDLE = [
    ("--optimizer_cpu_offload --optimizer sgd", "--optimizer_cpu_offload"),
    ("--sgd_momentum 0.8", "--sgd_momentum 0.8 --optimizer sgd"),
    ("--precision_aware_optimizer --optimizer sgd", "--precision_aware_optimizer"),
    ("--precision_aware_optimizer --optimizer_cpu_offload", "--precision_aware_optimizer"),
    *(
        (f"--{option}", f"--{option} --precision_aware_optimizer")
        for option in (
            "main_grads_dtype bf16",
            "exp_avg_dtype bf16",
            "exp_avg_sq_dtype bf16",
            "store_param_remainders false",
        )
    ),
    ("--distributed_optimizer --optimizer sgd", "--distributed_optimizer"),
    (
        "--optimizer_offload_fraction 0.5",
        "--optimizer_offload_fraction 0.5 --optimizer_cpu_offload",
    ),
    ("--adam_beta1 0.8 --optim sgd", "--adam_beta1 0.8 --engine ddp --optim lion_8bit"),
    ("--adam_beta2 0.8 --optim sgd", "--adam_beta2 0.8"),
    ("--adam_epsilon 1e-6 --engine ddp --optim paged_lion", "--adam_epsilon 1e-6 --engine ddp --optim paged_adamw"),
    ("--muon_momentum 0.9 --engine ddp", "--muon_momentum 0.9 --engine ddp --optim muon"),
    ("--muon_nesterov false --engine ddp", "--muon_nesterov false --engine ddp --optim muon"),
    ("--muon_num_ns_steps 3 --engine ddp", "--muon_num_ns_steps 3 --engine ddp --optim muon"),
    *(
        (f"--{name} {value} --engine ddp --optim adafactor", f"--{name} {value} --engine ddp --optim galore_adafactor")
        for name, value in (
            ("galore_rank", 8),
            ("galore_update_proj_gap", 50),
            ("galore_scale", 1.0),
            ("galore_proj_type", "left"),
            ("optim_target_modules", "mlp"),
        )
    ),
]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers, one of which may step parts of tensors."""
    monkeypatch.setitem(PLUGIN_CHOICES, "optimizer", ["whole", "parts"])
    for name in ("whole", "parts"):
        parts = PluginOptimizerParts(lambda groups, options: None, (), None, name == "parts")
        monkeypatch.setitem(PLUGIN_OPTIMIZERS, name, parts)


def test_contradictions(plugins: None, tmp_path: Path) -> None:
    drive = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "shards"}}}
    (tmp_path / "drive.json").write_text(json.dumps(drive))
    for words, clash in zip(CLASHING, OPTIMIZER_CLASHES, strict=True):
        found = problems(words.format(drive=tmp_path / "drive.json"))
        name = clash.options[0]
        assert len(found) == 1 and found[0].startswith("--optim" if name == "optimizer" else f"--{name}"), found


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SPELLINGS])
def test_names(name: str) -> None:
    """transformers' spellings; all of them under ddp."""
    assert SwiftConfig(engine="ddp", optim=name).optim.optimizer == SPELLINGS.get(name, name)


def test_auto_takes_an_engine_that_can(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megaswift.run.checks.engine_choice.SMALL", 1.0)
    model = str(write_model(tmp_path_factory.mktemp("m")))
    assert resolve_engine(SwiftConfig(model=model, engine="auto"), 2).engine.engine != "ddp"
    assert resolve_engine(SwiftConfig(model=model, engine="auto", optim="adafactor"), 2).engine.engine == "ddp"
    assert "the optimizer adafactor needs whole matrices" in capsys.readouterr().err
    assert resolve_engine(SwiftConfig(model=model, engine="auto", optim="lion"), 2).engine.engine == "fsdp2"


@pytest.mark.parametrize("engine", ["megatron", "zero3", "fsdp2"])
def test_an_optimizer_of_a_plugin(plugins: None, engine: str) -> None:
    """One that needs whole tensors runs on ddp only; no other is sharded by Megatron-Core."""
    for given in (f"--engine {engine}", *(["--tp 2"] if engine == "megatron" else [])):
        (found,) = problems(f"{given} --optim whole")
        assert "registered without elementwise=True" in found
        assert problems(f"{given} --optim parts") == []
    (found,) = problems("--engine megatron --distributed_optimizer --optim parts")
    assert "Megatron-Core shards only the state of adam" in found
    assert not uses_distributed_optimizer(True, "parts") and uses_distributed_optimizer(True, "adam")
    assert problems("--engine ddp --optim whole") == problems("--optim whole") == []
