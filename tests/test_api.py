"""The Python API puts a configuration together; the run itself is the command line's."""

from pathlib import Path

import pytest

from megaswift import SwiftConfig, Trainer
from megaswift.api import launch_problems
from megaswift.errors import ConfigError


def test_the_design_s_example_is_understood(tmp_path: Path) -> None:
    trainer = Trainer(model=tmp_path, config=SwiftConfig(parallel={"tensor_parallel_size": 4}, dtype="bf16"))
    assert trainer.config.model.model == str(tmp_path) and trainer.config.parallel.tensor_parallel_size == 4
    assert trainer.config.model.torch_dtype == "bfloat16" and trainer.config.task == "sft"


def test_what_is_missing_is_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(config=SwiftConfig(task="pt")).train()
    assert [p.what for p in caught.value.problems] == ["model", "dataset"]


def test_options_of_train_are_checked() -> None:
    with pytest.raises(ConfigError, match="nosuch=1: is not an option"):
        Trainer("DIR").train(dataset="d.jsonl", nosuch=1)


def test_launch_options_that_are_not_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    trainer = Trainer("NO_SUCH_DIR", SwiftConfig(nproc_per_node=2))
    with pytest.raises(ConfigError, match="--nproc_per_node 2: the Python API starts no processes"):
        trainer.train("d.jsonl")
    assert launch_problems(SwiftConfig()) == launch_problems(SwiftConfig(nproc_per_node=1)) == []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launch_problems(trainer.config) == []
    assert [p.what for p in launch_problems(SwiftConfig(nproc_per_node=4))] == ["--nproc_per_node 4"]
