"""One run as users start it: by scripts/run_distributed.py, accelerate and DeepSpeed's launcher, on two processes of a
CPU.

Covers: megaswift/commands/training.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from megaswift.launchers.options.variables import COUNTS, IDENTITY
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, SFT = str(ROOT / "scripts/run_distributed.py"), str(ROOT / "megaswift/sft.py")
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", "--mixed_precision", "no", "--dynamo_backend", "no"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run's configuration; no step count, which the command lines say."""
    folder = tmp_path_factory.mktemp("inputs")
    words = write_inputs(folder, "1e-3")
    options = {name.lstrip("-"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    path = folder / "run.json"
    path.write_text(json.dumps(options | {"engine": "ddp", "report_to": "none", "split_dataset_ratio": 0}))
    return str(path)


def environment(folder: Path) -> dict[str, str]:
    """Of no launcher, on a CPU; no accelerate configuration of the user's is read."""
    launched = (
        *IDENTITY,
        *(n for names in COUNTS.values() for n in names),
        "NPROC_PER_NODE",
        "NNODES",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    clean = {k: v for k, v in os.environ.items() if k not in launched}
    own = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    return clean | own


def start(words: list[str], folder: Path, **environ: str) -> tuple[int, str]:
    """Exit code and what was printed; nothing of it lives on."""
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment(folder) | environ,
        cwd=folder,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        text = process.communicate(timeout=240)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text


def losses(words: list[str], folder: Path, processes: int = 2) -> list[float]:
    """Of the run's two steps, after a look at the first screen."""
    code, text = start([*words, "--max_steps", "2", "--output_dir", str(folder / "out")], folder)
    assert code == 0, text[-3000:]
    assert f"DP{processes} on {processes} process" in text and text.count("megaswift: supervised fine-tuning") == 1, (
        text
    )
    lines = read_lines(folder / "out/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    return [line["loss"] for line in lines]


def reference(file: str, export: Path | None = None) -> float:
    """The first step's loss: that of Hugging Face's model over the first eight rows, in one process, plain torch; or of
    an export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = json.loads(Path(file).read_text())
    model = AutoModelForCausalLM.from_pretrained(export or options["model"])
    tokenizer = AutoTokenizer.from_pretrained(export or options["model"])
    rows = [json.loads(line)["messages"] for line in Path(options["dataset"]).read_text().splitlines()[:8]]
    total, count = 0.0, 0
    for row in rows:
        made = tokenizer.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[mask[1:]]
        total, count = total + float(each.sum()), count + each.numel()
    return total / count


@pytest.mark.process
def test_run_distributed(file: str, tmp_path: Path) -> None:
    """The first step's loss is Hugging Face's over the first eight rows: both processes had their half of them."""
    words = [
        SCRIPT,
        "--nproc_per_node",
        "2",
        "--nnodes",
        "1",
        "--config",
        file,
        "--algorithm",
        "sft",
        "--shuffle",
        "false",
    ]
    assert losses(words, tmp_path)[0] == pytest.approx(reference(file), rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "accelerate-module", "deepspeed"])
def test_every_launcher_starts_the_same_run(launcher: str, file: str, tmp_path: Path) -> None:
    """As above; DeepSpeed's launcher puts `--local_rank=N` before the file."""
    port = str(free_port())
    words = {
        "torchrun": [SCRIPT, "--use_torchrun", "--nproc-per-node", "2", "--config", file, "--algorithm", "sft"],
        "accelerate": [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", port, SFT, file],
        "accelerate-module": [
            *ACCELERATE,
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            port,
            "-m",
            "megaswift.sft",
            file,
        ],
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port, SFT, file],
    }[launcher]
    if launcher == "deepspeed":
        deepspeed_here()
    assert losses([*words, "--shuffle", "false"], tmp_path)[0] == pytest.approx(reference(file), rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [["--use_torchrun"], []], ids=["use_torchrun", "checked"])
def test_two_machines_are_two_commands(torchrun: list[str], file: str, tmp_path: Path) -> None:
    """Both on this one, as machine 0 and 1 with a process each."""
    words = [
        SCRIPT,
        *torchrun,
        "--nproc_per_node",
        "1",
        "--nnodes",
        "2",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
        "--config",
        file,
        "--algorithm",
        "sft",
        "--shuffle",
        "false",
        "--max_steps",
        "2",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: start([*words, "--node_rank", rank], tmp_path), ["0", "1"])
    assert first[0] == second[0] == 0, first[1][-2000:] + second[1][-2000:]
    assert "DP2 on 2 processes" in first[1] and "megaswift: supervised" not in second[1]
    assert read_lines(tmp_path / "out/metrics.jsonl")[0]["loss"] == pytest.approx(reference(file), rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "no_shard", "fsdp", "fsdp1", "deepspeed", "deepspeed-file"])
def test_a_configuration_file_of_accelerate_s_is_followed(name: str, file: str, tmp_path: Path) -> None:
    """Both files are YAML. The engine is accelerate's file's, and it is said; transformers computes from the export the
    loss of the last evaluation."""
    if "deepspeed" in name:
        deepspeed_here()
    own = json.loads(Path(file).read_text())
    if name != "ddp":
        del own["engine"]
    rows = Path(own["dataset"]).read_text().splitlines(keepends=True)[:8]
    Path(tmp_path, "held.jsonl").write_text("".join(rows))
    run = {"train": {"max_steps": 2, "output_dir": "out"}, "data": {"shuffle": False, "val_dataset": "held.jsonl"}}
    del own["split_dataset_ratio"]
    Path(tmp_path, "run.yaml").write_text(yaml.safe_dump(own | run))
    zero3 = str(ROOT / "configs/deepspeed/zero3.json")
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    }
    unsharded = {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
    kind, section, says = {
        "ddp": ("MULTI_GPU", {"gpu_ids": "all"}, ""),
        "no_shard": ("FSDP", {"fsdp_config": unsharded}, "--engine ddp"),
        "fsdp": (
            "FSDP",
            {"fsdp_config": fsdp},
            "--fsdp shard_grad_op --fsdp_transformer_layer_cls_to_wrap Qwen3DecoderLayer",
        ),
        "fsdp1": (
            "FSDP",
            {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}},
            "--fsdp full_shard offload",
        ),
        "deepspeed": (
            "DEEPSPEED",
            {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            "--deepspeed zero2_offload",
        ),
        "deepspeed-file": ("DEEPSPEED", {"deepspeed_config": {"deepspeed_config_file": zero3}}, f"--deepspeed {zero3}"),
    }[name]
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": 2,
        "mixed_precision": "no",
        "use_cpu": False,
        "main_process_port": free_port(),
    } | section
    Path(tmp_path, "accelerate.yaml").write_text(yaml.safe_dump(settings))
    words = [*ACCELERATE[:3], "--config_file", str(tmp_path / "accelerate.yaml"), SFT, "run.yaml"]
    code, text = start(words, tmp_path)
    assert code == 0, text[-3000:]
    assert text.count(f"from accelerate's settings: {says}\n") == (1 if says else 0), text
    assert ("fsdp_transformer_layer_cls_to_wrap Qwen3DecoderLayer has no effect" in text) == (name == "no_shard")
    assert ("fsdp_version 1 has no effect: FSDP2 is always used" in text) == (name == "fsdp1")
    ddp = {"ddp": "ddp", "no_shard": "ddp"}
    engine = {**ddp, "fsdp": "fsdp2", "fsdp1": "fsdp2", "deepspeed": "zero2_offload", "deepspeed-file": "zero3"}[name]
    assert f"engine: {engine}\n" in Path(tmp_path, "out/config.yaml").read_text()
    assert read_lines(tmp_path / "out/metrics.jsonl")[0]["loss"] == pytest.approx(reference(file), rel=1e-5)
    (evaluation,) = read_lines(tmp_path / "out/eval.jsonl")
    assert evaluation["step"] == 2 and evaluation["loss"] < reference(file)
    assert evaluation["loss"] == pytest.approx(reference(file, tmp_path / "out/hf"), rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
def test_accelerate_with_cpu_is_one_process_and_says_so(file: str, tmp_path: Path) -> None:
    """accelerate 1.15 starts its script once under --cpu (more only through mpirun), whatever --num_processes says."""
    words = [*ACCELERATE, "--cpu", "--num_processes", "2", SFT, file, "--max_steps", "1", "--output_dir", "out"]
    code, text = start(words, tmp_path)
    assert code == 0 and "accelerate started one process" in text and "DP1 on 1 process" in text, text[-3000:]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_a_mistake_is_told_once(launcher: str, tmp_path: Path) -> None:
    port = str(free_port())
    words = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", port]
    if launcher == "deepspeed":
        deepspeed_here()
        words = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]
    code, text = start([*words, SFT, "--lr", "abc"], tmp_path)
    assert code == (2 if launcher == "deepspeed" else 1)  # accelerate and torchrun: always 1
    lines = text.splitlines()
    assert sum(line.startswith("megaswift: the configuration is wrong") for line in lines) == 1, text
    summaries = sum(line.strip().startswith("traceback : megaswift: the configuration is wrong") for line in lines)
    assert summaries == (launcher == "accelerate") and "[rank" not in text, "torchrun's summary ends with it"


def deepspeed_here() -> None:
    """Skips on a GPU machine: its launcher overwrites CUDA_VISIBLE_DEVICES, and there may be one GPU for two."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPUs: DeepSpeed's launcher gives each process one of its own")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
