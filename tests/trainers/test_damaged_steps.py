"""Steps that were damaged after they were saved: no command uses one, and a history is never started over.

Covers: megaswift/trainers/file_hashes.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.convert import to_hf
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.bridge.convert.weight_comparison import WeightComparisonSide
from megaswift.bridge.weight_source import open_weights
from megaswift.cli import main
from megaswift.config import load_config
from megaswift.errors import CheckpointError
from megaswift.folders import saved_steps
from megaswift.folders.source import locate_model
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.inference.prechecks import locate_generation_model
from megaswift.run import output
from megaswift.run.checks.sources import verify_sources_and_locate_model
from megaswift.trainers import checkpoints
from megaswift.trainers.file_hashes import first_intact_step
from tests.bridge.folders import make
from tests.parity.pool import RankError
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

FILE = "engine/__0_0.distcp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with the steps 4 and 8 of one model."""
    root = tmp_path_factory.mktemp("whole")
    converted, store = root / "converted", checkpoints.CheckpointStore(root / "run" / "checkpoints")
    hf_to_megatron(make("dense", root), converted, HfToMegatronOptions({"tp": 1}))
    for step in (4, 8):
        folder = store.begin(step)
        shutil.copytree(converted, folder / "engine", ignore=shutil.ignore_patterns("model"))
        shutil.copytree(converted / "model", folder / "model")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        store.finish(
            step,
            checkpoints.hash_files(folder, checkpoints.unhashed_files(folder, ())),
            {"data": {}, "hooks": {}},
        )
    (root / "run" / "metrics.jsonl").write_text('{"step": 8}\n')
    return root / "run"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip(file: Path) -> None:
    """One bit of a weight, which nothing but the hash can see."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def step(out: Path, number: int) -> Path:
    return out / "checkpoints" / f"step-{number}"


def test_no_reader_takes_a_damaged_step_that_is_named(out: Path, tmp_path: Path) -> None:
    bad = step(out, 8)
    flip(bad / FILE)
    flip(bad / "adapter" / "adapter_config.json")
    options = ModelLoadingOptions(model=str(bad))
    readers = [
        lambda: open_weights(bad),
        lambda: open_weights(bad / "model"),
        lambda: to_hf.megatron_to_hf(bad, tmp_path / "hf"),
        lambda: locate_model(options),
        lambda: locate_generation_model(options),
        lambda: verify_sources_and_locate_model(
            load_config("sft", ["--model", str(bad), "--dataset", "d.jsonl"]), bad / "model"
        ),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=r"__0_0.distcp: its content changed(.|\n)*another step.*step-4"):
            read()
    added = str(bad / "adapter")
    good, words = str(step(out, 4)), ["--model", str(step(out, 4)), "--dataset", "d.jsonl", "--train_type", "lora"]
    for read in (
        lambda: PeftFolder(bad / "adapter"),
        lambda: locate_generation_model(ModelLoadingOptions(model=good, adapters=(added,))),
        lambda: verify_sources_and_locate_model(
            load_config("sft", [*words, "--adapters", added]), step(out, 4) / "model"
        ),
        lambda: merge_adapter_folder_into_base(good, added, tmp_path / "hf"),
    ):
        with pytest.raises(CheckpointError, match=r"adapter_config.json: its content changed"):
            read()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: its content changed"):
        merge_adapter_folder_into_base(bad, step(out, 4) / "adapter", tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: its content changed"):
        WeightComparisonSide.open(bad)
    assert not (tmp_path / "hf").exists()
    assert locate_model(options, weights=False) == bad / "model"  # names alone: before the ranks share the reading


def test_of_a_run_the_newest_intact_step_is_taken(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flip(step(out, 8) / FILE)
    assert locate_model(ModelLoadingOptions(model=str(out))) == step(out, 4) / "model"
    assert "step-8 is damaged and is not used" in capsys.readouterr().err
    cfg = load_config("sft", ["--model", str(out), "--dataset", "d.jsonl"])
    assert verify_sources_and_locate_model(cfg, locate_model(cfg.model, verify=False)) == step(out, 4) / "model"
    assert main(["convert", "megatron-to-hf", str(out), str(tmp_path / "hf")]) == 0
    good = open_weights(step(out, 4))
    assert all(torch.equal(open_weights(tmp_path / "hf").slice(name), good.slice(name)) for name in good.names())
    assert first_intact_step(checkpoints.resume_step_candidates("latest", out)[0]) == step(out, 4)
    flip(step(out, 4) / FILE)
    for read in (
        lambda: open_weights(out),
        lambda: first_intact_step(checkpoints.resume_step_candidates("latest", out)[0]),
    ):
        with pytest.raises(CheckpointError, match="its content changed"):
            read()


def test_without_a_manifest_an_older_step_is_taken(out: Path) -> None:
    (step(out, 8) / "manifest.json").write_text("{")
    steps, notes = checkpoints.resume_step_candidates("latest", out)
    assert steps == [step(out, 4)] and "step-8: its manifest.json is damaged" in notes[0]
    assert locate_model(ModelLoadingOptions(model=str(out))) == step(out, 4) / "model"
    with pytest.raises(CheckpointError, match=r"manifest.json: cannot be read"):
        open_weights(step(out, 8))
    (step(out, 8) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json: is missing"):
        open_weights(step(out, 8))


@pytest.mark.parametrize("harm", ["manifests", "folders"])
def test_a_history_is_not_started_over(harm: str, out: Path) -> None:
    for number in (4, 8):
        if harm == "manifests":
            (step(out, number) / "manifest.json").write_text("")
        else:
            shutil.rmtree(step(out, number))
    words = ["--model", "m", "--dataset", "d", "--output_dir", str(out)]
    problems = output.output_folder_problems(load_config("sft", [*words, "--resume_from_checkpoint", "latest"]))
    assert len(problems) == 1 and "--overwrite_output_dir true" in problems[0].fix
    assert problems[0].rule.startswith(
        "has no usable checkpoint" if harm == "manifests" else "has no checkpoint, but latest.json"
    )
    assert output.output_folder_problems(load_config("sft", [*words, "--overwrite_output_dir", "true"])) == []
    with pytest.raises(CheckpointError):
        open_weights(out)


def test_a_run_killed_before_its_first_step_was_saved_starts_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    checkpoints.CheckpointStore(tmp_path / "checkpoints").begin(2)
    steps, notes = checkpoints.resume_step_candidates("latest", tmp_path)
    assert steps == [] and "an interrupted save" in notes[0]


def test_a_file_is_read_once_until_it_changes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = checkpoints.saved_steps.hash_file
    monkeypatch.setattr(checkpoints.saved_steps, "hash_file", lambda path: (read.append(path.name), real(path))[1])
    for _ in range(2):
        locate_model(ModelLoadingOptions(model=str(out)))
        open_weights(step(out, 8))
    assert len(read) == len(set(read)) > 3
    flip(step(out, 8) / FILE)
    with pytest.raises(CheckpointError):
        open_weights(step(out, 8))


@pytest.mark.slow
def test_a_run_goes_on_from_the_step_before_a_damaged_one(tmp_path: Path) -> None:
    words, out = write_inputs(tmp_path), tmp_path / "out"
    run(words, out, "--max_steps", 4, "--save_steps", 2, "--logging_steps", 1)
    flip(next((step(out, 4) / "engine").glob("__1_0.distcp")))
    text = run(words, out, "--max_steps", 6, "--logging_steps", 1, "--resume_from_checkpoint", "latest")
    assert "step-4 is damaged and is not used" in text and "resuming from" in text and "step-2" in text
    lines = (out / "metrics.jsonl").read_text()
    assert [f'"step": {n}' in lines for n in range(1, 7)] == [True] * 6
    for manifest in out.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(RankError):
        run(words, out, "--max_steps", 8, "--resume_from_checkpoint", "latest")
    assert (out / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("name", ["engine/" + "x" * 300, "engine/a\ud83d", "engine", FILE + "/x"])
def test_a_manifest_with_names_that_no_file_has(out: Path, name: str) -> None:
    step = out / "checkpoints" / "step-8"
    manifest = saved_steps.load_manifest_or_problem(step)
    assert isinstance(manifest, dict)
    manifest["files"][name] = manifest["files"][FILE]
    (step / saved_steps.MARKER).write_text(json.dumps(manifest | {"sha256": saved_steps.manifest_seal(manifest)}))
    assert [p.what for p in saved_steps.damaged_file_problems(step)] == [str(step / name)]
    (saved,) = (s for s in saved_steps.steps_with_valid_manifest(step.parent) if s.path == step)
    assert saved_steps.has_missing_or_known_changed_files(saved)
