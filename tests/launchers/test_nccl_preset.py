"""`--nccl_preset`: on machines made of files, and in a process of a run before it joins a group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.clusters.network_presets import NETWORK_PRESETS, network_variables
from megaswift.commands import training
from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.launchers.nccl_preset import AUTO, NONE, apply_nccl_preset, node_count, preset_by_devices
from megaswift.launchers.options.launch import NCCL_PRESETS
from tests.diagnosis.fake_machine import machine, put_program
from tests.diagnosis.test_gpu_topology import ALL, PAIRS
from tests.diagnosis.test_gpu_topology import NONE as NO_LINKS
from tests.diagnosis.test_infiniband import ACTIVE, DOWN, devices

ROCE = ACTIVE | {"link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}
OTHER = ACTIVE | {"link_layer": "Unspecified"}
SEVERAL = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
"""As torchrun sets them on two nodes."""
SINGLE = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}


def test_the_option_has_every_preset() -> None:
    assert (NONE, AUTO, *NETWORK_PRESETS) == NCCL_PRESETS


@pytest.mark.parametrize(
    ("ports", "usable", "preset", "why"),
    [
        ([ACTIVE, ACTIVE], True, "infiniband", "mlx5_0, mlx5_1, 400 Gb/sec (4X NDR)"),
        ([DOWN, ACTIVE], True, "infiniband", "mlx5_1, 400 Gb/sec (4X NDR)"),
        ([ROCE], True, "roce", "mlx5_0, 100 Gb/sec (4X EDR)"),
        ([ROCE, ACTIVE], True, "infiniband", "mlx5_1"),  # an Ethernet port for storage beside InfiniBand
        ([DOWN], True, "ethernet", "no active InfiniBand or RoCE port"),
        ([], False, "ethernet", "no active InfiniBand or RoCE port"),
        ([ACTIVE], False, "ethernet", "/dev/infiniband is missing"),
        ([OTHER], True, None, "mlx5_0 is neither InfiniBand nor RoCE"),
    ],
)
def test_several_nodes_by_their_ports(
    ports: list[dict[str, str]], usable: bool, preset: str | None, why: str, tmp_path: Path
) -> None:
    devices(tmp_path, *ports, usable=usable)
    found, reason = preset_by_devices(machine(tmp_path), 2)
    assert found == preset and why in reason


@pytest.mark.parametrize(("matrix", "preset"), [(ALL, "nvlink_node"), (NO_LINKS, None), (PAIRS, None)])
def test_one_node_by_nvlink(matrix: str, preset: str | None, tmp_path: Path) -> None:
    """NCCL's own choice stays where GPUs have no NVLink: InfiniBand is then no worse than PCIe."""
    devices(tmp_path, ACTIVE)
    put_program(tmp_path / "bin", "nvidia-smi", f"cat <<'END'\n{matrix}END")
    assert preset_by_devices(machine(tmp_path), 1)[0] == preset
    put_program(tmp_path / "bin", "nvidia-smi", "exit 9")
    assert preset_by_devices(machine(tmp_path), 1)[0] is None


@pytest.mark.parametrize("preset", NETWORK_PRESETS)
def test_variables_of_the_user_stay(preset: str) -> None:
    nodes = SINGLE if preset == "nvlink_node" else SEVERAL
    environ = dict(nodes)
    line = apply_nccl_preset(preset, environ, gpu=True)
    assert environ == nodes | network_variables(preset) and "kept" not in line
    assert all(f"{name}={value}" in line for name, value in network_variables(preset).items())
    environ = {**nodes, "NCCL_SOCKET_IFNAME": "eth7"}
    line = apply_nccl_preset(preset, environ, gpu=True)
    assert environ == nodes | network_variables(preset) | {"NCCL_SOCKET_IFNAME": "eth7"}
    assert line.endswith("set before and kept: NCCL_SOCKET_IFNAME=eth7")


def test_auto_says_why(tmp_path: Path) -> None:
    devices(tmp_path, ACTIVE)
    environ = dict(SEVERAL)
    line = apply_nccl_preset(AUTO, environ, True, machine(tmp_path))
    assert line.startswith("--nccl_preset infiniband (auto: mlx5_0, 400 Gb/sec (4X NDR)): NCCL_SOCKET_IFNAME=")
    assert environ["NCCL_IB_TIMEOUT"] == "22"
    environ = dict(SINGLE)
    assert "nothing is set" in apply_nccl_preset(AUTO, environ, True, machine(tmp_path, PATH="")) and environ == SINGLE


def test_where_nccl_is_not_used() -> None:
    for environ, gpu, text in ((dict(SEVERAL), False, "without a GPU"), ({}, True, "one process")):
        before = dict(environ)
        assert text in apply_nccl_preset("infiniband", environ, gpu) and environ == before


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        (SEVERAL, 2),
        (SINGLE, 1),
        ({}, 1),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_SIZE": "2"}, 2),  # DeepSpeed's launcher
        ({"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "4"}, 2),
    ],
)
def test_number_of_nodes(environ: dict[str, str], nodes: int) -> None:
    assert node_count(environ) == nodes


def test_nvlink_node_is_refused_on_several_nodes() -> None:
    given = ["--model", "m", "--dataset", "d", "--nccl_preset", "nvlink_node"]
    environ = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0", "NPROC_PER_NODE": "2"}
    with pytest.raises(ConfigError, match="is for a single node"):
        load_config("sft", given, environ=environ)
    with pytest.raises(ConfigError, match="the launcher started 2"):
        apply_nccl_preset("nvlink_node", dict(SEVERAL), True)


def test_a_process_sets_them_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run under another launcher; the default sets and says nothing."""
    import torch

    seen: list[str | None] = []
    monkeypatch.setattr("megaswift.run.training.preflight", lambda *_: None)
    monkeypatch.setattr("megaswift.run.checks.engine_choice.resolve_engine", lambda cfg, *_, **__: cfg)
    monkeypatch.setattr(
        "megaswift.run.training.run_training", lambda cfg: seen.append(os.environ.get("NCCL_IB_TIMEOUT"))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NCCL")}
    monkeypatch.setattr(os, "environ", environ | SEVERAL)
    words = ["--model", "m", "--dataset", "d"]
    assert training._start("sft", words, load_config("sft", words)) == 0
    assert "nccl_preset" not in capsys.readouterr().err
    words += ["--nccl_preset", "infiniband"]
    assert training._start("sft", words, load_config("sft", words)) == 0
    assert seen == [None, "22"] and "NCCL_IB_TIMEOUT=22" in capsys.readouterr().err
