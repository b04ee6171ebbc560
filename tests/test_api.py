"""The Python API puts a configuration together; the run itself is the command line's."""

from pathlib import Path

import pytest

from megaswift import SwiftConfig, Trainer
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
