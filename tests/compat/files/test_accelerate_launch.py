"""accelerate's settings, as `accelerate launch` (1.15) leaves them in the environment: taken, told, or refused.

Covers: megaswift/options/option_json.py.
"""

from __future__ import annotations

import pytest

from megaswift.compat.files.accelerate_launch import accelerate_notices, python_api_accelerate_engine_problems
from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.errors import ConfigError
from tests.launchers.options.test_variables import ACCELERATE, ALONE

ZERO2 = ACCELERATE | {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
}
FSDP1 = ACCELERATE | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
FSDP2 = FSDP1 | {"FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    "environ, options",
    [
        (ZERO2, {"deepspeed": "zero2"}),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"deepspeed": "zero3"}),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {"deepspeed": "zero2_offload"}),
        (
            ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/deepspeed/zero1.json"},
            {"deepspeed": "configs/deepspeed/zero1.json"},
        ),
        (FSDP1, {"fsdp": ("full_shard",)}),
        (FSDP1 | {"FSDP_SHARDING_STRATEGY": "2"}, {"fsdp": ("shard_grad_op",)}),
        (FSDP1 | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"fsdp": ("hybrid_shard",)}),
        (FSDP2, {"fsdp": ("full_shard",)}),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"fsdp": ("shard_grad_op",)}),
        (
            FSDP2
            | {
                "FSDP_OFFLOAD_PARAMS": "true",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
                "FSDP_ACTIVATION_CHECKPOINTING": "true",
            },
            {
                "fsdp": ("full_shard", "offload"),
                "fsdp_transformer_layer_cls_to_wrap": ("A", "B"),
                "recompute_granularity": "full",
            },
        ),
        (FSDP2 | {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"fsdp": ("full_shard",), "torch_dtype": "bfloat16"}),
        (FSDP1 | {"FSDP_SHARDING_STRATEGY": "5"}, {"fsdp": ("hybrid_shard_zero2",)}),
        (ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp16"}, {"torch_dtype": "float16"}),
        (ACCELERATE, {}),
    ],
)
def test_what_is_taken_and_said(environ: dict[str, str], options: dict[str, object]) -> None:
    cfg = load_config("sft", [], environ=environ)
    assert {name: cfg.value(name) for name in cfg.given} == options
    said = list(accelerate_notices(environ, cfg, alone=False))
    assert [line.startswith("from accelerate's settings: --") for line in said[:1]] == [True] * bool(options)
    assert all(f"--{name} " in said[0] for name in options)
    assert [s for s in said[1:] if "fsdp_version 1" not in s] == []
    engine = "fsdp2" if "fsdp" in options else str(options.get("deepspeed", "megatron"))
    assert requested_engine(cfg) == ("zero1" if engine.endswith("json") else engine)
    assert requested_engine(cfg.replace(engine=requested_engine(cfg))) == requested_engine(cfg)


def test_the_run_s_own_options_go_over_them() -> None:
    environ = ZERO2 | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    cfg = load_config("sft", ["--deepspeed", "zero3", "--dtype", "fp32"], environ=environ)
    assert cfg.engine.deepspeed == "zero3" and cfg.model.torch_dtype == "float32"
    assert list(accelerate_notices(environ, cfg, alone=False)) == [
        "accelerate's mixed_precision bf16 has no effect: --torch_dtype float32 of the run overrides it",
        "accelerate's deepspeed_config has no effect: --deepspeed zero3 of the run overrides it",
    ]
    assert requested_engine(load_config("sft", ["--engine", "zero2"], environ=ZERO2)) == "zero2"
    with pytest.raises(ConfigError, match="accelerate's deepspeed_config: conflicts with engine ddp"):
        load_config("sft", ["--engine", "ddp"], environ=ZERO2)
    with pytest.raises(ConfigError, match="accelerate's fsdp_config"):
        load_config("sft", ["--engine", "ddp"], environ=FSDP2)


@pytest.mark.parametrize(
    "added, part",
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision fp8"),
        ({"FSDP_IGNORED_MODULES": "a"}, "fsdp_ignored_modules"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_nvme_path"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "x"}, "moe_layer_cls_names"),
    ],
)
def test_what_is_refused(added: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("sft", [], environ=(ACCELERATE if "ACCELERATE_USE_DEEPSPEED" in added else FSDP1) | added)
    assert len(caught.value.problems) == 1 and part in str(caught.value) and caught.value.problems[0].fix


@pytest.mark.parametrize(
    "added, part",
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps 4 has no effect"),
        (
            {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
            "gradient_clipping 0.5 has no effect: --max_grad_norm determines it",
        ),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend inductor has no effect"),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "fsdp_auto_wrap_policy no_wrap has no effect"),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "fsdp_state_dict_type sharded_state_dict has no effect"),
    ],
)
def test_what_has_no_effect_is_said(added: dict[str, str], part: str) -> None:
    environ = FSDP2 | added
    assert part in list(accelerate_notices(environ, load_config("sft", [], environ=environ), alone=False))[-1]


@pytest.mark.parametrize(
    "added, option, value",
    [
        ({"FSDP_FORWARD_PREFETCH": "true"}, "fsdp_forward_prefetch", True),
        ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, "fsdp_backward_prefetch", "no_prefetch"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "7"}, "fsdp_min_num_params", 7),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "7"}, "fsdp_min_num_params", None),
    ],
)
def test_units_and_prefetch_of_fsdp(added: dict[str, str], option: str, value: object) -> None:
    assert load_config("sft", [], environ=FSDP2 | added).value(option) == value


def test_layers_that_no_shard_does_not_wrap() -> None:
    environ = FSDP1 | {"FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Layer"}
    cfg = load_config("sft", [], environ=environ)
    said = [*accelerate_notices(environ, cfg, alone=False)]
    assert requested_engine(cfg) == "ddp" and not any("FSDP2 is always used" in line for line in said)
    assert any(
        "fsdp_transformer_layer_cls_to_wrap Layer has no effect: no_shard is engine ddp" in line for line in said
    )


def test_one_process_that_was_not_meant() -> None:
    cfg = load_config("sft", [], environ=ALONE)
    assert ["accelerate started one process" in s for s in accelerate_notices(ALONE, cfg, alone=True)] == [True]
    assert not list(accelerate_notices(ALONE, cfg, alone=False)) and not list(
        accelerate_notices({"MASTER_PORT": "1"}, SwiftConfig(), alone=True)
    )


@pytest.mark.parametrize("environ, engine", [(ZERO2, "zero2"), (FSDP1, "fsdp2")])
def test_the_python_api_does_not_read_them(environ: dict[str, str], engine: str) -> None:
    (problem,) = python_api_accelerate_engine_problems(environ)
    assert f"SwiftConfig(engine='{engine}')" in problem.fix and not python_api_accelerate_engine_problems(ACCELERATE)
