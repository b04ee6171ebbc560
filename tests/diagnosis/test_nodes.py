"""Other nodes: sockets of this machine, names of /etc/hosts, and an ssh that is a script."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaswift.diagnosis import nodes
from megaswift.diagnosis.nodes import (
    NodeAddress,
    clock_finding,
    node_findings,
    own_name_finding,
    parse_nodes,
    reach,
)
from megaswift.errors import ConfigError
from tests.diagnosis.fake_machine import machine, only, put_program

NO_SSH = "echo 'Permission denied (publickey).' >&2; exit 255"


@pytest.fixture
def port() -> Iterator[int]:
    """Something listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_addresses() -> None:
    rows = parse_nodes("node0:29500, 10.0.0.2,[fe80::1]:22,fe80::2")
    assert rows == [
        NodeAddress("node0", 29500),
        NodeAddress("10.0.0.2", None),
        NodeAddress("fe80::1", 22),
        NodeAddress("fe80::2", None),
    ]


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:port", "a:", "a:0", "a:70000", "-oProxyCommand=x", "a b", ":22", "[::1]:x"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST or HOST:PORT"):
        parse_nodes(text)


def test_an_open_and_a_closed_port(port: int, tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "ssh", NO_SSH)
    addresses = [NodeAddress("127.0.0.1", port), NodeAddress("127.0.0.1", closed_port())]
    found = [f for f in node_findings(addresses, machine(tmp_path)) if f.name.startswith("node ")]
    assert [f.state for f in found] == ["ok", "problem"]
    assert f"port {port} is open" in found[0].found and "is closed" in found[1].found and "node 0" in found[1].fix


def test_without_a_port_the_machine_itself_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SSH_PORT", closed_port())
    finding, answered = reach(NodeAddress("127.0.0.1", None))
    assert finding.state == "ok" and answered and "nothing listens" in finding.found


def test_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of connections: the next is neither taken nor refused."""
    monkeypatch.setattr(nodes, "LIMIT_S", 0.3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        finding, answered = reach(NodeAddress(*address))
        for one in waiting:
            one.close()
    assert (
        finding.state == "problem"
        and not answered
        and "does not answer" in finding.found
        and "firewalls" in finding.fix
    )


def test_no_route() -> None:
    finding, answered = reach(NodeAddress("255.255.255.255", 22))
    assert finding.state == "problem" and not answered and "routes" in finding.fix


def test_names(port: int, tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "ssh", NO_SSH)
    rows = [NodeAddress("no-such-node.invalid", 1), NodeAddress("localhost", port)]
    found = [f for f in node_findings(rows, machine(tmp_path)) if f.name.startswith("node ")]
    assert [f.state for f in found] == ["problem", "problem", "ok"]
    assert "does not resolve" in found[0].found and "/etc/hosts" in found[0].fix
    assert "loopback" in found[1].found and "gloo" in found[1].found and "/etc/hosts" in found[1].fix


@pytest.mark.parametrize(
    ("addresses", "several", "state", "told"),
    [
        (["10.1.2.3"], True, "ok", "resolves to 10.1.2.3"),
        (["127.0.1.1"], True, "problem", "loopback"),
        ([], True, "problem", "does not resolve"),
        (["127.0.1.1"], False, "ok", "several nodes only"),
    ],
)
def test_the_name_of_this_machine(
    addresses: list[str], several: bool, state: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "resolve", lambda host: addresses)
    finding = own_name_finding(several)
    assert finding.state == state and told in finding.found
    assert ("GLOO_SOCKET_IFNAME" in finding.fix) is (state == "problem")


@pytest.mark.parametrize(
    ("ahead", "state", "told"),
    [(0.0, "ok", "s (within"), (-4.0, "note", "-4."), (60.0, "problem", "rendezvous of torchrun")],
)
def test_clocks(ahead: float, state: str, told: str, tmp_path: Path) -> None:
    """ssh answers with the time of a clock that is `ahead` seconds fast."""
    script = f"shift 4; [ \"$*\" = '-- node1 date +%s.%N' ] && date -d '{ahead - 0.2:+.1f} seconds' +%s.%N"
    put_program(tmp_path / "bin", "ssh", script)
    start = time.monotonic()
    finding = clock_finding("node1", machine(tmp_path))
    if time.monotonic() - start < 0.5:
        assert finding.state == state and told in finding.found and ("chrony" in finding.fix) is (state != "ok")
    else:
        assert "within" in finding.found, "a machine too busy to compare clocks with"


def test_a_clock_that_cannot_be_read(tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "ssh", NO_SSH)
    finding = clock_finding("node1", machine(tmp_path))
    assert finding.state == "note" and "Permission denied (publickey)." in finding.found and "ssh keys" in finding.fix
    alone = machine(tmp_path)
    without = type(alone)({"PATH": str(tmp_path)}, tmp_path)
    assert only([clock_finding("node1", without)]).found == "not checked: ssh is not installed"
