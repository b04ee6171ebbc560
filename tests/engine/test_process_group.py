"""The store of a run's default group: attempts of one torchrun do not meet, and a port in use is one message."""

from __future__ import annotations

import datetime
import os
import resource
import signal
import socket
import time
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import torch.distributed as dist

from megaswift import distributed
from megaswift.engine import process_group
from megaswift.errors import ConfigError
from tests.rank_context import rank_context

SECOND = datetime.timedelta(seconds=1)


def _environ(port: int, rank: int, attempt: int, **more: str) -> dict[str, str]:
    """As torchrun's agent sets it for two workers."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "GROUP_WORLD_SIZE": "1",
    } | more


def _rank(port: int, rank: int, attempt: int, answer: Connection) -> None:
    os.environ.update(_environ(port, rank, attempt))
    time.sleep(0.7 * attempt * rank)  # rank 0 is there first, and looks up where rank 1 is
    process_group.init_default_and_gloo_process_groups("gloo", 60)
    total = torch.ones(1)
    dist.all_reduce(total)
    answer.send(float(total))
    if attempt == 0:
        signal.pause()


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 1 << 20),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_a_rank_may_have_as_many_files_as_the_system_lets_it(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    process_group.raise_open_file_limit()
    assert given == ([] if raised is None else [(raised, hard)])


def _limited_rank(port: int, rank: int, world: int, answer: Connection) -> None:
    """The gloo group beside a default group, as beside NCCL; how many connections it opened, and the limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.environ.update(_environ(port, rank, 0) | {"WORLD_SIZE": str(world)})
    process_group.init_default_and_gloo_process_groups("gloo", 60)
    before = len(psutil.Process().net_connections())
    distributed.start_cpu_group(datetime.timedelta(seconds=60))
    opened = len(psutil.Process().net_connections()) - before
    answer.send((opened, distributed.all_gather_objects(rank), resource.getrlimit(resource.RLIMIT_NOFILE)))
    answer.recv()


@pytest.mark.process
def test_the_gloo_group_beside_nccl_connects_ranks_when_they_talk() -> None:
    """Not each with every other one at the start; and the limit of open files is the system's."""
    context, world = rank_context(), 4
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(world)]
    ranks = [context.Process(target=_limited_rank, args=(agent.port, r, world, pipes[r][1])) for r in range(world)]
    try:
        for rank in ranks:
            rank.start()
        assert all(here.poll(60) for here, _ in pipes)
        for opened, gathered, (soft, hard) in [here.recv() for here, _ in pipes]:
            assert opened < world - 1 and gathered == list(range(world))
            assert soft == min(hard, process_group.MOST_FILES)
        assert distributed.LAZY_GLOO not in os.environ
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.process
def test_a_second_attempt_on_the_agent_s_store() -> None:
    """Both ranks die by SIGKILL and come back: torch's own store still has the addresses of the dead."""
    context = rank_context()
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in (0, 1):
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [context.Process(target=_rank, args=(agent.port, r, attempt, pipes[r][1])) for r in range(2)]
        try:
            for rank in ranks:
                rank.start()
            assert all(read.poll(60) for read, _ in pipes), f"attempt {attempt} did not come together"
            assert [read.recv() for read, _ in pipes] == [2.0, 2.0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def test_several_machines_share_no_attempt_number() -> None:
    """Agents may count attempts differently: keys then have no prefix, and the run says what is missing."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, two = (_environ(agent.port, 0, 3, GROUP_WORLD_SIZE=n, TORCHELASTIC_MAX_RESTARTS="3") for n in "12")
    process_group.launcher_store_of_this_attempt(one, 1, 1, SECOND).set("a", "1")
    process_group.launcher_store_of_this_attempt(two, 1, 1, SECOND).set("b", "2")
    assert agent.get("megaswift/attempt-3/a") == b"1" and agent.get("b") == b"2"
    assert process_group.shared_rdzv_store_restart_warning(one) == ""
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in process_group.shared_rdzv_store_restart_warning(two)
    assert process_group.shared_rdzv_store_restart_warning(two | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == ""
    assert process_group.shared_rdzv_store_restart_warning(two | {"TORCHELASTIC_MAX_RESTARTS": "0"}) == ""


def _late(port: int, answer: Connection) -> None:
    os.environ.update(_environ(port, 0, 0))
    try:
        process_group.init_default_and_gloo_process_groups("gloo", 1.0)
    except process_group.MissingRanksError as error:
        answer.send(str(error))
    answer.send("")


@pytest.mark.process
def test_a_rank_that_does_not_start_is_named() -> None:
    context = rank_context()
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read, write = context.Pipe(duplex=False)
    rank = context.Process(target=_late, args=(agent.port, write))
    rank.start()
    try:
        assert read.poll(60)
        assert "rank 1 of 2: did not start within 1 s (--ddp_timeout); rank 0 is on" in read.recv()
    finally:
        rank.kill()
        rank.join()


def test_gloo_s_interface_is_the_one_towards_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(address: str, **more: str) -> str | None:
        environ = {"MASTER_ADDR": address, "MASTER_PORT": "29500", **more}
        process_group.choose_gloo_interface(environ)
        return environ.get("GLOO_SOCKET_IFNAME")

    assert chosen("127.0.0.1") is None and chosen("no-such-host.invalid") is None
    monkeypatch.setattr(process_group, "interface_of_address", lambda address: {"10.0.0.2": "eth7"}.get(address, ""))
    monkeypatch.setattr(process_group, "local_address", lambda *_: "10.0.0.2")
    assert chosen("10.0.0.1") == "eth7" and chosen("10.0.0.1", GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_a_port_in_use_is_one_message() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = _environ(port, 0, 0, TORCHELASTIC_USE_AGENT_STORE="False")
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: another process"):
            process_group.launcher_store_of_this_attempt(environ, 0, 1, SECOND)
