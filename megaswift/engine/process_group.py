"""Starts the default process group of a run, for every engine.

Owns the store through which ranks find each other. Groups that are made later use the default group's store, so they
need nothing of their own.
"""

from __future__ import annotations

import datetime
import os
import resource
import socket
from collections.abc import Mapping, MutableMapping

import torch.distributed as dist

from megaswift import distributed
from megaswift.engine.diagnostics.flight_recorder import record_collectives
from megaswift.errors import ConfigError, Problem, UserError, first_line
from megaswift.launchers.local_address import interface_of_address, local_address

ADDRESS_IN_USE = "EADDRINUSE"
ARRIVED = "megaswift/arrived/"
MOST_NAMED = 16
MOST_FILES = 1 << 20
"""Programs that a rank starts close each file that they may have: a limit without bounds makes that slow."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"


class MissingRanksError(UserError):
    """Ranks that did not come to the start of the process group."""

    title = "not all ranks started"
    exit_code = 1


def init_default_and_gloo_process_groups(backend: str, timeout_s: float, store: dist.Store | None = None) -> None:
    """Starts the default group, unless there is one, and a gloo group beside one without gloo. Rank and world size come
    from the launcher's variables.

    ConfigError when rank 0 cannot listen on MASTER_PORT. `store`: the one to use in place of the launcher's.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    raise_open_file_limit()
    choose_gloo_interface(os.environ)
    record_collectives(os.environ)
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    launched = store is None
    if store is None:
        store = dist.HashStore() if world == 1 else launcher_store_of_this_attempt(os.environ, rank, world, timeout)
    if launched:
        store.set(f"{ARRIVED}{rank}", f"{socket.gethostname()} (process {os.getpid()})")
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except dist.DistStoreError:
        missing = [r for r in range(world) if launched and not store.check([f"{ARRIVED}{r}"])]
        if not missing:
            raise
        raise MissingRanksError(_missing_rank_problem(store, missing, world, timeout_s)) from None
    if "gloo" not in backend:
        distributed.start_cpu_group(timeout)


def raise_open_file_limit() -> None:
    """Raises the soft limit of open files to the hard one: each rank that this one is connected to is an open file, and
    the usual soft limit of 1,024 is reached by groups of as many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_timeout_of_all_groups(timeout_s: float) -> None:
    """Gives every process group of this rank the timeout of the default one: groups that libraries make (DeepSpeed's,
    those of a device mesh) have PyTorch's 10 or 30 minutes."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def _missing_rank_problem(store: dist.Store, missing: list[int], world: int, timeout_s: float) -> Problem:
    there = next(r for r in range(world) if r not in missing)
    names = ", ".join(map(str, missing[:MOST_NAMED])) + (", ..." if len(missing) > MOST_NAMED else "")
    what = f"rank{'s' if len(missing) > 1 else ''} {names} of {world}"
    rule = f"did not start within {timeout_s:.0f} s (--ddp_timeout); rank {there} is on"
    fix = "look for the error of that process, and check that all nodes run the same command"
    return Problem(what, f"{rule} {store.get(f'{ARRIVED}{there}').decode()}", fix)


def choose_gloo_interface(environ: MutableMapping[str, str]) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set, to the interface by which MASTER_ADDR on another machine is reached.

    gloo itself takes the address that this machine's host name stands for, often 127.0.0.1, where no other machine
    finds it.
    """
    address = environ.get("MASTER_ADDR", "")
    port = environ.get("MASTER_PORT", "")
    if GLOO_INTERFACE in environ or not address or not port.isdigit():
        return
    interface = interface_of_address(local_address(address, int(port)))
    if interface and interface != LOOPBACK:
        environ[GLOO_INTERFACE] = interface


def launcher_store_of_this_attempt(
    environ: Mapping[str, str], rank: int, world: int, timeout: datetime.timedelta
) -> dist.Store:
    """Open the store at MASTER_ADDR and MASTER_PORT for keys of this attempt only.

    torchrun's agent keeps one store over all attempts (`--max-restarts`), and `init_process_group` reads addresses of
    dead processes from it. On several machines agents may count attempts differently, so the number is no common
    prefix there; `shared_rdzv_store_restart_warning` names the variable that gives each attempt a store of its own.
    """
    address = environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address, port, world, is_master=rank == 0 and not agent, timeout=timeout, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if ADDRESS_IN_USE not in str(error):
            raise
        raise ConfigError(
            Problem(
                f"MASTER_PORT {port}",
                f"another process on {address} listens on this port: {first_line(error)[:100]}",
                "use another --master_port, or torchrun --standalone, which chooses a free one",
            )
        ) from None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_machine = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return dist.PrefixStore(f"megaswift/attempt-{attempt}", store) if agent and one_machine else store


def shared_rdzv_store_restart_warning(environ: Mapping[str, str]) -> str:
    """Return a warning about torchrun's restarts on several machines; empty when nothing is missing."""
    several = environ.get("GROUP_WORLD_SIZE", "1") != "1" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not several or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun --max-restarts on several nodes needs the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
        "without it the processes of a restarted attempt wait for those of the previous one"
    )
