"""What checks read of a machine: files of /sys, /proc and /dev below a root, variables, and programs on PATH."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProgramOutput:
    """The exit code and the output of a program that ended."""

    code: int
    text: str
    error: str


@dataclass(frozen=True)
class Machine:
    """This machine, or in tests a tree of files and a PATH that stand for another."""

    environ: Mapping[str, str]
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """A path such as `sys/class/net`."""
        return self.root / name

    def read(self, name: str) -> str:
        """A small file without surrounding white space; empty where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def folders(self, name: str) -> list[str]:
        """Names in a folder, in order; none where there is no such folder."""
        try:
            return sorted(p.name for p in self.path(name).iterdir())
        except OSError:
            return []

    def program(self, words: Sequence[str], limit_s: float) -> ProgramOutput | None:
        """Runs a program; None where it is not on PATH. One that does not end in time has the code 124."""
        found = shutil.which(words[0], path=self.environ.get("PATH", ""))
        if found is None:
            return None
        try:
            done = subprocess.run(
                [found, *words[1:]],
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ProgramOutput(124, "", f"no answer within {limit_s:.0f} s")
        except OSError as error:
            return ProgramOutput(126, "", str(error))
        return ProgramOutput(done.returncode, done.stdout, done.stderr)
