"""Files of hosts: what they say, the rank of this machine, and what goes over them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megaswift.compat.files.hostfile import Host, is_this_machine, read_hostfile
from megaswift.config import load_config
from megaswift.engine.options.engine_checks import filled_deepspeed_config
from megaswift.errors import ConfigError

HERE = socket.gethostname()
TWO = f"first slots=8\n{HERE} slots=8\n"


def launch(tmp_path: Path, text: str, *words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The launch options that a run with this file has."""
    file = tmp_path / "hosts"
    file.write_text(text)
    cfg = load_config("sft", ["--hostfile", str(file), *words], environ=environ or {})
    return {n: getattr(cfg.launch, n) for n in ("nproc_per_node", "nnodes", "node_rank", "master_addr")}


def test_a_file_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """The same hosts and slots as DeepSpeed's own reader finds."""
    from deepspeed.launcher import runner

    file = tmp_path / "hosts"
    file.write_text("# two nodes\nworker-1 slots=8\n\nworker-2 slots=4 # small\n10.0.0.3 slots=2\n")
    assert [(h.name, h.slots) for h in read_hostfile(file)] == [*runner.fetch_hostfile(str(file)).items()]


def test_a_deepspeed_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key `hostfile` launches as `--hostfile` does, read in the file's folder, else in the working folder; the
    option counts more; DeepSpeed is not given the key."""
    folder, elsewhere = tmp_path / "files", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "hosts").write_text(TWO)
    (elsewhere / "hosts").write_text(f"{HERE} slots=3\n")
    (elsewhere / "own").write_text(f"{HERE} slots=5\n")
    content = {"zero_optimization": {"stage": 2}, "hostfile": "hosts"}
    (folder / "ds.json").write_text(json.dumps(content))
    monkeypatch.chdir(elsewhere)

    def launched(*words: str) -> tuple[int | None, int | None, str | None]:
        cfg = load_config("sft", ["--model", "m", "--dataset", "d.jsonl", "--deepspeed", *words], environ={})
        filled = filled_deepspeed_config(cfg, 16, "bfloat16", 64)
        assert "hostfile" not in filled.config and not filled.problems
        return cfg.launch.nproc_per_node, cfg.launch.nnodes, cfg.launch.master_addr

    file = str(folder / "ds.json")
    assert launched(file) == (8, 2, "first")
    assert launched(json.dumps(content)) == (3, None, None)
    assert launched(file, "--hostfile", "own") == (5, None, None)
    assert launched(file, "--nproc_per_node", "2") == (2, 2, "first")
    (folder / "hosts").unlink()
    assert launched(file) == (3, None, None)
    (elsewhere / "hosts").unlink()
    with pytest.raises(ConfigError, match=r'ds.json: "hostfile": hosts: .*cannot be read'):
        launched(file)
    (folder / "ds.json").write_text(json.dumps({**content, "hostfile": 3}))
    cfg = load_config("sft", ["--deepspeed", json.dumps({**content, "hostfile": 3})], environ={})
    (problem,) = filled_deepspeed_config(cfg, 1, "bfloat16", 64).problems
    assert str(problem).startswith('--deepspeed: "hostfile": 3: is not a path')


def test_forms_of_mpi(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\nuser@b:4\nc slots=2 max_slots=9\n")
    assert read_hostfile(file) == [Host("a"), Host("user@b", 4), Host("c", 2)]
    assert [host.address for host in read_hostfile(file)] == ["a", "b", "c"]


def test_the_launch_that_follows(tmp_path: Path) -> None:
    both = {"nproc_per_node": 8, "nnodes": 2, "master_addr": "first"}
    assert launch(tmp_path, TWO) == {**both, "node_rank": 1}
    assert launch(tmp_path, TWO, "--nproc_per_node", "2", "--master_addr", "10.0.0.1") == {
        **both,
        "node_rank": 1,
        "nproc_per_node": 2,
        "master_addr": "10.0.0.1",
    }
    assert launch(tmp_path, "first slots=8\nsecond slots=8\n", environ={"NODE_RANK": "1"}) == {**both, "node_rank": 1}
    assert launch(tmp_path, "first slots=8\nsecond slots=8\n", "--machine_rank", "0") == {**both, "node_rank": 0}
    alone = {"nproc_per_node": 8, "nnodes": None, "node_rank": None, "master_addr": None}
    assert launch(tmp_path, f"{HERE} slots=8\n") == alone
    assert launch(tmp_path, "first\n127.0.0.1\n")["nproc_per_node"] is None


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("first slots=8\nsecond slots=8\n", [], f"does not name this machine (host name {HERE})"),
        (f"{HERE} slots=8\n127.0.0.1 slots=8\n", [], "names this machine more than once"),
        (f"first slots=8\n{HERE} slots=4\n", [], "different slots (4, 8)"),
        (TWO, ["--nnodes", "3"], "has 2 hosts"),
        ("# none\n", [], "names no host"),
        ("first slots=8\nfirst slots=8\n", [], "occurs twice"),
        ("first slots=many\n", [], "has no number of slots"),
    ],
)
def test_mistakes(text: str, words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        launch(tmp_path, text, *words)
    assert said in str(error.value)
    assert len(error.value.problems) == 1 and "hosts" in error.value.problems[0].what or words


def test_a_file_that_is_not_there_and_ray(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config("sft", ["--hostfile", str(tmp_path / "none")], environ={})
    (tmp_path / "hosts").write_text(TWO)
    with pytest.raises(ConfigError, match="--hostfile [^ ]*: would be ignored: applies only to --launcher torchrun"):
        load_config(
            "sft", ["--hostfile", str(tmp_path / "hosts"), "--launcher", "ray", "--num_workers", "2"], environ={}
        )


def test_which_machine() -> None:
    assert all(map(is_this_machine, (HERE, "127.0.0.1", "localhost", f"{HERE}.some.domain")))
    assert not any(map(is_this_machine, ("192.0.2.7", "no-such-host.invalid")))
