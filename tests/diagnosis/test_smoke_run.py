"""Two steps on this machine, and runs that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaswift.diagnosis import smoke_run
from megaswift.diagnosis.smoke_run import kill_with_descendants, last_words, read_losses, smoke_finding, write_inputs
from tests.diagnosis.fake_machine import write_tree


@pytest.mark.process
def test_two_processes_train() -> None:
    finding = smoke_finding(2, {**os.environ, "RANK": "3", "WORLD_SIZE": "4"})
    assert finding.state == "ok" and finding.found.startswith("2 steps on 2 processes in "), finding
    first, last = (float(text) for text in finding.found.rsplit("loss ")[-1].split(" to "))
    assert 0 < last < first < 5, "a vocabulary of 31 starts near ln 31"


@pytest.mark.process
def test_a_library_that_cannot_be_imported(tmp_path: Path) -> None:
    write_tree(tmp_path, {"transformers/__init__.py": "raise ImportError('undefined symbol: x')\n"})
    finding = smoke_finding(1, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert finding.state == "problem" and "exit code 1" in finding.found and "undefined symbol: x" in finding.found
    assert "--random_init" in finding.fix


@pytest.mark.process
def test_a_run_that_does_not_end(tmp_path: Path) -> None:
    write_tree(tmp_path, {"transformers/__init__.py": "import time\ntime.sleep(600)\n"})
    finding = smoke_finding(1, {**os.environ, "PYTHONPATH": str(tmp_path)}, limit_s=2)
    assert finding.state == "problem" and "did not end within 2 s" in finding.found and "NCCL_DEBUG" in finding.fix


@pytest.mark.process
def test_processes_in_other_sessions_end_too(tmp_path: Path) -> None:
    inner = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", outer])
    while process.poll() is None and not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.05)
    kill_with_descendants(process.pid)
    assert process.wait(300) == -signal.SIGKILL
    left = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 300
    while state_of(left) not in "ZX":  # the kernel delivers the signal when it next schedules the process
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(stat: Path) -> str:
    """The kernel's letter for a process; X where it is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.parametrize("losses", [[3.0, float("nan")], [3.0, float("inf")], [3.0], []])
def test_a_loss_that_is_not_finite(losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], folder: Path, *rest: object) -> tuple[int, str]:
        write_tree(
            folder,
            {"out/metrics.jsonl": "".join(json.dumps({"step": i, "loss": x}) + "\n" for i, x in enumerate(losses))},
        )
        return 0, ""

    monkeypatch.setattr(smoke_run, "run", run)
    finding = smoke_finding(1, {})
    assert finding.state == "problem" and f"losses {losses}" in finding.found and "finite" in finding.fix


def test_the_tokenizer_is_one(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_inputs(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = json.loads((tmp_path / "data.jsonl").read_text().splitlines()[0])["text"]
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert len(tokenizer) == AutoConfig.from_pretrained(tmp_path / "model").vocab_size


def test_what_is_shown_of_an_error(tmp_path: Path) -> None:
    assert last_words("Traceback\n  File x\nRuntimeError: NCCL error\nW0101 noise\n") == "RuntimeError: NCCL error"
    assert last_words("megaswift: wrong\n  - --lr x: must be a number\n    try: 1\n") == "--lr x: must be a number"
    assert last_words("killed\n") == "killed" and last_words("") == "no message"
    assert read_losses(tmp_path / "none") == []
