"""Stand-ins for the programs that a rendered job calls, so that its shell runs here: what reaches the run is written to
a file."""

from __future__ import annotations

import json
import os
import re
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
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in arrived.read_text().splitlines()] if arrived.exists() else []


def expanded_by_kubernetes(text: str, environ: dict[str, str]) -> str:
    """A command or value as the kubelet starts it: `$(NAME)` replaced where it is a variable of the container, `$$(`
    for `$(` (Kubernetes' reference, "Dependent environment variables")."""

    def one(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return environ.get(found[1], found[0])

    return re.sub(r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", one, text)
