"""Files that cannot be written or read: one message and exit code 2, and the report hides no error.

Covers: megaswift/base/atomic_writes.py.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.commands import training
from megaswift.errors import CheckpointError, StorageError, storage_error
from megaswift.trainers.hooks import checkpoint
from megaswift.trainers.hooks.metrics import JsonLinesHook
from tests.parity.pool import shared
from tests.trainers.inputs import write_inputs

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "read and write access"),
        (errno.ELOOP, "use a path that is valid on this file system"),
    ],
)
def test_errors_of_the_system_become_a_message(number: int, words: str, tmp_path: Path) -> None:
    found = storage_error(OSError(number, os.strerror(number), str(tmp_path)))
    assert found is not None and found.exit_code == 2
    assert str(tmp_path) in found.message() and os.strerror(number) in found.message() and words in found.message()


@pytest.mark.parametrize("error", [ConnectionResetError(errno.ECONNRESET, "x"), FileNotFoundError(errno.ENOENT, "x")])
def test_others_stay_what_they_are(error: OSError) -> None:
    assert storage_error(error) is None


def test_a_file_in_a_folder_that_may_not_be_searched(tmp_path: Path) -> None:
    """Even whether the file exists cannot be asked there."""
    folder, user = tmp_path / "closed", os.geteuid()
    folder.mkdir()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        found = storage_error(PermissionError(errno.EACCES, "Permission denied", str(folder / "config.json")))
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    assert found is not None and "config.json: Permission denied" in found.message()


def test_a_full_disk_under_safetensors(tmp_path: Path) -> None:
    """Its own error names neither the file nor a kind that is known as the disk's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError) as raised, safetensors_errors_as_oserror(tmp_path / "x"):
            save_file({"a": torch.zeros(5000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = storage_error(raised.value)
    assert found is not None and f"{tmp_path / 'x'}: File too large" in found.message()


def test_a_full_disk_under_metrics(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the system refuses the same write."""
    lines, (soft, hard) = JsonLinesHook(tmp_path / "eval.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    lines.write({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(StorageError, match="eval.jsonl: File too large"):
            lines.write({"step": 2, "loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_needs_room_for_the_new_checkpoint_beside_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2000, 1000, 1000))
    checkpoint.check_space(tmp_path / "not" / "there", 1000, 3)
    with pytest.raises(CheckpointError, match="checkpoint of step 3: needs about 1001 B.*has only 1000 B free"):
        checkpoint.check_space(tmp_path, 1001, 3)


def limited(job: tuple[list[str], int, str]) -> int:
    """The exit code of a run in which no file may be larger than a limit (on the ranks)."""
    words, limit, out = job
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    else:
        (Path(out) / "report.html.new").mkdir(parents=True)  # the page cannot be written
    try:
        code = training.main("sft", [*words, "--output_dir", out])
    except SystemExit as left:
        code = int(left.code or 0)
    return code


@pytest.mark.process
def test_a_report_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    words = [*write_inputs(tmp_path), "--max_steps", "2", "--report_to", "none"]
    job = (words, 0, str(tmp_path / "out"))
    text = shared().logged("tests.trainers.test_full_disk:expect_0", job, 1, timeout=120.0)
    assert "report.html could not be written: [Errno 21] Is a directory" in text and "Traceback" not in text
    assert (tmp_path / "out/hf/model.safetensors").exists()


@pytest.mark.process
@pytest.mark.parametrize("what, limit", [("metrics.jsonl", 6000), ("step-40.saving", 30000)])
def test_a_full_disk_ends_a_run_with_one_message(what: str, limit: int, tmp_path: Path) -> None:
    """Also where the report cannot be written either."""
    words = [*write_inputs(tmp_path), "--max_steps", "40", "--logging_steps", "1", "--report_to", "none"]
    text = shared().logged(
        "tests.trainers.test_full_disk:expect_2", (words, limit, str(tmp_path / "out")), 1, timeout=120.0
    )
    assert "File too large" in text and "Traceback" not in text and text.count("    try: ") == 1, text
    assert what in text.partition("  - ")[2]


def expect_0(rank: int, world: int, job: Any) -> None:
    """A run that succeeds (on the ranks)."""
    assert limited(job) == 0


def expect_2(rank: int, world: int, job: Any) -> None:
    """A run that is refused (on the ranks)."""
    assert limited(job) == 2


@pytest.mark.parametrize("place", ["data", "cache"])
def test_data_and_caches_without_access(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests may run as root, whom no mode stops: the system's answer is put in its place."""
    words = write_inputs(tmp_path)
    data, cache, opened, made = tmp_path / "data.jsonl", tmp_path / "cache", Path.open, Path.mkdir

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if place == "data":
        monkeypatch.setattr(Path, "open", lambda p, *a, **k: refuse(p) if p == data else opened(p, *a, **k))
    else:
        monkeypatch.setattr(Path, "mkdir", lambda p, *a, **k: refuse(p) if p == cache else made(p, *a, **k))
    with pytest.raises(SystemExit) as left:
        training.main("sft", [*words, "--max_steps", "1", "--output_dir", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert left.value.code == 2 and "Permission denied" in err and "Traceback" not in err
    assert str(data if place == "data" else cache) in err
