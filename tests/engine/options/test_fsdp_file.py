"""`--fsdp_config`: keys that mean something here are options, what is so anyway passes, the rest is told, all at
once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.engine.options.fsdp_file import fsdp_file_options, options_from_fsdp
from megaswift.errors import ConfigError
from megaswift.run.checks.engine_choice import resolve_engine

ACCELERATE: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Qwen3RMSNorm",
    "fsdp_activation_checkpointing": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
"""The shape of file that `accelerate config` makes."""
FSDP1: dict[str, Any] = {
    "backward_prefetch": "backward_pre",
    "forward_prefetch": "false",
    "use_orig_params": True,
    "sync_module_states": "true",
    "limit_all_gathers": True,
    "xla": False,
    "min_num_params": 0,
    "fsdp_sharding_strategy": 1,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "fsdp_version": 1,
}
"""What users of FSDP1 have."""


def made(folder: Path, content: Any, **more: Any) -> SwiftConfig:
    path = folder / "fsdp.json"
    path.write_text(json.dumps(content))
    return SwiftConfig(model="m", dataset=["d"], fsdp_config=str(path), **more)


def test_what_is_taken() -> None:
    assert options_from_fsdp(ACCELERATE, "f").options == {
        "fsdp": ("shard_grad_op", "offload"),
        "fsdp_transformer_layer_cls_to_wrap": ("Qwen3DecoderLayer", "Qwen3RMSNorm"),
        "recompute_granularity": "full",
    }
    assert options_from_fsdp(FSDP1, "f").options == {
        "fsdp": ("full_shard",),
        "fsdp_transformer_layer_cls_to_wrap": ("LlamaDecoderLayer",),
    }
    assert options_from_fsdp({"offload_params": True}, "f").options == {"fsdp": ("full_shard", "offload")}
    assert options_from_fsdp({}, "f").options == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"xla": True}, ("XLA is not supported",)),
        ({"mixed_precision_policy": "bf16"}, ("--torch_dtype",)),
        ({"reshard_after_foward": True}, ("reshard_after_forward",)),
        ({"sharding_strategy": "SHARDED"}, ("is not a supported sharding strategy",)),
        ({"offload_params": 3}, ("true or false",)),
        ({"transformer_layer_cls_to_wrap": [1]}, ("must be a list of layer classes",)),
        (
            {"reshard_after_forward": True, "sharding_strategy": "HYBRID_SHARD"},
            ("full_shard and hybrid_shard", "keep one of the two"),
        ),
    ],
)
def test_what_is_told(content: dict[str, Any], said: tuple[str, ...]) -> None:
    text = "\n".join(str(p) for p in options_from_fsdp(content, "f.json").problems)
    assert all(part in text for part in ("f.json", *said)), text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "full tensors"),
        ({"cpu_ram_efficient_loading": False}, "shard by shard"),
        ({"limit_all_gathers": False}, "limits all-gathers"),
        ({"use_orig_params": "false"}, "original parameters"),
        ({"auto_wrap_policy": "NO_WRAP"}, "decoder layers are units"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_what_changes_memory_or_speed_at_most(
    content: dict[str, Any], said: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says that it has no effect."""
    ((name, value),) = content.items()
    cfg = made(tmp_path, {prefix + name: value})
    resolve_engine(cfg, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert f'fsdp.json: "{name}"' in line and said in line


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ({"backward_prefetch": "NO_PREFETCH"}, {"fsdp_backward_prefetch": "no_prefetch"}),
        ({"backward_prefetch": "backward_post"}, {"fsdp_backward_prefetch": "no_prefetch"}),
        ({"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": "false"}, {}),
        ({"forward_prefetch": True}, {"fsdp_forward_prefetch": True}),
        ({"min_num_params": 2000}, {"fsdp_min_num_params": 2000}),
        ({"min_num_params": "2000", "auto_wrap_policy": "SIZE_BASED_WRAP"}, {"fsdp_min_num_params": 2000}),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, {"fsdp_min_num_params": 100_000_000}),
        ({"min_num_params": 100_000_000, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
        (
            {"min_num_params": 100_000_000, "transformer_layer_cls_to_wrap": ["L"]},
            {"fsdp_transformer_layer_cls_to_wrap": ("L",)},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_units_and_prefetch(content: dict[str, Any], options: dict[str, Any], prefix: str) -> None:
    made = options_from_fsdp({prefix + name: value for name, value in content.items()}, "f")
    assert not made.problems and not made.notices and made.options == options


@pytest.mark.parametrize(
    "content", [{"min_num_params": -1}, {"auto_wrap_policy": "BY_NAME"}, {"backward_prefetch": "later"}], ids=str
)
def test_units_and_prefetch_that_are_none(content: dict[str, Any]) -> None:
    (problem,) = options_from_fsdp(content, "f").problems
    assert problem.what.startswith(f'f: "{next(iter(content))}"') and problem.fix


def test_a_size_beside_classes_is_named() -> None:
    content = {"min_num_params": 2000, "transformer_layer_cls_to_wrap": ["L"]}
    assert "chosen by class" in options_from_fsdp(content, "f").notices[0]


def test_a_run_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks for fsdp2 by itself, its keys become options, and the run may be repeated from those."""
    cfg = made(tmp_path, ACCELERATE, fsdp=["shard_grad_op", "offload", "auto_wrap"])
    assert requested_engine(cfg) == "fsdp2" and not fsdp_file_options(cfg).problems
    run = resolve_engine(cfg, 2)
    assert run.engine.engine == "fsdp2" and run.engine.fsdp == ("shard_grad_op", "offload")
    assert run.engine.fsdp_transformer_layer_cls_to_wrap == ("Qwen3DecoderLayer", "Qwen3RMSNorm")
    assert run.model.recompute_granularity == "full"
    assert "FSDP2" in capsys.readouterr().err
    assert resolve_engine(run, 2).engine == run.engine


def test_contradictions_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        made(
            tmp_path,
            ACCELERATE,
            fsdp="full_shard",
            recompute_granularity="none",
            fsdp_transformer_layer_cls_to_wrap=["Other"],
            learning_rate=-1,
        )
    text = str(caught.value)
    named = "--fsdp_transformer_layer_cls_to_wrap Other"
    for part in (
        "--fsdp full_shard",
        "conflicts with fsdp.json, which sets shard_grad_op offload",
        named,
        "learning_rate",
    ):
        assert part in text, text
    with pytest.raises(ConfigError, match="engine ddp|would be ignored"):
        made(tmp_path, ACCELERATE, engine="ddp")
    with pytest.raises(ConfigError, match="is not JSON"):
        (tmp_path / "bad.json").write_text("{")
        SwiftConfig(model="m", dataset=["d"], fsdp_config=str(tmp_path / "bad.json"))
