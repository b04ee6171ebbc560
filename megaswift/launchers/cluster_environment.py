"""The variables of clusters that count nodes or processes, as torchrun's: Slurm's steps, Open MPI and other MPIs,
Kubeflow, Indexed Jobs, Volcano, PAI-DLC.

Pure. What is set already is never changed, and nothing is derived inside of torchrun, DeepSpeed's launcher or Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megaswift.launchers.options.variables import is_launched_worker

# A port for each Slurm job, so that two jobs on a node do not meet.
FIRST_PORT = 20_000
PORTS = 10_000
MPI_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
"""Open MPI, Intel MPI and MPICH (Hydra), MVAPICH2."""


@dataclass(frozen=True)
class ClusterVariables:
    """What a cluster's variables say."""

    source: str
    """In a message: `Slurm (SLURM_PROCID)`."""
    variables: dict[str, str]
    """torchrun's: of one launcher a node NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; of one process a rank RANK,
    LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and the address."""


def cluster_variables(environ: Mapping[str, str]) -> ClusterVariables | None:
    """None where nothing is said, where there is one process only, or where NNODES or ranks are set already
    (an Indexed Job's pods lack only their rank then)."""
    if is_launched_worker(environ) or "TORCHELASTIC_RUN_ID" in environ:
        return None
    if "NNODES" in environ:
        return _indexed_job(environ)
    for read in (_kubeflow, _slurm_step, _mpi, _volcano, _nodes_by_rank):
        if (found := read(environ)) is not None:
            own = {name: value for name, value in found.variables.items() if name not in environ or name in _REPLACED}
            return ClusterVariables(found.source, own)
    return None


_REPLACED = ("RANK", "WORLD_SIZE")
"""Variables that some clusters set for nodes: as ranks they are other numbers."""


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None


def _kubeflow(environ: Mapping[str, str]) -> ClusterVariables | None:
    nodes = _number(environ, "PET_NNODES")
    rank = _number(environ, "PET_NODE_RANK")
    if nodes is None or rank is None or nodes < 2 or "PET_MASTER_ADDR" not in environ:
        return None
    made = {"NNODES": str(nodes), "NODE_RANK": str(rank), "MASTER_ADDR": environ["PET_MASTER_ADDR"]}
    for ours in ("MASTER_PORT", "NPROC_PER_NODE"):
        if (value := environ.get(f"PET_{ours}", "")).isdigit():
            made[ours] = value
    return ClusterVariables("Kubeflow (PET_NODE_RANK)", made)


def _slurm_step(environ: Mapping[str, str]) -> ClusterVariables | None:
    """Reads the variables of `srun`: a batch script itself is one process, whatever the job has."""
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    if not environ.get("SLURM_STEP_ID", "").isdigit() or tasks is None or nodes is None or tasks < 2:
        return None
    port = FIRST_PORT + int(environ.get("SLURM_JOB_ID", "0")) % PORTS
    address = {"MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "")), "MASTER_PORT": str(port)}
    if tasks == nodes:
        made = {"NNODES": str(nodes), "NODE_RANK": environ.get("SLURM_NODEID", "")}
        return ClusterVariables("Slurm (SLURM_NODEID)", {**made, **address})
    made = _ranks(environ, "SLURM_PROCID", str(tasks), "SLURM_LOCALID", str(tasks // nodes))
    return ClusterVariables("Slurm (SLURM_PROCID)", {**made, **address})


def _mpi(environ: Mapping[str, str]) -> ClusterVariables | None:
    for rank, size, local, local_size in MPI_RANKS:
        world = _number(environ, size)
        here = _number(environ, local_size)
        if world is None or world < 2 or _number(environ, rank) is None:
            continue
        if here == 1:
            return ClusterVariables(f"MPI ({rank})", {"NNODES": str(world), "NODE_RANK": environ[rank]})
        made = _ranks(environ, rank, str(world), local, str(here or world))
        alone = {} if here not in (None, world) else {"MASTER_ADDR": "127.0.0.1"}
        return ClusterVariables(f"MPI ({rank})", {**made, **alone, "MASTER_PORT": "29500"})
    return None


def _volcano(environ: Mapping[str, str]) -> ClusterVariables | None:
    """Hosts that Volcano's plugin svc lists by task, VC_TASK_HOSTS and their number VC_TASK_NUM, and the index of the
    plugin env. The nodes of a job with several tasks are those of `master` and `worker`, and a pod's name is its
    rank."""
    index = _number(environ, "VC_TASK_INDEX")
    found = {name: match[1] for name in environ if (match := re.fullmatch(r"VC_(\w+)_HOSTS", name))}
    tasks = {task: [host for host in environ[name].split(",") if host] for name, task in found.items()}
    chosen = [task for task in ("MASTER", "WORKER") if task in tasks] or list(tasks)
    hosts = [host for task in chosen for host in tasks[task]]
    counts = [_number(environ, f"VC_{task}_NUM") for task in chosen]
    partial = None not in counts and sum(filter(None, counts)) != len(hosts)
    if index is None or len(hosts) < 2 or partial or "MASTER_ADDR" in environ:
        return None
    if len(tasks) > 1:
        names = [host.partition(".")[0] for host in hosts]
        if len(chosen) != len(set(chosen) & {"MASTER", "WORKER"}) or environ.get("HOSTNAME") not in names:
            return None
        index = names.index(environ["HOSTNAME"])
    made = {"NNODES": str(len(hosts)), "NODE_RANK": str(index), "MASTER_ADDR": hosts[0]}
    return ClusterVariables("Volcano (VC_TASK_INDEX)", made)


def _indexed_job(environ: Mapping[str, str]) -> ClusterVariables | None:
    """Reads the variables of Kubernetes' Indexed Job, which gives a pod its index but not the number of pods: NNODES is
    the user's."""
    nodes = _number(environ, "NNODES")
    index = _number(environ, "JOB_COMPLETION_INDEX")
    if nodes is None or nodes < 2 or index is None or "NODE_RANK" in environ:
        return None
    return ClusterVariables("Kubernetes (JOB_COMPLETION_INDEX)", {"NODE_RANK": str(index)})


def _nodes_by_rank(environ: Mapping[str, str]) -> ClusterVariables | None:
    """PAI-DLC, Volcano's plugin pytorch and PyTorchJob count nodes by RANK and WORLD_SIZE; LOCAL_RANK is not set."""
    rank = _number(environ, "RANK")
    world = _number(environ, "WORLD_SIZE")
    if rank is None or world is None or world < 2 or "LOCAL_RANK" in environ or "MASTER_ADDR" not in environ:
        return None
    return ClusterVariables("the cluster (RANK of WORLD_SIZE nodes)", {"NNODES": str(world), "NODE_RANK": str(rank)})


def _ranks(environ: Mapping[str, str], rank: str, world: str, local: str, local_world: str) -> dict[str, str]:
    return {
        "RANK": environ.get(rank, ""),
        "WORLD_SIZE": world,
        "LOCAL_RANK": environ.get(local, ""),
        "LOCAL_WORLD_SIZE": local_world,
    }


def first_host(nodes: str) -> str:
    """Returns the first host of a list as Slurm writes it: `gpu[03-05,9],login` is gpu03."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "" if found is None else f"{found[1]}{found[2] or ''}{found[3] or ''}"
