"""The address and interface by which other nodes reach this machine."""

from __future__ import annotations

import socket

from megaswift.launchers.local_address import interface_of_address, local_address


def test_loopback() -> None:
    assert local_address("127.0.0.1", 29500) == "127.0.0.1" and interface_of_address("127.0.0.1") == "lo"


def test_what_cannot_be_found() -> None:
    assert local_address("no-such-host.invalid", 29500) == socket.gethostname()
    assert interface_of_address("203.0.113.7") == ""
