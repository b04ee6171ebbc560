"""A file of hosts, as DeepSpeed and MPI have it: the nodes of a run, the address of node 0, the rank of this one, and
the processes on each.

Owns reading the file, and the launch options that follow from it. They have less weight than any that are given.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megaswift.compat.files.deepspeed_file import hostfile_of_deepspeed_file
from megaswift.compat.names.translated import RENAMED
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError, Problem
from megaswift.launchers.options.variables import is_launched_worker
from megaswift.options.sources import ConfigSource, GivenOptionValue

NAME = "hostfile"


@dataclass(frozen=True)
class Host:
    """A line of the file."""

    name: str
    """As it is written, a user before @ included."""
    slots: int | None = None
    """Processes on it; None: not said."""

    @property
    def address(self) -> str:
        """Without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(file: Path) -> list[Host]:
    """The hosts: `host slots=8`, `host:8` or `host` on a line, comments with #. ConfigError where there are none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(Problem(f"hostfile {file}", f"cannot be read: {reason}")) from None
    hosts = [_host(words, file) for line in lines if (words := re.sub(r"#.*", "", line).split())]
    if not hosts:
        raise ConfigError(Problem(f"hostfile {file}", "names no host", "write one on each line: node1 slots=8"))
    if twice := [h.name for i, h in enumerate(hosts) if h.name in {other.name for other in hosts[:i]}]:
        raise ConfigError(Problem(f"hostfile {file}: {twice[0]}", "occurs twice", "leave one of the two lines out"))
    return hosts


def _host(words: Sequence[str], file: Path) -> Host:
    name, colon, count = words[0].partition(":")
    said = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
    said += [count] if colon else []
    if any(not text.isdigit() or int(text) < 1 for text in said):
        raise ConfigError(Problem(f"hostfile {file}: {' '.join(words)}", "has no number of slots", f"{name} slots=8"))
    return Host(name, int(said[0]) if said else None)


def expand_hostfile(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """The sources, before them the launch options of the last hostfile that they name, or that a
    DeepSpeed file names."""
    named = [given for source in sources for given in source.givens if _option(given) == NAME and given.value]
    in_deepspeed_file = None if named else hostfile_of_deepspeed_file(sources)
    if in_deepspeed_file is not None:
        sources = [ConfigSource((in_deepspeed_file,), ambient=True), *sources]
        named = [in_deepspeed_file]
    if not named:
        return [*sources]
    given = named[-1]
    others = {_option(g): g for source in sources for g in source.givens if g.value is not None}
    try:
        hosts = read_hostfile(Path(str(given.value)).expanduser())
        options = tuple(_options(hosts, given, others))
    except ConfigError as error:
        problems = tuple(Problem(given.label, f"{p.what}: {p.rule}", p.fix) for p in error.problems)
        return [ConfigSource(problems=problems), *sources]
    return [ConfigSource(options, ambient=True), *sources]


def _option(given: GivenOptionValue) -> str:
    return NAMES.get(RENAMED.get(given.name, given.name), given.name)


def _options(
    hosts: Sequence[Host], given: GivenOptionValue, others: dict[str, GivenOptionValue]
) -> Iterator[GivenOptionValue]:
    slots = {host.slots for host in hosts}
    if "nproc_per_node" not in others and len(slots) > 1:
        listed = ", ".join(str(s or "unset") for s in sorted(slots, key=lambda s: s or 0))
        rule = f"has hosts with different slots ({listed}); a run has as many processes on each node"
        raise ConfigError(Problem(NAME, rule, f"--nproc_per_node {min((s for s in slots if s), default=8)}"))
    if (wanted := others.get("nnodes")) is not None and str(wanted.value).isdigit() and int(wanted.value) > len(hosts):
        raise ConfigError(Problem(wanted.label, f"{given.value} has {len(hosts)} hosts", f"--nnodes {len(hosts)}"))
    values: dict[str, int | str | None] = {"nproc_per_node": hosts[0].slots}
    if len(hosts) > 1:
        values |= {"nnodes": len(hosts), "master_addr": hosts[0].address}
        if "node_rank" not in others:
            values["node_rank"] = _own_rank(hosts)
    for name, value in values.items():
        if value is not None and name not in others:
            label = f"{given.label}: {name} {value}"
            yield GivenOptionValue(name, value, label, f"{given.label}: {name}")


def _own_rank(hosts: Sequence[Host]) -> int:
    if is_launched_worker(os.environ):
        return int(os.environ.get("GROUP_RANK", "0"))
    own = [rank for rank, host in enumerate(hosts) if is_this_machine(host.address)]
    if len(own) != 1:
        which = "names this machine more than once" if own else "does not name this machine"
        rule = f"{which} (host name {socket.gethostname()})"
        raise ConfigError(Problem(NAME, rule, "--node_rank N, its place in the file, from 0"))
    return own[0]


@cache
def is_this_machine(host: str) -> bool:
    """Whether a host's name or address is this machine's: by its host name, else by an address that it has."""
    own = socket.gethostname()
    if host == own or host.partition(".")[0] == own.partition(".")[0] and not host.replace(".", "").isdigit():
        return True
    found: list[tuple[socket.AddressFamily, str]] = []
    with suppress(OSError, UnicodeError):
        found = [(family, str(address[0])) for family, *_, address in socket.getaddrinfo(host, None)]
    for family, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only an address of this machine can be bound
            return True
    return False
