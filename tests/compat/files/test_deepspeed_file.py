"""A DeepSpeed file's optimizer, schedule, batch and precision as options of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.compat.files.deepspeed_file import LINEAR_WARMUP
from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import filled_deepspeed_config, requested_engine
from tests.compat.files.whole_deepspeed_files import WHOLE_FILES

GIVEN = ["--model", "m", "--dataset", "d.jsonl"]
WHOLE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 50, "total_num_steps": 1000},
    },
    "zero_optimization": {"stage": 2},
}


def load(folder: Path, content: dict[str, Any], *words: str) -> SwiftConfig:
    file = folder / "ds.json"
    file.write_text(json.dumps(content))
    return load_config("sft", [*GIVEN, "--deepspeed", str(file), *words], environ={})


def test_a_whole_file(tmp_path: Path) -> None:
    """Every value, and nothing left to contradict the run on two ranks."""
    cfg = load(tmp_path, WHOLE)
    optim, train = cfg.optim, cfg.train
    assert (optim.learning_rate, optim.weight_decay, optim.max_grad_norm) == (3e-5, 3e-7, 0.5)
    assert (optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon) == (0.8, 0.99, 1e-6)
    assert (cfg.schedule.lr_scheduler_type, cfg.schedule.warmup_steps, cfg.model.torch_dtype) == (
        "linear",
        50,
        "bfloat16",
    )
    batch = (train.global_batch_size, train.per_device_train_batch_size, train.gradient_accumulation_steps)
    assert batch == (64, 4, 8)
    assert any(LINEAR_WARMUP in n for n in cfg.notices) and any("total_num_steps" in n for n in cfg.notices)
    without = {**WHOLE, "optimizer": {**WHOLE["optimizer"], "params": {"lr": 3e-5}}}  # type: ignore[dict-item]
    assert filled_deepspeed_config(load(tmp_path, without), 2, "bfloat16", 64).problems == ()


def test_the_command_line_counts_more(tmp_path: Path) -> None:
    cfg = load(tmp_path, WHOLE, "--lr", "1e-4", "--warmup_steps", "7", "--torch_dtype", "float32")
    assert (cfg.optim.learning_rate, cfg.schedule.warmup_steps, cfg.model.torch_dtype) == (1e-4, 7, "float32")
    assert cfg.optim.weight_decay == 3e-7


def test_auto_and_missing_values_leave_the_defaults(tmp_path: Path) -> None:
    auto = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3},
    }
    cfg = load(tmp_path, auto)
    assert (
        cfg.optim.learning_rate == 1e-5
        and cfg.schedule.warmup_steps == 0
        and cfg.schedule.lr_scheduler_type == "constant"
    )
    assert not cfg.given - {"model", "dataset", "deepspeed", "lr_scheduler_type"}


@pytest.mark.parametrize(
    "content", [{"optimizer": 3, "scheduler": [1], "bf16": 1}, {"optimizer": {"params": {"betas": [1]}}}]
)
def test_a_malformed_part_sets_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    assert load(tmp_path, content).given == {"model", "dataset", "deepspeed"}


def test_python_and_other_names_of_the_option(tmp_path: Path) -> None:
    """The file speaks however it is named."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(WHOLE))
    for cfg in (
        SwiftConfig(model="m", deepspeed=str(file)),
        SwiftConfig(model="m", deepspeed={"config_path": str(file)}),
        load_config("sft", [*GIVEN, "--deepspeed_config", str(file)], environ={}),
        SwiftConfig(model="m", deepspeed=str(file)).replace(max_steps=3),
    ):
        assert cfg.optim.learning_rate == 3e-5 and cfg.train.global_batch_size == 64


def test_a_missing_file_is_not_another_engine(tmp_path: Path) -> None:
    """The rules leave it to the check that names the file."""
    cfg = load_config("sft", [*GIVEN, "--deepspeed", "no.json", "--engine", "zero3"], environ={})
    assert cfg.engine.deepspeed == "no.json"


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_whole_files(name: str, tmp_path: Path) -> None:
    """Their values are the run's, and nothing is left that contradicts it."""
    file = WHOLE_FILES[name]
    cfg = load(tmp_path, file.content)
    assert requested_engine(cfg) == file.kind
    assert {option: cfg.value(option) for option, _ in file.options} == dict(file.options)
    dtype = cfg.model.torch_dtype.replace("auto", "bfloat16")
    filled = filled_deepspeed_config(cfg, file.world, dtype, 64)
    assert (filled.kind, filled.problems) == (file.kind, ())
    assert filled.config["bf16"]["enabled"] == (dtype == "bfloat16") and ("fp16" in filled.config) == (
        dtype == "float16"
    )


def test_a_loss_scale(tmp_path: Path) -> None:
    """Its numbers count where float16 does: a file of transformers repeats DeepSpeed's defaults beside bfloat16."""
    numbers = {"initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 1, "min_loss_scale": 4}
    names = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
    zero = {"zero_optimization": {"stage": 2}}
    for words, enabled in (((), True), (("--fp16", "true"), "auto")):
        optim = load(tmp_path, {**zero, "fp16": {"enabled": enabled, **numbers}}, *words).optim
        assert [getattr(optim, name) for name in names] == [2**12, 50, 1, 4]
    for words, section in ((("--bf16", "true"), {"enabled": "auto"}), ((), {"enabled": False}), ((), {})):
        assert load(tmp_path, {**zero, "fp16": {**section, **numbers}}, *words).optim.hysteresis == 2


@pytest.mark.parametrize("lr", ["1e-5", "3e-4"])
def test_ratios_of_the_rate_of_the_run(lr: str, tmp_path: Path) -> None:
    """A file without a rate."""
    params = {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "warmup_num_steps": 5}
    content = {"scheduler": {"type": "WarmupCosineLR", "params": params}, "zero_optimization": {"stage": 2}}
    cfg = load(tmp_path, content, "--learning_rate", lr)
    assert (cfg.schedule.lr_warmup_init_ratio, cfg.schedule.min_lr_ratio) == (0.1, 0.01)
    assert filled_deepspeed_config(cfg, 1, "float32", 64).problems == ()
    other = load(tmp_path, content, "--learning_rate", lr, "--min_lr", "1e-9")
    assert ["min_lr" in p.what for p in filled_deepspeed_config(other, 1, "float32", 64).problems] == [True]


def test_ratios_of_a_cosine(tmp_path: Path) -> None:
    params = {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "warmup_num_steps": 5}
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
        "scheduler": {"type": "WarmupCosineLR", "params": params},
        "zero_optimization": {"stage": 2},
    }
    cfg = load(tmp_path, content)
    assert (cfg.schedule.lr_warmup_init, cfg.schedule.min_lr) == (pytest.approx(2e-5), pytest.approx(2e-6))
    assert filled_deepspeed_config(cfg, 1, "float32", 64).problems == ()
