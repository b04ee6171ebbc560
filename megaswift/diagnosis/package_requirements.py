"""Installed versions against the requirements of megaswift and of libraries that are built for one torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata, util

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.installed_software import installed_version

OWN = "megaswift"
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
    """Of megaswift itself and of each installed package with a requirement that is not met."""
    if util.find_spec("packaging") is None:
        yield Finding("packages", "problem", "the package packaging is not installed", "run pip install packaging")
        return
    if not installed_version(OWN):
        found = "megaswift runs from its source folder without being installed; its requirements are not checked"
        yield Finding("packages", "note", found, "run pip install -e . in its repository")
    else:
        yield requirement_finding(OWN)
    for package in OTHERS:
        if installed_version(package) and (finding := requirement_finding(package)).state != "ok":
            yield finding


def requirement_finding(package: str) -> Finding:
    """Whether the requirements of an installed package are met."""
    name = "packages" if package == OWN else package
    unmet = list(unmet_requirements(metadata.requires(package) or []))
    if not unmet:
        return Finding(name, "ok", f"requirements of {package} {installed_version(package)} are met")
    found = "; ".join(f"needs {wanted}, {has}" for wanted, has in unmet)
    wanted = " ".join(f"'{wanted}'" for wanted, _ in unmet)
    fix = f"run pip install {wanted}"
    if package != OWN:
        fix += f", or install a version of {package} that fits the installed packages"
    return Finding(name, "problem", f"{package} {installed_version(package)} {found}", fix)


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
