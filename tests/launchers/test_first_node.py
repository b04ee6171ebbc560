"""`megaswift export` and `megaswift convert` started on every node: node 0 does the work, all end with its exit code.

Covers: megaswift/launchers/first_node.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megaswift.errors import ConfigError, Problem
from megaswift.launchers import first_node
from megaswift.launchers.first_node import LostNodeError, run_on_node_0
from megaswift.launchers.options.single_process import NodePlace
from megaswift.launchers.torchrun_launcher import free_port
from tests.inference.models import folder
from tests.sources import ROOT


def places(count: int = 2) -> list[NodePlace]:
    port = free_port()
    return [NodePlace(rank, count, "127.0.0.1", port) for rank in range(count)]


def other_node(place: NodePlace) -> tuple[threading.Thread, list[int | str]]:
    """Waits in a thread; the list gets its exit code."""
    ended: list[int | str] = []

    def wait() -> None:
        try:
            ended.append(run_on_node_0(place, "export", lambda: pytest.fail("works on node 1")))
        except LostNodeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, ended


@pytest.mark.wide
@pytest.mark.parametrize("code", [0, 2])
def test_the_other_nodes_end_with_the_exit_code(code: int) -> None:
    first, *others = places(3)
    waiting = [other_node(place) for place in others]
    assert run_on_node_0(first, "export", lambda: code) == code
    for thread, ended in waiting:
        thread.join(300)
        assert ended == [code]


def test_a_mistake_on_node_0_is_raised_there_and_is_exit_code_2_elsewhere() -> None:
    first, second = places()
    thread, ended = other_node(second)

    def refuse() -> int:
        raise ConfigError(Problem("--model m", "is not there"))

    with pytest.raises(ConfigError, match="is not there"):
        run_on_node_0(first, "export", refuse)
    thread.join(300)
    assert ended == [2]


@pytest.mark.wide
def test_nodes_that_never_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(first_node, "LATE_SECONDS", 0.3)
    monkeypatch.setattr(first_node, "CONNECT_SECONDS", 1.0)
    first, second = places()
    assert run_on_node_0(first, "export", lambda: 0) == 0
    assert "node 1 of 2 did not come for the exit code" in capsys.readouterr().err
    with pytest.raises(LostNodeError, match="does not answer within 1 s"):
        run_on_node_0(second, "export", lambda: 0)


def started(words: list[str], options: list[str], **variables: str) -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "megaswift", *words, *options]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.process
def test_two_nodes(tmp_path: Path) -> None:
    """`convert` by a file, in which every node's variable goes over its rank; `export` by a file and options, whose
    mistake ends both nodes."""
    model = folder(tmp_path / "model")
    port = str(free_port())
    place = f"nnodes: 2\nnode_rank: 0\nmaster_addr: 127.0.0.1\nmaster_port: {port}\n"
    (tmp_path / "convert.yaml").write_text(f"{place}source: {model}\ntarget: {tmp_path / 'mcore'}\n")
    words = ["convert", "hf-to-megatron", "--config", str(tmp_path / "convert.yaml")]
    nodes = [started(words, [], NODE_RANK=str(rank), NPROC_PER_NODE="4") for rank in (0, 1)]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "wrote" in said[0] and "wrote" not in said[1] and "node 1 of 2" in said[1]
    assert (tmp_path / "mcore/.metadata").is_file()
    run = tmp_path / "export.yaml"
    run.write_text(f"mcore_model: {tmp_path / 'mcore'}\nto_hf: true\noutput_dir: {tmp_path / 'mcore'}\nnnodes: 2\n")
    options = ["--master_addr", "127.0.0.1", "--master_port", port, "--node_rank"]
    nodes = [started(["export", "--config", str(run)], [*options, str(rank)]) for rank in (0, 1)]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], said
    assert "already exists" in said[0] and "already exists" not in said[1]
