"""Machines made of files: a tree of /sys and /proc, programs on a PATH, packages in a folder of sys.path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.machine import Machine


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def put_program(folder: Path, name: str, script: str) -> None:
    """A shell script on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def put_distribution(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """Metadata of an installed package."""
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    write_tree(info, {"METADATA": "\n".join(lines) + "\n"})


def machine(root: Path, **environ: str) -> Machine:
    """With programs of `root/bin` before those of the real PATH."""
    return Machine({"PATH": f"{root / 'bin'}:{os.environ['PATH']}", **environ}, root)


def states(findings: Iterable[Finding]) -> dict[str, str]:
    """Name to state; a fix goes with every note and problem."""
    rows = list(findings)
    assert all(f.fix for f in rows if f.state != "ok"), rows
    return {f.name: f.state for f in rows}


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    assert finding.fix or finding.state == "ok", finding
    return finding
