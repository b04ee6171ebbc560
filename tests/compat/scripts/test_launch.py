"""The launch of a translated command, and settings of accelerate.

Covers: megaswift/compat/scripts/accelerate_settings.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megaswift.compat.scripts.accelerate_settings import accelerate_environment, read_settings_file
from megaswift.compat.scripts.commands import migrated_run
from megaswift.compat.scripts.launch import command_line
from megaswift.compat.scripts.toolkits import command_of_file
from megaswift.config.sections import TRAINING
from megaswift.options.files import read_config_file
from tests.compat.scripts.translated import loaded, translated

WORDS = "train.py --model_name_or_path m --dataset_name d --num_train_epochs 1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1 swift sft --model m", "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=8"),
        ("swift sft --model m", ""),
        ("export NCCL_DEBUG=INFO\nNNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=4 swift sft --model m",
         "NCCL_DEBUG=INFO NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=4"),
        (f"torchrun --nproc_per_node 2 {WORDS}", "NPROC_PER_NODE=2"),
        (f"torchrun --nproc_per_node gpu {WORDS}", "NPROC_PER_NODE=N"),
        ("NPROC_PER_NODE=0 swift sft --model m", "NPROC_PER_NODE=N"),
        (f"torchrun --nnodes $N --node_rank=$RANK --nproc_per_node 8 {WORDS}",
         'NNODES="$N" NODE_RANK="$RANK" NPROC_PER_NODE=8'),
        (f"accelerate launch --num_processes 16 --num_machines 2 --machine_rank 0 {WORDS}",
         "NNODES=2 NODE_RANK=0 NPROC_PER_NODE=8"),
        (f"CUDA_VISIBLE_DEVICES=1,3 deepspeed {WORDS}", "CUDA_VISIBLE_DEVICES=1,3 NPROC_PER_NODE=2"),
        (f"deepspeed --include localhost:4,5,6 {WORDS}", "CUDA_VISIBLE_DEVICES=4,5,6 NPROC_PER_NODE=3"),
        (f"deepspeed {WORDS}", "NPROC_PER_NODE=N"),
        ("export LD_LIBRARY_PATH='/x y':${LD_LIBRARY_PATH}:/z\nswift sft --model m",
         "LD_LIBRARY_PATH='/x y:'\"$LD_LIBRARY_PATH\":/z"),
        ("NCCL_X='$A' swift sft --model m", "NCCL_X='$A'"),
        (f"torchrun --nnodes 2 --node_rank 1 --rdzv_endpoint $H:29400 --rdzv_backend c10d {WORDS}",
         'NNODES=2 NODE_RANK=1 MASTER_ADDR="$H" MASTER_PORT=29400'),
        (f"torchrun --nnodes ${{N:?not set}} --node_rank 1 {WORDS}", 'NNODES="$N" NODE_RANK=1'),
        (f"torchrun --nnodes 1 --nproc_per_node 2 --rdzv_endpoint localhost:0 {WORDS}", "NPROC_PER_NODE=2"),
        ("NCCL_X='a;$(b)' swift sft --model m", "NCCL_X='a;$(b)'"),
    ],
)  # fmt: skip
def test_the_command(text: str, line: str, tmp_path: Path) -> None:
    run = translated(text, tmp_path)
    assert command_line(run, "x y.yaml") == f"{line} megaswift sft 'x y.yaml'".strip()
    asked = any(question.startswith("NPROC_PER_NODE: ") for question in run.open)
    assert asked == ("=N " in f"{line} ")


def test_the_environment(tmp_path: Path) -> None:
    script = "export WANDB_API_KEY=abcd1234 HF_TOKEN=hf_abc MINE=1\nMIN_PIXELS=100 swift sft --model m"
    run = translated(script, tmp_path)
    assert run.environment == {} and any("MIN_PIXELS=100" in line for line in run.open)
    assert any(line.startswith("MINE=1: ") for line in run.left_out)
    text = repr(run.left_out) + repr(run.open)
    assert "abcd1234" not in text and "hf_abc" not in text and "WANDB_API_KEY" in text


def test_sizes_of_images_and_videos_become_options(tmp_path: Path) -> None:
    script = "MAX_PIXELS=1003520 VIDEO_MAX_PIXELS=50176 FPS=2 FPS_MAX_FRAMES=16 swift sft --model m --dataset d"
    data = loaded(translated(f"{script} --train_type lora --deepspeed zero2", tmp_path), tmp_path).data
    assert (data.max_pixels, data.video_max_pixels, data.video_fps, data.video_max_frames) == (1003520, 50176, 2, 16)


def test_what_the_shell_computes_is_asked(tmp_path: Path) -> None:
    script = "export NCCL_A=$(b) NCCL_B=$1 NCCL_C=x\nif c; then export NCCL_C=y; fi\nMASTER_ADDR=$(head -n1 hosts)"
    run = translated(f"{script} NNODES=2 NODE_RANK=$R swift sft --model m", tmp_path)
    line = 'NNODES=2 NODE_RANK="$R" MASTER_ADDR=ADDRESS megaswift sft f'
    assert run.environment == {} and command_line(run, "f") == line
    asked = [q.what.partition(":")[0] for q in run.questions if "does not set $" in q.rule]
    assert asked == ["NCCL_A", "NCCL_B", "NCCL_C", "MASTER_ADDR"]


def test_options_that_a_condition_adds_are_asked(tmp_path: Path) -> None:
    script = 'A=(--lr 1)\nif [ $1 ]; then A+=(--max_length 3); M=x; else M=y; fi\nswift sft "${A[@]}" --model $M'
    run = translated(script, tmp_path)
    asked = [(q.what, q.rule) for q in run.questions if "does not set" in q.rule]
    outside = "outside of a condition"
    assert asked == [(w, f"the script does not set {w[-2:]} {outside}") for w in ("$A", "model: $M")]


def test_settings_of_torchrun(tmp_path: Path) -> None:
    run = translated(f"torchrun --standalone --max_restarts 3 --rdzv_id=7 {WORDS}", tmp_path)
    assert (
        command_line(run, "f") == "NPROC_PER_NODE=1 megaswift sft f"
        and loaded(run, tmp_path).value("max_restarts") == 3
    )
    assert [line.partition(":")[0] for line in run.left_out if "launcher" in line] == ["--standalone", "--rdzv_id 7"]
    run = translated(f"torchrun --nnodes 2 --max_restarts 3 --rdzv_endpoint h:1 {WORDS}", tmp_path)
    assert command_line(run, "f") == "NNODES=2 NODE_RANK=N MASTER_ADDR=h MASTER_PORT=1 megaswift sft f"
    assert {"NODE_RANK", "--max_restarts 3"} <= {q.what for q in run.questions}
    run = translated(f"torchrun --nproc_per_node gpu --max_restarts 3 {WORDS}", tmp_path)
    asked = [q.what for q in run.questions if q.what.startswith(("NPROC", "--max"))]
    assert asked == ["NPROC_PER_NODE", "--max_restarts 3"]
    run = translated(f"torchrun --nnodes 2 --rdzv_endpoint $E {WORDS}", tmp_path)
    assert "--rdzv_endpoint $E" in {q.what for q in run.questions} and run.launch["master_addr"] == "ADDRESS"


def test_settings_of_accelerate_without_effect_are_listed(tmp_path: Path) -> None:
    section = "{zero_stage: 2, gradient_accumulation_steps: 4, gradient_clipping: 0.5}"
    (tmp_path / "a.yaml").write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {section}\n")
    run = translated(f"accelerate launch --config_file a.yaml --dynamo_backend inductor {WORDS}", tmp_path)
    assert [line for line in run.left_out if line.startswith("accelerate's")] == [
        "accelerate's gradient_accumulation_steps 4 has no effect: --gradient_accumulation_steps determines it",
        "accelerate's gradient_clipping 0.5 has no effect: --max_grad_norm determines it",
        "accelerate's dynamo_backend inductor has no effect: --torch_compile determines it",
    ]


ZERO = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
num_machines: 1
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: cpu, zero3_init_flag: true}
"""
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
"""


def test_settings_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text(ZERO)
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    run = translated(f"accelerate launch --config_file zero.yaml {WORDS}", tmp_path)
    c = loaded(run, tmp_path)
    assert c.value("deepspeed") == "zero3_offload" and c.value("torch_dtype") == "bfloat16"
    assert run.launch == {"nproc_per_node": "4"}
    run = translated(f"accelerate launch --config_file fsdp.yaml --num_processes 8 {WORDS}", tmp_path)
    c = loaded(run, tmp_path)
    assert c.value("fsdp") == ("full_shard",) and c.value("recompute_granularity") == "full"
    assert (
        c.value("fsdp_transformer_layer_cls_to_wrap") == ("Qwen3DecoderLayer",) and run.launch["nproc_per_node"] == "8"
    )
    assert (
        loaded(translated(f"trl sft --accelerate_config zero2 {WORDS[9:]}", tmp_path), tmp_path).value("deepspeed")
        == "zero2"
    )
    run = translated(f"accelerate launch --config_file none.yaml {WORDS}", tmp_path)
    assert any(line.startswith("--config_file none.yaml: no such file") for line in run.open)
    megatron = "--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_pp_degree 1"
    run = translated(f"accelerate launch --num_processes 2 {megatron} {WORDS}", tmp_path)
    c = loaded(run, tmp_path)
    assert (c.value("engine"), c.value("tensor_parallel_size")) == ("megatron", 2)
    assert not any("megatron_lm" in line for line in [*run.open, *run.left_out])


@pytest.mark.parametrize("text", [ZERO, FSDP])
def test_the_variables_are_those_that_accelerate_sets(text: str, tmp_path: Path) -> None:
    """accelerate's own launcher, on the same file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = tmp_path / "a.yaml"
    file.write_text(text + "main_training_function: main\ncompute_environment: LOCAL_MACHINE\nuse_cpu: false\n")
    words = ["--config_file", str(file), "train.py"]
    args: Any = launch_command_parser().parse_args(words)
    assert isinstance(args, argparse.Namespace)
    args, _, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    made = prepare_deepspeed_cmd_env(args)[1] if "DEEPSPEED" in text else prepare_multi_gpu_env(args)
    ours = accelerate_environment(read_settings_file(file))
    assert len(ours) > 3 and {n: v.lower() for n, v in ours.items()} == {n: made[n].lower() for n in ours}


def test_a_file_with_aliases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &x [1]\nb: *x\n")
    run = translated(f"accelerate launch --num_processes 1 --config_file a.yaml {WORDS}", tmp_path)
    assert any("has aliases" in line for line in run.open)


def test_a_file_of_accelerate_by_itself(tmp_path: Path) -> None:
    """Its settings, processes and machines; what it does not have is asked."""
    file = tmp_path / "zero.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 16\nnum_machines: 2\nmachine_rank: 1\n"
        "main_process_ip: host0\nmain_process_port: 29501\n"
        "deepspeed_config:\n  zero_stage: 3\n  deepspeed_hostfile: /job/hosts\n"
    )
    run = migrated_run(command_of_file(read_config_file(str(file), TRAINING), file.name), tmp_path)
    assert (run.toolkit, run.task) == ("accelerate", "sft")
    assert {name: o.value for name, o in run.options.items()} == {"torch_dtype": "bfloat16", "deepspeed": "zero3"}
    assert run.launch == {
        "nproc_per_node": "8", "nnodes": "2", "node_rank": "1", "master_addr": "host0", "master_port": "29501"
    }  # fmt: skip
    text = "\n".join(run.open)
    assert "settings of accelerate launch only" in text and "--deepspeed_hostfile /job/hosts: names several" in text


@pytest.mark.parametrize("prefix", ["", "export "])
def test_a_number_of_machines_that_a_condition_changes(prefix: str, tmp_path: Path) -> None:
    script = f"{prefix}NNODES=1\nif [ $X ]; then\n  {prefix}NNODES=2\nfi\n"
    run = translated(script + f"torchrun --nnodes $NNODES --nproc_per_node 8 swift/cli/sft.py {WORDS[9:]}", tmp_path)
    assert run.launch["nnodes"] == "N" and any(
        "NNODES: $NNODES" in line and "does not set $NNODES outside of a condition" in line for line in run.open
    )


def test_a_hostfile(tmp_path: Path) -> None:
    run = translated(f"deepspeed --hostfile hosts --num_gpus 4 swift/cli/sft.py {WORDS[9:]}", tmp_path)
    assert any(line.startswith("--hostfile hosts: names several machines; type the command") for line in run.open)
    assert command_line(run, "run.yaml") == "NPROC_PER_NODE=4 megaswift sft run.yaml --hostfile hosts"
    run = translated(f"deepspeed --hostfile $HOSTS swift/cli/sft.py {WORDS[9:]}", tmp_path)
    assert command_line(run, "run.yaml") == 'megaswift sft run.yaml --hostfile "$HOSTS"'
