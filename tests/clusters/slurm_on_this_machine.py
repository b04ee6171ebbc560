"""A real Slurm of several nodes on this machine: a controller, a slurmd a node (`slurmd -N`), its own munge."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=20
JobRequeue=1
SchedulerParameters=bf_interval=1,sched_min_interval=100000
"""


def missing_programs() -> list[str]:
    """Of Slurm and munge, those that are not installed."""
    return [name for name in NEEDED if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]


@contextmanager
def slurm(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """The environment in which sbatch, squeue and scontrol find this Slurm."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    ports = [_free_port() for _ in range(nodes + 1)]
    text = CONF.format(host=socket.gethostname(), port=ports[0], folder=folder)
    for i in range(nodes):
        text += (
            f"NodeName=machine{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[i + 1]} CPUs=2\n"
        )
    text += "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin"}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        + [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", f"machine{i}"] for i in range(nodes)),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}-{len(started)}.out").open("wb")
            started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
            if command[0] == "munged":
                _wait_until((folder / "munge.socket").exists, 20, "munged")
        _wait_until(lambda: _idle(environ) == nodes, 60, f"{nodes} idle nodes (logs in {folder})")
        yield environ
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _idle(environ: dict[str, str]) -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environ, capture_output=True, text=True, check=False)
    return sum(line.strip() == "idle" for line in done.stdout.splitlines())


def _wait_until(reached: object, seconds: float, what: str) -> None:
    assert callable(reached)
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
