"""The packages of a GPU machine go together: bounds of pyproject.toml, docker/constraints-gpu.txt, and what pip makes
of them.

Covers: pyproject.toml, docker/constraints-gpu.txt.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.sources import ROOT
from tests.test_docker import FOLDER, arguments

CONSTRAINTS = FOLDER / "constraints-gpu.txt"
TE_PARTS = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")


def pinned() -> dict[str, str]:
    """Package to version."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def requirements(*extras: str) -> list[str]:
    """Of megaswift with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]


def test_the_constraints_are_within_the_bounds_and_those_of_the_image() -> None:
    versions = pinned()
    asked = {r.name: r for r in map(Requirement, requirements("gpu", "vllm"))}
    for name in ("torch", "transformer-engine", "vllm"):
        bounds = asked[name].specifier
        assert versions[name] in bounds, f"{asked[name]} and {versions[name]}"
        assert any(bound.operator == "<" for bound in bounds), f"{name}: a release that nothing was tested with"
    image = arguments(FOLDER / "Dockerfile")
    assert (image["TORCH"], image["VLLM_VERSION"]) == (versions["torch"], versions["vllm"])
    assert image["TRANSFORMER_ENGINE"] == f"=={versions['transformer-engine']}"
    assert image["FLASH_ATTN_VERSION"] == versions["flash-attn"]
    assert arguments(FOLDER / "Dockerfile.cpu")["TORCH"] == versions["torch"]
    assert len({versions[part] for part in TE_PARTS}) == 1


@pytest.mark.parametrize("page", ["install.md", "install.zh-CN.md"])
def test_the_page_has_the_commands_and_versions_of_the_files(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| (\d[\d.]*) \|$", text, re.M))
    assert rows == pinned()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {name for found in re.findall(r"-e '\.\[([\w,-]+)\]'", text) for name in found.split(",")}
    assert asked == {"infer", "all", "gpu", "gpu-cu12", "vllm"} and asked <= extras.keys()
    assert "core_cu13" in extras["gpu"][0] and "core_cu12" in extras["gpu-cu12"][0]
    everything = " ".join(extras["all"])
    assert not re.search(r"\bgpu|vllm|transformer-engine|flash-attn", everything), "all needs no compiler"


def wheel_of_transformer_engine_torch(folder: Path) -> None:
    """Stands for the published source package, whose metadata pip can only get by compiling against torch: named as
    that of 2.12.0, which was built."""
    version = pinned()["transformer-engine-torch"]
    needs = ["torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect"]
    needs.append(f"transformer_engine_cu13=={version}")
    name = f"transformer_engine_torch-{version}"
    lines = ["Metadata-Version: 2.1", "Name: transformer_engine_torch", f"Version: {version}"]
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join([*lines, *(f"Requires-Dist: {n}" for n in needs), ""]))
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Python 3.12, in an environment of its own."""
    places = [shutil.which("python3.12"), *Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12")]
    for python in filter(None, places):  # pyenv's shim may stand for a version that is not chosen
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no Python 3.12")
    folder = tmp_path_factory.mktemp("python312")
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    wheel_of_transformer_engine_torch(folder)
    return folder / "bin" / "pip"


def resolved(pip: Path, *words: str) -> dict[str, str]:
    """What pip would install from the index, without the settings of this machine; nothing large is downloaded."""
    command = [str(pip), "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    environ = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PIP_FIND_LINKS")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(pip.parents[1])}
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environ, timeout=1200, check=False)
    if "NewConnectionError" in done.stderr or "Temporary failure in name resolution" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)["install"]
    return {p["metadata"]["name"].lower().replace("_", "-"): p["metadata"]["version"] for p in report}


@pytest.mark.slow
def test_the_extra_gpu_takes_releases_that_go_together(pip: Path) -> None:
    """By the bounds alone: torch of the tests, and the Transformer Engine for its CUDA."""
    found, versions = resolved(pip, *requirements("gpu")), pinned()
    for name in ("torch", "triton", *TE_PARTS):
        assert found[name] == versions[name], name
    assert "transformer-engine-cu12" not in found


@pytest.mark.slow
def test_constrained_extras_are_installed_together(pip: Path) -> None:
    """Trainer, Transformer Engine and vLLM in one environment, each of the release that is named."""
    found = resolved(pip, "-c", str(CONSTRAINTS), *requirements("gpu", "vllm"))
    assert {name: found[name] for name in pinned() if name in found} == {
        name: version for name, version in pinned().items() if name not in ("flash-attn", "transformer-engine-cu12")
    }
