"""Ranks of one start on a node: one downloads, the others take its result or its error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.errors import DataError, Problem, WeightsError
from megaswift.node_download import download_once_per_node
from tests.data.dataset_hub_server import DatasetHub, dataset_hub_server
from tests.sources import ROOT

RANK = """
import os, signal, sys, time
from pathlib import Path
from megaswift.node_download import download_once_per_node
from megaswift.errors import DataError
calls, target = Path(sys.argv[1]), Path(sys.argv[2])
def download():
    first = not calls.exists()
    with calls.open("a") as f:
        f.write("x")
    time.sleep(0.3)
    if first and "FIRST_DIES" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    target.mkdir(exist_ok=True)
    return target
print(download_once_per_node(("hub", "a/b"), download, DataError))
"""
DATASET_RANK = """
import os, sys
from pathlib import Path
from megaswift.data.tokenization import resolve_or_download_dataset_files
from megaswift.error_exit import exit_worker, print_error_once
from megaswift.errors import UserError
try:
    (file,) = resolve_or_download_dataset_files(sys.argv[2], Path(sys.argv[1])).files
    print(file, len(file.read_bytes()))
except UserError as error:
    print(error)
    exit_worker(print_error_once(error, os.environ), os.environ)
"""


def start(words: list[str], environ: dict[str, str], ranks: int) -> list[tuple[int, str, str]]:
    """The code, output and error output of ranks that start together."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    them = [
        subprocess.Popen(
            [sys.executable, "-c", *words],
            env={**whole, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300) for process in them]
    return [(process.returncode, *output) for process, output in zip(them, outputs, strict=True)]


@pytest.mark.process
def test_one_rank_downloads(tmp_path: Path) -> None:
    """Once for three ranks; again for the next start, whose files may be newer; by everyone without other ranks."""
    words = [RANK, str(tmp_path / "calls"), str(tmp_path / "model")]
    environ = {"TMPDIR": str(tmp_path), "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "one"}
    assert [out.strip() for _, out, _ in start(words, environ, 3)] == [str(tmp_path / "model")] * 3
    assert (tmp_path / "calls").read_text() == "x"
    start(words, {**environ, "TORCHELASTIC_RUN_ID": "two"}, 3)
    assert (tmp_path / "calls").read_text() == "xx"
    start(words, {**environ, "LOCAL_WORLD_SIZE": "1"}, 2)
    assert (tmp_path / "calls").read_text() == "xxxx"


@pytest.mark.process
def test_a_rank_that_dies_leaves_the_download_to_the_next(tmp_path: Path) -> None:
    words = [RANK, str(tmp_path / "calls"), str(tmp_path / "model")]
    ended = start(words, {"TMPDIR": str(tmp_path), "LOCAL_WORLD_SIZE": "3", "FIRST_DIES": "1"}, 3)
    assert sorted(code for code, _, _ in ended) == [-signal.SIGKILL, 0, 0]
    assert sorted(out.strip() for _, out, _ in ended) == ["", *[str(tmp_path / "model")] * 2]
    assert (tmp_path / "calls").read_text() == "xx"


@pytest.mark.process
@pytest.mark.parametrize("hub", ["HF", pytest.param("MS", marks=pytest.mark.slow)])
def test_ranks_ask_a_hub_for_a_data_set_as_often_as_one(tmp_path: Path, hub: str) -> None:
    """The others read the finished file. Of one that is not there, each exits with 2 and the same message, which is
    printed once."""
    with dataset_hub_server(DatasetHub({"org/plain": {"train.jsonl": b'{"text": "a"}\n' * 2000}})) as server:
        asked = {}
        for name in "org/plain", "org/none":
            for ranks in 1, 3:
                home = tmp_path / f"{name}-{ranks}"
                (home / "tmp").mkdir(parents=True)
                environ = {"HOME": str(home), "HF_HOME": str(home / "hf"), "TMPDIR": str(home / "tmp")}
                environ |= {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
                environ |= {"MODELSCOPE_ENDPOINT": server.url, "LOCAL_WORLD_SIZE": str(ranks)}
                server.requests.clear()
                ended = start([DATASET_RANK, str(home / "cache"), f"{hub}::{name}"], environ, ranks)
                asked[name, ranks] = sorted(server.requests)
                (printed,) = {out for _, out, _ in ended}
                assert {code for code, _, _ in ended} == {0 if name == "org/plain" else 2}, ended
                errors = "".join(err for _, _, err in ended)
                assert errors.count("could not provide it") == printed.count("could not provide it")
                assert (printed.count("could not provide it") == 1) == (name == "org/none")
            assert asked[name, 1] == asked[name, 3] != []


def test_failures_and_foreign_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that is announced is the next rank's, too, in this attempt; the one that met it may try again, and any
    other exception is its own. A folder that others can write is not used."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    calls = []

    def fail() -> Path:
        calls.append("failed")
        raise DataError(Problem("--dataset a/b", "no network", "use a local file"))

    def mistake() -> Path:
        raise TypeError("a mistake of ours")

    def model() -> Path:
        return tmp_path / "model"

    for _ in range(2):
        with pytest.raises(DataError, match="no network"):
            download_once_per_node(("m",), fail, DataError)
    assert len(calls) == 2
    with monkeypatch.context() as other_rank:
        other_rank.setattr("os.getpid", lambda: 1)
        with pytest.raises(DataError, match="no network\n    try: use a local file"):
            download_once_per_node(("m",), model, DataError)
        other_rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert download_once_per_node(("m",), model, DataError) == model()
        for path in (tmp_path / f"megaswift-{os.getuid()}").iterdir():
            path.write_text('["an older version\'s", "/"]')
    with pytest.raises(TypeError, match="a mistake of ours"):
        download_once_per_node(("m",), mistake, DataError)
    model().mkdir()
    assert download_once_per_node(("m",), model, DataError) == model()
    assert download_once_per_node(("m",), fail, DataError) == model()
    with pytest.raises(DataError, match="no network"):
        download_once_per_node(("m", "other patterns"), fail, WeightsError)
    (tmp_path / f"megaswift-{os.getuid()}").chmod(0o777)
    with pytest.raises(DataError, match="no network"):
        download_once_per_node(("m",), fail, DataError)
