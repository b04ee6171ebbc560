"""What the slow tier needs beyond Python: the script names each program that tests look for; in the slow tier, it
installs them in a new base system."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clusters.slurm_on_this_machine import NEEDED
from tests.sources import ROOT
from tests.test_docker_image import MISSING, Builder, base_system

SCRIPT = ROOT / "scripts" / "setup_slow_tier.sh"
PROGRAMS = (*NEEDED, "sshd", "ip", "buildah", "debootstrap", "chromium")
LINE = re.compile(r"^missing  (\S+): .* \(package (\S+)\)$", re.MULTILINE)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A copy of the script that looks for programs in the folder alone."""
    script = folder / "setup.sh"
    script.write_text(SCRIPT.read_text(encoding="utf-8").replace("PATH=$PATH:/usr/sbin", f"PATH={folder}"))
    return subprocess.run(["/bin/bash", str(script), *words], capture_output=True, text=True, check=False)


def add(folder: Path, name: str, body: str = "") -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With what the script itself calls; apt-get writes its words down."""
    add(tmp_path, "id", "echo 0")
    add(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/installed')
    return tmp_path


def test_every_program_that_tests_look_for_is_named_with_its_package(folder: Path) -> None:
    done = run(folder, "--dry_run")
    found = LINE.findall(done.stdout)
    assert done.returncode == 0 and {program for program, _ in found} == set(PROGRAMS)
    words = done.stdout.splitlines()[-1].split()
    assert words[:4] == ["apt-get", "install", "-y", "--no-install-recommends"]
    assert words[4:] == list(dict.fromkeys(package for _, package in found))
    assert not (folder / "installed").exists()


def test_only_what_is_missing_is_installed(folder: Path) -> None:
    for name in PROGRAMS:
        if name != "ip":
            add(folder, name)
    assert run(folder).returncode == 0
    assert (folder / "installed").read_text().splitlines() == [
        "update -qq",
        "install -y --no-install-recommends iproute2",
    ]
    (folder / "installed").unlink()
    add(folder, "ip")
    assert run(folder).returncode == 0 and not (folder / "installed").exists()


def test_mistakes(folder: Path) -> None:
    wrong = run(folder, "--dry")
    assert wrong.returncode == 2 and "--dry_run" in wrong.stderr
    (folder / "apt-get").unlink()
    other = run(folder)
    assert other.returncode == 2 and "slurm-wlm" in other.stderr
    add(folder, "id", "echo 1000")
    assert run(folder, "--dry_run").stdout.splitlines()[-1].startswith("sudo apt-get install")


def test_skipped_tests_name_the_script() -> None:
    for file in ("tests/clusters/test_slurm.py", "tests/network_namespaces.py", "tests/test_docker_image.py"):
        assert SCRIPT.relative_to(ROOT).as_posix() in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason="needs root, buildah and debootstrap (this script)")
def test_the_packages_bring_the_programs(tmp_path: Path) -> None:
    """In a new base system."""
    build = Builder(tmp_path)
    container = base_system(build, "bookworm")
    bash = ("--isolation", "chroot", "--volume", f"{SCRIPT}:/setup.sh:ro", container, "--", "bash", "/setup.sh")
    try:
        before = build("run", *bash, "--dry_run").stdout
        build("run", *bash)
        after = build("run", *bash, "--dry_run").stdout
    finally:
        build("rm", "--all")
    assert set(PROGRAMS) == {program for program, _ in LINE.findall(before)} and "missing" not in after
