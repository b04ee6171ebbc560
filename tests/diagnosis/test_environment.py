"""Variables that do harm, each with and without what makes it harmful."""

from __future__ import annotations

import pytest

from megaswift.diagnosis.environment import HARMFUL, HarmConditions, nccl_interfaces, variable_findings
from tests.diagnosis.fake_machine import only

PLAIN = HarmConditions(cores=8, interfaces=("lo", "eth0", "ib0"))


def facts(**changed: object) -> HarmConditions:
    return HarmConditions(**{**vars(PLAIN), **changed})  # type: ignore[arg-type]


CASES = [
    ("CUDA_LAUNCH_BLOCKING", "1", "0", {}, "note"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "0", {}, "note"),
    ("NVIDIA_TF32_OVERRIDE", "1", "0", {}, "note"),
    ("NCCL_IB_DISABLE", "1", "0", {"infiniband": True}, "note"),
    ("NCCL_IB_DISABLE", "1", "0", {"infiniband": True, "several_nodes": True}, "problem"),
    ("NCCL_P2P_DISABLE", "1", "0", {"nvlink": True}, "note"),
    ("NCCL_SHM_DISABLE", "1", "0", {}, "note"),
    ("NCCL_DEBUG", "info", "WARN", {}, "note"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF", {}, "note"),
    ("CUDA_VISIBLE_DEVICES", "", "0,1", {"gpus": 2}, "note"),
    ("OMP_NUM_THREADS", "5", "4", {"gpus": 2}, "note"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "max_split_size_mb:64", {"old_vllm": True}, "note"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "max_split_size_mb:64", {"old_vllm": True}, "note"),
    ("RANK", "0", "", {}, "note"),
    ("LOCAL_RANK", "0", "", {}, "note"),
    ("WORLD_SIZE", "8", "", {}, "note"),
    ("NCCL_SOCKET_IFNAME", "eth1", "eth", {}, "problem"),
    ("GLOO_SOCKET_IFNAME", "eth", "eth0", {}, "problem"),
    ("NCCL_SOCKET_IFNAME", "lo", "eth0", {"several_nodes": True}, "problem"),
    ("GLOO_SOCKET_IFNAME", "lo", "ib0", {"several_nodes": True}, "problem"),
]


@pytest.mark.parametrize(("name", "bad", "good", "here", "state"), CASES)
def test_a_value_that_does_harm_and_one_that_does_not(name: str, bad: str, good: str, here: dict, state: str) -> None:
    finding = only(variable_findings({name: bad}, facts(**here)))
    assert (finding.name, finding.state) == (name, state) and finding.found.startswith(f"{bad or 'empty'}: ")
    assert name in finding.fix or "interface" in finding.fix
    assert only(variable_findings({name: good}, facts(**here))).state == "ok"
    if here:
        assert only(variable_findings({name: bad}, PLAIN)).state == "ok", "harmless where the machine has none of it"


def test_every_row_has_a_case() -> None:
    assert sorted(row.name for row in HARMFUL) == sorted(name for name, *_ in CASES)


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^lo,docker", ["eth0", "eth1"]),
        ("^=lo,eth0", ["docker0", "eth1"]),
        ("ib,eth1", ["eth1"]),
    ],
)
def test_interfaces_of_nccl(value: str, chosen: list[str]) -> None:
    """As NCCL's documentation says: prefixes, = for exact names, ^ for all others."""
    assert sorted(nccl_interfaces(value, ("lo", "docker0", "eth0", "eth1"))) == chosen
