"""Processes and nodes of `megaswift infer`, by options and variables; commands that are one process.

Covers: megaswift/inference/options/launch.py, megaswift/inference/options/run_files.py,
megaswift/launchers/options/single_process.py, megaswift/commands/convert.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift import export, infer
from megaswift.cli import main
from megaswift.commands import convert
from megaswift.commands.convert import FileArgumentParser
from megaswift.config.swift_config import load_config
from megaswift.errors import ConfigError
from megaswift.inference.options.commands import InferProcessOptions
from megaswift.inference.options.launch import LAUNCH_OPTIONS, node_option_values
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.options.single_process import NodePlace, place_among_nodes

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
    assert launch(rows) == InferProcessOptions(nproc_per_node=8, nnodes=1)
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


SOURCE = ["--model", "m", "--to_mcore", "true", "--output_dir", "new"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--nnodes 2 --master_addr a", "--nnodes 2: needs the rank of this node"),
        ("--nnodes 2 --node_rank 1", "--nnodes 2: needs the address of node 0"),
        ("--nnodes 2 --node_rank 2 --master_addr a", "--node_rank 2: must be less than nnodes"),
        ("--node_rank 1", "--node_rank 1: applies only to several nodes"),
    ],
)
def test_mistakes_of_export_and_convert(words: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        export.COMMAND.parse([*SOURCE, *words.split()])
    assert rule in str(caught.value)
    assert main(["convert", "hf-to-megatron", "a", "b", *words.split()]) == 2
    assert rule in capsys.readouterr().err


def test_processes_of_a_command_that_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    told = "nproc_per_node 8 has no effect: one process converts"
    assert any(told in line for line in export.COMMAND.parse([*SOURCE, "--nproc_per_node", "8"]).notices)
    assert main(["convert", "hf-to-megatron", "none", "b", "--nproc-per-node=8"]) == 2
    said = capsys.readouterr().err
    assert told in said and "unrecognized" not in said


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, NodePlace(3, 4, "a", 29500, "rank")),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        (NODES, NodePlace(1, 2, "node0", 4000)),
        (NODES | {"NODE_RANK": "0"}, NodePlace(0, 2, "node0", 4000)),
        (NODES | {"NNODES": "1"}, None),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"},
            NodePlace(1, 2, "gpu1", 20007),
        ),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
            NodePlace(3, 4, "gpu1", 20007, "rank"),
        ),
        ({}, None),
    ],
)
def test_the_place_of_a_process(environ: dict[str, str], place: NodePlace | None) -> None:
    environ = dict(environ)
    take_cluster_variables(environ)
    assert place_among_nodes(node_option_values({}, environ), environ) == place
    given = {"nnodes": 3, "node_rank": 2, "master_addr": "b"}
    if "RANK" not in environ:  # options go over variables
        port = int(environ.get("MASTER_PORT", 29500))
        assert place_among_nodes(node_option_values(given, environ), environ) == NodePlace(2, 3, "b", port)


FILE = "nnodes: 2\nnode_rank: 0\nmaster_addr: node0\nmaster_port: 4000\nnproc_per_node: 8\n"


def launch_of(command: str, file: Path, words: list[str]) -> tuple[int | str | None, ...]:
    """The launch options that a command takes from this file and these words."""
    text = [str(file), *words]
    if command == "train":
        found = load_config(None, [*text, "--model", "m"]).launch
    elif command == "infer":
        found = infer.COMMAND.parse([*text, "--model", "m"]).sections["launch"]
    elif command == "export":
        found = export.COMMAND.parse([*text, *SOURCE]).sections["launch"]
    else:
        place, others = convert._place_and_other_words(["--config", *text, "a", "b"])
        assert place is not None and others == ["--config", str(file), "a", "b"]
        return (8, place.count, place.rank, place.address, place.port)
    return tuple(getattr(found, name) for name in LAUNCH_OPTIONS)


@pytest.mark.parametrize("command", ["train", "infer", "export", "convert"])
def test_every_command_reads_a_file_then_variables_then_options(
    command: str, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nodes.yaml"
    needs_rows = command in ("train", "infer")
    file.write_text(FILE + f"dataset: {rows[-1]}\n" * needs_rows)
    assert launch_of(command, file, []) == (8, 2, 0, "node0", 4000)
    set_all(monkeypatch, {"NODE_RANK": "1", "MASTER_ADDR": "other"})
    assert launch_of(command, file, []) == (8, 2, 1, "other", 4000)
    assert launch_of(command, file, ["--master_addr", "third", "--nnodes", "3"]) == (8, 3, 1, "third", 4000)


def converted(command: str, text: str, words: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `megaswift convert` says of this file."""
    file.write_text(text)
    assert main(["convert", command, str(file), *words]) == 2
    return capsys.readouterr().err


def test_a_file_of_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    wrong = "source: a\ntarget: b\ntp: 0\ndtyp: bf16\ndtype: int8\noverwrite: 3\n"
    said = converted("hf-to-megatron", wrong, [], file, capsys)
    for line, rule in ((3, "tp: 0"), (4, "dtyp: bf16: is not an option"), (5, "dtype: int8"), (6, "overwrite: 3")):
        assert f"c.yaml:{line} {rule}" in said
    assert "did you mean dtype?" in said
    nodes = converted("verify", "nnodes: many\nnode_rank: -1\nmaster_port: 70000\n", ["a", "b"], file, capsys)
    assert nodes.count(" must be ") == 3 and "c.yaml:3 master_port: 70000" in nodes
    assert "c.yaml:1 nnodes: 2: needs the rank" in converted("verify", "nnodes: 2\n", ["a", "b"], file, capsys)
    two = "nnodes: 2\nnode_rank: 5\nmaster_addr: x\n"
    assert "c.yaml:2 node_rank: 5: must be less" in converted("verify", two, ["a", "b"], file, capsys)
    monkeypatch.setenv("NODE_RANK", "3")
    assert "NODE_RANK=3: must be less" in converted("verify", two, ["a", "b"], file, capsys)
    assert main(["convert", "verify", "--config", "none.yaml"]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "source", "target"),
    [
        ("source: a\ntarget: b\n", [], "a", "b"),
        ("source: a\n", ["b"], "a", "b"),
        ("target: b\n", ["a"], "a", "b"),
        ("source: a\ntarget: b\n", ["c"], "c", "b"),
        ("source: a\ntarget: b\n", ["c", "d"], "c", "d"),
        ("", ["c", "d"], "c", "d"),
        ("source: a\n", [], None, None),
        ("", ["c"], None, None),
    ],
)
def test_arguments_of_convert_in_a_file(
    text: str, words: list[str], source: str | None, target: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text + "overwrite: true\ntp: 4\n")
    parser = FileArgumentParser(prog="megaswift convert x", allow_abbrev=False)
    for name in ("source", "target"):
        parser.add_argument(name, metavar=name.upper())
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--tp", type=int)
    if source is None:
        with pytest.raises(ConfigError, match="the following arguments are required: (TARGET|SOURCE)"):
            parser.parse_args(["--config", str(file), *words])
        return
    found = parser.parse_args(["--config", str(file), *words, "--tp", "2"])
    assert (found.source, found.target, found.overwrite, found.tp) == (source, target, True, 2)
