"""Presets of NCCL's environment variables, each with the reason (docs/launch.md has them as a table).

A variable of the user's is never changed: presets only fill in what is not set. Sources: NVIDIA's NCCL documentation,
"Environment Variables" (2.27), which gives meanings and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PresetVariable:
    """A variable of a preset."""

    name: str
    value: str
    reason: str


_SOCKET = PresetVariable(
    "NCCL_SOCKET_IFNAME", "^lo,docker", "bootstrap over a real interface, not loopback or a bridge"
)
_NAMED = PresetVariable(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a failed collective ends the process, so the run restarts"
)

NETWORK_PRESETS: dict[str, tuple[PresetVariable, ...]] = {
    "ethernet": (
        _SOCKET,
        PresetVariable("NCCL_IB_DISABLE", "1", "no RDMA devices: NCCL does not look for them"),
        PresetVariable("NCCL_SOCKET_NTHREADS", "4", "several threads fill a link of 25 Gbit/s or more"),
        PresetVariable("NCCL_NSOCKS_PERTHREAD", "2", "two connections a thread; threads x connections is at most 64"),
        _NAMED,
    ),
    "roce": (
        _SOCKET,
        PresetVariable("NCCL_IB_GID_INDEX", "3", "RoCE v2 over IPv4 on most Mellanox drivers (show_gids lists them)"),
        PresetVariable(
            "NCCL_IB_TC", "106", "traffic class of a lossless queue in the usual DSCP 26 setup; ask the operator"
        ),
        PresetVariable("NCCL_IB_QPS_PER_CONNECTION", "4", "several paths through the fabric for one connection"),
        _NAMED,
    ),
    "infiniband": (
        _SOCKET,
        PresetVariable(
            "NCCL_IB_TIMEOUT", "22", "about 17 s before a lost packet is an error; short flaps are survived"
        ),
        PresetVariable("NCCL_IB_RETRY_CNT", "7", "retries of a send, the most that the hardware has"),
        _NAMED,
    ),
    "nvlink_node": (
        PresetVariable("NCCL_IB_DISABLE", "1", "a single node: everything goes over NVLink and shared memory"),
        PresetVariable("NCCL_SOCKET_IFNAME", "lo", "bootstrap without a network"),
        _NAMED,
    ),
}


def network_variables(preset: str | None) -> dict[str, str]:
    """Name to value; empty without a preset."""
    return {v.name: v.value for v in NETWORK_PRESETS[preset]} if preset else {}
