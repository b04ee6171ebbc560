"""Reverse lookups: how long the name service takes for the names of addresses.

torch asks for them: its TCPStore looks up the address of each connection, for messages, before it connects and after it
accepts (`formatSockAddr` in torch/csrc/distributed/c10d/socket.cpp), and has no switch for that.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import time
from collections.abc import Sequence

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.timed_calls import answers_within

LOOPBACK = "127.0.0.1"
SLOW_S = 1.0
"""Seconds from which a lookup is reported as slow."""
LIMIT_S = 6.0
"""Seconds that a lookup may take: glibc repeats an unanswered question after 5 s and gives up after 10 s, unless
resolv.conf says otherwise."""
MOST_SHOWN = 3


def reverse_lookup_finding(name: str, addresses: Sequence[str]) -> Finding:
    """Looks up all addresses at once, in `LIMIT_S` seconds at most; `name` is the finding's."""
    addresses = list(dict.fromkeys(addresses))
    seconds = answers_within(LIMIT_S, {a: functools.partial(seconds_for_name, a) for a in addresses})
    slow = [a for a in addresses if seconds.get(a, LIMIT_S) >= SLOW_S]
    if not slow:
        return Finding(name, "ok", f"{_some(addresses)}: at most {max(seconds.values(), default=0.0):.2f} s")
    taken = [f"{a}: {seconds[a]:.1f} s" if a in seconds else f"{a}: more than {LIMIT_S:.0f} s" for a in slow]
    found = f"{_some(taken)}; torch looks up the address of each connection as a run starts"
    lines = _some([f"`{mapped(a)} address-{a.replace('.', '-').replace(':', '-')}`" for a in slow])
    fix = f'add to /etc/hosts {lines} (any name does), or export RES_OPTIONS="timeout:1 attempts:1"'
    return Finding(name, "note", found, fix)


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more


def seconds_for_name(address: str) -> float:
    """Times a lookup of the address as torch's sockets do it, whatever its result."""
    begun = time.perf_counter()
    with contextlib.suppress(OSError):
        socket.getnameinfo((mapped(address), 1, 0, 0), socket.NI_NUMERICSERV)
    return time.perf_counter() - begun


def mapped(address: str) -> str:
    """An IPv4 address as torch connects to it, in IPv6: `::ffff:127.0.0.1`, for which 127.0.0.1 in /etc/hosts does not
    stand."""
    return f"::ffff:{address}" if ipaddress.ip_address(address).version == 4 else address
