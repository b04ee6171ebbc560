"""Presets: never over the user's own, and each variable is explained in the docs."""

from __future__ import annotations

import subprocess

import pytest

from megaswift.clusters.network_presets import NETWORK_PRESETS, network_variables
from megaswift.clusters.shell_lines import preparation_lines
from tests.clusters.jobs import job
from tests.sources import ROOT


@pytest.mark.parametrize("preset", NETWORK_PRESETS)
def test_the_user_s_own_values_stay(preset: str) -> None:
    """Those of the node's environment, and those of the cluster's entry."""
    name = next(iter(network_variables(preset)))
    lines = preparation_lines(job("slurm", network=preset, workdir="/", environment={"NCCL_DEBUG": "INFO"}))
    show = "\n".join([*lines, "env"])
    found = dict(
        line.partition("=")[::2]
        for line in subprocess.check_output(["bash", "-c", show], text=True, env={"PATH": "/bin:/usr/bin"}).splitlines()
    )
    assert {k: found[k] for k in network_variables(preset)} == network_variables(preset) and found[
        "NCCL_DEBUG"
    ] == "INFO"
    own = subprocess.check_output(["bash", "-c", show], text=True, env={"PATH": "/bin:/usr/bin", name: "mine"})
    assert f"{name}=mine" in own.splitlines()
    entry = preparation_lines(job("slurm", network=preset, workdir="/", environment={name: "theirs"}))
    set_ = subprocess.check_output(["bash", "-c", "\n".join([*entry, "env"])], text=True, env={"PATH": "/bin:/usr/bin"})
    assert f"{name}=theirs" in set_.splitlines()


def test_the_docs_have_every_variable() -> None:
    page = (ROOT / "docs/launch.md").read_text(encoding="utf-8")
    for preset, variables in NETWORK_PRESETS.items():
        for v in variables:
            assert f"| `{preset}` | `{v.name}` | `{v.value}` | {v.reason} |" in page
