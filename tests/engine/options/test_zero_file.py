"""DeepSpeed files: "auto" is filled from the run, contradictions and keys without effect are told, presets are what
configs/ holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import filled_deepspeed_config
from megaswift.engine.options.zero_file import (
    KINDS,
    DeepspeedAutoValues,
    LossScaleNumbers,
    deepspeed_auto_values,
    deepspeed_preset,
    fill_deepspeed_auto,
    matching_deepspeed_preset,
    offloads_optimizer_and_weights,
    read_deepspeed_json,
)
from megaswift.engine.options.zero_keys import READ_AHEAD_ON_A_DRIVE, offload_parts_on_a_drive
from megaswift.engine.torch.strategies.zero_config import deepspeed_config_with_engine_overrides
from megaswift.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "deepspeed"
FACTS = DeepspeedAutoValues(4, 8, 2, 2e-5, 0.0, 0.0, (0.9, 0.95), 1e-8, 0.1, 1.0, "cosine", "bfloat16", 1024)
NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "/n"}
LABEL = "--deepspeed f.json"
TRANSFORMERS_ZERO3: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 100,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The shape of file that users of transformers have."""


def wrong(given: dict[str, Any], facts: DeepspeedAutoValues = FACTS) -> str:
    return "\n".join(str(p) for p in fill_deepspeed_auto(given, facts, LABEL).problems)


@pytest.mark.parametrize("kind", KINDS)
def test_presets(kind: str) -> None:
    assert json.loads((FOLDER / f"{kind}.json").read_text()) == deepspeed_preset(kind)
    filled = fill_deepspeed_auto(deepspeed_preset(kind), FACTS, LABEL)
    assert (filled.kind, filled.problems) == (kind, ())
    assert "auto" not in json.dumps(filled.config)
    assert matching_deepspeed_preset(filled.config) == kind


def test_auto_is_filled() -> None:
    filled = fill_deepspeed_auto(TRANSFORMERS_ZERO3, FACTS, LABEL)
    assert (filled.kind, filled.problems) == ("zero3", ())
    assert filled.config["train_batch_size"] == 64
    assert filled.config["gradient_clipping"] == 1.0
    assert filled.config["bf16"] == {"enabled": True}
    zero = filled.config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (1024 * 1024, 943718)
    assert zero["stage3_param_persistence_threshold"] == 10240
    assert not {"optimizer", "scheduler", "fp16"} & filled.config.keys(), "these are the run's own"
    assert TRANSFORMERS_ZERO3["train_batch_size"] == "auto", "the user's dictionary has been changed"


def test_auto_without_a_known_size_is_deepspeeds_own() -> None:
    filled = fill_deepspeed_auto(TRANSFORMERS_ZERO3, replace(FACTS, hidden_size=None, world=None), LABEL)
    assert filled.problems == ()
    assert not {"reduce_bucket_size", "stage3_prefetch_bucket_size"} & filled.config["zero_optimization"].keys()
    assert "train_batch_size" not in filled.config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_batch_size": 32}, ("train_batch_size", "64", "--global_batch_size 32")),
        (
            {"train_micro_batch_size_per_gpu": 1},
            ("conflicts with the run, which uses 4", "--per_device_train_batch_size 1"),
        ),
        (
            {"gradient_accumulation_steps": 2},
            ("conflicts with the run, which uses 8", "--gradient_accumulation_steps 2"),
        ),
        ({"gradient_clipping": 0.3}, ("conflicts with the run, which uses 1.0", "--max_grad_norm 0.3")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, ("--learning_rate 0.0001",)),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}},
            ("--adam_beta1 0.9 --adam_beta2 0.999, or",),
        ),
        ({"optimizer": {"type": "Lamb"}}, ("is not supported: ZeRO runs always use AdamW",)),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            ("is not supported: ZeRO runs always use AdamW",),
        ),
        ({"scheduler": {"type": "WarmupLR"}}, ("the schedule of the run is cosine", "--lr_scheduler_type constant")),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_lr": 1e-6}}},
            ("warmup_min_lr", "--lr_warmup_init 1e-06"),
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.5}}},
            ("min_lr", "which uses 0.0", "--min_lr 1e-05"),
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_step": 5}}},
            ("warmup_num_step", "would be ignored", "did you mean warmup_num_steps?"),
        ),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, ("amsgrad", "would be ignored")),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ("--recompute_granularity",)),
        ({"tensorboard": {"enabled": True}}, ("--report_to tensorboard",)),
        ({"sequence_parallel_size": 2}, ("--engine megatron with --cp",)),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            ("nvme", "needs stage 3"),
        ),
        ({"bf16": {"enabled": False}}, ("conflicts with the compute dtype bfloat16", "--torch_dtype float32")),
        ({"fp16": {"enabled": True}}, ("conflicts with the compute dtype bfloat16", "--torch_dtype float16")),
        ({"amp": {"enabled": True}}, ("would be ignored", "bf16")),
        ({"gradient_cliping": 1.0}, ("would be ignored", "did you mean gradient_clipping?")),
        ({"prescale_gradients": True}, ("gradients are summed",)),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, ("is not supported",)),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, ("nvme", "nvme_path")),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, ("none, cpu, nvme",)),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME | {"fast_init": True}}},
            ('"offload_param": "fast_init": true', "starts from wrong weights", "leave it out"),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": NVME | {"buffer_count": 3}}},
            ('"offload_optimizer": "buffer_count": 3', "is too few", '"buffer_count": 4'),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": NVME | {"pipeline_read": True}}},
            ('"buffer_count": 4', "of 2 groups", '"buffer_count": 8'),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": NVME}, "aio": {"use_gds": True}},
            ('"aio": "use_gds": true', "is not supported", "leave it out"),
        ),
        (
            {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}},
            ("sub_group_size", "the run does not provide this value"),
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            ("with this offload is not one of",),
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ("with this offload is not one of",)),
        ({"zero_optimization": {"stage": 4}}, ("with this offload is not one of",)),
    ],
)
def test_contradictions_are_told(change: dict[str, Any], words: tuple[str, ...]) -> None:
    text = wrong({**TRANSFORMERS_ZERO3, **change})
    assert all(word in text for word in words), text
    assert len(fill_deepspeed_auto({**TRANSFORMERS_ZERO3, **change}, FACTS, LABEL).problems) == 1, text


@pytest.mark.parametrize("parts", [("optimizer",), ("param",), ("optimizer", "param")])
def test_a_drive(parts: tuple[str, ...], tmp_path: Path) -> None:
    """Taken as it is written, but for what would leave DeepSpeed without buffers, which a notice says."""
    zero = {"stage": 3, **{f"offload_{part}": NVME for part in parts}, "stage3_prefetch_bucket_size": 5e8}
    filled = fill_deepspeed_auto({"zero_optimization": zero, "aio": {"queue_depth": 8}}, FACTS, LABEL)
    assert (filled.kind, filled.problems) == ("zero3_offload", ())
    assert filled.config["zero_optimization"] == zero and filled.config["aio"] == {"queue_depth": 8}
    assert offload_parts_on_a_drive(filled.config) == list(parts)
    file = tmp_path / "n.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    said = [
        n
        for n in load_config("sft", ["--model", "m", "--dataset", "d", "--deepspeed", str(file)]).notices
        if "0 is" in n
    ]
    assert [n.split(", because")[0] for n in said] == (
        ['n.json: "stage3_prefetch_bucket_size": 0 is used'] if "param" in parts else []
    )
    given = deepspeed_config_with_engine_overrides(filled.config, 2, "cpu")["zero_optimization"]
    assert {given.get(key) for key in READ_AHEAD_ON_A_DRIVE} == ({0} if "param" in parts else {5e8, None})


@pytest.mark.parametrize("part", ["optimizer", "param"])
def test_stage_3_may_offload_one_part(part: str) -> None:
    filled = fill_deepspeed_auto(
        {"zero_optimization": {"stage": 3, f"offload_{part}": {"device": "cpu"}}}, FACTS, LABEL
    )
    assert (filled.kind, filled.problems, offloads_optimizer_and_weights(filled.config)) == (
        "zero3_offload",
        (),
        (part == "optimizer", part == "param"),
    )


def test_values_that_agree_are_no_mistake() -> None:
    same = {
        "train_batch_size": 64,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    }
    assert wrong({**TRANSFORMERS_ZERO3, **same}) == ""


def test_what_is_switched_off_asks_for_nothing() -> None:
    off = {
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "amp": {"enabled": False, "opt_level": "O1"},
        "tensorboard": {"enabled": False, "output_path": "t"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "sequence_parallel_size": 1,
        "elasticity": {"enabled": False},
        "sparse_gradients": False,
    }
    filled = fill_deepspeed_auto({**TRANSFORMERS_ZERO3, **off}, FACTS, LABEL)
    assert filled.problems == () and not off.keys() & filled.config.keys()


def test_offload_in_older_files(tmp_path: Path) -> None:
    older = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True}
    (tmp_path / "f.json").write_text(json.dumps({"zero_optimization": older}))
    read = read_deepspeed_json(str(tmp_path / "f.json"))
    pinned = {"device": "cpu", "pin_memory": True}
    assert read["zero_optimization"] == {"stage": 3, "offload_optimizer": pinned, "offload_param": pinned}
    assert matching_deepspeed_preset(read) == "zero3_offload"


HALF = {
    "loss_scale": 0,
    "initial_scale_power": 12,
    "loss_scale_window": 50,
    "hysteresis": 1,
    "min_loss_scale": 4,
}


@pytest.mark.parametrize("enabled", [True, "auto"])
def test_float16(enabled: object) -> None:
    """DeepSpeed's own section with the run's numbers, whether the file repeats them or leaves them to the run."""
    numbers = LossScaleNumbers(12, 50, 1, 4)
    facts = replace(FACTS, dtype="float16", loss_scale=numbers)
    want = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 1, "min_loss_scale": 4}
    for section in ({"enabled": enabled}, {"enabled": enabled, "auto_cast": True, **HALF}):
        filled = fill_deepspeed_auto({**TRANSFORMERS_ZERO3, "fp16": section}, facts, LABEL)
        assert filled.problems == () and filled.config["fp16"] == want and filled.config["bf16"] == {"enabled": False}
    other = fill_deepspeed_auto(
        {**TRANSFORMERS_ZERO3, "fp16": {"enabled": True, "initial_scale_power": 20}}, facts, LABEL
    )
    assert "conflicts with the run, which uses 12" in str(other.problems[0])
    assert "--initial_loss_scale 1048576" in str(other.problems[0])
    fixed = fill_deepspeed_auto({**TRANSFORMERS_ZERO3, "fp16": {"enabled": True, "loss_scale": 128}}, facts, LABEL)
    assert "the loss scale is dynamic" in str(fixed.problems[0])


def test_facts_come_from_the_configuration() -> None:
    cfg = SwiftConfig(learning_rate=3e-5, global_batch_size=16, per_device_train_batch_size=2, max_grad_norm=0.7)
    facts = deepspeed_auto_values(cfg, 4, "float32", 64)
    assert (facts.per_device, facts.accumulation, facts.world, facts.learning_rate, facts.clip) == (2, 2, 4, 3e-5, 0.7)
    half = SwiftConfig(initial_loss_scale=2**12, loss_scale_window=50, hysteresis=1, min_loss_scale=4)
    assert deepspeed_auto_values(half, 4, "float16", 64).loss_scale == LossScaleNumbers(12, 50, 1, 4)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_file_that_is_none(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"f\.json"):
        read_deepspeed_json(str(file))


def test_settings_without_a_file(tmp_path: Path) -> None:
    """An object in YAML or Python, or JSON on the command line, is as a file with it: values, engine and mistakes."""
    settings = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    given = {"model": "m", "dataset": "d.jsonl"}
    file = SwiftConfig(deepspeed=str(tmp_path / "ds.json"), **given)
    words = ["--model", "m", "--dataset", "d.jsonl", "--deepspeed", json.dumps(settings)]
    (tmp_path / "run.yaml").write_text(json.dumps({**given, "deepspeed": settings}))
    for cfg in (
        SwiftConfig(deepspeed=settings, **given),
        load_config("sft", words, environ={}),
        load_config("sft", [str(tmp_path / "run.yaml")], environ={}),
    ):
        assert cfg.optim.learning_rate == file.optim.learning_rate == 3e-5
        filled, wanted = (filled_deepspeed_config(c, 2, "bfloat16", 64) for c in (cfg, file))
        assert filled.config == wanted.config and not filled.problems
    wrong = SwiftConfig(deepspeed={"zero_optimization": {"stage": 7}}, **given)
    (problem,) = filled_deepspeed_config(wrong, 2, "bfloat16", 64).problems
    assert problem.what == '--deepspeed: "stage": 7'
