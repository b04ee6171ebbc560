"""`--fit`: what the run summary says, what is refused, and runs of one and two ranks that take the choice.

Covers: megaswift/run/checks/fit.py, megaswift/parallel/options/checks.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.errors import UserError
from megaswift.families import load_spec
from megaswift.memory.estimate import usable_bytes
from megaswift.memory.microbatch_setup import TRANSFORMER_ENGINE, ComputeKernels
from megaswift.parallel.layout import Layout
from megaswift.run.checks import fit as fit_to_device
from megaswift.run.checks.preflight import preflight
from megaswift.run.engines import native_kernels
from megaswift.run.faults.out_of_memory import out_of_memory_error
from megaswift.trainers.hooks.metrics import read_lines
from tests.memory.of_config import estimate_of
from tests.parity.pool import RankError
from tests.planner.questions import run_of, spec_of
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs, write_model
from tests.trainers.runs import run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*write_inputs(tmp_path_factory.mktemp("inputs")), "--report_to", "none", "--max_length", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def needed(model: str, ranks: int, **options: object) -> int:
    """Bytes of a device on which a run on this machine just fits."""
    cfg = SwiftConfig(task="sft", model=model, max_length=64, per_device_train_batch_size=4, **options)
    spec, layout = load_spec(model), Layout.from_config(cfg.parallel, ranks)
    total = estimate_of(cfg, spec, layout, native_kernels(cfg, spec, layout)).total
    return next(n for n in range(total, 2 * total, 64) if usable_bytes(n, False) >= total)


def refused(cfg: SwiftConfig, world: int = 1) -> str:
    with pytest.raises(UserError) as error:
        preflight(cfg, world)
    assert len(error.value.problems) == 1
    return str(error.value.problems[0])


def config(model: Path, tmp_path: Path, **options: object) -> SwiftConfig:
    return SwiftConfig(task="sft", model=str(model), dataset="d", output_dir=str(tmp_path / "out"), fit=True, **options)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_takes_the_choice_and_says_so(inputs: list[str], ranks: int, tmp_path: Path) -> None:
    """Recomputation is what this run needs; it is in its configuration, and changes no number. With as much memory as
    the options need nothing is changed."""
    folder, layout = inputs[inputs.index("--model") + 1], ["--tp", "2"] * (ranks > 1)
    tp = {"tp": 2} if ranks > 1 else {}
    plain, full = (needed(folder, ranks, **tp, **more) for more in ({}, {"recompute_granularity": "full"}))
    assert full < plain
    words = [*inputs, *layout, "--max_steps", "2"]
    texts = {
        name: run(words, tmp_path / name, "--fit", "true", "--device_memory", size, ranks=ranks)
        for name, size in (("small", full), ("large", plain))
    }
    run(words, tmp_path / "without", ranks=ranks)
    assert texts["small"].count("chosen: --recompute_granularity full, because") == 1
    assert f"would need {bytes_text(plain * 0.96)}" in texts["small"]
    assert texts["large"].count("the options as given fit: nothing was changed") == 1
    written = {name: yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("small", "large")}
    assert written["small"]["model"]["recompute_granularity"] == "full"
    assert written["large"]["model"]["recompute_granularity"] is None
    small, large, without = (
        [(line["loss"], line["grad_norm"]) for line in read_lines(tmp_path / name / "metrics.jsonl")]
        for name in ("small", "large", "without")
    )
    assert small == large == without
    resumed = run(
        [*words[:-1], "3"],
        tmp_path / "small",
        *("--fit", "true", "--device_memory", full, "--resume_from_checkpoint", "latest"),
        ranks=ranks,
    )
    assert "chosen: --recompute_granularity full" in resumed and "recompute_granularity None ->" not in resumed


@pytest.mark.process
def test_ranks_end_with_exit_code_2(inputs: list[str], tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises((RankError, AssertionError), match="exit status 2"):
        run(inputs, tmp_path / "out", "--fit", "true", "--device_memory", "100KiB", ranks=2)
    assert not (tmp_path / "out").exists()


def test_nothing_fits(model: Path, tmp_path: Path) -> None:
    """The nearest figures, and what would help."""
    text = refused(config(model, tmp_path, device_memory="100KiB", max_length=64))
    assert re.search(r"no settings fit 96.0 KiB usable of a device with 100.0 KiB; estimate [\d.]+ KiB: weights", text)
    assert re.search(r"With --recompute_granularity \w+ .*it would still be [\d.]+ KiB", text)
    assert "--train_type lora, or more devices, with --tp or --pp" in text


@pytest.mark.process
def test_the_message_is_all_that_is_printed(inputs: list[str], tmp_path: Path) -> None:
    """No warnings of Megatron-Core, which the estimate imports in the first process."""
    words = [*inputs, "--output_dir", str(tmp_path / "out"), "--fit", "true", "--device_memory", "100KiB"]
    command = [sys.executable, "-m", "megaswift", "sft", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"megaswift: cannot run this\n  - --fit true: .*\n    try: .*\n", done.stdout + done.stderr)


def test_what_the_user_set_is_named_where_it_is_in_the_way(model: Path, tmp_path: Path) -> None:
    size = needed(str(model), 1, recompute_granularity="full")
    cfg = config(
        model, tmp_path, device_memory=size, max_length=64, per_device_train_batch_size=4, recompute_granularity="none"
    )
    assert "leave out --recompute_granularity: with --recompute_granularity full the estimate is" in refused(cfg)


def test_a_cpu_has_no_memory_of_a_device(model: Path, tmp_path: Path) -> None:
    text = refused(config(model, tmp_path))
    assert "there is no CUDA device whose memory could be read" in text and "--device_memory 80GiB" in text


def test_what_the_estimate_does_not_cover_is_refused(model: Path, tmp_path: Path) -> None:
    cfg = config(model, tmp_path, device_memory="1GiB", megatron_extra_kwargs={"attention_softmax_in_fp32": "true"})
    assert "the memory estimate does not cover --megatron_extra_kwargs" in refused(cfg)


def test_ranks_agree_on_the_smallest_gpu(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a maximum over the ranks of the negative sizes."""
    asked: list[float] = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Gpu", (), {"total_memory": 80 * 2**30}))
    monkeypatch.setattr(
        "megaswift.distributed.all_max", lambda values: [*map(asked.append, values), -24.0 * 2**20][-1:]
    )
    cfg, text = fit_to_device.fit_to_device(config(model, tmp_path), load_spec(model), Layout(1))
    assert asked == [-80.0 * 2**30] and "(24.0 MiB a device)" in text


def test_after_an_out_of_memory_error_the_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 B on a GPU of 139 GiB: a bfloat16 moment, before recomputation. With --fit, on a CPU and on torch engines there
    is nothing to say."""
    spec = spec_of("qwen3-8b")
    cfg = run_of("qwen3-8b", engine="megatron")
    assert fit_to_device.fit_advice(cfg, spec, Layout(1)) == ""
    kernels = ComputeKernels(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, "bfloat16", True)
    monkeypatch.setattr("megaswift.run.engines.native_kernels", lambda *_: kernels)
    monkeypatch.setattr(fit_to_device, "_cuda", lambda: True)
    monkeypatch.setattr(fit_to_device, "_own_gpu", lambda: 139 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    text = fit_to_device.fit_advice(cfg, spec, Layout(1))
    assert text.startswith(
        "--precision_aware_optimizer true --exp_avg_dtype bf16, which --fit true would choose: 126.9 GiB"
    )
    assert fit_to_device.fit_advice(run_of("qwen3-8b", engine="megatron", fit=True), spec, Layout(1)) == ""
    assert fit_to_device.fit_advice(run_of("qwen3-8b", engine="ddp"), spec, Layout(1)) == ""
    message = out_of_memory_error(cfg, 0, MemoryError("no room"), fit=text).message()
    assert re.search(r"1\. --precision_aware_optimizer true .*\n\s+2\. ", message)
