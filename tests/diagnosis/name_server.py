"""The only name server of a process, which answers late or never: in a network and with a resolv.conf of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

PRIVATE = ["unshare", "--map-root-user", "--mount", "--net", "bash", "-ec"]
INSIDE = """
ip link set lo up
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/hosts" /etc/hosts
shift
exec "$@"
"""


def why_not() -> str:
    """Why a process cannot have a network and files of its own here; empty where it can."""
    try:
        tried = subprocess.run([*PRIVATE, "ip link set lo up; mount --bind /etc/hosts /etc/hosts"], capture_output=True)
    except OSError as error:
        return f"no namespaces: {error}"
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


def output_of(folder: Path, program: str, hosts: str = "", **environ: str) -> str:
    """What a Python program prints whose name service is 127.0.0.1, with these lines of /etc/hosts."""
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    words = [*PRIVATE, INSIDE, "inside", str(folder), sys.executable, "-c", program]
    kept = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    done = subprocess.run(words, env=kept | environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class NameServer:
    """On port 53; answers each question, with "no such name", when it has come `answers_after` times, or never (0)."""

    def __init__(self, answers_after: int) -> None:
        self.answers_after = answers_after
        self.questions: list[str] = []
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        seen: dict[bytes, int] = {}
        while True:
            packet, sender = self.socket.recvfrom(4096)
            labels, at = [], 12
            while packet[at]:
                labels.append(packet[at + 1 : at + 1 + packet[at]].decode())
                at += packet[at] + 1
            self.questions.append(".".join(labels))
            seen[packet[:2]] = seen.get(packet[:2], 0) + 1
            if seen[packet[:2]] == self.answers_after:
                no_such_name = b"\x81\x83" + packet[4:6] + bytes(6)
                self.socket.sendto(packet[:2] + no_such_name + packet[12 : at + 5], sender)
