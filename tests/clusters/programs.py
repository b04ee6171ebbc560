"""Stand-ins for the programs that a rendered job calls, so that its shell runs here: what reaches the run is written to
a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = """\
#!{python}
import json, os, sys
with open(os.environ["ARRIVED"], "a") as file:
    file.write(json.dumps({{"words": sys.argv[1:], "environ": dict(os.environ), "folder": os.getcwd()}}) + "\\n")
"""
SRUN = """\
#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 exec "$@"
"""
SCONTROL = "#!/bin/bash\necho localhost\n"
MPIRUN = """\
#!/bin/bash
while [ "$1" != bash ]; do shift; done
OMPI_COMM_WORLD_RANK=1 exec "$@"
"""
SSH = """\
#!/bin/bash
while [ "$1" != bash ]; do shift; done
exec "$@"
"""


def program(folder: Path) -> Path:
    """Notes its words and variables, in place of a Python with megaswift."""
    file = folder / "noting python"
    file.write_text(RUN.format(python=sys.executable))
    file.chmod(0o755)
    return file


def run_here(command: list[str], folder: Path, **more: str) -> list[dict[str, Any]]:
    """Runs a command of a rendered job with the stand-ins; what arrived at the run, a mapping a process."""
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "ssh": SSH,
        "mpirun": MPIRUN,
        "megaswift": RUN.format(python=sys.executable),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    arrived = folder / "arrived"
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/nowhere", "ARRIVED": str(arrived), **more}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in arrived.read_text().splitlines()] if arrived.exists() else []


def expanded_by_kubernetes(text: str, environ: dict[str, str]) -> str:
    """A command or value as the kubelet starts it (k8s.io/kubernetes, third_party/forked/golang/expansion/expand.go):
    `$$` is `$`, `$(NAME)` the variable where the container has it; a single `$` and the byte behind it are written as
    two characters, which breaks one of several bytes."""
    given, made, at = text.encode(), b"", 0
    while at < len(given):
        following = given[at + 1 : at + 2]
        end = given.find(b")", at)
        if given[at : at + 1] != b"$" or not following:
            made, at = made + given[at : at + 1], at + 1
        elif following == b"$":
            made, at = made + b"$", at + 2
        elif following == b"(" and end >= 0:
            name = given[at + 2 : end].decode()
            made, at = made + environ.get(name, f"$({name})").encode(), end + 1
        else:
            made, at = made + b"$" + chr(following[0]).encode(), at + 2
    return made.decode(errors="replace")
