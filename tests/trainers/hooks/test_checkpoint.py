"""Save and resume of the whole trainer on a real engine: the continued run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.errors import CheckpointError
from megaswift.folders.saved_steps import manifest_seal
from megaswift.models.flops import StepFlopFormula
from megaswift.trainers import checkpoints
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hook import Hook, Run
from megaswift.trainers.hooks.checkpoint import CheckpointHook, global_batch_size_change_notice, restore_run
from megaswift.trainers.hooks.metrics import MetricsJsonlHook, ThroughputFormula, read_lines
from megaswift.trainers.loop import train
from megaswift.trainers.options.batch_sizes import BatchPlan
from tests.trainers.tiny import tiny_loop

MODEL = {"family": "tiny", "num_layers": 2}
CLOCK = {
    "step_time",
    "data_wait",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "memory_gib",
}


def loop_in(folder: Path, steps: int, *extra: Hook, every: int | None = 3, seed: int = 0) -> Run:
    hooks = [
        MetricsJsonlHook(folder / "metrics.jsonl", 2, ThroughputFormula([StepFlopFormula(1, 1)], 1), "label_weight"),
        *extra,
        CheckpointHook(CheckpointStore(folder / "checkpoints"), every, None, {"model": MODEL, "config": {}}),
    ]
    return tiny_loop(steps, *hooks, seed=seed)


def values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read_lines(folder / "metrics.jsonl")]


def weights(loop: Run) -> dict[str, torch.Tensor]:
    return loop.engine.model.state_dict()


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = loop_in(tmp_path / "whole", 9)
    (tmp_path / "whole").mkdir()
    train(whole)
    (tmp_path / "cut").mkdir()
    train(loop_in(tmp_path / "cut", 9, Kill(5)))  # steps 4 and 5 are past the checkpoint of step 3
    (tmp_path / "cut" / "checkpoints" / "step-5").rename(tmp_path / "lost")  # as if the process had died
    second = loop_in(tmp_path / "cut", 9, seed=99)
    folder = CheckpointStore(tmp_path / "cut" / "checkpoints").latest()
    assert folder is not None and folder.name == "step-3"
    restore_run(second, folder, MODEL)
    assert second.step == 3 and second.data.position == 3
    train(second)
    assert values(tmp_path / "cut") == values(tmp_path / "whole")
    assert [line["step"] for line in values(tmp_path / "cut")] == [2, 4, 6, 8, 9]
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


@pytest.mark.parametrize("name", ["data", "hooks"])
def test_a_manifest_without_a_state_of_the_run(name: str, tmp_path: Path) -> None:
    train(loop_in(tmp_path, 3))
    folder = CheckpointStore(tmp_path / "checkpoints").latest()
    assert folder is not None
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[name], manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_seal(manifest)}))
    with pytest.raises(CheckpointError, match=f"manifest.json: lacks the state of {name}"):
        restore_run(loop_in(tmp_path, 6), folder, MODEL)


def test_data_from_the_first_row_again(tmp_path: Path) -> None:
    """ignore_data_skip: all else goes on where it was."""
    train(loop_in(tmp_path, 3))
    folder = CheckpointStore(tmp_path / "checkpoints").latest()
    assert folder is not None
    second = loop_in(tmp_path, 6, seed=99)
    restore_run(second, folder, MODEL, data=False)
    assert (second.step, second.data.position) == (3, 0)


class Kill(Hook):
    """SIGTERM to this process at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, loop: Run, step: Any) -> None:
        if step.number == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_the_step_it_came_in(tmp_path: Path) -> None:
    loop = loop_in(tmp_path, 9, Kill(4))
    train(loop)
    assert loop.interrupted == signal.SIGTERM
    assert CheckpointStore(tmp_path / "checkpoints").latest() == tmp_path / "checkpoints" / "step-4"


def test_the_last_step_is_saved_once_and_a_run_without_save_steps_saves_at_its_end(tmp_path: Path) -> None:
    for every, steps in ((3, ["step-3", "step-6"]), (None, ["step-6"]), (4, ["step-4", "step-6"])):
        folder = tmp_path / str(every)
        folder.mkdir()
        loop = loop_in(folder, 6, every=every)
        saves: list[int] = []
        save = loop.engine.save
        loop.engine.save = lambda directory, loop=loop, save=save, saves=saves: (
            saves.append(loop.step),
            save(directory),
        )[1]
        train(loop)
        assert [f"step-{n}" for n in saves] == steps
        assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == steps


def test_steps_of_another_size_are_told() -> None:
    four, eight = BatchPlan(2, 1, 4), BatchPlan(2, 2, 8)
    assert (
        global_batch_size_change_notice({"global_batch_size": 4}, four)
        == global_batch_size_change_notice({}, four)
        == ""
    )
    assert "is 8; it was 4 in the checkpoint's run: --global_batch_size 4 keeps it" in global_batch_size_change_notice(
        {"global_batch_size": 4}, eight
    )
    assert (
        "is 8; it was 6 in the checkpoint's run: fewer data-parallel ranks keep it"
        in global_batch_size_change_notice({"global_batch_size": 6}, eight)
    )


def test_a_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    train(loop_in(tmp_path, 3))
    file = tmp_path / "checkpoints" / "step-3" / "engine" / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state\.pt: its content changed"):
        restore_run(loop_in(tmp_path, 6), tmp_path / "checkpoints" / "step-3", MODEL)


def test_another_model_and_another_format_are_refused_together(tmp_path: Path) -> None:
    train(loop_in(tmp_path, 3))
    folder = tmp_path / "checkpoints" / "step-3"
    manifest = json.loads((folder / checkpoints.MARKER).read_text()) | {"format": 9}
    (folder / checkpoints.MARKER).write_text(json.dumps(manifest | {"sha256": checkpoints.manifest_seal(manifest)}))
    with pytest.raises(CheckpointError) as error:
        restore_run(loop_in(tmp_path, 6), folder, {"family": "tiny", "num_layers": 4})
    assert [p.rule for p in error.value.problems] == [
        "has format 9; this version reads 1",
        "is 2 in the checkpoint and 4 in --model",
    ]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    loop = loop_in(tmp_path, 9)
    save = loop.engine.save

    def full(directory: Path) -> Any:
        if loop.step == 6:
            (directory / "state.pt").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save(directory)

    loop.engine.save = full
    with pytest.raises(OSError, match="No space"):
        train(loop)
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() == tmp_path / "checkpoints" / "step-3"
    assert [p.name for p in store.incomplete()] == ["step-6.saving"]
