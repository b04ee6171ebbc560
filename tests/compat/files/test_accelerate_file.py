"""Files of `accelerate config` given to megaswift itself: every key of the usual kinds has an effect, a notice or a
refusal."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import filled_deepspeed_config, requested_engine
from megaswift.engine.options.fsdp_file import fsdp_file_options
from megaswift.errors import ConfigError
from megaswift.run.saved_paths import with_absolute_paths

COMMON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""What `accelerate config` writes whatever the answers."""
GPUS = {**COMMON, "distributed_type": "MULTI_GPU", "gpu_ids": "all"}
ZERO = {
    **COMMON,
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
}
FSDP = {
    **COMMON,
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    },
}


def load(folder: Path, content: dict[str, Any], *words: str, way: str = "--accelerate_config") -> SwiftConfig:
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    named = [way, str(file)] if way else [str(file)]
    return load_config("sft", [*named, "--model", "m", "--dataset", "d.jsonl", *words], environ={})


@pytest.mark.parametrize("way", ["--accelerate_config", "--config", ""])
def test_several_gpus(way: str, tmp_path: Path) -> None:
    cfg = load(tmp_path, GPUS, way=way)
    assert (cfg.launch.nproc_per_node, cfg.model.torch_dtype, requested_engine(cfg)) == (4, "bfloat16", "megatron")
    assert cfg.given == {"model", "dataset", "nproc_per_node", "torch_dtype"} and not cfg.notices


def test_several_machines(tmp_path: Path) -> None:
    more = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29501}
    launch = load(tmp_path, {**GPUS, "num_processes": 16, **more}).launch
    assert (launch.nproc_per_node, launch.nnodes, launch.node_rank) == (8, 2, 1)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 29501)


def test_deepspeed(tmp_path: Path) -> None:
    cfg = load(tmp_path, ZERO)
    assert (requested_engine(cfg), cfg.launch.nproc_per_node) == ("zero3_offload", 4)
    assert ["gradient_clipping 1.0 has no effect: --max_grad_norm" in n for n in cfg.notices] == [True]
    plain = {**ZERO, "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4}}
    cfg = load(tmp_path, plain)
    assert requested_engine(cfg) == "zero2" and "gradient_accumulation_steps 4 has no effect" in cfg.notices[0]
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    own = {"deepspeed_config_file": str(file), "deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}
    cfg = load(tmp_path, {**ZERO, "deepspeed_config": own})
    assert cfg.engine.deepspeed == str(file) and requested_engine(cfg) == "zero1"
    assert "deepspeed_multinode_launcher has no effect: every machine" in cfg.notices[0]


def test_deepspeed_offload_to_nvme(tmp_path: Path) -> None:
    """The configuration that accelerate would give to DeepSpeed, filled in by the run."""
    section = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/fast//drive"}
    both = {**section, "offload_param_device": "cpu"}
    for given, weights in ((section, None), (both, {"device": "cpu"})):
        cfg = load(tmp_path, {**ZERO, "deepspeed_config": given})
        filled = filled_deepspeed_config(cfg, 4, "bfloat16", 64)
        zero = filled.config["zero_optimization"]
        assert filled.problems == () and zero["stage"] == 3 and zero.get("offload_param") == weights
        assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/fast//drive"}
        assert requested_engine(cfg) == "zero3_offload" and not any("nvme" in n for n in cfg.notices)
        assert with_absolute_paths(cfg.to_dict())["engine"]["deepspeed"] == cfg.engine.deepspeed
    cfg = load(tmp_path, {**ZERO, "deepspeed_config": {**section, "zero_stage": 2}})
    (problem,) = filled_deepspeed_config(cfg, 4, "bfloat16", 64).problems
    assert "--deepspeed" in problem.what and "stage 3" in f"{problem.rule} {problem.fix}"


@pytest.mark.parametrize("left_out", ["compute_environment", "distributed_type"])
def test_a_file_with_one_of_its_names(left_out: str, tmp_path: Path) -> None:
    """Written by hand."""
    cfg = load(tmp_path, {name: value for name, value in GPUS.items() if name != left_out}, way="")
    assert (cfg.launch.nproc_per_node, cfg.model.torch_dtype) == (4, "bfloat16")


def test_machines_of_deepspeed_s_launcher(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"elsewhere slots=4\n{socket.gethostname()} slots=4\n")
    section = {"zero_stage": 2, "deepspeed_hostfile": str(hosts)}
    launch = load(tmp_path, {**ZERO, "deepspeed_config": section}).launch
    assert (launch.nnodes, launch.node_rank, launch.master_addr, launch.nproc_per_node) == (2, 1, "elsewhere", 4)
    hosts.unlink()
    with pytest.raises(ConfigError, match=f"deepspeed_hostfile: {hosts}: hostfile {hosts}: cannot be read"):
        load(tmp_path, {**ZERO, "deepspeed_config": section})


def test_fsdp_without_sharding(tmp_path: Path) -> None:
    fsdp = {"fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD", "fsdp_use_orig_params": True}
    assert requested_engine(load(tmp_path, {**FSDP, "fsdp_config": fsdp})) == "ddp"
    cfg = load(tmp_path, {**FSDP, "fsdp_config": {**fsdp, "fsdp_transformer_layer_cls_to_wrap": "Layer"}})
    assert requested_engine(cfg) == "ddp"
    assert any("fsdp_transformer_layer_cls_to_wrap has no effect: no_shard is" in line for line in cfg.notices)


def test_fsdp(tmp_path: Path) -> None:
    cfg = load(tmp_path, FSDP)
    settings = fsdp_file_options(cfg)
    assert requested_engine(cfg) == "fsdp2" and settings.problems == ()
    assert settings.options == {"fsdp": ("full_shard", "offload"), "recompute_granularity": "full"}
    assert len(settings.notices) == 1 and "state_dict_type" in settings.notices[0]


def test_the_run_s_own_options_go_over_it(tmp_path: Path) -> None:
    cfg = load(tmp_path, ZERO, "--deepspeed", "zero2", "--nproc_per_node", "2", "--torch_dtype", "float32")
    assert (cfg.engine.deepspeed, cfg.launch.nproc_per_node, cfg.model.torch_dtype) == ("zero2", 2, "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distributed_type": "XLA"}, ("distributed_type: XLA", "MULTI_GPU")),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, ("compute_environment", "LOCAL_MACHINE")),
        ({"fsdp_config": "fsdp.json"}, ("fsdp_config: fsdp.json", "must be a section")),
        ({"num_processes": 1, "num_machines": 2, "main_process_ip": "h"}, ("num_processes: 1", "num_processes: 2")),
        ({"use_cpu": True}, ("use_cpu: true", "CUDA_VISIBLE_DEVICES")),
        ({"gpu_ids": "0, 2"}, ("gpu_ids: 0,2", "CUDA_VISIBLE_DEVICES=0,2")),
        ({"num_processes": 5, "num_machines": 2, "main_process_ip": "h"}, ("num_processes: 5", "num_processes: 4")),
        ({"tpu_use_cluster": True}, ("TPUs are not supported",)),
        ({"num_process": 3}, ("num_process: 3", "did you mean num_processes?")),
        (
            {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp": 2}},
            ("megatron_lm_config: megatron_lm_tp", "would be ignored"),
        ),
        ({"parallelism_config": {"parallelism_config_ep_size": 2}}, ("parallelism_config_ep_size", "would be ignored")),
        ({"mixed_precision": "fp8"}, ("--fp8_format hybrid",)),
        ({**ZERO, "deepspeed_config": {"zero_stag": 3}}, ("zero_stag", "did you mean zero_stage?")),
        (
            {**ZERO, "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "nvme"}},
            ("offload_optimizer_device: nvme", "offload_optimizer_nvme_path: /local_nvme"),
        ),
        (
            {**ZERO, "deepspeed_config": {"zero_stage": 4}},
            ("zero_stage: 4", "is not a stage of ZeRO"),
        ),
        ({**FSDP, "fsdp_config": {"fsdp_ignored_modules": "x"}}, ("ignored_modules", "--freeze_parameters")),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {**GPUS, **change})
    assert len(error.value.problems) == 1 and all(part in str(error.value) for part in said), str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"debug": True}, "debug has no effect: TORCH_DISTRIBUTED_DEBUG"),
        ({"enable_cpu_affinity": True}, "enable_cpu_affinity has no effect"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config has no effect: distributed_type is not FSDP"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_backend inductor has no effect: --torch_compile"),
    ],
)
def test_what_has_no_effect(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (line,) = load(tmp_path, {**GPUS, **change}).notices
    assert line.startswith("accelerate.yaml: ") and said in line


def test_no_without_quotes(tmp_path: Path) -> None:
    """YAML reads it as false."""
    assert load(tmp_path, {**GPUS, "distributed_type": False}).notices == ()


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"--accelerate_config no\.yaml: cannot be read"):
        load_config("sft", ["--accelerate_config", "no.yaml"], environ={})
