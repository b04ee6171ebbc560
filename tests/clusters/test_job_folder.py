"""job.json of a stranger: what `megaswift jobs` reads of it runs no command, ends nothing else and does not wait.

Covers: jobs, job_folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.cli import main
from megaswift.clusters.job_folder import read_record
from megaswift.clusters.options import CLUSTER_OPTIONS
from megaswift.errors import ConfigError

TOOLS = ("ssh", "scancel", "squeue", "sacct", "kubectl", "ray", "dlc")
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("4711", {}),
    "slurm": ("7", {}),
    "ssh": ("node0 me@node1", {}),
    "kubernetes": ("run-2", {"context": "prod", "namespace": "train", "kind": "mpijob"}),
    "ray": ("run", {"address": "http://head:8265", "submit_to": "address", "namespace": "default"}),
    "dlc": ("dlc1k2x3y4", {}),
}


def record(folder: Path, launcher: str, job_id: str, options: dict[str, Any], **more: str) -> Path:
    """job.json in the folder of a job below `folder`, which is returned."""
    place = folder / "out/jobs/a"
    place.mkdir(parents=True, exist_ok=True)
    content = {"name": "a", "cluster": "c", "launcher": launcher, "id": job_id, "folder": "x", "submitted": "now"}
    (place / "job.json").write_text(json.dumps({**content, **more, "options": options}))
    return folder / "out"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each call of a cluster's tool; the working folder is empty."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        line = f'printf "%s " {name} "$@" >> {tmp_path}/called; echo >> {tmp_path}/called'
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "called"


@pytest.mark.parametrize("launcher", GOOD)
def test_records_of_megaswift_are_read(launcher: str, tmp_path: Path) -> None:
    job_id, options = GOOD[launcher]
    folder = record(tmp_path, launcher, job_id, options)
    read = read_record(folder / "jobs/a")
    assert (read.id, read.options, read.folder) == (job_id, options, str(folder / "jobs/a"))


@pytest.mark.parametrize(
    ("launcher", "job_id", "options"),
    [
        ("ssh", "-oProxyCommand=touch${IFS}X", {}),
        ("ssh", "a -oProxyCommand=x", {}),
        ("ssh", "a;touch", {}),
        ("ssh", "a  b", {}),
        ("ssh", "$(touch)", {}),
        ("ssh", "", {}),
        ("slurm", "--user=root", {}),
        ("slurm", "7 8", {}),
        ("slurm", "7\n", {}),
        ("slurm", "", {}),
        ("local", "-1", {}),
        ("local", "0", {}),
        ("local", "1 2", {}),
        ("kubernetes", "--all", {"kind": "job"}),
        ("kubernetes", "a,b", {"kind": "job"}),
        ("kubernetes", "a", {"kind": "namespace"}),
        ("kubernetes", "a", {"kind": "job", "context": "--kubeconfig=x"}),
        ("kubernetes", "a", {"kind": "job", "namespace": "a b"}),
        ("kubernetes", "a", {"kind": ["job"]}),
        ("kubernetes", "a", {"kind": "job", "address": "http://h"}),
        ("kubernetes", "a", {"kind": "job", "image": "i"}),
        ("ray", "a", {}),
        ("ray", "a", {"address": "evil_module://x"}),
        ("ray", "a", {"address": "--working-dir=x"}),
        ("ray", "a", {"address": "http://h/?token=x"}),
        ("ray", "-h", {"address": "http://h:8265"}),
        ("dlc", "--help", {}),
        ("dlc", "dlc-\x1b[2J", {}),
        ("slurm", "7", {"nodes": 2}),
    ],
)
@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_what_no_job_has_is_refused(
    verb: str, launcher: str, job_id: str, options: dict[str, Any], tmp_path: Path, called: Path
) -> None:
    folder = record(tmp_path, launcher, job_id, options)
    assert main(["jobs", verb, str(folder)]) == 2
    assert not called.exists()


@pytest.mark.parametrize(
    "more",
    [
        {"name": "../x"},
        {"cluster": "a\x1b[2J"},
        {"submitted": "a\nb"},
        {"cluster": "a\x9b2J"},
        {"cluster": "a\ud800"},
        {"submitted": "a\u202eb"},
        {"cluster": "a\u2028b"},
    ],
)
def test_texts_that_no_job_has_are_refused(more: dict[str, str], tmp_path: Path) -> None:
    folder = record(tmp_path, "slurm", "7", {}, **more)
    with pytest.raises(ConfigError) as refused:
        read_record(folder / "jobs/a")
    assert not any(value in str(refused.value) for value in more.values())


def test_ssh_options_of_a_record_are_not_used(tmp_path: Path, called: Path) -> None:
    """Those of clusters.yaml are, which names no program either."""
    folder = record(tmp_path, "ssh", "node0", {"ssh_options": ["-o", f"ProxyCommand=touch {tmp_path}/canary"]})
    assert main(["jobs", "status", str(folder)]) == 0
    quiet = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes "
    assert called.read_text() == f"{quiet}-- node0 bash -s \n"
    called.unlink()
    file = tmp_path / "c.yaml"
    file.write_text("clusters: {c: {launcher: ssh, hosts: [node0], ssh_options: [-p, '2222', -oUser=me]}}\n")
    assert main(["jobs", "cancel", str(folder), "--clusters", str(file)]) == 0
    assert called.read_text() == f"{quiet}-p 2222 -oUser=me -- node0 bash -s \n"


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["-p", "2222", "-i", "/k", "-o", "Port=1"], True),
        (["-p2222", "-oconnecttimeout=5", "-4", "-C"], True),
        (["-J", "me@gate:22"], True),
        (["-p", 22], True),
        (["-o", "ProxyCommand=/tmp/x"], False),
        (["-oProxyCommand=/tmp/x"], False),
        (["-o", "LocalCommand=x"], False),
        (["-o", "Include=/tmp/x"], False),
        (["-F", "/tmp/config"], False),
        (["-I", "/tmp/lib.so"], False),
        (["-oPKCS11Provider=/tmp/lib.so"], False),
        (["-o", "SendEnv=*"], False),
        (["-A"], False),
        (["host"], False),
        (["--"], False),
        (["-p"], False),
        (["-p", "-oProxyCommand=x"], False),
        (["-o", "Port"], False),
        (["-i", "a b"], False),
        ("-p", False),
    ],
)
def test_ssh_options_start_no_program(words: Any, taken: bool) -> None:
    (option,) = [o for o in CLUSTER_OPTIONS if o.name == "ssh_options"]
    assert (option.wrong(words) == "") is taken


def test_a_slurm_job_is_cancelled_by_its_number(tmp_path: Path, called: Path) -> None:
    assert main(["jobs", "cancel", str(record(tmp_path, "slurm", "7", {}))]) == 0
    assert called.read_text() == "scancel -- 7 \n"


@pytest.mark.parametrize("launcher", ["kubernetes", "ray"])
def test_a_manifest_in_the_folder_does_not_name_what_is_deleted(launcher: str, tmp_path: Path, called: Path) -> None:
    options = {"kind": "job"} if launcher == "kubernetes" else {"submit_to": "rayjob"}
    folder = record(tmp_path, launcher, "a", options)
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "payments"}}
    (folder / "jobs/a/job.yaml").write_text(yaml.safe_dump(manifest))
    assert main(["jobs", "cancel", str(folder)]) == 0
    said = called.read_text()
    assert "delete" in said and "-f" not in said.split() and "job.yaml" not in said
    assert "-l app.kubernetes.io/name=megaswift,app.kubernetes.io/instance=a " in said


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder", "long"])
@pytest.mark.parametrize("verb", ["list", "status"])
def test_a_record_that_is_no_file_is_not_waited_for(
    verb: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path, "slurm", "7", {})
    file = folder / "jobs/a/job.json"
    text = file.read_text()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        (tmp_path / "other.json").write_text(text)
        file.symlink_to(tmp_path / "other.json")
    elif kind == "folder":
        file.mkdir()
    else:
        file.write_text(text + " " * (1 << 20))
    assert main(["jobs", verb, str(folder)]) == 2
    assert "job.json: " in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "log"), [("local", "job.log"), ("slurm", "slurm-7.log"), ("ssh", "node-0.log")])
def test_a_log_that_is_no_file_is_not_waited_for(
    launcher: str, log: str, tmp_path: Path, called: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path, launcher, "7", {})
    os.mkfifo(folder / "jobs/a" / log)
    assert main(["jobs", "logs", str(folder)]) == 2
    assert f"{log}: is not a file" in capsys.readouterr().err


def test_a_process_id_that_is_no_number_ends_nothing(tmp_path: Path, called: Path) -> None:
    """node-0.pid is read on the host; here by a stand-in for ssh that runs the lines."""
    folder = record(tmp_path, "ssh", "node0", {})
    (tmp_path / "tools/ssh").write_text('#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    place = folder / "jobs/a"
    for text in ("-1", "1 2", "$(touch X)", "0"):
        (place / "node-0.pid").write_text(text)
        assert main(["jobs", "cancel", str(folder)]) == 0
    (place / "node-0.pid").unlink()
    os.mkfifo(place / "node-0.pid")
    assert main(["jobs", "status", str(folder)]) == 0
    assert not list(tmp_path.rglob("X"))


@pytest.mark.parametrize(
    ("launcher", "job_id"),
    [
        *(("slurm", text) for text in ("0", "１２３", "07", "7\n", "7,8")),
        *(("local", text) for text in ("１２", "0", "-1")),
        *(("ssh", text) for text in ("me@-oProxyCommand=x", "-l@host", "a,b", "*", "../x", "@x", "a  b", "a=b")),
    ],
)
def test_ids_that_no_tool_gives_are_refused(launcher: str, job_id: str, tmp_path: Path) -> None:
    folder = record(tmp_path, launcher, job_id, {})
    with pytest.raises(ConfigError, match=f"id: {launcher} gives no such ids"):
        read_record(folder / "jobs/a")


@pytest.mark.parametrize("job_id", ["ssh://me@host:22", "fe80::1%eth0", "10.0.0.1", "gpu_01.site me.you@gpu-02"])
def test_hosts_in_every_form_of_ssh_are_taken(job_id: str, tmp_path: Path) -> None:
    assert read_record(record(tmp_path, "ssh", job_id, {}) / "jobs/a").id == job_id


def test_a_log_that_leads_elsewhere_is_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path, "local", "4711", {})
    (tmp_path / "private").write_text("hunter2")
    (folder / "jobs/a/job.log").symlink_to(tmp_path / "private")
    assert main(["jobs", "logs", str(folder)]) == 2
    assert "hunter2" not in "".join(capfd.readouterr())
