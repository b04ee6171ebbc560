"""Processes and nodes of `megaswift infer`, by options and variables; commands that are one process.

Covers: megaswift/config/infer_launch_rules.py, megaswift/config/inference_run_files.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift import export, infer
from megaswift.cli import main
from megaswift.config.inference import InferProcessOptions
from megaswift.errors import ConfigError

NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "4000", "NPROC_PER_NODE": "8"}
STEP = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[1,2]", "SLURM_JOB_ID": "7"}


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "a"}\n')
    return ["--model", "m", "--dataset", str(file)]


def launch(words: list[str]) -> InferProcessOptions:
    return infer.COMMAND.parse(words).sections["launch"]


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_nodes_by_options_and_by_variables(rows: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "node0"]
    given += ["--master_port", "4000", "--nproc_per_node", "8"]
    wanted = InferProcessOptions(8, 2, 1, "node0", 4000)
    assert launch([*rows, *given]) == wanted
    set_all(monkeypatch, NODES)
    assert launch(rows) == wanted
    assert launch([*rows, "--node_rank", "0", "--master_addr", "other"]) == InferProcessOptions(8, 2, 0, "other", 4000)


def test_variables_of_a_single_node_ask_for_nothing(rows: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers set an address also where there is one node."""
    set_all(monkeypatch, NODES | {"NNODES": "1", "NODE_RANK": "0"})
    assert launch(rows) == InferProcessOptions(nproc_per_node=8)
    set_all(monkeypatch, {"NPROC_PER_NODE": "0", "NNODES": "many"})
    assert launch(rows) == InferProcessOptions()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--nnodes 2 --master_addr a", "--nnodes 2: needs the rank of this node"),
        ("--nnodes 2 --node_rank 1", "--nnodes 2: needs the address of node 0"),
        ("--nnodes 2 --node_rank 2 --master_addr a", "--node_rank 2: must be less than nnodes"),
        ("--node_rank 1", "--node_rank 1: applies only to several nodes"),
        ("--nnodes 1 --master_port 1", "--master_port 1: applies only to several nodes"),
        ("--nnodes 0", "--nnodes 0: must be"),
    ],
)
def test_mistakes(words: str, rule: str, rows: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        launch([*rows, *words.split()])
    assert rule in str(caught.value)


def test_a_conversation_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--nnodes 2: divides the rows of a prompt file"):
        launch(["--model", "m", "--nnodes", "2"])
    set_all(monkeypatch, NODES)
    with pytest.raises(ConfigError, match="NNODES=2: divides the rows of a prompt file"):
        launch(["--model", "m"])


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "master_addr", "master_port", "nproc_per_node"])
def test_export_and_convert_refuse_the_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="leave it out: one process converts"):
        export.COMMAND.parse(["--model", "m", "--to_mcore", "true", "--output_dir", "new", f"--{name}", "2"])
    for word in (f"--{name}=2", f"--{name.replace('_', '-')}=2"):
        assert main(["convert", "hf-to-megatron", "a", "b", word]) == 2
        assert f"{word}: is not an option: one process converts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
            "was started as 4 processes by a launcher; one process converts",
        ),
        (NODES, "was started on node 1 of 2 (NODE_RANK)"),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"},
            "was started on node 1 of 2 (Slurm (SLURM_NODEID))",
        ),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "was started as 4 processes by Slurm (SLURM_PROCID)",
        ),
    ],
)
def test_several_processes_do_not_write_one_folder(
    environ: dict[str, str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_all(monkeypatch, environ)
    for words in (
        ["export", "--model", str(tmp_path), "--to_mcore", "true", "--output_dir", str(tmp_path / "new")],
        ["convert", "hf-to-megatron", str(tmp_path), str(tmp_path / "new")],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert text in said and ("srun --nodes 1" in said) == ("on node 1 of 2 (Slurm" in said)
        assert not (tmp_path / "new").exists()
    assert main(["export", "--help"]) == 0
    with pytest.raises(SystemExit, match="^0$"):
        main(["convert", "hf-to-megatron", "--help"])


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, NODES | {"NODE_RANK": "0"}, NODES | {"NNODES": "1"}],
)
def test_one_process_goes_on(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one node, or the first of several: it fails here for the folder without a model."""
    set_all(monkeypatch, environ)
    assert main(["convert", "hf-to-megatron", str(tmp_path), str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "one process converts" not in said and "config.json" in said
