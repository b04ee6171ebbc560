"""Other nodes: whether their names resolve, and their addresses in time, whether they can be reached, and whether their
clocks agree."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.machine import Machine
from megaswift.diagnosis.reverse_lookups import reverse_lookup_finding
from megaswift.errors import ConfigError, Problem

SSH_PORT = 22
LIMIT_S = 3.0
CLOCK_NOTE_S = 1.0
"""Seconds between the clocks of two nodes that are reported as a note."""
CLOCK_PROBLEM_S = 10.0
"""Seconds between the clocks of two nodes that are reported as a problem: torchrun's c10d rendezvous drops a node
whose heartbeats, every 5 s, look older than 15 s."""


@dataclass(frozen=True)
class NodeAddress:
    """An entry of `--nodes`; `port` None: the user gave none."""

    host: str
    port: int | None


def parse_nodes(text: str) -> list[NodeAddress]:
    """`node0:29500,node1` and `[fe80::1]:29500`; ConfigError for what is neither."""
    found = []
    for entry in text.split(","):
        host = entry.strip()
        port = ""
        if host.startswith("["):
            host, _, port = host[1:].partition("]")
            port = port.removeprefix(":")
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        wrong = not host or (port and not (port.isdigit() and 0 < int(port) < 65536)) or entry.strip().endswith(":")
        if wrong or host.startswith("-") or any(c.isspace() for c in host):
            raise ConfigError(
                Problem(f"--nodes {text}", f"{entry.strip()!r} is not HOST or HOST:PORT", "node0:29500,node1")
            )
        found.append(NodeAddress(host, int(port) if port else None))
    return found


def node_findings(nodes: Sequence[NodeAddress], machine: Machine) -> Iterator[Finding]:
    """Yields findings about this machine's own name, then about each node in the order given."""
    yield own_name_finding(bool(nodes))
    with ThreadPoolExecutor(max(1, min(32, len(nodes)))) as pool:
        for findings in pool.map(lambda node: list(one_node_findings(node, machine)), nodes):
            yield from findings


def own_name_finding(several: bool) -> Finding:
    """gloo and torchrun give other nodes the address that this machine's name resolves to."""
    name = socket.gethostname()
    addresses = resolve(name)
    if addresses and not all(ipaddress.ip_address(a).is_loopback for a in addresses):
        return Finding("host name", "ok", f"{name} resolves to {', '.join(addresses)}")
    found = (
        f"{name} resolves to {', '.join(addresses)}, a loopback address" if addresses else f"{name} does not resolve"
    )
    fix = "set GLOO_SOCKET_IFNAME to the network interface of the nodes, or correct /etc/hosts"
    if several:
        return Finding("host name", "problem", f"{found}: gloo would listen where other nodes cannot connect", fix)
    return Finding("host name", "ok", f"{found}; this matters with several nodes only")


def resolve(host: str) -> list[str]:
    """Addresses of a name, in the system's order."""
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(row[4][0]).split("%")[0] for row in rows))


def one_node_findings(node: NodeAddress, machine: Machine) -> Iterator[Finding]:
    """Name and port first; the clock only of a node that answers."""
    name = f"node {node.host}"
    addresses = resolve(node.host)
    if not addresses:
        fix = "correct the name, or add it to DNS or to /etc/hosts on all nodes"
        yield Finding(name, "problem", "the name does not resolve", fix)
        return
    if node.host not in addresses and all(ipaddress.ip_address(a).is_loopback for a in addresses):
        found = f"resolves to {addresses[0]}, a loopback address: gloo would listen where other nodes cannot connect"
        yield Finding(
            name, "problem", found, "correct /etc/hosts: the name stands for an address of the nodes' network"
        )
    lookup = reverse_lookup_finding(f"reverse lookup of {node.host}", addresses)
    if lookup.state != "ok":
        yield lookup
    finding, answered = reach(node)
    yield finding
    if answered:
        yield clock_finding(node.host, machine)


def reach(node: NodeAddress) -> tuple[Finding, bool]:
    """A TCP connection, and whether the machine answered at all."""
    name = f"node {node.host}"
    port = node.port or SSH_PORT
    start = time.perf_counter()
    try:
        socket.create_connection((node.host, port), LIMIT_S).close()
    except ConnectionRefusedError:
        if node.port is None:
            return Finding(name, "ok", f"reachable; nothing listens on port {port} (ssh)"), True
        fix = "start the program that listens there (for MASTER_PORT: node 0 of a run), or correct the port"
        return Finding(name, "problem", f"reachable, but port {port} is closed", fix), True
    except TimeoutError:
        fix = f"check that the machine is running and that firewalls between the nodes let port {port} pass"
        return Finding(name, "problem", f"port {port} does not answer within {LIMIT_S:.0f} s", fix), False
    except OSError as error:
        fix = "check routes and firewalls between the nodes (ip route get, ping)"
        return Finding(name, "problem", f"port {port}: {error.strerror or error}", fix), False
    return Finding(name, "ok", f"port {port} is open, {(time.perf_counter() - start) * 1e3:.1f} ms"), True


def clock_finding(host: str, machine: Machine) -> Finding:
    """The offset of a node's clock, by ssh where that needs no password."""
    name = f"clock of {host}"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={LIMIT_S:.0f}"]
    before = time.time()
    done = machine.program(["ssh", *options, "--", host, "date", "+%s.%N"], 3 * LIMIT_S)
    after = time.time()
    fix = "compare date +%s.%N on the nodes; set up ssh keys to have it checked here"
    if done is None:
        return Finding(name, "note", "not checked: ssh is not installed", fix)
    try:
        remote = float(done.text.strip())
    except ValueError:
        error = done.error.strip().splitlines()[-1:] or [f"exit code {done.code}"]
        return Finding(name, "note", f"not checked: ssh without a password: {error[0]}", fix)
    offset = remote - (before + after) / 2
    uncertain = (after - before) / 2
    found = f"{offset:+.2f} s (within {uncertain:.2f} s)"
    sure = abs(offset) - uncertain
    sync = "synchronize the clocks (chrony or systemd-timesyncd on all nodes)"
    if sure > CLOCK_PROBLEM_S:
        return Finding(name, "problem", f"{found}: the rendezvous of torchrun drops nodes that are 15 s behind", sync)
    if sure > CLOCK_NOTE_S:
        return Finding(name, "note", f"{found}: times in the logs of the nodes do not compare", sync)
    return Finding(name, "ok", found)
