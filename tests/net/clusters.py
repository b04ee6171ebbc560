"""Every option of a cluster with every launcher: accepted, or which options the refusal names.

`clusters.txt` lists the options: name | values. `submitted.txt` has the outcome of a job that is not sent, for every
value with every launcher. `python -m tests.net.clusters --write` rewrites it.
"""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import yaml

from megaswift.commands.submit import main as submit
from megaswift.errors import UserError
from tests.net.front import ACCEPTED, on_any_machine, refusal
from tests.net.record import FOLDER, write_record
from tests.trainers.inputs import write_inputs

LAUNCHERS = {
    "slurm": "partition: p",
    "kubernetes job": "kind: job, image: i",
    "kubernetes trainjob": "kind: trainjob, image: i",
    "kubernetes pytorchjob": "kind: pytorchjob, image: i",
    "kubernetes mpijob": "kind: mpijob, image: i",
    "kubernetes volcano": "kind: volcano, image: i",
    "ray address": "submit_to: address, address: 'http://h:8265'",
    "ray rayjob": "submit_to: rayjob, image: i, ray_version: 2.51.0",
    "ray raycluster": "submit_to: raycluster, image: i, ray_version: 2.51.0",
    "dlc": "image: i, worker_spec: w, workspace_id: '1'",
    "ssh": "hosts: [a]",
    "local": "",
}
"""What a cluster needs besides the option, by launcher and what it submits to."""
HEAD = re.compile(r"- .*?\bc: (\w+)")
"""The part of a message that names what is at fault in the cluster c."""
SEED = 46


@dataclass(frozen=True)
class ClusterCase:
    """An option of a cluster."""

    launcher: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.launcher}, {self.name}: {self.value}"

    def entry(self) -> str:
        """The cluster as its file has it."""
        words = LAUNCHERS[self.launcher].split(", ")
        others = [word for word in words if word and not word.startswith(f"{self.name}:")]
        return ", ".join([f"launcher: {self.launcher.split()[0]}", *others, f"{self.name}: {self.value}"])


class JobFolder:
    """A folder with a run that a cluster could start."""

    def __init__(self, folder: Path, options: Iterable[str]) -> None:
        """`options`: names of options of clusters, which messages have without dashes."""
        given = iter(write_inputs(folder))
        run = {word.removeprefix("--"): next(given) for word in given}
        run |= {"task": "sft", "max_steps": "2", "train_type": "full", "per_device_train_batch_size": "1"}
        run["output_dir"] = str(folder / "out")
        self.run = folder / "run.yaml"
        self.run.write_text(yaml.safe_dump(run))
        self.clusters = folder / "clusters.yaml"
        self.option = re.compile(rf"(?<![\w/])({'|'.join(options)})(?!\w)")

    def outcome(self, entry: str) -> str:
        """Return the outcome of a dry run on a cluster, `launcher: slurm, partition: p`."""
        self.clusters.write_text(f"clusters: {{c: {{{entry}}}}}")
        words = [str(self.run), "--cluster", "c", "--clusters", str(self.clusters), "--dry_run"]
        said = io.StringIO()
        with on_any_machine(), redirect_stdout(said), redirect_stderr(said):
            try:
                submit(words)
            except UserError as error:
                return refusal(str(error), HEAD, self.option)
        return ACCEPTED


def cases() -> list[ClusterCase]:
    """Return every value with every launcher."""
    return [
        ClusterCase(launcher, name, value) for name, values in listed() for value in values for launcher in LAUNCHERS
    ]


def listed() -> list[tuple[str, list[str]]]:
    """Return the options of `clusters.txt` with their values."""
    lines = (FOLDER / "clusters.txt").read_text(encoding="utf-8").splitlines()
    return [(name, values.split(" ; ")) for name, values in (line.split(" | ") for line in lines)]


def sample(count: int) -> list[ClusterCase]:
    """Return cases that have every option and every launcher, the same ones every time."""
    draw = random.Random(SEED)
    launchers = list(LAUNCHERS)
    chosen = {ClusterCase(launchers[i % len(launchers)], name, values[0]) for i, (name, values) in enumerate(listed())}
    return [*chosen, *draw.sample([case for case in cases() if case not in chosen], count - len(chosen))]


def outcomes(chosen: Iterable[ClusterCase], folder: Path) -> dict[str, str]:
    """Return what the code does now, by case. `folder` is empty."""
    jobs = JobFolder(folder, [name for name, _ in listed()])
    return {str(case): jobs.outcome(case.entry()) for case in chosen}


def main() -> int:
    """Rewrite the record."""
    if sys.argv[1:] != ["--write"]:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_record("submitted.txt", outcomes(cases(), Path(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
