"""A job submitted to a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megaswift.clusters.job import Cluster
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.jobs import job
from tests.clusters.programs import expanded_by_kubernetes, program, run_here
from tests.network_namespaces import Machine, machines, why_not
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

RAY = Path(sys.executable).with_name("ray")
reason = why_not() or ("" if RAY.exists() else "ray is not installed")
needs_machines = pytest.mark.skipif(bool(reason), reason=reason or "-")
PORT, DASHBOARD = 6379, 8265


@contextmanager
def ray_cluster(two: list[Machine], environ: dict[str, str]) -> Iterator[str]:
    """A head and a second node with a core each and files of their own; the dashboard's address."""
    head, other = two
    start = [str(RAY), "start", "--num-cpus=1", "--disable-usage-stats", "--block"]
    first = ["--head", f"--port={PORT}", f"--dashboard-port={DASHBOARD}", f"--dashboard-host={head.address}"]
    commands = [
        (head, [*start, *first, f"--node-ip-address={head.address}", f"--temp-dir={head.view}"]),
        (other, [*start, f"--address={head.address}:{PORT}", f"--node-ip-address={other.address}"]),
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for machine, words in commands:
            log = (machine.own / "log").open("wb")
            words = machine.words(words)
            running.append(subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True))
            wait_for(f"{head.address}:{DASHBOARD if machine is head else PORT}", head)
        yield f"http://{head.address}:{DASHBOARD}"
    finally:
        for machine in two:
            subprocess.run(
                ["bash", "-c", 'kill -9 $(ip netns pids "$1")', "-", machine.name], check=False, capture_output=True
            )
        for process in running:
            process.wait(20)


def wait_for(address: str, machine: Machine) -> None:
    """Until somebody listens there."""
    host, _, port = address.partition(":")
    probe = machine.words(["bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"])
    deadline = time.monotonic() + 300
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, address
        time.sleep(0.5)


@pytest.mark.slow
@needs_machines
def test_a_job_on_two_ray_nodes(tmp_path: Path) -> None:
    """The configuration travels with the job: the other node sees no file of this one but model, data and output."""
    words = iter(write_inputs(tmp_path))
    run = {word.removeprefix("--"): next(words) for word in words}
    run |= {"task": "sft", "train_type": "full", "max_steps": 3, "output_dir": str(tmp_path / "out")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{RAY.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # Ray's default from 2.60 on
    short = Path("/tmp") / f"ms{os.getpid()}"  # sockets in it may have no longer names
    try:
        with machines(short) as two, ray_cluster(two, environ) as address:
            cluster = {"launcher": "ray", "address": address, "python": sys.executable}
            cluster |= {"environment": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
            (tmp_path / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"lab": cluster}}))

            def megaswift(*more: str) -> str:
                command = two[0].words([sys.executable, "-m", "megaswift", *more])
                done = subprocess.run(
                    command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
                )
                assert done.returncode == 0, done.stderr + done.stdout
                return done.stdout

            megaswift("submit", "run.yaml", "--cluster", "lab", "--nodes", "2", "--lr", "1e-3")
            deadline = time.monotonic() + 300
            while "succeeded" not in (state := megaswift("jobs", "status", "out").lower()):
                assert time.monotonic() < deadline and "failed" not in state, megaswift("jobs", "logs", "out")
                time.sleep(1)
            assert "DP2 on 2 processes" in megaswift("jobs", "logs", "out")
    finally:
        shutil.rmtree(short, ignore_errors=True)
    assert (tmp_path / "out/hf/model.safetensors").exists()
    assert "learning_rate: 0.001" in (tmp_path / "out/config.yaml").read_text()


@pytest.mark.parametrize("submit_to", ["address", "rayjob"])
def test_a_job_starts_in_the_cluster_s_workdir(submit_to: str, tmp_path: Path) -> None:
    """And finds its configuration, which a submitted job has in the folder where Ray starts it."""
    place = tmp_path / "it's $(a) folder"
    place.mkdir()
    more = {"submit_to": submit_to, "image": "i", "ray_version": "2.51.0", "python": str(program(tmp_path))}
    made = job("ray", **more)
    made = replace(made, cluster=Cluster("lab", "ray", {**made.cluster.options, "workdir": str(place)}))
    rendered = scheduler_of("ray").render(made)
    if submit_to == "address":
        words = list(rendered.commands[-1])
        command, run_file = words[words.index("--") + 1 :], "/run.yaml"
    else:
        entry = list(yaml.safe_load_all(rendered.files["job.yaml"]))[-1]["spec"]["entrypoint"]
        command = ["bash", "-c", expanded_by_kubernetes(entry, {})]
        run_file = "/etc/megaswift/run.yaml"
    (arrived,) = run_here(command, tmp_path)
    assert arrived["folder"] == str(place) and arrived["words"][2] == "train"
    assert arrived["words"][3].replace("//", "/") == run_file


@pytest.mark.parametrize("submit_to", ["rayjob", "raycluster"])
def test_a_manifest_has_a_run_and_ray_counts_its_processes(submit_to: str) -> None:
    """NNODES in a pod would ask the run, which `--launcher ray` starts once, for its rank among nodes."""
    made = job("ray", 2, 8, submit_to=submit_to, image="i", ray_version="2.51.0", environment={"HF_HOME": "/h"})
    text = scheduler_of("ray").render(made).files["job.yaml"]
    kinds = {document["kind"]: document for document in yaml.safe_load_all(text)}
    spec = kinds["RayJob"]["spec"]
    assert "--num_workers 16" in spec["entrypoint"] and "NNODES" not in text and "NPROC_PER_NODE" not in text
    if submit_to == "raycluster":
        assert spec["clusterSelector"] == {"ray.io/cluster": kinds["RayCluster"]["metadata"]["name"]}
    else:
        assert "clusterSelector" not in spec and spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": None}, "needs the address of the dashboard"),
        ({"secrets": {"HF_TOKEN": "hub/token"}}, "set the variables where `ray start` runs"),
        ({"submit_to": "rayjob"}, "needs an image"),
        ({"submit_to": "rayjob", "image": "i"}, "needs ray_version"),
    ],
)
def test_options_that_do_not_do(options: dict[str, object], text: str) -> None:
    assert text in "".join(map(str, scheduler_of("ray").problems(job("ray", **options))))
