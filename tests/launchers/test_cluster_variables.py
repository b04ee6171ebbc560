"""A process's place by its cluster's variables, in its environment."""

from __future__ import annotations

import pytest

from megaswift.launchers.cluster_variables import take_cluster_variables

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
    "SLURM_JOB_ID": "12",
}


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_process_says_so(node: int, capsys: pytest.CaptureFixture[str]) -> None:
    environ = STEP | {"SLURM_NODEID": str(node)}
    take_cluster_variables(environ)
    assert (environ["NNODES"], environ["NODE_RANK"], environ["MASTER_ADDR"]) == ("2", str(node), "gpu3")
    assert ("those of Slurm (SLURM_NODEID)" in capsys.readouterr().err) == (node == 0)


def test_what_is_set_stays(capsys: pytest.CaptureFixture[str]) -> None:
    environ = STEP | {"SLURM_NODEID": "0", "NNODES": "1"}
    before = dict(environ)
    take_cluster_variables(environ)
    take_cluster_variables(empty := {})
    assert environ == before and empty == {} and capsys.readouterr().err == ""
