"""The torchrun command from flags and environment, and what happens to its exit code.

Covers: megaswift/launchers/parent_death.py.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.launcher import api as torch_launcher

from megaswift.commands import training
from megaswift.config import load_config
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.options.variables import NODE, RESTARTS
from megaswift.launchers.torchrun_launcher import (
    requests_worker_processes,
    run_torchrun_with_restarts,
    torchrun_command,
    torchrun_environment,
    world_size_of_launch_options,
)
from megaswift.run.output import OutputFolder
from megaswift.trainers import checkpoints
from tests.trainers.inputs import write_inputs

SCRIPT = Path("/x/megaswift/sft.py")


def words(argv: str, **environ: str) -> list[str]:
    launch = load_config("sft", argv.split(), environ=environ).launch
    assert requests_worker_processes(launch)
    made = torchrun_command(launch, SCRIPT, ["run.yaml"])
    assert made[:3] == [sys.executable, "-m", "megaswift.launchers.torchrun_agent"] and made[-2:] == [
        str(SCRIPT),
        "run.yaml",
    ]
    return made[3:-2]


def test_one_machine() -> None:
    alone = ["--nproc-per-node", "4", "--standalone", "--local-addr", "127.0.0.1"]
    assert (
        words("--nproc_per_node 4")
        == words("", NPROC_PER_NODE="4")
        == words("--nproc-per-node=4", NPROC_PER_NODE="8")
        == alone
    )
    assert words("", NPROC_PER_NODE="4", MASTER_ADDR="elsewhere", NODE_RANK="0") == alone
    assert words("--master_port 1234", NPROC_PER_NODE="2")[2:] == [
        "--nnodes",
        "1",
        "--node-rank",
        "0",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "1234",
    ]


def test_several_machines() -> None:
    made = words("--node_rank 1", NPROC_PER_NODE="8", NNODES="2", NODE_RANK="0", MASTER_ADDR="head", MASTER_PORT="77")
    assert made == [
        "--nproc-per-node",
        "8",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "head",
        "--master-port",
        "77",
    ]
    assert words("", NNODES="2", NODE_RANK="0", MASTER_ADDR="head")[-1] == "29500"


def test_no_number_given_is_this_very_process() -> None:
    launch = load_config("sft", [], environ={"MASTER_ADDR": "h", "MASTER_PORT": "1"}).launch
    assert not requests_worker_processes(launch) and world_size_of_launch_options(launch) == 1
    assert (
        world_size_of_launch_options(
            load_config(
                "sft", [], environ={"NPROC_PER_NODE": "4", "NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "h"}
            ).launch
        )
        == 12
    )


def test_threads_are_shared_out_unless_said() -> None:
    launch = load_config("sft", ["--nproc_per_node", "4"], environ={}).launch
    assert torchrun_environment(launch, {})["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert torchrun_environment(launch, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_torchrun_gives_workers_the_time_to_save() -> None:
    launch, name = load_config("sft", ["--nproc_per_node", "2"], environ={}).launch, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert torchrun_environment(launch, {})[name] == "1800" and torchrun_environment(launch, {name: "5"})[name] == "5"
    assert name in Path(torch_launcher.__file__).read_text(encoding="utf-8"), "this torch knows another name"


@pytest.mark.parametrize("engine", ["--engine auto", "--use_fsdp true", "--deepspeed zero2", "--engine ddp"])
def test_every_way_to_name_an_engine_starts_the_processes(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The number of processes comes from the environment, and the engine is settled in between."""
    seen: list[str] = []
    monkeypatch.setattr(torchrun_launcher, "run_torchrun_with_restarts", lambda made, *_: seen.extend(made) or 0)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    inputs = write_inputs(tmp_path)
    assert training.main("sft", [*inputs, *engine.split(), "--output_dir", str(tmp_path / "out")]) == 0
    assert seen[1:5] == ["-m", "megaswift.launchers.torchrun_agent", "--nproc-per-node", "2"]


def waiting(ready: Path) -> str:
    """The end of a script that says that it can be signalled, and then waits."""
    return f"open({str(ready)!r}, 'w').close(); time.sleep(600)"


def signal_when(ready: Path, number: int) -> None:
    """Sends the signal to this process as soon as the file is there."""

    def send() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_was_stopped_ends_as_a_shell_says(number: int, tmp_path: Path) -> None:
    """torchrun ends with 1 after a signal; SIGINT it has from the terminal."""
    before = signal.signal(number, signal.default_int_handler)  # a shell ignores SIGINT for tests in the background
    ready = tmp_path / "ready"
    ends = f"import signal, sys, time; signal.signal({int(number)}, lambda *_: sys.exit(1)); "
    signal_when(ready, number)
    try:
        assert run_torchrun_with_restarts([sys.executable, "-c", ends + waiting(ready)], os.environ) == 128 + number
    finally:
        signal.signal(number, before)


@pytest.mark.process
def test_exit_codes_and_signals_pass_through(tmp_path: Path) -> None:
    run = [sys.executable, "-c"]
    assert run_torchrun_with_restarts([*run, "raise SystemExit(7)"], os.environ) == 7
    assert (
        run_torchrun_with_restarts([*run, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], os.environ)
        == 128 + 9
    )
    signal_when(tmp_path / "ready", signal.SIGTERM)
    before = time.monotonic()
    assert run_torchrun_with_restarts([*run, "import time; " + waiting(tmp_path / "ready")], os.environ) == 128 + 15
    assert time.monotonic() - before < 300


def attempts(script: str, folder: Path, restarts: int) -> tuple[int, int]:
    """The exit code, and how often the script was started; it writes a line into its folder each time."""
    count = f"open({str(folder / 'count')!r}, 'a').write('x'); "
    code = run_torchrun_with_restarts(
        [sys.executable, "-c", "import os, signal; " + count + script], os.environ, restarts
    )
    return code, len((folder / "count").read_text())


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.process
@pytest.mark.parametrize(
    "script, restarts, code, count",
    [
        (f"'{RESTARTS}' in os.environ or {KILL}", 2, 0, 2),
        (f"os.environ.get('{RESTARTS}') == '2' or {KILL}", 2, 0, 3),
        (KILL, 1, 137, 2),
        (KILL, 0, 137, 1),
        ("raise SystemExit(1)", 1, 1, 2),
        ("raise SystemExit(2)", 3, 2, 1),
        ("raise SystemExit(3)", 3, 3, 1),
    ],
)
def test_restarts(script: str, restarts: int, code: int, count: int, tmp_path: Path) -> None:
    """A user's mistake (2) and a run that learned nothing (3) would end the same again."""
    assert attempts(script, tmp_path, restarts) == (code, count)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_run_that_could_be_restarted(number: int, tmp_path: Path) -> None:
    before = signal.signal(number, lambda *_: None)  # a signal that is not handed on must not end the tests
    signal_when(tmp_path / "ready", number)
    try:
        assert attempts("import time; " + waiting(tmp_path / "ready"), tmp_path, 3) == (128 + number, 1)
    finally:
        signal.signal(number, before)


@pytest.mark.process
def test_children_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """Launcher, child: SIGKILL of the first ends the second with SIGTERM, which saves."""
    told = tmp_path / "told"
    child = (
        "import os, signal, time; from megaswift.launchers.parent_death import end_with_parent; "
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(told)!r}, 'w').write('saved'), os._exit(0))); "
        "end_with_parent(os.environ); print(os.getpid(), flush=True); time.sleep(600)"
    )
    launch = (
        "import os, sys; from megaswift.launchers.torchrun_launcher import run_torchrun_with_restarts; "
        f"run_torchrun_with_restarts([sys.executable, '-c', {child!r}], os.environ)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", launch], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert int(launcher.stdout.readline()) != launcher.pid
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 300
    while not (told.exists() and told.stat().st_size) and time.monotonic() < end:
        time.sleep(0.02)
    assert told.read_text() == "saved"


def test_a_port_in_use_is_refused_with_another() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        alone = load_config("sft", ["--nproc_per_node", "2", "--master_port", str(port)], environ={}).launch
        (problem,) = torchrun_launcher.port_in_use_problems(alone)
        assert f"--master_port {port}" in problem.what and "leave it out" in problem.fix
        head, other = (
            load_config(
                "sft", f"--nnodes 2 --node_rank {n} --master_addr h --master_port {port}".split(), environ={}
            ).launch
            for n in (0, 1)
        )
        (problem,) = torchrun_launcher.port_in_use_problems(head)
        assert "on every machine" in problem.fix and torchrun_launcher.port_in_use_problems(other) == []
    assert torchrun_launcher.port_in_use_problems(alone) == []


def test_workers_are_told_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not read NPROC_PER_NODE: without it an option of several processes would be refused there."""
    cfg = load_config("sft", ["--max_restarts", "2"], environ={"NPROC_PER_NODE": "2"})
    arguments = torchrun_launcher.environment_launch_arguments(cfg.launch, cfg.given)
    assert arguments == ["--nproc_per_node", "2"]
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert load_config("sft", ["--max_restarts", "2", *arguments]).launch.max_restarts == 2
    assert torchrun_launcher.environment_launch_arguments(cfg.launch, {"nproc_per_node"}) == []


def test_a_restarted_attempt_resumes_from_its_own_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cfg = load_config("sft", ["--output_dir", str(out), "--overwrite_output_dir"], environ={})
    assert training.config_after_restart(cfg, 0) is cfg
    again = training.config_after_restart(cfg, 1).checkpoint
    assert again.resume_from_checkpoint == "latest" and not again.overwrite_output_dir
    other = load_config("sft", ["--output_dir", str(out), "--resume_from_checkpoint", str(tmp_path)], environ={})
    assert training.config_after_restart(other, 1).checkpoint.resume_from_checkpoint == str(tmp_path), (
        "nothing of its own is saved yet"
    )
    store = checkpoints.CheckpointStore(out / "checkpoints")
    store.begin(3)
    store.finish(3, {}, {})
    assert training.config_after_restart(other, 1).checkpoint.resume_from_checkpoint == "latest"


def test_the_same_job_of_a_cluster_resumes_and_another_is_refused(tmp_path: Path) -> None:
    """A cluster starts pods again without a count: the folder says whose run it holds."""
    out = tmp_path / "out"
    cfg = load_config("sft", ["--output_dir", str(out)], environ={})
    store = checkpoints.CheckpointStore(out / "checkpoints")
    store.begin(3)
    store.finish(3, {}, {})
    assert training.config_after_restart(cfg, 0, "run-1") is cfg, "a run without a job"
    OutputFolder(out).job.write_text("run-1\n")
    assert training.config_after_restart(cfg, 0, "run-1").checkpoint.resume_from_checkpoint == "latest"
    assert training.config_after_restart(cfg, 0, "run-2") is cfg and training.config_after_restart(cfg, 0) is cfg


def test_restarts_of_several_nodes_use_torchrun_s_dynamic_rendezvous() -> None:
    words = [
        "--nnodes",
        "2",
        "--node_rank",
        "1",
        "--master_addr",
        "127.0.0.1",
        "--max_restarts",
        "3",
        "--rdzv_timeout",
        "9",
    ]
    launch = load_config("sft", words, environ={}).launch
    command = torchrun_command(launch, SCRIPT, [])
    assert (
        command[command.index("--rdzv-backend") + 1] == "c10d" and command[command.index("--max-restarts") + 1] == "3"
    )
    assert command[command.index("--rdzv-conf") + 1] == "is_host=0,join_timeout=9"
    assert command[command.index("--local-addr") + 1] == "127.0.0.1"
    environ = torchrun_environment(launch, {})
    assert environ[NODE] == "1 2 127.0.0.1 29500 9.0" and environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    once = load_config("sft", words[:6], environ={}).launch
    assert "--rdzv-backend" not in torchrun_command(once, SCRIPT, [])
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in torchrun_environment(once, {})


@pytest.mark.process
def test_sigusr1_reaches_the_workers_as_sigterm(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = (
        f"import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: (open({str(told)!r}, 'w').write('saved'), "
        "os._exit(0))); " + waiting(tmp_path / "ready")
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal_when(tmp_path / "ready", signal.SIGUSR1)
    try:
        run_torchrun_with_restarts([sys.executable, "-c", script], os.environ)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told.read_text() == "saved"


@pytest.mark.process
def test_a_child_whose_launcher_has_ended_already_ends_too() -> None:
    """A launcher that is killed before its child asks to end with it."""
    script = (
        "from megaswift.launchers.parent_death import PARENT, end_with_parent; "
        "end_with_parent({PARENT: '1'}); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
    told = "import os; raise SystemExit(os.environ.get('MEGASWIFT_PARENT') != str(os.getppid()))"
    assert run_torchrun_with_restarts([sys.executable, "-c", told], os.environ) == 0


@pytest.mark.parametrize(("here", "attempts"), [(True, ["0 1", "1 1", "2 "]), (False, ["0 "])])
def test_out_of_memory_is_restarted_unless_the_agents_do_it(
    here: bool, attempts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 75 at every attempt; each notes its number and whether another one may follow. Not without end."""
    monkeypatch.setattr(torchrun_launcher, "OOM_RETRIES", 2)
    note = (
        "import os, sys; print(os.environ.get('MEGASWIFT_RESTARTS', 0), os.environ.get('MEGASWIFT_OOM_RETRY', ''), "
        f"file=open({str(tmp_path / 'attempts')!r}, 'a')); sys.exit(75)"
    )
    code = run_torchrun_with_restarts([sys.executable, "-c", note], os.environ, retries_oom=here)
    assert code == 2 and (tmp_path / "attempts").read_text().splitlines() == attempts
