"""The version folder of a run: new ones never collide, a resumed or restarted run finds its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megaswift.base.versions import version_number, versions
from megaswift.config import SwiftConfig
from megaswift.launchers.options.variables import JOB_ID, RESTARTS, RUN
from megaswift.run import output_version
from megaswift.run.output import OutputFolder, output_folder_problems, prepare_output_folder
from megaswift.run.output_version import (
    config_of_new_version,
    config_of_started_version,
    make_version,
    names_of_all_ranks,
    run_names,
)
from megaswift.trainers.checkpoints import CheckpointStore
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs


def config(root: Path, **options: object) -> SwiftConfig:
    return SwiftConfig(task="sft", model="m", dataset="d.jsonl", output_dir=str(root), add_version=True, **options)


def begin(cfg: SwiftConfig, step: int | None = None, **environ: str) -> Path:
    """The folder of a run as `run_training` chooses it; with a checkpoint of `step`."""
    names = names_of_all_ranks(run_names(cfg, environ))
    settled = config_of_new_version(config_of_started_version(cfg, names, environ))
    assert settled.checkpoint.add_version is False
    outputs = prepare_output_folder(settled, names=names)
    if step is not None:
        outputs.metrics.write_text('{"step": 1}\n')
        outputs.store.begin(step)
        outputs.store.finish(step, {}, {})
    return outputs.root


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = begin(config(tmp_path)), begin(config(tmp_path))
    assert [version_number(first), version_number(second)] == [0, 1] and versions(tmp_path) == [first, second]


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(make_version, [tmp_path] * 16))
    assert len(set(made)) == 16
    assert sorted(map(version_number, made)) == sorted({*map(version_number, made)}), "each number once"


def test_a_number_taken_in_another_second_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "v0-20260101-000000"
    read = iter([[], [taken], [taken], [taken]])
    monkeypatch.setattr(output_version, "versions", lambda root: next(read))
    assert version_number(make_version(tmp_path)) == 1
    assert [path.name[:2] for path in versions(tmp_path)] == ["v1"]


@pytest.mark.parametrize("variables", [{JOB_ID: "run-1"}, {RUN: "a"}])
def test_a_restart_keeps_the_folder_and_resumes(variables: dict[str, str], tmp_path: Path) -> None:
    cfg = config(tmp_path)
    own = begin(cfg, step=3, **variables)
    begin(cfg, step=5)
    again = {**variables, RESTARTS: "1"}
    settled = config_of_started_version(cfg, run_names(cfg, again), again)
    assert settled.checkpoint.output_dir == str(own) and settled.checkpoint.resume_from_checkpoint == "latest"
    assert begin(cfg, **again) == own
    other = {name: f"{value}-other" for name, value in again.items() if name != RESTARTS} | {RESTARTS: "1"}
    assert begin(cfg, **other) not in (own, versions(tmp_path)[1]), "a run that died before it had a folder"


def test_a_job_that_slurm_queues_again_resumes_its_own_folder(tmp_path: Path) -> None:
    """A batch script of the user, which no variable of ours names: two commands, queued again."""
    one, two = config(tmp_path), config(tmp_path, learning_rate=1e-4)
    first = begin(one, step=1, SLURM_JOB_ID="7")
    second = begin(two, step=2, SLURM_JOB_ID="7")
    assert first != second
    assert begin(one, SLURM_JOB_ID="7") not in (first, second), "the same command again in an interactive job"
    assert begin(one, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1") not in (first, second)
    assert begin(two, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1") == second


def test_names_of_any_rank_find_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a second attempt may be on a machine that was lost: the other ranks' launchers have not changed."""
    cfg = config(tmp_path)
    monkeypatch.setattr(output_version.distributed, "all_gather_objects", lambda names: [names, ("agent b",)])
    names = names_of_all_ranks(("agent a",))
    assert names == ("agent a", "agent b")
    made = config_of_new_version(config_of_started_version(cfg, names, {}))
    prepare_output_folder(made, names=names)
    again = config_of_started_version(cfg, ("agent c", "agent b"), {})
    assert again.checkpoint.output_dir == made.checkpoint.output_dir


def test_latest_is_the_newest_version_that_has_a_run(tmp_path: Path) -> None:
    old, new = begin(config(tmp_path), step=3), begin(config(tmp_path), step=5)
    begin(config(tmp_path))  # it failed before its first step
    cfg = config(tmp_path, resume_from_checkpoint="latest")
    assert output_folder_problems(cfg) == []
    settled = config_of_started_version(cfg, (), {}).checkpoint
    assert (settled.output_dir, settled.resume_from_checkpoint) == (str(new), "latest")
    whole = config_of_started_version(config(tmp_path, resume_from_checkpoint=str(tmp_path)), (), {}).checkpoint
    assert (whole.output_dir, whole.resume_from_checkpoint) == (str(new), "latest")
    step = str(OutputFolder(old).store.folder(3))
    named = config(tmp_path, resume_from_checkpoint=step)
    assert output_folder_problems(named) == []
    settled = config_of_started_version(named, (), {}).checkpoint
    assert (settled.output_dir, settled.resume_from_checkpoint) == (str(old), step)


def test_without_a_version_latest_starts_one_and_a_run_of_the_folder_itself_is_continued(tmp_path: Path) -> None:
    cfg = config(tmp_path, resume_from_checkpoint="latest")
    assert output_folder_problems(cfg) == [] and config_of_started_version(cfg, (), {}) is cfg
    store = CheckpointStore(tmp_path / "checkpoints")
    store.begin(2)
    store.finish(2, {}, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert output_folder_problems(cfg) == []
    assert config_of_started_version(cfg, (), {}).checkpoint.output_dir == str(tmp_path)


def test_a_version_below_an_occupied_folder_is_let_in(tmp_path: Path) -> None:
    prepare_output_folder(SwiftConfig(task="sft", output_dir=str(tmp_path)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert output_folder_problems(config(tmp_path)) == []
    refused = output_folder_problems(SwiftConfig(task="sft", output_dir=str(tmp_path)))
    assert "--add_version true" in refused[0].fix and "--resume_from_checkpoint latest" in refused[0].fix
    (tmp_path / "file").write_text("")
    assert "is a file" in output_folder_problems(config(tmp_path / "file"))[0].rule


SCRIPT = """\
import sys
from megaswift.commands import training as training_command_entry
from megaswift.config.swift_config import SwiftConfig
from megaswift.api import Trainer

words = sys.argv[1:]
for _ in range(2):
    assert training_command_entry.main("sft", words) == 0
options = dict(zip([w.lstrip("-") for w in words[::2]], words[1::2]))
out = Trainer(options.pop("model"), SwiftConfig(**options)).train().output_dir
print("python", out)
"""


@pytest.mark.process
def test_commands_and_python_without_a_folder_write_side_by_side(tmp_path: Path) -> None:
    words = [*write_inputs(tmp_path), "--engine", "ddp", "--max_steps", "1", "--save_strategy", "no"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    made = versions(tmp_path / "output")
    assert [version_number(path) for path in made] == [0, 1, 2]
    lines = done.stdout.splitlines()
    said = [f"megaswift: output folder: {path.relative_to(tmp_path)}" for path in made]
    assert [line for line in lines if "output folder" in line] == said
    assert lines[-1] == f"python {made[-1].relative_to(tmp_path)}" and lines[-2] == said[-1], "the last line of a run"
    assert all((path / "hf/config.json").is_file() for path in made)
    assert f"output_dir: {made[0].relative_to(tmp_path)}" in (made[0] / "config.yaml").read_text()


FAULT = """\
import os, signal
from megaswift.launchers.options.variables import restart_count
from megaswift.trainers.hook import Run
emit = Run.emit

def planted(self, event, *values):
    emit(self, event, *values)
    if event == "on_step" and self.step == 3 and restart_count(os.environ) == 0:
        os.kill(os.getpid(), signal.SIGKILL)

Run.emit = planted
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("-m megaswift sft --nproc_per_node 2 --max_restarts 1", id="own"),
        pytest.param(
            "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1 megaswift/sft.py",
            id="torchrun",
        ),
    ],
)
def test_ranks_agree_and_a_restart_keeps_the_folder(launcher: str, tmp_path: Path) -> None:
    from tests.trainers.planted import STARTER

    (tmp_path / "sitecustomize.py").write_text(STARTER)
    (tmp_path / "planted_fault.py").write_text(FAULT)
    options = "--engine ddp --max_steps 5 --save_steps 1 --global_batch_size 8 --logging_steps 1 --report_to none"
    begun = shlex.split(launcher.replace("megaswift/sft.py", str(ROOT / "megaswift/sft.py")))
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1", "FAULTY_RANK": "1"}
    done = subprocess.run(
        [sys.executable, *begun, *write_inputs(tmp_path), *options.split()],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    made = versions(tmp_path / "output")
    assert len(made) == 1 and "resuming from" in done.stderr, done.stderr
    steps = [line.split(",")[0] for line in (made[0] / "metrics.jsonl").read_text().splitlines()]
    assert steps == [f'{{"step": {n}' for n in (1, 2, 3, 4, 5)]
