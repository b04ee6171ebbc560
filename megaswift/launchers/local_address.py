"""This machine in the network of a run: its address and network interface as node 0 is reached."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux: an interface's IPv4 address."""


def local_address(address: str, port: int) -> str:
    """This machine's address in the network of `address`, for other nodes: its host name need not be known there, or
    may stand for 127.0.0.1. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def interface_of_address(address: str) -> str:
    """The network interface that has an IPv4 address; empty where none has."""
    return next((name for name, found in addresses_of_interfaces().items() if found == address), "")


def addresses_of_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(found[20:24])
    return addresses
