"""Variables of clusters, as their documents give them, and what they mean for a run."""

from __future__ import annotations

import pytest

from megaswift.launchers.cluster_environment import cluster_variables, first_host

STEP = {"SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM_ADDRESS = {"MASTER_ADDR": "gpu03", "MASTER_PORT": "20001"}


@pytest.mark.parametrize(
    ("environ", "variables"),
    [
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"},
            {"NNODES": "2", "NODE_RANK": "1", **SLURM_ADDRESS},
        ),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"},
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **SLURM_ADDRESS},
        ),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "ib0", "MASTER_PORT": "1"},
            {"NNODES": "2", "NODE_RANK": "1"},
        ),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "h"},
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "29500"},
        ),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "h"}, {"NNODES": "16", "NODE_RANK": "9"}),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29400"}
            | {"PET_NPROC_PER_NODE": "8", "RANK": "8", "WORLD_SIZE": "16", "MASTER_PORT": "23456"},
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "m", "NPROC_PER_NODE": "8"},
        ),
        (
            {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"},
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "job-worker-0.job"},
        ),
        (
            {"VC_TASK_INDEX": "2", "VC_NODE_HOSTS": "j-node-0.j,j-node-1.j,j-node-2.j", "VC_NODE_NUM": "3"},
            {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "j-node-0.j"},
        ),
        (  # the first worker of a job with a master: its index is 0, too
            {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j", "VC_MASTER_HOSTS": "j-master-0.j"}
            | {"VC_WORKER_NUM": "2", "VC_MASTER_NUM": "1", "HOSTNAME": "j-worker-0"},
            {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "j-master-0.j"},
        ),
        ({"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "j-0.j"}, {"NODE_RANK": "1"}),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "m", "MASTER_PORT": "23456"},
            {"NNODES": "4", "NODE_RANK": "1"},
        ),
    ],
)
def test_what_is_derived(environ: dict[str, str], variables: dict[str, str]) -> None:
    found = cluster_variables(environ)
    assert found is not None and found.variables == variables


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun of one task, or an interactive shell
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_NNODES": "2"},  # a batch script itself
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "NNODES": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"},  # torchrun inside
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "m"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"PET_NNODES": "1:2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m"},
        {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "one"},
        {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "a,b", "VC_WORKER_NUM": "3"},  # not all hosts
        {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "a,b", "VC_LAUNCHER_HOSTS": "c", "HOSTNAME": "c"},
        {"VC_TASK_INDEX": "0", "VC_A_HOSTS": "a,b", "VC_B_HOSTS": "c", "HOSTNAME": "a"},
        {"JOB_COMPLETION_INDEX": "1"},  # the number of pods is unknown
        {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "NODE_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "1", "NNODES": "1"},
    ],
)
def test_what_says_nothing(environ: dict[str, str]) -> None:
    assert cluster_variables(environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu3", "gpu3"), ("gpu[03-05,9],login", "gpu03"), ("a,b", "a"), ("rack[1-2]-ib", "rack1-ib"), ("", "")],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
