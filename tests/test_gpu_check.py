"""scripts/gpu_check.sh: the order of its steps, a second call after a failure, a budget. A shell script stands in for
Python and records what it is asked; every file and case that the steps name is there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.gpu.not_run import NOT_RUN
from tests.sources import ROOT
from tests.test_bench_gpu import all_cases

SCRIPT = ROOT / "scripts/gpu_check.sh"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Succeeds, but for commands that match the file `fails`."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\nhere=$(dirname "$0")\necho "$*" >> "$here/calls"\n'
        '[ -e "$here/fails" ] && echo "$*" | grep -q -f "$here/fails" && exit 1\nexit 0\n'
    )
    path.chmod(0o755)
    return path


ORDER = (
    "doctor --offline",
    "test_transformer_engine_modules.py",
    "test_triton_kernels.py",
    "gpu_benchmark/head.py",
    "--synchronizations --only qwen3-8b/full/packed/te",
    "full/packed/bf16_moment",
    "--profile --only qwen3-30b-a3b/lora/4096/te",
    "-k float16 or resumes",
    "qwen3-8b/fp8/4096/te",
    "test_native.py",
    "-k export",
    "qwen3-0.6b/full/4096/te",
    "qwen3-8b/full/4096/torch",
)
"""What decides most on a first GPU comes first, in a quarter of an hour; benchmarks that only compare come last."""
AFTER = ("-k bits", "-k vllm", "test_vllm_sleep.py", "-k fp8")


def check(python: Path, *words: str) -> tuple[int, list[str], str]:
    """Exit code, the commands of this call without the look for a device, output."""
    calls = python.with_name("calls")
    calls.unlink(missing_ok=True)
    command = ["bash", str(SCRIPT), "--python", str(python), *words, str(python.with_name("out"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    asked = calls.read_text().splitlines()
    return done.returncode, asked[1:] if "is_available" in asked[0] else asked, done.stdout + done.stderr


def test_what_has_passed_is_not_repeated(python: Path) -> None:
    python.with_name("fails").write_text("-k fp8")
    code, first, text = check(python)
    assert code == 1
    assert "failed: fp8" in text
    assert all(words in call for words, call in zip((*ORDER, *AFTER), first, strict=False))
    assert all("scripts/bench_gpu.py" in call for call in first[len(ORDER) + len(AFTER) :])
    python.with_name("fails").unlink()
    code, second, text = check(python)
    assert code == 0
    assert "all passed" in text
    assert len(second) == 1
    assert "-k fp8" in second[0]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pytest.skip('no vLLM')", NOT_RUN),
        ("pytest.skip('no vLLM') if number else None", NOT_RUN),
        ("pass", 0),
        ("pass\n\npytest.skip('no vLLM', allow_module_level=True)", NOT_RUN),
        ("assert not number; pytest.skip('no vLLM')", 1),
    ],
)
def test_skipped_tests_have_not_passed(body: str, code: int, tmp_path: Path) -> None:
    """pytest ends with 0 where every test skips: without vLLM its test has not run."""
    text = "import pytest\n\n\n@pytest.mark.parametrize('number', [0, 1])\ndef test(number):\n    "
    (tmp_path / "test_some.py").write_text(text + body + "\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.not_run", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == code


def test_a_step_whose_tests_skip_is_not_run(python: Path) -> None:
    """And is tried again by the next call."""
    python.write_text(python.read_text().replace("exit 0\n", 'case "$*" in *sleep*) exit 77;; esac\nexit 0\n'))
    code, first, text = check(python)
    assert code == 0 and "== vllm_sleep: not run" in text and "gpu_check.sh: not run: vllm_sleep" in text
    tests = [call for call in first if "-m pytest" in call]
    assert tests and all("-p tests.gpu.not_run" in call for call in tests)
    [again] = check(python)[1]
    assert "test_vllm_sleep.py" in again


def test_only_redo_repeats_good_cases(python: Path) -> None:
    """Results that are there stay, and benchmarks repeat what failed; --redo forgets results and passed steps, and a
    call without it goes on from there."""
    results = python.with_name("out") / "bench/results.jsonl"
    results.parent.mkdir(parents=True)
    results.write_text("{}\n")
    _, first, _ = check(python)
    benchmarks = [call for call in first if "bench_gpu.py" in call]
    assert benchmarks and all("--redo_failed" in call and "--redo " not in call for call in benchmarks)
    assert results.exists() and check(python)[1] == []
    python.with_name("fails").write_text("-k fp8")
    code, again, _ = check(python, "--redo")
    assert (code, again) == (1, first) and not results.exists()
    assert len(check(python)[1]) == 1


def test_the_first_part(python: Path) -> None:
    """Its steps alone, each with a limit, told in lines of JSON; the next call without --first does the rest."""
    python.with_name("fails").write_text("-k export")
    code, calls, text = check(python, "--first")
    assert code == 1 and len(calls) == len(ORDER)
    assert all(words in call for words, call in zip(ORDER, calls, strict=True))
    limits = [int(seconds) for seconds in re.findall(r"up to (\d+) s", text)]
    assert len(limits) == len(ORDER) and sum(limits) < 1000
    lines = [json.loads(line) for line in (python.with_name("out") / "steps.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines].count("passed") == len(ORDER) - 1
    assert [(line["step"], line["code"]) for line in lines if line["state"] == "failed"] == [("export", 1)]
    assert all(line["seconds"] >= 0 for line in lines)
    python.with_name("fails").unlink()
    calls = check(python)[1]
    assert "-k export" in calls[0] and AFTER[0] in calls[1]


@pytest.mark.process
def test_a_step_ends_with_the_budget(python: Path) -> None:
    """It has not failed then."""
    python.write_text(python.read_text().replace("exit 0\n", 'case "$*" in *doctor*) sleep 30;; esac\nexit 0\n'))
    code, calls, text = check(python, "--first", "--budget", "6")
    assert code == 3 and len(calls) == 1 and "not yet run: doctor te_modules" in text


@pytest.mark.process
@pytest.mark.wide
def test_a_budget(python: Path) -> None:
    """A step is only begun with five seconds left: the first leaves four."""
    slow_steps = 'case "$*" in *is_available*) ;; *) sleep 4 ;; esac\nexit 0\n'
    python.write_text(python.read_text().replace("exit 0\n", slow_steps))
    code, calls, text = check(python, "--budget", "8")
    assert code == 3
    assert "not yet run: " in text
    assert len(calls) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_the_script(python: Path, number: signal.Signals) -> None:
    """As Ctrl-C sends it: to the terminal's foreground process group, in which `timeout` and its command are not."""
    child = python.with_name("child")
    python.write_text(f'#!/bin/sh\ncase "$*" in *bench_gpu*) echo $$ > {child}; exec sleep 60;; esac\nexit 0\n')
    command = ["bash", str(SCRIPT), "--cpu", "--python", str(python), str(python.with_name("out"))]
    script = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits "ignored"
    )
    try:
        wait_for(lambda: child.exists() and child.read_text().endswith("\n"))
        os.killpg(script.pid, number)
        text = script.communicate(timeout=300)[0]
        wait_for(lambda: not psutil.pid_exists(int(child.read_text())))
    finally:
        script.kill()
    assert script.returncode == 128 + number
    assert text.count("bench_gpu.py") == 1
    assert "type the command again" in text


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once it holds; fails after 20 s."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_shapes_of_a_cpu(python: Path) -> None:
    """Without the look for a device; the benchmarks with small models, resumed as on a GPU, and no test."""
    python.with_name("fails").write_text("--redo_failed.*qwen3-4b")
    code, calls, text = check(python, "--cpu")
    assert code == 1
    assert "failed: medium_model" in text
    assert calls[0] == "-m megaswift doctor --offline"
    assert len(calls) > 5
    assert all("gpu_bench" in call or "bench_gpu" in call for call in calls[1:])
    assert all(call.endswith("--small") for call in calls[1:])
    python.with_name("fails").unlink()
    code, calls, text = check(python, "--cpu")
    assert (code, len(calls)) == (0, 1)
    assert (
        "gpu_check.sh: not run: te_modules kernels runs engine export weight_transfer vllm_weights vllm_sleep fp8\n"
        in text
    )
    assert "== kernels: not run: needs a CUDA device\n" in text


def test_steps_that_cannot_be_run_are_not_passed(python: Path) -> None:
    """A benchmark's exit code says so; the step is tried again by the next call."""
    python.write_text(python.read_text().replace("exit 1", "exit 77"))
    python.with_name("fails").write_text("full/packed/te\nfp8/4096/te")
    for count in (None, 2, 2):
        code, calls, text = check(python)
        assert code == 0 and (count is None or len(calls) == count)
        assert "== packed_8b: not run, or not all of it, for the reason above" in text
        assert "gpu_check.sh: not run: packed_8b fp8_8b\ngpu_check.sh: all others passed" in text
    python.with_name("fails").unlink()
    code, calls, text = check(python)
    assert (code, len(calls)) == (0, 2) and "not run" not in text


def test_wrong_options() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "--pyton", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--pyton" in done.stderr


def test_steps_name_what_is_there() -> None:
    text = SCRIPT.read_text()
    files = re.findall(r"tests/gpu/\w+\.py", text)
    assert set(files) == {f"tests/gpu/{p.name}" for p in (ROOT / "tests/gpu").glob("test_*.py")}
    cases = re.findall(r"'([\w.-]+/[\w./-]+)'", text[text.index("step 60 doctor") :])
    assert cases
    assert set(cases) <= {case.name for case in all_cases()}
    for file, words in re.findall(r"(tests/gpu/\w+\.py) -k ('[\w ]+'|\w+)", text):
        for word in words.strip("'").split(" or "):
            assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text())
