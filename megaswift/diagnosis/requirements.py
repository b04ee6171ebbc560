"""Installed versions against the requirements of megaswift and of libraries that are built for one torch."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.installed import installed_version
from megaswift.version import __version__

OWN = "megaswift"
REPOSITORY = Path(__file__).resolve().parents[2]
"""Above the package, where it runs from its repository."""
OTHERS = (
    "megatron-core",
    "transformers",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "vllm",
    "sglang",
    "deepspeed",
    "peft",
    "accelerate",
    "torchvision",
)
"""Packages whose requirements are checked where they are installed; vLLM and torchvision require one torch exactly."""


def requirement_findings() -> Iterator[Finding]:
    """Yields a finding for megaswift itself and for each installed package with a requirement that is not met."""
    if util.find_spec("packaging") is None:
        yield Finding("packages", "problem", "the package packaging is not installed", "run pip install packaging")
        return
    yield requirement_finding(OWN, own_requirements())
    for package in OTHERS:
        if installed_version(package) and (finding := _of_installed(package)).state != "ok":
            yield finding
    yield from transformer_engine_range_findings()


def transformer_engine_range_findings() -> Iterator[Finding]:
    """The versions of Transformer Engine that the installed Megatron-Core was tested with are in its extra `dev`."""
    from packaging.requirements import Requirement

    version = installed_version("transformer-engine")
    if not version or not installed_version("megatron-core"):
        return
    for text in metadata.requires("megatron-core") or []:
        wanted = Requirement(text)
        if wanted.name == "transformer-engine" and not wanted.specifier.contains(version, prereleases=True):
            found = f"{version}; megatron-core {installed_version('megatron-core')} is tested with {wanted.specifier}"
            fix = (
                f"if layers fail, run pip install --no-build-isolation 'transformer-engine[pytorch]{wanted.specifier}'"
            )
            yield Finding("transformer-engine", "note", found, fix)
            return


def own_requirements(repository: Path = REPOSITORY) -> list[str]:
    """megaswift's: of pyproject.toml in a repository, whose metadata may be from an earlier installation; else of the
    installed package."""
    project = repository / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") == OWN:
            return list(table["dependencies"])
    return metadata.requires(OWN) or [] if installed_version(OWN) else []


def _of_installed(package: str) -> Finding:
    return requirement_finding(package, metadata.requires(package) or [])


def requirement_finding(package: str, requirements: Iterable[str]) -> Finding:
    """Whether the requirements of a package are met."""
    name = "packages" if package == OWN else package
    version = __version__ if package == OWN else installed_version(package)
    unmet = list(unmet_requirements(requirements))
    if not unmet:
        return Finding(name, "ok", f"requirements of {package} {version} are met")
    found = "; ".join(f"needs {wanted}, {has}" for wanted, has in unmet)
    wanted = " ".join(f"'{wanted}'" for wanted, _ in unmet)
    fix = f"run pip install {wanted}"
    if package != OWN:
        fix += f", or install a version of {package} that fits the installed packages"
    return Finding(name, "problem", f"{package} {version} {found}", fix)


def unmet_requirements(requirements: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(Requirement, what is installed) of those that apply to this Python and platform, without extras."""
    from packaging.requirements import Requirement

    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if not version:
            yield wanted, "not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield wanted, f"{version} is installed"
