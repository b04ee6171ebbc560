"""The examples of configs/by_size, without a GPU and without weights: each is submitted by its own command with
--dry_run on a model folder of the true shape, its layout is valid, and its memory fits the card and its comment."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megaswift.commands import submit
from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.families import family_of
from megaswift.memory.estimate import usable_bytes
from megaswift.models.published.sizes import MODELS, published_model
from megaswift.parallel.layout import Layout
from megaswift.run.checks import preflight
from tests.config_memory import NATIVE_KERNELS, bytes_on_the_fullest_gpu
from tests.memory.of_config import estimate_of
from tests.sources import ROOT

FOLDER = ROOT / "configs" / "by_size"
FILES = sorted(FOLDER.glob("*.yaml"))
CLUSTERS = ROOT / "configs" / "clusters.yaml"
GIB = 2**30
NAME = re.compile(r"(?:sft|pt|dpo|grpo)_\w*?(\d+)b_\w+_((?:\d+x)+)(\d+)gb")
"""`sft_72b_lora_zero3_2x8x40gb`: billions of parameters, nodes and GPUs, the memory of each in GB."""
SAID = re.compile(r"docs/memory\.md\): ([\d.]+) GiB a GPU")
HELD = re.compile(r"([\d.]+) GiB are weights, gradients and optimizer")
PRODUCT = re.compile(r"([\d.]+) x ([\d.]+) B(?: / (\d+))? = ([\d.]+) GB")
"""`2 x 72.7 B / 16 = 9.1 GB`."""
CASES = pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)


def command(file: Path, word: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words of the comment's command: `megaswift submit`, or the one that starts the run by hand."""
    start = f"megaswift {word} "
    line = next(line for line in file.read_text(encoding="utf-8").splitlines() if start in line and ".yaml" in line)
    before, after = line.lstrip("# ").split("megaswift ", 1)
    return dict(word.split("=") for word in before.split()), shlex.split(after)


def run_of(file: Path) -> tuple[SwiftConfig, int]:
    """As it is started by hand, and its number of processes."""
    environ, words = command(file, file.stem.split("_")[0])
    words[1] = str(ROOT / words[1])
    cfg = load_config(words[0], words[1:], complete=True, environ=environ)
    return cfg, (cfg.launch.nproc_per_node or 1) * (cfg.launch.nnodes or 1)


def config_of(cfg: SwiftConfig) -> dict[str, Any]:
    """The published config.json of a run's model."""
    found = published_model(str(cfg.model.model))
    assert found is not None
    return found[1]


def machines(file: Path) -> tuple[int, int]:
    """GPUs, bytes of each, by the file's name."""
    found = NAME.fullmatch(file.stem)
    assert found is not None
    gpus = 1
    for number in found[2].strip("x").split("x"):
        gpus *= int(number)
    return gpus, int(found[3]) * 10**9


@CASES
def test_memory_is_what_the_comment_says_and_fits(file: Path) -> None:
    cfg, ranks = run_of(file)
    gpus, card = machines(file)
    assert ranks == gpus
    name, config = published_model(str(cfg.model.model)) or ("", {})
    parameters = MODELS[name][1]
    needed = bytes_on_the_fullest_gpu(cfg, family_of(config).spec(config), ranks)
    text = file.read_text(encoding="utf-8")
    said = SAID.search(text)
    assert said is not None and float(said[1]) == pytest.approx(needed / GIB, abs=0.06)
    assert needed <= usable_bytes(card, cuda=True)
    if held := HELD.search(text):
        parts = estimate_of(
            cfg, family_of(config).spec(config), Layout.from_config(cfg.parallel, ranks), NATIVE_KERNELS
        ).held
        total = parts.weights + parts.gradients + parts.optimizer
        assert float(held[1]) == pytest.approx(total / GIB, abs=0.06)
    for each, billions, parts, gigabytes in PRODUCT.findall(text):
        assert float(billions) == pytest.approx(parameters / 1e9, rel=0.005)
        assert float(gigabytes) == pytest.approx(float(each) * float(billions) / int(parts or 1), rel=0.02)
        assert not parts or int(parts) == ranks


@CASES
def test_it_is_submitted_as_its_comment_says(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model folder with the published config.json and no weights; the layout is checked on the way."""
    cfg, ranks = run_of(file)
    _, words = command(file, "submit")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config_of(cfg)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    name = words[words.index("--dataset") + 1]
    assert name.startswith("/data/") == ("cloud" in words)  # a pod does not see this machine's files
    Path(name.rpartition("/")[2]).write_text('{"messages": []}\n')
    words[words.index("--model") + 1] = str(tmp_path / "model")
    words[1] = str(ROOT / words[1])
    assert submit.main([*words[1:], "--clusters", str(CLUSTERS), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    nodes, processes = cfg.launch.nnodes or 1, cfg.launch.nproc_per_node or 1
    assert nodes * processes == ranks and str(processes) in shown and "hf_of_the_test" not in shown
    assert "# ---- submitted by" in shown
    if nodes > 1:
        assert f"#SBATCH --nodes={nodes}" in shown and f"NPROC_PER_NODE={processes}" in shown


@CASES
def test_the_model_s_own_rules_hold(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout, recomputation, experts, adapters, positions: what a run checks before it loads anything."""
    cfg, ranks = run_of(file)
    (tmp_path / "config.json").write_text(json.dumps(config_of(cfg)))
    monkeypatch.setattr(preflight, "missing_model_file_problems", lambda *_: [])  # there are no weights
    assert preflight.model_problems(cfg.replace(model=str(tmp_path)), ranks) == []


def test_every_case_is_there() -> None:
    """By engine, task, size and number of GPUs."""
    found = set()
    for file in FILES:
        cfg, ranks = run_of(file)
        p = cfg.parallel
        kind = cfg.model.train_type if cfg.task == "sft" else cfg.task
        found.add((kind, requested_engine(cfg), p.tensor_parallel_size, p.pipeline_parallel_size, ranks))
    assert found >= {
        ("lora", "megatron", 1, 1, 1),
        ("lora", "megatron", 1, 1, 4),
        ("lora", "zero2", 1, 1, 4),
        ("lora", "zero3", 1, 1, 8),
        ("lora", "zero3", 1, 1, 16),
        ("full", "fsdp2", 1, 1, 4),
        ("lora", "megatron", 4, 8, 32),
        ("full", "megatron", 4, 8, 32),
        ("dpo", "megatron", 4, 8, 64),
        ("full", "megatron", 4, 8, 128),
        ("qlora", "megatron", 1, 1, 1),
        ("grpo", "megatron", 2, 1, 8),
        ("pt", "megatron", 2, 8, 256),
        ("pt", "megatron", 2, 8, 512),
        ("pt", "megatron", 2, 8, 1024),
    }
    assert {str(run_of(f)[0].rollout.rollout_backend) for f in FILES if f.stem.startswith("grpo")} == {
        "vllm",
        "vllm_server",
    }


def test_every_cluster_of_the_example_is_read() -> None:
    import yaml

    from megaswift.clusters.clusters_file import read_cluster
    from megaswift.clusters.scheduler import scheduler_of

    for name in yaml.safe_load(CLUSTERS.read_text(encoding="utf-8"))["clusters"]:
        cluster = read_cluster(name, str(CLUSTERS), {})
        assert scheduler_of(cluster.launcher)
