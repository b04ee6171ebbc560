"""A job of two nodes on a real Slurm: submitted, signalled, queued again, resumed by itself, exported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.scheduler import HAS_ENDED, scheduler_of
from megaswift.clusters.slurm import SCHEDULER
from megaswift.errors import ConfigError
from tests.clusters.jobs import job
from tests.clusters.programs import run_here
from tests.clusters.slurm_on_this_machine import missing_programs, slurm
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

needs_slurm = pytest.mark.skipif(
    bool(missing_programs()), reason=f"no {', '.join(missing_programs())}: scripts/setup_slow_tier.sh"
)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_file(folder: Path, **options: Any) -> None:
    words = iter(write_inputs(folder))
    run = {word.removeprefix("--"): next(words) for word in words}
    run |= {"task": "sft", "output_dir": "out", "train_type": "full", "logging_steps": 5, **options}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "clusters.yaml").write_text("clusters: {lab: {launcher: slurm, partition: gpu, time_limit: '10'}}\n")


def megaswift(folder: Path, environ: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "megaswift", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(environ: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


def ended(environ: dict[str, str], folder: Path, seconds: float = 240) -> None:
    """Waits until the queue is empty; a job on its way from running to waiting is in it at times, and at times not."""
    deadline, empty = time.monotonic() + seconds, 0
    while empty < 10:
        empty = 0 if tool(environ, "squeue", "-h", "-o", "%i") else empty + 1
        log = "\n".join(f.read_text() for f in (folder / "out/jobs/run").glob("slurm-*.log"))
        assert time.monotonic() < deadline, log
        time.sleep(0.2)


def steps(folder: Path) -> list[int]:
    file = folder / "out/metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@needs_slurm
@pytest.mark.process
def test_two_nodes_train_to_their_export(environ: dict[str, str], tmp_path: Path) -> None:
    run_file(tmp_path, max_steps=5)
    megaswift(tmp_path, environ, "submit", "run.yaml", "--cluster", "lab", "--nodes", "2")
    log = megaswift(tmp_path, environ, "jobs", "logs", "out", "--follow")
    ended(environ, tmp_path)
    assert (
        "DP2 on 2 processes" in log and "report with curves" in log and (tmp_path / "out/hf/model.safetensors").exists()
    ), log
    assert steps(tmp_path) == [5]
    assert "COMPLETED" in megaswift(tmp_path, environ, "jobs", "status", "out")
    record = tmp_path / "out/jobs/run/job.json"
    number = json.loads(record.read_text())["id"]
    ended_file = tmp_path / f"out/jobs/run/ended-{number}"
    assert ended_file.read_text().startswith("0 2")
    record.write_text(record.read_text().replace(f'"{number}"', '"99999"'))  # as when Slurm has forgotten it
    ended_file.rename(ended_file.with_name("ended-99999"))
    assert "with exit code 0" in megaswift(tmp_path, environ, "jobs", "status", "out")


QUEUE = "     JOBID NAME\n"


@pytest.mark.parametrize(
    ("squeue", "sacct", "kept", "code", "text"),
    [
        (f"echo '{QUEUE}         7  run RUNNING'", "exit 1", "", 0, "RUNNING"),
        (f"echo -n '{QUEUE}'", "echo '7 run COMPLETED 0:0'", "", 0, "7 run COMPLETED"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "echo '7 FAILED'", "", 0, "7 FAILED"),
        (
            "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            "echo 'Slurm accounting storage is disabled' >&2; exit 1",
            "3 2026-01-02T03:04:05Z\n",
            0,
            "job 7 is not in Slurm's queue any more, and Slurm's accounting has no record of it\n"
            "its script ended at 2026-01-02T03:04:05Z with exit code 3",
        ),
        (f"echo -n '{QUEUE}'", "exit 0", "", 1, "did not get to its end"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "echo no", "0 now\n", 1, "Unable to contact"),
    ],
)
def test_the_status_of_a_job_that_slurm_has_forgotten(
    squeue: str, sacct: str, kept: str, code: int, text: str, tmp_path: Path
) -> None:
    for name, line in (("squeue", squeue), ("sacct", sacct)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    if kept:
        (tmp_path / "ended-7").write_text(kept)
    words = SCHEDULER.status(SubmittedJob("run", "lab", "slurm", "7", str(tmp_path), ""))
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(words, env=path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code and text in done.stdout + done.stderr, done


@pytest.mark.parametrize(
    ("squeue", "ended"),
    [
        ("echo PENDING", False),
        ("exit 0", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", False),
    ],
)
def test_a_job_that_the_queue_has_no_more_prints_nothing_more(squeue: str, ended: bool, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/bash\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    words = SCHEDULER.alive(SubmittedJob("run", "lab", "slurm", "7", str(tmp_path), ""))
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False, timeout=300)
    assert (done.returncode == HAS_ENDED) == ended


@needs_slurm
@pytest.mark.slow
def test_signalled_requeued_resumed(environ: dict[str, str], tmp_path: Path) -> None:
    """USR1 as Slurm sends it before the time limit; the job comes back without anyone's doing."""
    run_file(tmp_path, max_steps=600, save_steps=1000)
    megaswift(tmp_path, environ, "submit", "run.yaml", "--cluster", "lab", "--nodes", "2")
    deadline = time.monotonic() + 300
    while len(steps(tmp_path)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    number = tool(environ, "squeue", "-h", "-o", "%i")
    tool(environ, "scancel", "--batch", "--signal=USR1", number)
    while tool(environ, "squeue", "-h", "-o", "%T") != "PENDING":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first = steps(tmp_path)
    time.sleep(5)  # Slurm waits two minutes, so that nodes have put away the first attempt
    tool(environ, "scontrol", "update", f"JobId={number}", "StartTime=now")
    ended(environ, tmp_path, 200)
    log = megaswift(tmp_path, environ, "jobs", "logs", "out")
    state = tool(environ, "scontrol", "show", "job", number)
    assert "SIGUSR1 received" in log and "resuming" in log.lower(), f"{log}\n{state}"
    assert steps(tmp_path) == list(range(5, 601, 5)) and first[-1] < 600, "no step twice, none left out"
    assert (tmp_path / "out/hf/model.safetensors").exists()


@needs_slurm
@pytest.mark.slow
def test_a_node_with_a_sick_gpu_is_left_out(environ: dict[str, str], tmp_path: Path) -> None:
    """nvidia-smi reports an error on machine0 from step 3 on; the job is queued again, avoids it, and goes on."""
    tool_folder = tmp_path / "bin"
    tool_folder.mkdir()
    sick = f'[ "$SLURMD_NODENAME" = machine0 ] && [ -s {tmp_path}/out/metrics.jsonl ]'
    (tool_folder / "nvidia-smi").write_text(
        f'#!/bin/bash\n[[ "$2" == *ecc* ]] || exit 2\n{sick} && echo "2, [N/A]" || echo "0, [N/A]"\n'
    )
    (tool_folder / "nvidia-smi").chmod(0o755)
    run_file(tmp_path, max_steps=6, save_steps=1, gpu_health_interval=3)
    (tmp_path / "run.yaml").write_text(
        (tmp_path / "run.yaml").read_text().replace("logging_steps: 5", "logging_steps: 1")
    )
    with (tmp_path / "clusters.yaml").open("w") as file:
        file.write("clusters: {lab: {launcher: slurm, partition: gpu, time_limit: '10', requeues: 1}}\n")
    own = environ | {"PATH": f"{tool_folder}:{environ['PATH']}"}
    megaswift(tmp_path, own, "submit", "run.yaml", "--cluster", "lab", "--nodes", "1")
    number = tool(environ, "squeue", "-h", "-o", "%i")
    deadline = time.monotonic() + 300
    while "ExcNodeList=machine0" not in tool(environ, "scontrol", "show", "job", number):
        assert time.monotonic() < deadline, megaswift(tmp_path, environ, "jobs", "logs", "out")
        time.sleep(0.2)
    time.sleep(5)  # Slurm waits two minutes, so that nodes have put away the first attempt
    tool(environ, "scontrol", "update", f"JobId={number}", "StartTime=now")
    ended(environ, tmp_path, 200)
    log = megaswift(tmp_path, environ, "jobs", "logs", "out")
    state = tool(environ, "scontrol", "show", "job", number)
    assert "queued again without machine0, whose GPUs report errors" in log and "BatchHost=machine1" in state, (
        log + state
    )
    assert "2 uncorrectable ECC errors, at step 3" in log and "take node machine0 out of service" in log
    assert steps(tmp_path) == list(range(1, 7)) and (tmp_path / "out/hf/model.safetensors").exists(), log


@needs_slurm
@pytest.mark.slow
def test_a_cancelled_job_has_saved(environ: dict[str, str], tmp_path: Path) -> None:
    run_file(tmp_path, max_steps=5000, save_steps=100_000)
    megaswift(tmp_path, environ, "submit", "run.yaml", "--cluster", "lab", "--nodes", "2")
    deadline = time.monotonic() + 300
    while len(steps(tmp_path)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "RUNNING" in megaswift(tmp_path, environ, "jobs", "status", "out")
    megaswift(tmp_path, environ, "jobs", "cancel", "out")
    ended(environ, tmp_path)
    assert list((tmp_path / "out/checkpoints").glob("step-*")), megaswift(tmp_path, environ, "jobs", "logs", "out")


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "layout"), [(2, "DP2 on 2 processes"), (4, "DP2 on 4 processes")])
def test_srun_itself_starts_nodes_or_ranks(environ: dict[str, str], tmp_path: Path, tasks: int, layout: str) -> None:
    """Without a script of ours: one task a node is a launcher, one task a core is a rank."""
    run_file(tmp_path, max_steps=2)
    words = ["srun", "-N2", f"-n{tasks}", sys.executable, "-m", "megaswift", "train", "run.yaml"]
    words += ["--tp", str(tasks // 2)]
    here = environ | {"MASTER_ADDR": "127.0.0.1"}  # the names of these nodes are in no name service
    done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert layout in done.stdout + done.stderr and (tmp_path / "out/hf/model.safetensors").exists()
    assert "nodes and ranks are those of Slurm" in done.stdout + done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    ("code", "early", "failures", "requeues", "again"),
    [
        (0, False, 0, 2, False),
        (0, True, 0, 0, False),  # it finished after the signal
        (138, True, 5, 0, True),
        (138, True, 5, 2, True),
        (1, False, 0, 0, False),
        (1, False, 1, 2, True),
        (1, False, 2, 2, False),
        (2, False, 0, 2, False),
        (3, False, 0, 2, False),
        (127, False, 0, 2, False),  # the environment is not there
        (4, False, 0, 2, True),  # a GPU with errors
        (138, False, 2, 2, True),  # --preemption_command: no failure
        (138, False, 0, 0, False),
        (2, True, 0, 2, False),  # no space for the checkpoint before the time limit
        (143, False, 0, 2, False),  # scancel
        (143, True, 0, 2, True),
    ],
)
def test_which_ends_are_queued_again(
    code: int, early: bool, failures: int, requeues: int, again: bool, tmp_path: Path
) -> None:
    """The script's own decision, with a run that ends with `code`, after USR1 where `early`."""
    render_script(tmp_path, requeues)
    (tmp_path / "failures-7").write_text("2026-01-01T00:00:00Z exit code 1\n" * failures)
    assert attempt(tmp_path, code, early, 9) == again


@pytest.mark.parametrize(("seconds", "again"), [(300, False), (5, True)])
def test_scancel_after_usr1_is_not_the_time_limit(seconds: int, again: bool, tmp_path: Path) -> None:
    """TERM right after USR1; Slurm itself sends it `seconds` later."""
    render_script(tmp_path, 2, save_before_end=seconds)
    (tmp_path / "python").write_text(
        "#!/bin/bash\ntrap 'touch got' USR1\ntrap 'exit 143' TERM\nscript=$(ps -o ppid= -p $$)\n"
        "kill -USR1 $script\nuntil [ -e got ]; do sleep 0.05; done\nkill -TERM $script\n"
        "while :; do sleep 0.05; done\n"
    )
    (tmp_path / "python").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NODEID": "0"}
    path = f"{tmp_path}/control:/usr/bin:/bin"
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], env={"PATH": path, **variables}, check=False, timeout=300)
    assert (done.returncode, (tmp_path / "again").exists()) == (0 if again else 143, again)


def render_script(folder: Path, requeues: int, **options: Any) -> None:
    """The job's script, with stand-ins for Slurm's programs."""
    made = job("slurm", python=str(folder / "python"), workdir=str(folder), folder=folder, requeues=requeues, **options)
    text = scheduler_of("slurm").render(made).files["job.sh"].replace("sleep 60", "exit 0")
    (folder / "job.sh").write_text(text)
    control = folder / "control"
    control.mkdir()
    (control / "scontrol").write_text(f"#!/bin/bash\n[ $1 = requeue ] && touch {folder}/again\necho localhost\n")
    (control / "scontrol").chmod(0o755)
    (control / "srun").write_text(
        f'#!/bin/bash\necho "$@" > {folder}/srun\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n'
    )
    (control / "srun").chmod(0o755)


def attempt(folder: Path, code: int, early: bool, restarts: int, **more: str) -> bool:
    """Starts the script once as Slurm does; whether the job is queued again."""
    for name in ("again", "got"):
        (folder / name).unlink(missing_ok=True)
    signal = (
        "trap : USR1; kill -USR1 $(ps -o ppid= -p $$); while :; do sleep 0.05; [ -e got ] && break; touch got; done; "
        if early
        else ""
    )
    (folder / "python").write_text(f"#!/bin/bash\n{signal}exit {code}\n")
    (folder / "python").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NODEID": "0", **more}
    variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(
        ["bash", str(folder / "job.sh")],
        env={"PATH": f"{folder}/control:/usr/bin:/bin", **variables},
        check=False,
        timeout=300,
    )
    again = (folder / "again").exists()
    assert done.returncode == (0 if again else code)
    return again


def test_time_limits_use_up_no_failure(tmp_path: Path) -> None:
    """requeues: 2. Time limits, and starts by Slurm itself, in between: the third failure ends the job."""
    render_script(tmp_path, 2)
    story = [(138, True), (1, False), (138, True), (138, True), (1, False), (138, True), (1, False)]
    again = [attempt(tmp_path, code, early, restarts) for restarts, (code, early) in enumerate(story)]
    assert again == [True] * 6 + [False]
    assert len((tmp_path / "failures-7").read_text().splitlines()) == 3


def test_a_failure_that_cannot_be_counted_ends_the_job(tmp_path: Path) -> None:
    """Full file system: counted by nothing, it would start for ever."""
    render_script(tmp_path, 2)
    (tmp_path / "failures-7").symlink_to("/dev/full")
    assert not attempt(tmp_path, 1, False, 0)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({}, {"SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_CPUS_PER_NODE": "96(x2)"}, ["--cpus-per-task=96"]),
        ({}, {"SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_CPUS_PER_NODE": "96,64"}, []),
        ({}, {}, []),
        ({"cpus_per_node": 8}, {"SLURM_CPUS_ON_NODE": "96"}, ["--cpus-per-task=8"]),
    ],
)
def test_a_task_gets_the_cores_of_its_node(
    options: dict[str, Any], variables: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    render_script(tmp_path, 0)
    made = job("slurm", python=str(tmp_path / "python"), workdir=str(tmp_path), folder=tmp_path, **options)
    (tmp_path / "job.sh").write_text(scheduler_of("slurm").render(made).files["job.sh"])
    attempt(tmp_path, 0, False, 0, **variables)
    assert [word for word in (tmp_path / "srun").read_text().split() if word.startswith("--cpus")] == words


def test_whole_nodes_have_their_memory() -> None:
    """--exclusive reserves cores and GPUs; the memory is that of one core where a site counts it by cores."""
    header = scheduler_of("slurm").render(job("slurm", exclusive=True)).files["job.sh"].splitlines()
    assert "#SBATCH --mem=0" in header
    header = scheduler_of("slurm").render(job("slurm", exclusive=True, memory_per_node="9G")).files["job.sh"].split()
    assert "--mem=9G" in header and "--mem=0" not in header


@pytest.mark.wide
def test_which_nodes_the_next_start_avoids(tmp_path: Path) -> None:
    """scontrol's calls after exit code 4, with a node that was excluded before and a change that succeeds later."""
    folder = tmp_path / "bin"
    folder.mkdir()
    run = "#!/bin/bash\nprintf 'n3\\nn2\\nn3\\n' >> \"$MEGASWIFT_SICK_NODES\"\nexit 4\n"
    control = f"""#!/bin/bash
echo "$@" >> {tmp_path}/calls
before="(null)"
[ -e {tmp_path}/before ] && before="n[7-9]"
[ "$1 $2" = "show job" ] && echo "   ReqNodeList=(null) ExcNodeList=$before"
[ $1 = update ] && [ ! -e {tmp_path}/tried ] && touch {tmp_path}/tried && exit 1
exit 0
"""
    srun = '#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n'
    for name, text in (("python", run), ("scontrol", control), ("srun", srun)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    made = job("slurm", python=str(folder / "python"), workdir=str(tmp_path), folder=tmp_path, requeues=2)
    (tmp_path / "job.sh").write_text(scheduler_of("slurm").render(made).files["job.sh"])
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NODEID": "0"}
    environ = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    for excluded in ("n2,n3", "n[7-9],n2,n3"):
        done = subprocess.run(["bash", str(tmp_path / "job.sh")], env=environ, check=False, timeout=300)
        calls = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.startswith("show")]
        update = f"update JobId=7 ExcNodeList={excluded}"
        tries = 1 if (tmp_path / "before").exists() else 2
        assert done.returncode == 4 and calls == ["requeuehold 7", *[update] * tries, "release 7"]
        (tmp_path / "before").touch(), (tmp_path / "calls").unlink()


def test_the_job_id() -> None:
    made = job("slurm")
    assert SCHEDULER.job_id("12\n", made) == "12" and SCHEDULER.job_id("12;lab\n", made) == "12"
    with pytest.raises(ConfigError, match="printed no job id: hello"):
        SCHEDULER.job_id("hello", made)


def test_a_percent_sign_in_a_path_is_no_pattern() -> None:
    (command,) = scheduler_of("slurm").render(job("slurm", folder=Path("/o/50%j/run"))).commands
    assert "--output=/o/50%%j/run/slurm-%j.log" in command


def test_setup_may_read_variables_that_are_not_set(tmp_path: Path) -> None:
    """As the scripts of conda and of modules do."""
    setup = ['[ -z "$NOT_SET_ANYWHERE" ] && export FOUND=yes']
    made = job("slurm", workdir=str(tmp_path), python=str(tmp_path / "megaswift"), setup=setup)
    (tmp_path / "job.sh").write_text(scheduler_of("slurm").render(made).files["job.sh"])
    arrived = run_here(["bash", str(tmp_path / "job.sh")], tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n")
    assert arrived[-1]["environ"]["FOUND"] == "yes"


def test_the_port_differs_between_jobs(tmp_path: Path) -> None:
    """Two jobs may share a node."""
    ports = set()
    for number in ("7", "8"):
        made = job("slurm", workdir=str(tmp_path), python=str(tmp_path / "megaswift"))
        (tmp_path / "job.sh").write_text(scheduler_of("slurm").render(made).files["job.sh"])
        arrived = run_here(["bash", str(tmp_path / "job.sh")], tmp_path, SLURM_JOB_ID=number, SLURM_JOB_NODELIST="n")
        ports.add(arrived[-1]["environ"]["MASTER_PORT"])
    assert len(ports) == 2


@pytest.mark.wide
@pytest.mark.parametrize(("name", "code", "again"), [("USR1", 138, True), ("TERM", 143, False)])
def test_a_signal_before_the_start_of_srun_reaches_it(name: str, code: int, again: bool, tmp_path: Path) -> None:
    render_script(tmp_path, 3)
    script = tmp_path / "job.sh"
    text = script.read_text()
    assert text.count("\ncd -- ") == 1
    script.write_text(text.replace("\ncd -- ", f"\nkill -{name} $$\ncd -- "))  # as in its setup
    (tmp_path / "python").write_text("#!/bin/bash\nexec sleep 20\n")
    (tmp_path / "python").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NODEID": "0"}
    path = f"{tmp_path}/control:/usr/bin:/bin"
    done = subprocess.run(["bash", str(script)], env={"PATH": path, **variables}, check=False, timeout=300)
    assert (done.returncode, (tmp_path / "again").exists()) == (0 if again else code, again)
