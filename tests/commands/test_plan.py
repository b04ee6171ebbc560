"""`megaswift plan`: what it prints and writes, rows that pass the checks of a run, and mistakes.

Covers: megaswift/commands/plan.py, megaswift/commands/plan_report.py, megaswift/run/checks/layout_plan.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.cli import main
from megaswift.config import load_config
from megaswift.engine.options import te
from megaswift.models.published.sizes import MODELS
from megaswift.run.checks import preflight

FIRST_NODE = {"NODE_RANK": "0", "MASTER_ADDR": "node-0"}
EIGHT = ["--gpus", "8", "--gpu", "h100"]


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    done = capsys.readouterr()
    return done.out + done.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return plan(capsys, *words, code=2)


@pytest.mark.wide
def test_a_published_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The figures of the file are those of the table; parts add up; memory is docs/memory.md's by hand: 8.19 B
    parameters at 2 bytes, gradients at 4, an eighth of 8 and of moments, and 18.9 GiB of activations."""
    file = tmp_path / "plan.json"
    text = plan(capsys, "Qwen/Qwen3-8B", *EIGHT, "--max_length", "4096", "--storage_gbps", "80", "--output", str(file))
    assert "sft of Qwen/Qwen3-8B (full, bfloat16) on 8 x h100" in text and "not measured" in text
    found = json.loads(file.read_text())
    first = found["rows"][0]
    assert f"  1  {first['layout']} " in text and f"{first['tokens_per_second_per_gpu']:.0f}" in text
    for row in found["rows"]:
        assert sum(row["memory_by_part"].values()) == row["memory_bytes"] <= found["usable_bytes"]
        assert sum(row["seconds_by_part"].values()) == pytest.approx(row["step_seconds"])
    parts = next(row for row in found["rows"] if row["layout"] == "TP2 SP DP4")["memory_by_part"]
    assert parts["gradients"] == pytest.approx(4 * 8.1907e9 / 2, rel=1e-3)
    assert parts["main weights"] == pytest.approx(4 * 8.1907e9 / 2 / 4, rel=1e-3)
    assert first["memory_by_part"]["kept activations"] == pytest.approx(18.9 * 2**30, rel=0.005)
    assert f"checkpoint: {first['checkpoint_bytes'] / 2**30:.1f} GiB, {first['checkpoint_bytes'] / 1e10:.0f} s" in text
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "gpus", "more", "row"),
    [
        ("llama-3.1-70b", 64, ["--max_length", "8192", "--global_batch_size", "256"], 1),
        ("qwen3-30b-a3b", 8, ["--train_type", "lora", "--max_length", "8192"], 2),
        ("qwen3-8b", 1, ["--train_type", "qlora", "--max_length", "2048"], 1),
        ("qwen3-8b", 8, ["--task", "dpo", "--max_length", "4096"], 2),
        ("qwen3-8b", 8, ["--engine", "fsdp2", "--max_length", "4096"], 1),
        ("qwen3-8b", 16, ["--task", "grpo", "--reward_funcs", "length", "--rollout_backend", "transformers"], 1),
        pytest.param("llama-3.1-8b", 8, ["--engine", "zero3", "--max_length", "4096"], 1, marks=pytest.mark.slow),
        pytest.param("llama-3.2-1b", 2, ["--engine", "ddp", "--train_type", "lora"], 1, marks=pytest.mark.slow),
        ("qwen3-8b", 8, ["--task", "rm", "--train_type", "lora", "--max_length", "2048"], 1),
        pytest.param("qwen3-8b", 4, ["--task", "kto", "--train_type", "lora"], 1, marks=pytest.mark.slow),
        pytest.param("qwen3-8b", 8, ["--task", "seq_cls", "--num_labels", "3"], 1, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 1024, ["--max_length", "4096"], 3, marks=pytest.mark.slow),
        pytest.param("qwen3-235b-a22b", 256, ["--max_length", "4096", "--tp", "2"], 3, marks=pytest.mark.slow),
    ],
)
def test_rows_are_runs(
    model: str,
    gpus: int,
    more: list[str],
    row: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file of a row is read as a run's and passes all of its own checks, with weights and Transformer Engine
    taken as there."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[model][0]))
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    monkeypatch.setattr(preflight, "missing_model_file_problems", lambda *_: [])
    monkeypatch.setattr(preflight, "side_file_problems", lambda *_: [])
    monkeypatch.setattr(te, "has_transformer_engine", lambda: True)
    run = tmp_path / "run.yaml"
    words = [str(folder), "--gpus", str(gpus), "--gpu", "h100", "--dataset", str(tmp_path / "rows.jsonl"), *more]
    words += ["--output_dir", str(tmp_path / "out"), "--yaml", str(run), "--top", "3", "--row", str(row)]
    text = plan(capsys, *words)
    cfg = load_config(None, [str(run)], complete=True, environ=FIRST_NODE)
    assert (cfg.launch.nnodes or 1) * (cfg.launch.nproc_per_node or 1) == gpus
    preflight.preflight(cfg, gpus)
    assert f"row {row}: --" in text


def test_a_run_s_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it sets stays, and the plan's own options are not the run's."""
    run = tmp_path / "run.yaml"
    run.write_text("task: pt\nmodel: qwen3-30b-a3b\nep: 8\nmax_length: 4096\nglobal_batch_size: 64\n")
    planned = tmp_path / "planned.yaml"
    text = plan(capsys, str(run), "--gpus", "16", "--gpu", "h200", "--top", "3", "--yaml", str(planned))
    assert text.startswith("pt of qwen3-30b-a3b") and "a step: 64 rows of 4096 tokens\n" in text
    written = yaml.safe_load(planned.read_text())
    assert written["expert_parallel_size"] == 8 and written["global_batch_size"] == 64
    assert (written["nnodes"], written["nproc_per_node"]) == (2, 8)


def test_a_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["qwen3-0.6b"][0]))
    assert "DP8" in plan(capsys, str(file), *EIGHT, "--max_length", "1024")


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "llama-3.1-405b", *EIGHT, "--max_length", "4096", code=1)
    assert "nothing fits; the least that layouts need:" in text and "of which" in text


def test_rules_that_layouts_break_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """28 heads on 8 ranks."""
    text = plan(capsys, "Qwen/Qwen2.5-7B-Instruct", *EIGHT, "--max_length", "4096")
    assert "28 attention heads are not divisible by 8 tensor-parallel ranks" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Qwen/Qwen3-9B", *EIGHT], ["is not a folder, a config.json or a published model", "qwen3-8b"]),
        (["qwen3-8b"], ["--gpus: is missing", "--gpu: is missing"]),
        (["qwen3-8b", "--gpus", "8", "--gpu", "h999"], ["is not in the table of GPUs", "--hardware FILE"]),
        (["qwen3-8b", "--gpus", "8", "--gpu", "l40s"], ["has no figures of products, memory or links"]),
        (["qwen3-8b", "--gpus", "12", "--gpu", "h100"], ["is no multiple of --gpus_per_node 8"]),
        (["qwen3-8b", *EIGHT, "--task", "gkd", "--teacher_model", "t"], ["is not a task that plans cover"]),
        (["qwen3-30b-a3b", *EIGHT, "--engine", "fsdp2"], ["do not cover the family qwen3_moe"]),
        (["qwen3-8b", *EIGHT, "--mxa_length", "4096"], ["--mxa_length"]),
        (["qwen3-8b", *EIGHT, "--row", "40", "--yaml", "row.yaml"], ["--row 40: no such row: ", " fit"]),
        (["qwen3-30b-a3b", *EIGHT, "--expert_imbalance", "0.5"], ["is less than 1", "--expert_imbalance 1.25"]),
        (["qwen3-8b", "--gpus", "8", "--gpu", "a100", "--fp8_format", "hybrid"], ["a100 has no FP8 in the table"]),
        (["qwen3-8b", *EIGHT, "--output", "plan.txt"], ["is not a file name ending in .json"]),
        (["qwen3-8b", *EIGHT, "--fp8_format", "e4m3", "--fp8_recipe", "mxfp8"], ["(Blackwell) or newer; h100 has 9.0"]),
        (["qwen3-8b", *EIGHT, "--attn_impl", "unfused"], ["does not cover --attn_impl unfused"]),
    ],
    ids=lambda v: " ".join(v)[:40],
)
def test_mistakes(words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *words)
    assert all(part in text for part in said), text


@pytest.mark.wide
def test_hardware_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table as a file; with other figures other times; a GPU that is not in the table."""
    shown: dict[str, Any] = yaml.safe_load(plan(capsys, "--show_hardware"))
    assert {"a100", "h100", "h200", "h800", "h20", "b200", "b300", "gb200", "rtx4090"} <= shown.keys()
    assert all(row["source"] for row in shown.values())
    file = tmp_path / "gpus.yaml"
    ours = {**shown["h100"], "bf16_tflops": 494.7, "pattern": "Ours"}
    file.write_text(yaml.safe_dump({"ours": ours}))
    words = ["qwen3-8b", "--gpus", "8", "--max_length", "4096", "--hardware", str(file)]
    times = []
    for gpu in ("h100", "ours"):
        plan(capsys, *words, "--gpu", gpu, "--output", str(tmp_path / "plan.json"))
        times.append(json.loads((tmp_path / "plan.json").read_text())["rows"][0]["seconds_by_part"]["products"])
    assert times[1] == pytest.approx(2 * times[0], rel=0.01)
    file.write_text("h100: {bf16: {products: 0.35}, fp8: {products: 0.1}}\n")
    plan(capsys, *words, "--gpu", "h100", "--output", str(tmp_path / "plan.json"))
    products = json.loads((tmp_path / "plan.json").read_text())["rows"][0]["seconds_by_part"]["products"]
    assert products == pytest.approx(2 * times[0], rel=0.01)
    for text in ("bf16: 0.5", "bf16: {product: 0.5}", "bf16: {products: much}"):
        file.write_text(f"h100: {{{text}}}\n")
        assert f"h100: {text.split(':')[0]}" in refused(capsys, *words, "--gpu", "h100")
    file.write_text("h100: {bandwidth: 3}\n")
    assert "is no field of a GPU" in refused(capsys, *words, "--gpu", "h100")
    file.write_text("h100: [3]\n")
    assert "is no mapping" in refused(capsys, *words, "--gpu", "h100")
    file.write_text("h100: {hbm_gbs: fast}\n")
    assert "is no positive number" in refused(capsys, *words, "--gpu", "h100")
