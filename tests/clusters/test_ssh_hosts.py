"""Two machines with an ssh server each: a job is started, looked at, ended, over ssh."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megaswift.clusters.scheduler import scheduler_of
from megaswift.clusters.ssh_hosts import with_hosts_of_its_file
from megaswift.errors import ConfigError
from tests.clusters.jobs import job
from tests.network_namespaces import Machine, machines, why_not
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
reason = why_not() or ("" if Path(SSHD).exists() else "no ssh server")
needs_machines = pytest.mark.skipif(bool(reason), reason=reason or "-")


@contextmanager
def ssh_servers(folder: Path, two: list[Machine]) -> Iterator[list[str]]:
    """One on each machine, for this user by a key made here; the words for ssh."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "authorized").chmod(0o600)
    key = (folder / "host.pub").read_text().split()
    (folder / "known").write_text("".join(f"{m.address} {key[0]} {key[1]}\n" for m in two))
    options = ["HostKey=" + str(folder / "host"), f"AuthorizedKeysFile={folder}/authorized", "StrictModes=no"]
    options += ["UsePAM=no", "PermitRootLogin=prohibit-password", "PidFile=none"]
    Path("/run/sshd").mkdir(exist_ok=True)
    running = []
    try:
        for machine in two:
            words = [SSHD, "-D", "-e", "-f", "/dev/null", *(w for o in options for w in ("-o", o))]
            log = (folder / f"sshd-{machine.name}").open("wb")
            running.append(subprocess.Popen(machine.words(words), stdout=log, stderr=log, start_new_session=True))
        deadline = time.monotonic() + 300
        while any("Server listening" not in (folder / f"sshd-{m.name}").read_text() for m in two):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield ["-i", str(folder / "user"), "-o", f"UserKnownHostsFile={folder}/known"]
    finally:
        for server in running:
            server.terminate()
            server.wait(60)


@pytest.mark.slow
@needs_machines
def test_a_job_over_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted from the first machine; a secret arrives and is in no file; a second job is cancelled and saves."""
    words = iter(write_inputs(tmp_path))
    run = {word.removeprefix("--"): next(words) for word in words}
    run |= {"task": "sft", "train_type": "full", "max_steps": 3, "logging_steps": 1, "output_dir": "out"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_zzqq'secret $(x)"}
    with machines(tmp_path / "net") as two, ssh_servers(tmp_path, two) as options:
        cluster = {
            "launcher": "ssh",
            "hosts": [f"{getpass.getuser()}@{m.address}" for m in two],
            "ssh_options": options,
        }
        cluster |= {"secret_variables": ["HF_TOKEN"], "environment": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
        cluster["setup"] = ['printf %s "$HF_TOKEN" | sha256sum > token.sha256']
        (tmp_path / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"lab": cluster}}))

        def megaswift(*more: str) -> str:
            command = two[0].words([sys.executable, "-m", "megaswift", *more])
            done = subprocess.run(
                command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        def logs() -> str:
            return "".join(f.read_text() for f in tmp_path.glob("out*/jobs/*/node-*.log"))

        megaswift("submit", "run.yaml", "--cluster", "lab", "--nodes", "2")
        deadline = time.monotonic() + 300
        while "running" in megaswift("jobs", "status", "out"):
            assert time.monotonic() < deadline, logs()
            time.sleep(0.5)
        assert (tmp_path / "out/hf/model.safetensors").exists(), logs()
        assert "DP2 on 2 processes" in megaswift("jobs", "logs", "out")
        digest = subprocess.run(
            ["sha256sum"], input=environ["HF_TOKEN"], capture_output=True, text=True, check=True
        ).stdout
        assert (tmp_path / "token.sha256").read_text() == digest
        kept = [f for f in (tmp_path / "out/jobs").rglob("*") if f.is_file()]
        assert kept and not any("zzqq" in f.read_text() for f in kept)

        megaswift(
            "submit", "run.yaml", "--cluster", "lab", "--nodes", "2", "--output_dir", "out2", "--max_steps", "9999"
        )
        while not (tmp_path / "out2/metrics.jsonl").exists() or not (tmp_path / "out2/metrics.jsonl").read_text():
            assert time.monotonic() < deadline, logs()
            time.sleep(0.2)
        megaswift("jobs", "cancel", "out2")
        while "running" in megaswift("jobs", "status", "out2"):
            assert time.monotonic() < deadline, logs()
            time.sleep(0.5)
        assert list((tmp_path / "out2/checkpoints").glob("step-*")), logs()


def test_hosts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# lab\nnode1\n\nnode2  # spare\n")
    made = job("ssh", hosts=None, hostfile=str(file))
    found = with_hosts_of_its_file(made.cluster)
    assert (found.get("hosts"), found.get("gpus_per_node")) == (["node1", "node2"], None)
    assert scheduler_of("ssh").problems(replace(made, cluster=found)) == []
    with pytest.raises(ConfigError, match="cannot be read"):
        with_hosts_of_its_file(job("ssh", hosts=None, hostfile=str(tmp_path / "none")).cluster)
    file.write_text("node1 slots=8\nnode2 slots=8\n")
    assert with_hosts_of_its_file(made.cluster).get("gpus_per_node") == 8
    file.write_text("node1 slots=8\nnode2 slots=4\n")
    with pytest.raises(ConfigError, match="different slots"):
        with_hosts_of_its_file(made.cluster)
    assert with_hosts_of_its_file(job("ssh", hosts=None, hostfile=str(file), gpus_per_node=4).cluster).get("hosts")
    both = job("ssh", hostfile="none").cluster
    assert with_hosts_of_its_file(both) is both


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": None}, "needs hosts or hostfile"),
        ({"hostfile": "x"}, "not both"),
        ({"hosts": ["-oProxyCommand=x", "b"]}, "is not the name"),
    ],
)
def test_options_that_do_not_do(options: dict[str, object], text: str) -> None:
    assert text in str(scheduler_of("ssh").problems(job("ssh", **options))[0])
