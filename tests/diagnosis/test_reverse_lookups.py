"""Names of addresses, from a name server that answers, answers late, or never does.

Covers: megaswift/diagnosis/reverse_lookups.py, megaswift/diagnosis/timed_calls.py.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.reverse_lookups import reverse_lookup_finding
from megaswift.diagnosis.timed_calls import answers_within
from tests.diagnosis import name_server
from tests.diagnosis.fake_machine import only

NAME_OF_LOOPBACK = "1.0.0.127.in-addr.arpa"
FINDING = """
import json, sys, time
from dataclasses import asdict
from megaswift.diagnosis import reverse_lookups
from tests.diagnosis.name_server import NameServer

server, begun = NameServer({answers_after}), time.monotonic()
reverse_lookups.LIMIT_S = {limit_s}
finding = reverse_lookups.reverse_lookup_finding("names", ["127.0.0.1", "127.0.0.1", "127.0.0.2"])
print(json.dumps([asdict(finding), sorted(set(server.questions)), time.monotonic() - begun]))
"""
STORE = """
import json, sys, time
from tests.diagnosis.name_server import NameServer
from torch.distributed import TCPStore

server = NameServer(2)
begun = time.monotonic()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(json.dumps([sorted(set(server.questions)), time.monotonic() - begun]))
"""

private = pytest.mark.skipif(bool(name_server.why_not()), reason="needs namespaces (unshare, ip)")


def found(
    folder: Path, answers_after: int, limit_s: float = 6.0, hosts: str = "", **environ: str
) -> tuple[Finding, list[str], float]:
    program = FINDING.format(answers_after=answers_after, limit_s=limit_s)
    finding, questions, seconds = json.loads(name_server.output_of(folder, program, hosts, **environ))
    return only([Finding(**finding)]), questions, seconds


@private
@pytest.mark.process
def test_a_name_server_that_answers_at_once(tmp_path: Path) -> None:
    finding, questions, _ = found(tmp_path, answers_after=1)
    assert finding.state == "ok" and finding.found.startswith("127.0.0.1, 127.0.0.2: at most 0.")
    assert questions == [NAME_OF_LOOPBACK, NAME_OF_LOOPBACK.replace("1", "2", 1)]


@private
@pytest.mark.process
def test_a_question_that_is_answered_when_it_is_repeated(tmp_path: Path) -> None:
    finding, _, _ = found(tmp_path, answers_after=2, RES_OPTIONS="timeout:2")
    assert finding.state == "note" and re.match(r"127.0.0.1: 2\.\d s, 127.0.0.2: 2\.\d s; torch", finding.found)


@private
@pytest.mark.process
def test_a_name_server_that_never_answers(tmp_path: Path) -> None:
    """The check ends in time; either part of the fix helps."""
    finding, _, seconds = found(tmp_path, answers_after=0, limit_s=3.0)
    assert finding.state == "note" and "127.0.0.2: more than 3 s" in finding.found and 2.9 < seconds < 15, (
        "20 s without a limit"
    )
    lines = finding.fix.split("`")[1::2]
    assert lines == ["::ffff:127.0.0.1 address-127-0-0-1", "::ffff:127.0.0.2 address-127-0-0-2"]
    finding, questions, _ = found(tmp_path, answers_after=0, hosts="\n".join(lines) + "\n")
    assert finding.state == "ok" and questions == []
    _, _, seconds = found(tmp_path, answers_after=0, RES_OPTIONS="timeout:1 attempts:1")
    assert 0.9 < seconds < 8, "10 s without these options"


@private
@pytest.mark.process
def test_it_is_what_torch_asks_for(tmp_path: Path) -> None:
    """A store and its own connection, at 1 s for each of the two lookups; none where /etc/hosts has the name."""
    questions, seconds = json.loads(name_server.output_of(tmp_path, STORE, RES_OPTIONS="timeout:1"))
    assert questions == [NAME_OF_LOOPBACK] and 1.9 < seconds < 10
    line = "::ffff:127.0.0.1 address-127-0-0-1\n"
    questions, seconds = json.loads(name_server.output_of(tmp_path, STORE, line, RES_OPTIONS="timeout:1"))
    assert questions == [] and seconds < 1.9


def test_many_addresses_and_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.diagnosis.reverse_lookups.seconds_for_name", lambda address: 5.02)
    finding = reverse_lookup_finding("names", ["10.0.0.1", "fe80::1", "10.0.0.3", "10.0.0.4", "10.0.0.5"])
    assert finding.found.startswith("10.0.0.1: 5.0 s, fe80::1: 5.0 s, 10.0.0.3: 5.0 s and 2 more; torch")
    assert "`fe80::1 address-fe80--1`, `::ffff:10.0.0.3 address-10-0-0-3` and 2 more (any name does)" in finding.fix


def test_a_call_that_does_not_end_is_left_behind() -> None:
    begun = time.monotonic()
    calls = {"slow": lambda: time.sleep(120), "quick": lambda: None, "also slow": lambda: time.sleep(120)}
    assert answers_within(0.3, calls) == {"quick": None}
    assert 0.25 < time.monotonic() - begun < 60
