"""`megaswift submit` and `megaswift jobs`: the checks, the files that are kept, a real run in the background. Covers:
jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megaswift.base.redaction import has_url_credentials
from megaswift.cli import main
from megaswift.clusters.job import job_name
from megaswift.clusters.job_folder import jobs_folder, next_job_folder
from megaswift.commands.submit import main as submit
from megaswift.errors import ConfigError
from megaswift.parallel.layout import size_problems
from tests.trainers.inputs import write_inputs

CLUSTERS = """\
clusters:
  lab: {launcher: slurm, partition: gpu, nodes: 2}
  pods: {launcher: kubernetes, image: registry/megaswift:cuda, gpus_per_node: 8}
  secret: {launcher: slurm, secret_variables: [MEGASWIFT_TEST_TOKEN]}
  shells: {launcher: ssh, hosts: [a, b]}
  proxy: {launcher: kubernetes, image: i, environment: {https_proxy: "http://me:hunter2@proxy:80"}}
  single: {launcher: slurm, network: nvlink_node}
  away: {launcher: slurm, workdir: /no/such/folder}
"""
FIELDS = ("name", "cluster", "launcher", "id", "folder", "submitted", "options")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run and clusters."""
    words = iter(write_inputs(tmp_path))
    run = {word.removeprefix("--"): next(words) for word in words}
    run |= {"task": "sft", "output_dir": "out", "max_steps": 2, "train_type": "full", "per_device_train_batch_size": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "clusters.yaml").write_text(CLUSTERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        submit([*words, "--dry_run"])
    return str(error.value)


def test_a_dry_run_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["run.yaml", "--cluster", "lab", "--dry_run", "--lr", "1e-4"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in said and f"{folder}/out/jobs/run/run.yaml --lr 1e-4" in said
    assert f"sbatch --parsable --export=ALL --output={folder}/out/jobs/run/slurm-%j.log" in said
    assert not (folder / "out").exists()


def test_a_dry_run_prints_the_run_and_needs_no_secret(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["run.yaml", "--cluster", "secret", "--dry_run"]) == 0
    said = capsys.readouterr()
    assert "MEGASWIFT_TEST_TOKEN is not set in this shell; to submit, export MEGASWIFT_TEST_TOKEN=" in said.err
    head, _, rest = said.out.partition("\n")
    assert head == f"# ---- {folder}/out/jobs/run/run.yaml"
    printed = yaml.safe_load(rest.partition("\n# ---- ")[0])
    assert printed == yaml.safe_load((folder / "run.yaml").read_text())
    with pytest.raises(ConfigError, match="MEGASWIFT_TEST_TOKEN is not set in this shell"):
        submit(["run.yaml", "--cluster", "secret"])


def test_a_run_that_is_saved_by_the_clock_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run.yaml", "--cluster", "lab", "--dry_run"]
    submit(words)
    said = capsys.readouterr().err
    assert (
        "no --save_steps: a run that takes over an hour writes a checkpoint every 30 minutes to out/checkpoints" in said
    )
    assert "keeps the last 2; a shorter one is saved at its end" in said
    for typed in (["--save_steps", "100"], ["--save_strategy", "no"]):
        submit([*words, *typed])
        assert "save_steps" not in capsys.readouterr().err
    submit([*words, "--save_total_limit", "5"])
    assert "keeps the last 5" in capsys.readouterr().err


def test_sizes_come_from_options_file_and_cluster_in_this_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nodes(*words: str) -> str:
        submit(["run.yaml", "--dry_run", *words])
        said = capsys.readouterr().out
        return next(line for line in said.splitlines() if "NNODES=" in line or line.strip().startswith("completions"))

    assert nodes("--cluster", "lab") == "export NNODES=2"
    with (folder / "run.yaml").open("a") as file:
        file.write("nnodes: 4\n")
    assert nodes("--cluster", "lab") == "export NNODES=4"
    assert nodes("--cluster", "lab", "--nodes", "1") == "export NNODES=1"
    assert nodes("--cluster", "pods") == "  completions: 4"


@pytest.mark.parametrize("words", [("--cluster", "local", "--gpus_per_node", "2"), ("--cluster", "lab")])
def test_checks_know_the_processes_of_the_job(words: tuple[str, ...], folder: Path) -> None:
    """Options that need several processes, which neither the file nor the command line of a run names."""
    assert submit(["run.yaml", *words, "--max_restarts", "2", "--dry_run"]) == 0


def test_a_model_that_lacks_files_is_told_before_it_waits_for_nodes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(yaml.safe_load((folder / "run.yaml").read_text())["model"])
    (model / "model.safetensors").unlink()
    assert submit(["run.yaml", "--cluster", "lab", "--dry_run"]) == 0
    said = capsys.readouterr().err
    assert "has no *.safetensors; to submit, use a folder with safetensors" in said
    with pytest.raises(ConfigError, match="has no \\*.safetensors"):
        submit(["run.yaml", "--cluster", "lab"])
    assert not (folder / "out").exists()


def test_an_ssh_job_has_all_hosts_by_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, count in (([], 2), (["--nodes", "1"], 1)):
        submit(["run.yaml", "--cluster", "shells", "--dry_run", *words])
        assert capsys.readouterr().out.count(f"export NNODES={count}\n") == count


def test_relative_paths_are_those_of_the_job_s_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data are looked for, and the job's files are kept, where the run will look and write."""
    there = folder / "there"
    there.mkdir()
    (folder / "clusters.yaml").write_text(f"clusters: {{lab: {{launcher: local, workdir: '{there}'}}}}\n")
    words = ["run.yaml", "--cluster", "lab", "--dataset", "own.jsonl", "--dry_run"]
    (folder / "own.jsonl").write_text((folder / "data.jsonl").read_text())
    told = "own.jsonl: no such file(.|\n)*launcher local reads this machine's files: submit where the path exists"
    with pytest.raises(ConfigError, match=told):
        submit(words)
    (folder / "own.jsonl").rename(there / "own.jsonl")
    assert submit(words) == 0
    assert f"{there}/out/jobs/run/run.yaml --dataset own.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cluster", "lab", "--nproc_per_node", "2"), "--nproc_per_node 2: is set by the job"),
        (("--cluster", "lab", "--nodes", "3", "--tp", "2"), "requires a multiple of 2 processes"),
        (("--cluster", "pods", "--tp", "3"), "requires a multiple of 3 processes"),
        (("--cluster", "lab", "--hub_token", "abcdef"), "--hub_token: is a secret"),
        (("--cluster", "lab", "--learning_rat", "1"), "did you mean"),
        (("--cluster", "local", "--nodes", "2"), "a local job has one node"),
        (("--cluster", "shells", "--nodes", "3"), "has 2 hosts"),
        (("--cluster", "single", "--nodes", "2"), "network: nvlink_node: is for a single node"),
        (("--cluster", "lab", "other.yaml"), "a job has one configuration file"),
        (("--cluster", "lab", "--hostfile", "hosts"), "hostfile of an ssh cluster"),
        (("--cluster", "lab", "--node", "2"), "did you mean nodes?"),
        (("--clsuter", "lab"), "did you mean cluster?"),
        (("--cluster", "lab", "--gpus_per_node=-2"), "-2 is not a whole number of at least 0"),
        (("--cluster", "away"), "workdir: /no/such/folder: is not a folder here"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(words: tuple[str, ...], text: str, folder: Path) -> None:
    assert text in refused("run.yaml", *words) and not (folder / "out").exists()


def test_credentials_in_urls_are_refused_in_one_message(folder: Path) -> None:
    """Of the file, the command line and the cluster, by their places; the values are not printed."""
    with (folder / "run.yaml").open("a") as file:
        file.write("# from https://hf_abc@hub.example/data\n")
    line = f"run.yaml, line {len((folder / 'run.yaml').read_text().splitlines())};"
    words = ["run.yaml", "--cluster", "proxy", "--dataset", "s3://key:hunter2@bucket/a.jsonl", "--dry_run"]
    with pytest.raises(ConfigError) as refused:
        submit(words)
    said = str(refused.value)
    assert said.count("credentials in a URL") == 1 and "hunter2" not in said and "hf_abc" not in said
    for place in (line, "the command line", "cluster proxy: environment", "secrets: {NAME: SECRET/KEY}"):
        assert place in said, said
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("git+ssh://git@host/a", False),
        ("https://host/a@b", False),
        ("http://h:80/x", False),
        ("HTTPS://tok@h", True),
        ("https://h/d.jsonl?token=x", True),
        ("https://h/?a=b&X-Amz-Signature=x", True),
        ("https://h/?revision=main&max_tokens=5", False),
    ],
)
def test_urls_with_and_without_credentials(text: str, found: bool) -> None:
    assert has_url_credentials(text) is found


@pytest.mark.parametrize(
    "words",
    [
        ("--dataset", "https://h/d.jsonl?token=SECRETCANARY123456"),
        ("--report_to", "mlflow", "--mlflow_tracking_uri", "https://h/?access_token=SECRETCANARY123456"),
        ("--run_name", "hf_SECRETCANARY123456"),
        ("--system", "Authorization: Bearer SECRETCANARY123456"),
    ],
)
@pytest.mark.parametrize("place", ["line", "file"])
def test_a_secret_in_any_option_is_refused(place: str, words: tuple[str, ...], folder: Path) -> None:
    if place == "file":
        names = [word.removeprefix("--") for word in words[::2]]
        with (folder / "run.yaml").open("r") as file:
            content = yaml.safe_load(file)
        content |= dict(zip(names, words[1::2], strict=True))
        (folder / "run.yaml").write_text(yaml.safe_dump(content))
        words = ()
    said = refused("run.yaml", "--cluster", "lab", *words)
    assert "credentials in a URL or text" in said and "SECRETCANARY" not in said
    assert ("run.yaml, line" if place == "file" else "the command line") in said


@pytest.mark.parametrize(
    "options",
    [
        {"environment": {"MIRROR": "https://h/?token=SECRETCANARY123456"}},
        {"environment": {"ARGS": "--api-key SECRETCANARY123456"}},
        {"environment": {"NOTE": "hf_SECRETCANARY123456"}},
        {"python": "/x?token=SECRETCANARY123456"},
    ],
)
def test_a_secret_in_any_option_of_a_cluster_is_refused(options: dict[str, object], folder: Path) -> None:
    (folder / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"c": {"launcher": "slurm", **options}}}))
    said = refused("run.yaml", "--cluster", "c")
    assert f"cluster c: {next(iter(options))}" in said and "SECRETCANARY" not in said


def test_ordinary_options_hold_no_secret(folder: Path) -> None:
    words = ["--system", "the password: ask your admin for the token", "--max_length", "64"]
    assert submit(["run.yaml", "--cluster", "lab", "--dry_run", *words]) == 0


@pytest.mark.parametrize("cluster", ["lab", "pods"])
@pytest.mark.parametrize(
    ("sizes", "axes", "fix"),
    [
        ((1, 8), {"tp": 3}, "--nodes 1 --gpus_per_node 6, or --nodes 3 --gpus_per_node 8"),
        ((3, 8), {"tp": 8, "pp": 2}, "--nodes 4 --gpus_per_node 8"),
        ((2, 6), {"tp": 4, "pp": 2}, "--nodes 2 --gpus_per_node 4, or --nodes 4 --gpus_per_node 6"),
        ((3, 4), {"tp": 2, "ep": 8}, "--nodes 4 --gpus_per_node 4"),
    ],
)
def test_a_layout_s_fix_names_the_options_of_submit(
    cluster: str, sizes: tuple[int, int], axes: dict[str, int], fix: str, folder: Path
) -> None:
    """And each of its choices is divided by the layout."""
    words = [word for name, size in axes.items() for word in (f"--{name}", str(size))]
    said = refused("run.yaml", "--cluster", cluster, "--nodes", str(sizes[0]), "--gpus_per_node", str(sizes[1]), *words)
    assert f"try: {fix}\n" in f"{said}\n" and "nproc_per_node" not in said
    full = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1, "vpp": 1} | axes
    for choice in fix.split(", or "):
        nodes, gpus = (int(word) for word in choice.split() if word.isdigit())
        assert size_problems(nodes * gpus, full) == []


def test_a_layout_s_fix_of_a_job_without_gpus(folder: Path) -> None:
    with (folder / "run.yaml").open("a") as file:
        file.write("nproc_per_node: 4\n")
    said = refused("run.yaml", "--cluster", "local", "--tp", "3")
    assert "--nodes 1 --nproc_per_node in the file: 3" in said


@pytest.mark.parametrize(
    ("mounts", "words", "warned"),
    [
        ([], [], ["--output_dir out is lost with its pod", "--model", "--dataset", "mounts nothing"]),
        (["/data"], ["--output_dir", "/data/out"], ["--model", "--dataset", "mounts /data"]),
        (["/workspace", "{here}"], [], []),
    ],
)
@pytest.mark.parametrize("launcher", ["kubernetes", "ray"])
def test_paths_that_a_pod_does_not_have_are_named(
    launcher: str,
    mounts: list[str],
    words: list[str],
    warned: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    claims = [{"claim": f"c{i}", "path": path.format(here=folder)} for i, path in enumerate(mounts)]
    more = {"submit_to": "rayjob", "ray_version": "2.51.0", "workdir": "/workspace"} if launcher == "ray" else {}
    cluster = {"launcher": launcher, "image": "i", "mounts": claims, **more}
    (folder / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"c": cluster}}))
    assert submit(["run.yaml", "--cluster", "c", "--dry_run", *words]) == 0
    said = capsys.readouterr().err
    said = "".join(line for line in said.splitlines(keepends=True) if "no --save_steps" not in line)
    assert said.count("megaswift: warning: ") == len([text for text in warned if text.startswith("--")])
    assert all(text in said for text in warned)


@pytest.mark.parametrize(
    ("options", "words", "warned"),
    [({}, [], True), ({}, ["--output_dir", "/o"], False), ({"workdir": "/w"}, [], False)],
)
def test_an_output_directory_in_ray_s_copy_of_the_job_is_named(
    options: dict[str, str], words: list[str], warned: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"launcher": "ray", "address": "http://127.0.0.1:8265", **options}
    (folder / "clusters.yaml").write_text(yaml.safe_dump({"clusters": {"c": cluster}}))
    assert submit(["run.yaml", "--cluster", "c", "--dry_run", *words]) == 0
    assert ("--output_dir out is below Ray's copy" in capsys.readouterr().err) is warned


def test_a_missing_tool_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["submit", "run.yaml", "--cluster", "pods"]) == 2
    assert "kubectl: is not on this machine" in capsys.readouterr().err and not (folder / "out").exists()


def test_a_failing_tool_keeps_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = folder / "bin/sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/bash\necho no partition >&2\nexit 7\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert main(["submit", "run.yaml", "--cluster", "lab"]) == 1
    assert "failed with exit code 7" in capsys.readouterr().err
    assert {f.name for f in (folder / "out/jobs/run").iterdir()} == {"run.yaml", "job.sh"}
    assert main(["jobs", "status", "out"]) == 2, "there is no job"


def test_a_folder_that_cannot_be_made_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--output_dir", "/proc/none/out"]) == 2
    assert "/proc/none/out/jobs/run: cannot be made: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "is not the record of a job"),
        ("[" * 100_000, "is not the record of a job"),
        ('{"a": 1}', "it has other fields"),
        (json.dumps(dict.fromkeys(FIELDS, "x") | {"options": {}}), "launcher x is not one of local, slurm"),
        (json.dumps(dict.fromkeys(FIELDS, "x") | {"submitted": 3}), "submitted, options: not a text"),
    ],
)
def test_a_damaged_record_is_one_message(
    record: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(record)
    assert main(["jobs", "status", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


def test_a_damaged_record_among_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are listed; what ends a job asks for its folder."""
    for name in ("a", "b"):
        (folder / f"out/jobs/{name}").mkdir(parents=True)
    (folder / "out/jobs/a/job.json").write_text("{")
    record = {**dict.fromkeys(FIELDS, "x"), "launcher": "local", "id": "999999", "options": {}}
    (folder / "out/jobs/b/job.json").write_text(json.dumps(record))
    assert main(["jobs", "list", "out"]) == 0
    said = capsys.readouterr()
    assert "out/jobs/b" in said.out and "out/jobs/a/job.json: is not the record of a job" in said.err
    assert main(["jobs", "status", "out"]) == 1, "of the other, whose process is not there"
    assert main(["jobs", "cancel", "out"]) == 2
    assert "give the folder of one job" in capsys.readouterr().err


def test_names_and_folders(tmp_path: Path) -> None:
    assert [job_name(text) for text in ("Run_1.v2", "7b LoRA", "--", "ä" * 99)] == [
        "run-1-v2",
        "job-7b-lora",
        "job",
        "job",
    ]
    assert len(f"{job_name('a' * 99)}-999") <= 47, "of a RayJob"
    assert len(f"{job_name('a' * 99)}-999-node-0-9999-abcde") <= 63, "of a TrainJob's pod"
    (tmp_path / "run").mkdir()
    assert [next_job_folder(tmp_path, name).name for name in ("run", "x")] == ["run-2", "x"]
    assert jobs_folder(str(tmp_path / "out"), False) == tmp_path / "out/jobs"
    (tmp_path / "out").write_text("")
    assert jobs_folder(str(tmp_path / "out"), False) == Path("output/out/jobs").absolute(), "of a container"


@pytest.mark.process
def test_a_local_job_runs_to_its_export(folder: Path) -> None:
    """Submitted, looked at, ended by itself; its record is complete, and its configuration is the one that ran."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "NPROC_PER_NODE": "2"}

    def megaswift(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megaswift", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

    done = megaswift("submit", "run.yaml", "--max_steps", "3")
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "out/jobs/run/job.json").read_text())
    assert record["launcher"] == "local" and record["id"].isdigit()
    (folder / "run.yaml").unlink()  # the job has a copy
    deadline = time.monotonic() + 300
    while not (folder / "out/hf/config.json").exists() or Path(f"/proc/{record['id']}").exists():
        assert time.monotonic() < deadline, (folder / "out/jobs/run/job.log").read_text()
        time.sleep(0.2)
    assert (folder / "out/job_id").read_text().startswith("run-2")
    assert "max_steps: 3" in (folder / "out/config.yaml").read_text()
    logs = megaswift("jobs", "logs", "out")
    assert logs.returncode == 0 and "step 3/3" in logs.stdout
    assert megaswift("jobs", "status", "out").returncode == 1, "the process has ended"
    assert "local" in megaswift("jobs", "list", "out").stdout
