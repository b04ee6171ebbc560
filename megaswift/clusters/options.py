"""The options of a cluster in clusters.yaml, by launcher, with their types. Docs and checks derive from these rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SLURM = "slurm"
KUBERNETES = "kubernetes"
RAY = "ray"
DLC = "dlc"
SSH = "ssh"
LOCAL = "local"
IN_IMAGES = (KUBERNETES, RAY, DLC)
SAFE = re.compile(r"(?!-)[A-Za-z0-9_.,:@/+=\[\]*%-]+")
"""Names allowed in a scheduler's options: nothing that a shell or a YAML file reads as more than text, and no leading
dash, which a program reads as an option."""
HOST = re.compile(r"(ssh://)?([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?(?!-)[A-Za-z0-9_.:%\[\]-]+")
"""Host names for ssh, with or without a user: neither part begins with a dash."""
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LAST_PORT = 65_535
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
DEVICES = re.compile(r"\^?=?[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*")
DASHBOARD = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~/-]*)?")
"""Ray reads an address with another scheme as the name of a Python module, and imports it."""
KEY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""The last part of a key of Kubernetes' labels and annotations."""
KEY_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
"""The first part of such a key, before the slash: a DNS subdomain."""
LONGEST_PREFIX = 253
SSH_SWITCHES = ("-4", "-6", "-C", "-q", "-v")
SSH_FLAGS = ("-p", "-l", "-i", "-J")
SSH_SETTINGS = (
    "AddressFamily",
    "BindAddress",
    "BindInterface",
    "Ciphers",
    "Compression",
    "ConnectTimeout",
    "ConnectionAttempts",
    "HostKeyAlgorithms",
    "HostKeyAlias",
    "IdentitiesOnly",
    "IdentityFile",
    "KexAlgorithms",
    "LogLevel",
    "MACs",
    "Port",
    "PreferredAuthentications",
    "ProxyJump",
    "ServerAliveCountMax",
    "ServerAliveInterval",
    "TCPKeepAlive",
    "User",
    "UserKnownHostsFile",
)
"""The settings that `ssh -o NAME=VALUE` may take: they start no program, load no library and send no variables.
ProxyCommand, LocalCommand, Include and others belong in the user's own ~/.ssh/config."""


@dataclass(frozen=True)
class ClusterOption:
    """One key below a cluster's name."""

    name: str
    kind: str
    """`name`, `path`, `url`, `count` (from 1), `number` (from 0), `port`, `bool`, `mapping`, `annotations`, `labels`,
    `mappings`, `fields`, `names`, `hosts`, `devices`, `ssh`, `lines`, or the values separated by |."""
    about: str
    launchers: tuple[str, ...] = ()
    """Empty: every launcher."""
    default: Any = None

    def wrong(self, value: Any) -> str:
        """The rule that the value breaks; empty for none."""
        if "|" in self.kind:
            choices = self.kind.split("|")
            return "" if str(value) in choices else f"must be one of {', '.join(choices)}"
        rule, check = _KINDS[self.kind]
        if not check(value):
            return rule
        return _key_rule(value, self.kind == "annotations") if self.kind in ("annotations", "labels") else ""


def _key_rule(keys: Iterable[str], is_annotation: bool) -> str:
    """Return the rule of Kubernetes for keys of labels and annotations that a key breaks; empty: none does.

    Args:
        keys: Keys of one mapping.
        is_annotation: Whether the prefix may have capitals, as Kubernetes allows in annotations only.
    """
    for key in keys:
        prefix, slash, name = key.rpartition("/")
        prefix = prefix.lower() if is_annotation else prefix
        prefix_is_right = len(prefix) <= LONGEST_PREFIX and KEY_PREFIX.fullmatch(prefix) is not None
        if not KEY_NAME.fullmatch(name) or (slash and not prefix_is_right):
            return (
                f"has the key {key!r}, which Kubernetes refuses: a key is NAME or PREFIX/NAME, NAME up to 63 letters, "
                "digits and -_. with a letter or digit first and last, PREFIX a domain such as example.com"
            )
    return ""


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and CONTROL.search(value) is None


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and bool(SAFE.fullmatch(str(value)))


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_text(k) and _scalar(v) for k, v in value.items())


def _scalar(value: Any) -> bool:
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and CONTROL.search(value) is None)


def _fields(value: Any) -> bool:
    """Part of a manifest."""
    if isinstance(value, Mapping):
        return all(_text(name) and _fields(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_fields, value))
    return value is None or isinstance(value, (int, float, bool)) or (isinstance(value, str) and "\0" not in value)


def _devices(value: Any) -> bool:
    return isinstance(value, str) and DEVICES.fullmatch(value) is not None


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(_is_name(item) for item in value)


def _hosts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_name(item) and bool(HOST.fullmatch(str(item))) for item in value)


def _is_path(value: Any) -> bool:
    return _text(value) and not value.startswith("-")


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and DASHBOARD.fullmatch(value) is not None


def _ssh_words(value: Any) -> bool:
    """Return whether these words change how ssh reaches a host, and nothing else."""
    if not isinstance(value, list):
        return False
    words = [str(word) for word in value]
    settings = {name.lower() for name in SSH_SETTINGS}
    while words:
        word = words.pop(0)
        if word in SSH_SWITCHES:
            continue
        flag = word[:2]
        given = word[2:]
        given = given or (words.pop(0) if words else "")
        if not SAFE.fullmatch(given):
            return False
        name, equals, setting = given.partition("=")
        is_setting = flag == "-o" and name.lower() in settings and bool(equals and SAFE.fullmatch(setting))
        if flag not in SSH_FLAGS and not is_setting:
            return False
    return True


def _lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and "\0" not in item for item in value)


_KINDS: dict[str, tuple[str, Any]] = {
    "name": ("must be a name of letters, digits and _.,:@/+=[]*%-, with no dash first", _is_name),
    "path": ("must be a path on one line, with no dash first", _is_path),
    "url": ("must be http://HOST:PORT or https://HOST:PORT", _is_url),
    "count": ("must be a whole number of at least 1", lambda v: _count(v, 1)),
    "number": ("must be a whole number of at least 0", lambda v: _count(v, 0)),
    "port": ("must be a port, 1 to 65535", lambda v: _count(v, 1) and v <= LAST_PORT),
    "bool": ("must be true or false", lambda v: isinstance(v, bool)),
    "mapping": ("must be a mapping of names to values", _mapping),
    "annotations": ("must be a mapping of names to values", _mapping),
    "labels": ("must be a mapping of names to values", _mapping),
    "mappings": (
        "must be a list of mappings",
        lambda v: isinstance(v, list) and all(isinstance(i, Mapping) for i in v),
    ),
    "fields": ("must be a mapping of a manifest's fields", lambda v: isinstance(v, Mapping) and _fields(v)),
    "devices": ("must be names as NCCL takes them: mlx5_0,mlx5_1, ^docker,lo, =eth0", _devices),
    "names": ("must be a list of names", _names),
    "hosts": ("must be a list of hosts: node1, user@node2", _hosts),
    "ssh": (
        f"must be of {', '.join(SSH_SWITCHES)}, {', '.join(SSH_FLAGS)} with a value, and -o NAME=VALUE with NAME of "
        f"{', '.join(SSH_SETTINGS)}; others belong in ~/.ssh/config",
        _ssh_words,
    ),
    "lines": ("must be a list of lines of shell", _lines),
}

CLUSTER_OPTIONS: tuple[ClusterOption, ...] = (
    ClusterOption("nodes", "count", "Nodes of a job; the run file and --nodes override it; default: 1, ssh: all hosts"),
    ClusterOption("gpus_per_node", "number", "GPUs of a node, one process each; 0: a CPU job"),
    ClusterOption("gpu_type", "name", "GPU in the table of megaswift plan, such as h100: jobs get a forecast"),
    ClusterOption("cpus_per_node", "count", "CPU cores of a node to reserve", (SLURM, KUBERNETES, RAY, DLC)),
    ClusterOption("memory_per_node", "name", "Memory of a node to reserve: 200Gi, 200G", (SLURM, KUBERNETES, RAY, DLC)),
    ClusterOption(
        "workdir",
        "path",
        "Folder in which a job starts; default: that of `megaswift submit`, in pods /workspace, Ray's own",
    ),
    ClusterOption("environment", "mapping", "Environment variables of a job"),
    ClusterOption(
        "secrets", "mapping", "Kubernetes: variable to SECRET/KEY of the cluster's secrets", (KUBERNETES, RAY)
    ),
    ClusterOption("secret_variables", "names", "Variables taken from the shell that submits", (SLURM, SSH, LOCAL)),
    ClusterOption("network", "ethernet|roce|infiniband|nvlink_node", "Preset of NCCL variables (docs/launch.md)"),
    ClusterOption("nccl_ib_hca", "devices", "NCCL_IB_HCA: InfiniBand or RoCE devices: mlx5_0,mlx5_1"),
    ClusterOption("nccl_socket_ifname", "devices", "NCCL_SOCKET_IFNAME: network interfaces: eth0, ^lo,docker"),
    ClusterOption("setup", "lines", "Lines of shell before the run: module load, source .../activate"),
    ClusterOption("python", "path", "Python with megaswift on the nodes; default: this one, in images `megaswift`"),
    ClusterOption("image", "name", "Container image", (KUBERNETES, RAY, DLC)),
    ClusterOption("master_port", "port", "Port of the rendezvous on the first node", default=None),
    # Slurm
    ClusterOption("partition", "name", "Partition", (SLURM,)),
    ClusterOption("account", "name", "Account", (SLURM,)),
    ClusterOption("qos", "name", "Quality of service", (SLURM,)),
    ClusterOption("reservation", "name", "Reservation", (SLURM,)),
    ClusterOption("constraint", "name", "Features that nodes must have", (SLURM,)),
    ClusterOption("gres", "name", "Generic resources in place of --gpus-per-node: gpu:h100:8", (SLURM,)),
    ClusterOption("time_limit", "name", "Time limit: 24:00:00, 2-00:00:00", (SLURM,)),
    ClusterOption("exclusive", "bool", "Reserve whole nodes", (SLURM,)),
    ClusterOption("save_before_end", "number", "Seconds before the time limit at which a run saves", (SLURM,), 300),
    ClusterOption("requeues", "number", "How often a failed job is queued again", (SLURM,), 0),
    ClusterOption("container_image", "name", "Image of the steps (pyxis)", (SLURM,)),
    ClusterOption("container_mounts", "name", "Mounts of the image (pyxis): /data:/data", (SLURM,)),
    # Kubernetes, and Ray on Kubernetes
    ClusterOption("context", "name", "Context of kubectl; default: the current one", (KUBERNETES, RAY)),
    ClusterOption("namespace", "name", "Namespace", (KUBERNETES, RAY), "default"),
    ClusterOption(
        "kind",
        "trainjob|pytorchjob|job|mpijob|volcano",
        "Resource for a job; job needs no operator",
        (KUBERNETES,),
        "job",
    ),
    ClusterOption("runtime", "name", "TrainJob: the ClusterTrainingRuntime", (KUBERNETES,), "torch-distributed"),
    ClusterOption("trainer_version", "2.1|2.2|2.3", "TrainJob: release of Kubeflow Trainer", (KUBERNETES,), "2.3"),
    ClusterOption(
        "gpu_resource",
        "name",
        "Name of the GPU resource; huawei.com/Ascend910 for NPUs",
        (KUBERNETES, RAY),
        "nvidia.com/gpu",
    ),
    ClusterOption(
        "resources",
        "mapping",
        "More resources of a node: rdma/ib: 8; with network infiniband and no device: rdma/ib: 1",
        (KUBERNETES, RAY),
    ),
    ClusterOption(
        "mounts", "mappings", "Volumes: {claim: NAME, path: /data}, host_path: or config_map:", (KUBERNETES, RAY)
    ),
    ClusterOption("shared_memory", "name", "Size of /dev/shm: 64Gi", (KUBERNETES, RAY), "16Gi"),
    ClusterOption("node_selector", "labels", "Labels that nodes must have", (KUBERNETES, RAY)),
    ClusterOption("tolerations", "mappings", "Tolerations of pods", (KUBERNETES, RAY)),
    ClusterOption("queue", "name", "Queue: of Kueue, or of Volcano for kind volcano", (KUBERNETES, RAY)),
    ClusterOption("service_account", "name", "Service account of pods", (KUBERNETES, RAY)),
    ClusterOption("image_pull_secrets", "names", "Secrets for pulling the image", (KUBERNETES, RAY)),
    ClusterOption(
        "host_network", "bool", "Pods use the network of their node, as RDMA often needs", (KUBERNETES, RAY), False
    ),
    ClusterOption(
        "retries", "number", "Restarts of a failed job by Kubernetes; no field of a TrainJob", (KUBERNETES, RAY), 3
    ),
    ClusterOption(
        "security_context", "fields", "securityContext of the run's container: {privileged: true}", (KUBERNETES, RAY)
    ),
    ClusterOption(
        "annotations", "annotations", "Annotations of pods: k8s.v1.cni.cncf.io/networks: ib0", (KUBERNETES, RAY)
    ),
    ClusterOption("pod_patch", "fields", "Fields merged into the spec of every pod (below)", (KUBERNETES, RAY)),
    # Ray
    ClusterOption(
        "submit_to", "address|rayjob|raycluster", "Running cluster, or a manifest for KubeRay", (RAY,), "address"
    ),
    ClusterOption("address", "url", "Of the dashboard of a running cluster: http://HOST:8265", (RAY,)),
    ClusterOption("ray_version", "name", "Version of Ray in the image", (RAY,)),
    # Alibaba Cloud PAI-DLC
    ClusterOption("workspace_id", "name", "PAI workspace", (DLC,)),
    ClusterOption("resource_id", "name", "PAI resource quota", (DLC,)),
    ClusterOption("worker_spec", "name", "ECS instance type of a node", (DLC,)),
    ClusterOption("data_sources", "names", "Ids of the data sets to mount", (DLC,)),
    ClusterOption("vpc_id", "name", "VPC", (DLC,)),
    ClusterOption("switch_id", "name", "Switch of the VPC", (DLC,)),
    ClusterOption("security_group_id", "name", "Security group of the VPC", (DLC,)),
    ClusterOption("priority", "count", "Priority, 1 to 9", (DLC,)),
    # ssh
    ClusterOption("hosts", "hosts", "Hosts, the first is node 0", (SSH,)),
    ClusterOption(
        "hostfile",
        "path",
        "File of hosts, as DeepSpeed and MPI have it; slots are gpus_per_node where that is not set",
        (SSH,),
    ),
    ClusterOption("ssh_options", "ssh", "Words for ssh before the host: -p, 2222", (SSH,)),
    ClusterOption("master_addr", "name", "Address of node 0 in the nodes' network; default: its host", (SSH,)),
)


def options_of_launcher(launcher: str) -> dict[str, ClusterOption]:
    """The keys that a cluster of this launcher takes."""
    return {o.name: o for o in CLUSTER_OPTIONS if not o.launchers or launcher in o.launchers}
