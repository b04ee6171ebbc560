"""A wheel built from the repository and installed: complete, with its version in one place and its command.

Nothing is downloaded: the build uses the setuptools that is here, and dependencies are not installed again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megaswift.version import __version__
from tests.sources import ROOT

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def done(*command: str, cwd: Path, **environ: str) -> str:
    """What a program prints; it has to end well."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env={**os.environ, **environ})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    shutil.copytree(ROOT / "megaswift", copy / "megaswift", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), ".", cwd=copy)
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.process
def test_a_wheel_holds_the_whole_package(wheel: Path) -> None:
    assert wheel.name == f"megaswift-{__version__}-py3-none-any.whl"
    files = (p for p in (ROOT / "megaswift").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    package = {p.relative_to(ROOT).as_posix() for p in files}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package


@pytest.mark.process
def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done(*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    assert done(str(site / "bin" / "megaswift"), "--version", cwd=tmp_path, PYTHONPATH=str(site)) == __version__
    where = done(
        sys.executable, "-c", "import megaswift; print(megaswift.__file__)", cwd=tmp_path, PYTHONPATH=str(site)
    )
    assert Path(where).is_relative_to(site)
    schema = done(sys.executable, "-m", "megaswift", "config", "--schema", cwd=tmp_path, PYTHONPATH=str(site))
    assert '"properties"' in schema
