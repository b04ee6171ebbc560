"""accelerate's Megatron-LM and parallelism sections: the options of the run, from its file and from its launcher's
variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.compat.files.accelerate_launch import accelerate_notices
from megaswift.compat.files.accelerate_parallel import OPTIONS_OF_MEGATRON, SETTLED_OF_MEGATRON, SIZES
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import OPTIONS
from megaswift.errors import ConfigError

MEGATRON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MEGATRON_LM",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "megatron_lm_config": {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_num_micro_batches": 4,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_use_distributed_optimizer": False,
        "megatron_lm_gradient_clipping": 0.5,
    },
}
"""What `accelerate config` asks for."""
WANT = {
    "engine": "megatron",
    "torch_dtype": "bfloat16",
    "nproc_per_node": 8,
    "tensor_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_parallel_size": 2,
    "gradient_accumulation_steps": 4,
    "recompute_granularity": "selective",
    "distributed_optimizer": False,
    "max_grad_norm": 0.5,
}
RUN = ["--model", "m", "--dataset", "d"]


def of_file(tmp_path: Path, content: dict[str, Any], *words: str, flag: str = "--accelerate_config") -> SwiftConfig:
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_config("sft", [flag, str(file), *RUN, *words], environ={})


def launcher_environment(*words: str) -> dict[str, str]:
    """The variables that `accelerate launch` itself sets."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    parser = launch.launch_command_parser()
    args, *_ = launch._validate_launch_command(parser.parse_args([*words, "script.py"]))
    return {k: v for k, v in prepare_multi_gpu_env(args).items() if k.startswith(("ACCEL", "MEGATRON", "PARALLEL"))}


@pytest.mark.parametrize("flag", ["--accelerate_config", "--config_file", "--config"])
def test_a_file_of_megatron_lm(flag: str, tmp_path: Path) -> None:
    cfg = of_file(tmp_path, MEGATRON, flag=flag)
    assert {name: cfg.value(name) for name in WANT} == WANT


def test_the_command_line_goes_over_it(tmp_path: Path) -> None:
    cfg = of_file(tmp_path, MEGATRON, "--tp", "4", "--max_grad_norm", "2")
    assert (cfg.parallel.tensor_parallel_size, cfg.optim.max_grad_norm) == (4, 2.0)


def test_accelerate_launch_with_flags() -> None:
    words = "--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_pp_degree 2 --megatron_lm_num_micro_batches 4 "
    words += "--megatron_lm_sequence_parallelism true --megatron_lm_recompute_activations true "
    words += "--megatron_lm_gradient_clipping 0.5 --mixed_precision bf16 --num_processes 8"
    environ = launcher_environment(*words.split())
    cfg = load_config("sft", RUN, environ=environ)
    same = {**WANT, "distributed_optimizer": True}
    del same["nproc_per_node"]
    assert {name: cfg.value(name) for name in same} == same
    assert "--tensor_parallel_size 2" in next(accelerate_notices(environ, cfg, alone=False))


def test_flags_that_ask_for_nothing() -> None:
    """`--use_megatron_lm` alone: the native engine, and no layout."""
    cfg = load_config("sft", RUN, environ=launcher_environment("--use_megatron_lm", "--num_processes", "2"))
    assert cfg.engine.engine == "megatron" and cfg.parallel == SwiftConfig().parallel


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp_size": 2, "dp_shard_size": 4}, {"tensor_parallel_size": 2}),
        ({"cp_size": 4}, {"context_parallel_size": 4}),
        ({"sp_size": 2, "sp_backend": "deepspeed"}, {"context_parallel_size": 2}),
        ({"dp_shard_size": 8}, {"fsdp": ("full_shard",)}),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"fsdp": ("hybrid_shard",)}),
        ({"tp_size": 1}, {"tensor_parallel_size": 1, "fsdp": ()}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP"])
def test_parallelism_config(kind: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    section = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    content = {"distributed_type": kind, "num_processes": 8, "parallelism_config": section}
    cfg = of_file(tmp_path, content)
    if kind == "MULTI_GPU" or "fsdp" not in options:
        assert {name: cfg.value(name) for name in options} == options
    splits = sizes.get("tp_size", 1) > 1 or "cp_size" in sizes or "sp_size" in sizes
    assert any("data-parallel sizes have no effect" in n for n in cfg.notices) == (splits and "dp_shard_size" in sizes)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"megatron_lm_use_custom_fsdp": True}, "megatron_lm_use_custom_fsdp: is not supported"),
        ({"megatron_lm_tp_degree": "two"}, "megatron_lm_tp_degree two: must be a whole number"),
    ],
)
def test_what_is_refused(section: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        of_file(tmp_path, {**MEGATRON, "megatron_lm_config": section})


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    section = {"megatron_lm_hidden_dropout": 0.1, "megatron_lm_attention_softmax_in_fp32": True}
    notices = [n for n in of_file(tmp_path, {**MEGATRON, "megatron_lm_config": section}).notices if "accelerate's" in n]
    (line,) = notices
    assert "megatron_lm_hidden_dropout 0.1 has no effect: config.json sets it" in line


def test_every_argument_of_accelerate_is_read() -> None:
    from accelerate.commands import launch

    args = vars(launch.launch_command_parser().parse_args(["script.py"]))
    theirs = {n.removeprefix("megatron_lm_").upper() for n in args if n.startswith("megatron_lm_")}
    assert theirs <= {*OPTIONS_OF_MEGATRON, *SETTLED_OF_MEGATRON, "RECOMPUTE_ACTIVATIONS", "USE_CUSTOM_FSDP"}
    assert {*OPTIONS_OF_MEGATRON.values(), *SIZES.values()} <= set(OPTIONS)
