"""Pods for InfiniBand, the patch of a user, and what `submit` says of pods.

Covers: kubernetes_pods, kubernetes, submit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.options import CLUSTER_OPTIONS
from megaswift.clusters.scheduler import scheduler_of
from megaswift.clusters.table import SCHEDULERS
from megaswift.commands.submit import main as submit
from megaswift.errors import ConfigError
from tests.clusters.jobs import NEEDED, job
from tests.trainers.inputs import write_inputs

KINDS = ["job", "trainjob", "pytorchjob", "mpijob", "volcano", "rayjob", "raycluster"]


def options_of(kind: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Launcher and options of a cluster with a manifest of this kind."""
    if kind.startswith("ray"):
        return "ray", {"submit_to": kind, "image": "i", "ray_version": "2.51.0", "address": None, **more}
    return "kubernetes", {"kind": kind, **more}


def rendered(kind: str, nodes: int = 2, **more: Any) -> list[dict[str, Any]]:
    launcher, options = options_of(kind, **more)
    made = job(launcher, nodes, **options)
    assert scheduler_of(launcher).problems(made) == []
    return list(yaml.safe_load_all(scheduler_of(launcher).render(made).files["job.yaml"]))


def found(value: Any, name: str) -> Iterator[Any]:
    """Values of a field, wherever it is."""
    if isinstance(value, dict):
        yield from ([value[name]] if name in value else [])
        for item in value.values():
            yield from found(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from found(item, name)


def run_containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [containers[0] for containers in found(documents, "containers")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", ["infiniband", "roce", "ethernet", None])
def test_rdma_may_lock_memory(kind: str, network: str | None) -> None:
    """Registering memory needs CAP_IPC_LOCK (ibv_reg_mr), in every pod of the run."""
    wanted = {"capabilities": {"add": ["IPC_LOCK"]}} if network in ("infiniband", "roce") else None
    containers = run_containers(rendered(kind, network=network))
    assert containers and all(container.get("securityContext") == wanted for container in containers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"network": "infiniband"}, {"rdma/ib": "1"}),
        ({"network": "infiniband", "resources": {"rdma/hca": 8}}, {"rdma/hca": "8"}),
        ({"network": "infiniband", "resources": {"ephemeral-storage": "1Gi"}}, {"rdma/ib": "1"}),
        ({"network": "infiniband", "security_context": {"privileged": True}}, {}),
        ({"network": "roce"}, {}),
        ({"resources": {"rdma/ib": 2}}, {"rdma/ib": "2"}),
    ],
)
def test_infiniband_asks_for_a_device(kind: str, options: dict[str, Any], devices: dict[str, str]) -> None:
    for needed in found(rendered(kind, **options), "limits"):
        assert {name: count for name, count in needed.items() if name.startswith("rdma/")} == devices
    assert list(found(rendered(kind, **options), "limits"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_security_context_is_kept(kind: str) -> None:
    given = {"runAsUser": 1000, "capabilities": {"add": ["SYS_PTRACE"], "drop": ["NET_RAW"]}}
    for container in run_containers(rendered(kind, network="infiniband", security_context=given)):
        wanted = {"runAsUser": 1000, "capabilities": {"add": ["SYS_PTRACE", "IPC_LOCK"], "drop": ["NET_RAW"]}}
        assert container["securityContext"] == wanted
    for container in run_containers(rendered(kind, security_context={"privileged": True})):
        assert container["securityContext"] == {"privileged": True}


@pytest.mark.parametrize("kind", KINDS)
def test_annotations_of_pods(kind: str) -> None:
    """As Multus reads them for a secondary network. A value stays as typed: the kubelet expands none."""
    given = {"k8s.v1.cni.cncf.io/networks": "ib-a", "sidecar.istio.io/inject": False, "cost": "$$5 $(A)"}
    wanted = {**given, "sidecar.istio.io/inject": "false"}
    documents = rendered(kind, annotations=given)
    pods = [one for one in found(documents, "template") if "containers" in one.get("spec", {})]
    assert pods and all(pod["metadata"]["annotations"] == wanted for pod in pods)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trainjob"])
def test_a_patch_is_merged_as_kubectl_does(kind: str) -> None:
    patch = {
        "priorityClassName": "high",
        "securityContext": {"fsGroup": 5},
        "tolerations": [{"key": "b"}],
        "volumes": [{"name": "more", "emptyDir": {}}, {"name": "megaswift-shm", "emptyDir": {"sizeLimit": "1Gi"}}],
        "terminationGracePeriodSeconds": None,
        "containers": [
            {
                "env": [{"name": "A", "value": "$(B)"}, {"name": "HF_HOME", "value": "/b"}],
                "volumeMounts": [{"name": "more", "mountPath": "/more"}],
            },
            {"name": "side", "image": "s"},
        ],
    }
    environment = {"HF_HOME": "/a"}
    documents = rendered(kind, tolerations=[{"key": "a"}], environment=environment, pod_patch=patch)
    plain = [spec for spec in found(rendered(kind, environment=environment), "spec") if "containers" in spec]
    pods = [spec for spec in found(documents, "spec") if "containers" in spec]
    assert len(pods) == len(plain) > 0
    for pod, before in zip(pods, plain, strict=True):
        own, side = pod["containers"]
        assert (pod["priorityClassName"], pod["securityContext"], pod["tolerations"]) == (
            "high",
            {"fsGroup": 5},
            [{"key": "b"}],
        )
        assert "terminationGracePeriodSeconds" not in pod and side == {"name": "side", "image": "s"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["megaswift-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        assert set(volumes) == {"more", *(volume["name"] for volume in before["volumes"])}
        env = {one["name"]: one.get("value") for one in own["env"]}
        assert env["A"] == "$(B)" and env["HF_HOME"] == "/b", "as written: the kubelet expands it"
        assert own["volumeMounts"] == [*before["containers"][0]["volumeMounts"], {"name": "more", "mountPath": "/more"}]
        assert own.get("command") == before["containers"][0].get("command")


def test_a_patch_of_a_train_job() -> None:
    affinity = {"nodeAffinity": {}}
    (patch,) = found(
        rendered("trainjob", pod_patch={"affinity": affinity, "securityContext": {"fsGroup": 5}}), "affinity"
    )
    assert patch == affinity


@pytest.mark.parametrize("launcher", SCHEDULERS)
def test_devices_of_nccl(launcher: str) -> None:
    """Over those of the preset, on every launcher."""
    made = job(launcher, 1, network="infiniband", nccl_ib_hca="=mlx5_0:1,mlx5_1", nccl_socket_ifname="^lo,ib")
    assert made.environment()["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1"
    assert made.environment()["NCCL_SOCKET_IFNAME"] == "^lo,ib"
    text = "".join(scheduler_of(launcher).render(made).files.values())
    assert "=mlx5_0:1,mlx5_1" in text and "^lo,ib" in text and "^lo,docker" not in text


@pytest.mark.parametrize("value", ["a b", "$(x)", "a,", "", "^^a", 5, "a\nb"])
def test_devices_are_names(value: Any) -> None:
    (option,) = [o for o in CLUSTER_OPTIONS if o.name == "nccl_ib_hca"]
    assert option.wrong(value) and not option.wrong("^=mlx5_bond_0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    words = iter(write_inputs(tmp_path))
    run = {word.removeprefix("--"): next(words) for word in words}
    run |= {"task": "sft", "output_dir": "/data/out", "max_steps": 2, "train_type": "full"}
    run |= {"per_device_train_batch_size": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(folder: Path, launcher: str, options: dict[str, Any], *words: str) -> int:
    given = {name: value for name, value in {**NEEDED[launcher], **options}.items() if value is not None}
    (folder / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"c": {"launcher": launcher, **given}}}))
    return submit(["run.yaml", "--cluster", "c", "--dry_run", *words])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "queue"), [(2, None), (2, "team"), (1, None)])
def test_pods_that_may_start_one_by_one_are_said(
    kind: str, nodes: int, queue: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, options = options_of(kind, queue=queue)
    assert dry_run(folder, launcher, options, "--nodes", str(nodes)) == 0
    alone = nodes > 1 and queue is None and kind != "volcano"
    assert ("pods may start one by one" in capsys.readouterr().err) is alone


@pytest.mark.parametrize(
    ("launcher", "options", "text"),
    [
        ("kubernetes", {"network": "infiniband"}, "asks for rdma/ib: 1 in each pod"),
        ("kubernetes", {"network": "roce"}, "no RDMA device: NCCL will use TCP"),
        ("kubernetes", {"network": "infiniband", "resources": {"rdma/x": 1}}, ""),
        (
            "kubernetes",
            {"network": "infiniband", "kind": "trainjob", "trainer_version": "2.1"},
            "no field for IPC_LOCK",
        ),
        ("slurm", {}, "Slurm reserves one core of each node"),
        ("slurm", {"exclusive": True}, ""),
        ("slurm", {"cpus_per_node": 8}, ""),
    ],
)
def test_what_may_not_do_is_said(
    launcher: str, options: dict[str, Any], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(folder, launcher, options, "--nodes", "1") == 0
    said = capsys.readouterr().err
    assert text in said if text else "cluster c: network" not in said and "core" not in said


@pytest.mark.parametrize(
    ("launcher", "options", "name"),
    [
        ("kubernetes", {"runtime": "own"}, "runtime"),
        ("kubernetes", {"kind": "pytorchjob", "trainer_version": "2.2"}, "trainer_version"),
        ("kubernetes", {"kind": "pytorchjob", "master_port": 5}, "master_port"),
        ("kubernetes", {"kind": "trainjob", "master_port": 5}, "master_port"),
        ("ray", {"retries": 3}, "retries"),
        ("ray", {"namespace": "x"}, "namespace"),
        ("ray", {"pod_patch": {"a": 1}}, "pod_patch"),
        ("ray", {"cpus_per_node": 8}, "cpus_per_node"),
        (
            "ray",
            {"submit_to": "raycluster", "image": "i", "ray_version": "2.51.0", "address": None, "retries": 2},
            "retries",
        ),
        ("ray", {"submit_to": "rayjob", "image": "i", "ray_version": "2.51.0", "address": "http://h"}, "address"),
        ("dlc", {"master_port": 5}, "master_port"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    launcher: str, options: dict[str, Any], name: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=f"cluster c: {name}: would be ignored"):
        dry_run(folder, launcher, options)


VALUES: dict[str, Any] = {
    "bool": True,
    "number": 2,
    "count": 2,
    "port": 4242,
    "name": "x",
    "mapping": {"A": "b"},
    "annotations": {"example.com/A": "b"},
    "labels": {"example.com/a": "b"},
    "fields": {"priorityClassName": "x"},
    "devices": "eth7",
    "names": ["x1"],
    "lines": ["true"],
    "path": "/x",
    "url": "http://other:1",
    "ssh": ["-4"],
}
SPECIAL: dict[str, Any] = {
    "pod_patch": {"affinity": {}},
    "mounts": [{"claim": "c", "path": "/c"}],
    "tolerations": [{"key": "a"}],
    "secrets": {"A": "b/c"},
    "image": "registry/other",
    "security_context": {"privileged": True},
    "trainer_version": "2.2",
}


@pytest.mark.wide
@pytest.mark.parametrize("kind", [*KINDS, "slurm", "ssh", "local", "dlc", "ray"])
def test_every_option_changes_what_is_submitted_or_is_refused(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, options = (kind, {}) if kind in SCHEDULERS else options_of(kind)
    if kind == "ray":
        options = {}
    nowhere = (
        "nodes",
        "gpus_per_node",
        "workdir",
        "hosts",
        "hostfile",
        "kind",
        "submit_to",
        "secret_variables",
        "context",
    )

    def text(**more: Any) -> str | None:
        capsys.readouterr()
        try:
            gpus = {"gpus_per_node": 1} if launcher == "kubernetes" or kind.startswith("ray") else {}
            dry_run(folder, launcher, {**options, **gpus, **more})
        except ConfigError:
            return None
        return re.sub(r"\d{8}-\d{6}", "TIME", capsys.readouterr().out).replace("2.2", "")

    plain = text()
    assert plain is not None
    for option in CLUSTER_OPTIONS:
        if option.name in nowhere or (option.launchers and launcher not in option.launchers):
            continue
        choices = option.kind.split("|")
        value = SPECIAL.get(option.name, choices[-1] if len(choices) > 1 else VALUES.get(option.kind))
        assert value is not None, option
        assert text(**{option.name: value}) != plain, f"{option.name} of {kind}: nothing changes"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"volumes": [5]}, "volumes"),
        ({"volumes": {"name": "a"}}, "volumes"),
        ({"containers": [{"env": 5}]}, "env"),
        ({"containers": [{"env": ["A=b"]}]}, "env"),
        ({"containers": [{"volumeMounts": "x"}]}, "volumeMounts"),
        ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    ],
)
def test_lists_of_a_patch_that_cannot_be_merged_are_refused(
    kind: str, patch: dict[str, Any], field: str, folder: Path
) -> None:
    launcher, options = options_of(kind)
    with pytest.raises(ConfigError, match=f"pod_patch: {field}"):
        dry_run(folder, launcher, {**options, "pod_patch": patch})
