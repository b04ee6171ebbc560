"""`megaswift checkpoint`: what it lists, verifies and deletes.

Covers: megaswift/base/command_words.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.run.lock import RunLock
from megaswift.trainers import checkpoints
from megaswift.trainers.checkpoints import CheckpointStore

LAYOUT = {"world_size": 2, "tp": 2}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with the steps 2, 4 and 6."""
    store = CheckpointStore(tmp_path / "out" / "checkpoints")
    for step in (2, 4, 6):
        folder = store.begin(step)
        (folder / "engine").mkdir()
        (folder / "engine" / "weights.bin").write_bytes(bytes(range(100)) * step)
        (folder / "engine" / "engine.json").write_text(json.dumps({"train_type": "lora", "kind": "fsdp2"}))
        state = {"task": "sft", "layout": LAYOUT, "data": {}, "hooks": {}}
        store.finish(step, checkpoints.hash_files(folder, checkpoints.unhashed_files(folder, ())), state)
    return tmp_path / "out"


def step(out: Path, number: int) -> Path:
    return out / "checkpoints" / f"step-{number}"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    return code, *capsys.readouterr()


def pointer(out: Path) -> str:
    return json.loads((out / "checkpoints" / "latest.json").read_text())["directory"]


def test_ls(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(step(out, 4) / "engine" / "weights.bin")
    (step(out, 2) / "manifest.json").write_text("{")
    CheckpointStore(out / "checkpoints").begin(8)
    code, text, _ = ran(capsys, "ls", out)
    lines = text.splitlines()
    assert code == 0 and lines[0].split()[:3] == ["step", "saved", "size"] and len(lines) == 5
    assert lines[1].startswith("4 ") and "not compared" in lines[1] and "fsdp2" in lines[1] and "sft lora" in lines[1]
    assert lines[2].startswith("6 ") and lines[2].endswith("latest") and "TP2" in lines[2].upper().replace(" ", "")
    assert "2 " in lines[3] and "manifest.json is damaged" in lines[3] and "incomplete" in lines[4]
    _, text, _ = ran(capsys, "ls", out / "checkpoints", "--verify")
    assert "1 of 2 differ" in text.splitlines()[1] and "intact" in text.splitlines()[2]


def test_verify(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "verify", out)[:2] == (0, "".join(f"{step(out, n).absolute()}: intact\n" for n in (2, 4, 6)))
    flip(step(out, 4) / "engine" / "weights.bin")
    (step(out, 2) / "manifest.json").unlink()
    assert ran(capsys, "verify", step(out, 6))[0] == 0
    code, text, error = ran(capsys, "verify", out)
    assert code == 2 and text.count("damaged") == 2 and text.count("intact") == 1
    assert "step-4/engine/weights.bin: its content changed" in error and "step-2/manifest.json: is missing" in error
    assert ran(capsys, "verify", out / "nowhere")[0] == 2


def test_rm_moves_the_pointer(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = ran(capsys, "rm", step(out, 6), step(out, 2))
    assert code == 0 and text.count("removed") == 2 and pointer(out) == "step-4"
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["latest.json", "step-4"]


def test_rm_keeps_the_last_intact_step(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 4):
        flip(step(out, number) / "engine" / "weights.bin")
    code, _, error = ran(capsys, "rm", step(out, 6))
    assert code == 2 and "no intact checkpoint would remain without step-6" in error and step(out, 6).is_dir()
    assert ran(capsys, "rm", step(out, 2), step(out, 4))[0] == 0 and pointer(out) == "step-6"
    assert ran(capsys, "rm", step(out, 6))[0] == 2
    assert ran(capsys, "rm", step(out, 6), "--force")[0] == 0
    assert list((out / "checkpoints").iterdir()) == []
    assert checkpoints.resume_step_candidates("latest", out) == (
        [],
        [],
    )  # removed on purpose: a run may start from the beginning


def test_rm_takes_steps_only(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (out, out / "checkpoints", step(out, 6) / "engine", out / "step-9"):
        code, _, error = ran(capsys, "rm", path)
        assert code == 2 and ("is not a checkpoint folder" in error or "does not exist" in error)
    assert "look in" in ran(capsys, "rm", out / "checkpoints" / "none-of-them")[2]
    assert "did you mean engine?" in ran(capsys, "rm", step(out, 6) / "engin")[2]
    assert ran(capsys, "rm")[0] == 2 and ran(capsys, "prune", out)[0] == 2
    assert ran(capsys, "--help")[0] == 0 and ran(capsys)[0] == 2
    assert step(out, 6).is_dir()


def test_rm_removes_nothing_while_a_run_writes(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = RunLock(out)
    running.take()
    for force in ((), ("--force",)):
        code, text, error = ran(capsys, "rm", step(out, 2), *force)
        assert code == 2 and "a run is writing to this folder: process" in error and "removed" not in text
        assert "use another --output_dir" not in error and step(out, 2).is_dir() and pointer(out) == "step-6"
    running.release()
    assert ran(capsys, "rm", step(out, 2))[0] == 0 and not step(out, 2).exists()
    RunLock(out).take()  # released: the next run may start
