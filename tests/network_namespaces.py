"""Machines in a network of their own: network namespaces of this machine, joined by a bridge, each with its own
address, and with a folder that looks different on each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.213.77"
"""Inside the namespaces only."""


@dataclass(frozen=True)
class Machine:
    """One of them."""

    name: str
    address: str
    own: Path
    """Under this path each machine sees a folder of its own."""
    view: Path

    def words(self, command: Sequence[str]) -> list[str]:
        """The command as it runs on this machine."""
        inside = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
        view = ["unshare", "--mount", "bash", "-ec", inside, "view", str(self.own), str(self.view)]
        return ["ip", "netns", "exec", self.name, *view, *command]


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "needs root and the program ip (scripts/setup_slow_tier.sh)"
    made = subprocess.run(["ip", "netns", "add", "megaswift-probe"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "megaswift-probe"], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.decode().strip()}"


@contextmanager
def machines(folder: Path, count: int = 2) -> Iterator[list[Machine]]:
    """Removed at the end, whatever happened."""
    hub = f"ms{os.getpid() % 100000}"
    (folder / "view").mkdir(parents=True)
    made = [Machine(f"{hub}n{i}", f"{NETWORK}.{i + 1}", folder / f"own-{i}", folder / "view") for i in range(count)]
    try:
        _ip("netns", "add", f"{hub}hub")
        _ip("-n", f"{hub}hub", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{hub}hub", "link", "set", "bridge", "up")
        for i, machine in enumerate(made):
            machine.own.mkdir()
            _ip("netns", "add", machine.name)
            _ip(
                "-n",
                machine.name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{i}",
                "netns",
                f"{hub}hub",
            )
            _ip("-n", f"{hub}hub", "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", device, "up")
        yield made
    finally:
        for name in (*(m.name for m in made), f"{hub}hub"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
