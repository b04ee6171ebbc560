"""The Python API puts a configuration together; the run itself is the command line's."""

import json
from pathlib import Path

import datasets
import pytest

from megaswift import SwiftConfig, Trainer
from megaswift.api import python_api_launch_option_problems
from megaswift.errors import ConfigError
from tests.data.makers import chat
from tests.trainers.inputs import write_model


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
    with pytest.raises(ConfigError, match="--nproc_per_node 2: the Python API does not start processes"):
        trainer.train("d.jsonl")
    assert (
        python_api_launch_option_problems(SwiftConfig().launch)
        == python_api_launch_option_problems(SwiftConfig(nproc_per_node=1).launch)
        == []
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert python_api_launch_option_problems(trainer.config.launch) == []
    refused = python_api_launch_option_problems(SwiftConfig(nproc_per_node=4).launch)
    assert [p.what for p in refused] == ["--nproc_per_node 4"]


@pytest.mark.process
def test_rows_go_in_and_metrics_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of rows, a `datasets.Dataset` to evaluate on; what comes back is what the files hold."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    rows = [chat(f"{i}+1=", str(i + 1)) for i in range(8)]
    options = {"engine": "ddp", "max_steps": 2, "global_batch_size": 4, "output_dir": str(tmp_path / "out")}
    trainer = Trainer(
        write_model(tmp_path / "model"), SwiftConfig(dataset_cache_dir=str(tmp_path / "cache"), **options)
    )
    result = trainer.train(dataset=rows, val_dataset=datasets.Dataset.from_list(rows[:3]))
    assert result.output_dir == tmp_path / "out" and result.global_step == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert result.log_history == lines and result.metrics == lines[-1] and result.metrics["loss"] > 0
    evaluated = json.loads((tmp_path / "out" / "eval.jsonl").read_text().splitlines()[-1])
    assert result.eval_metrics == evaluated and evaluated["step"] == 2
    assert (tmp_path / "out" / "hf" / "config.json").is_file()
