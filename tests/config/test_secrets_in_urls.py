"""URLs with credentials among a run's options, which config.yaml, logs and checkpoints would keep.

Covers: megaswift/options/given_options.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift import export, infer
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import OPTIONS
from megaswift.errors import ConfigError
from megaswift.options.given_options import CREDENTIALS
from megaswift.rollout.server_client import KEY

URLS = (
    "https://bob:hunter2@host/x",
    "https://hunter2@host",
    "https://host/x?token=hunter2",
    "https://host/?sig=hunter2",
)
ADDRESSES = (
    ("sft", "mlflow_tracking_uri"),
    ("grpo", "rollout_server_url"),
    ("grpo", "vllm_server_base_url"),
    ("sft", "dataset"),
    ("sft", "val_dataset"),
    ("sft", "model"),
    ("sft", "hub_model_id"),
    ("sft", "external_plugins"),
    ("sft", "output_dir"),
)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(("task", "name"), ADDRESSES)
def test_credentials_are_refused_and_not_repeated(task: str, name: str, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(task, [f"--{name}", url])
    assert "token in a URL" in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{name: [{inner: 'https://bob:hunter2@host'}]}", "['http://a:1', 'http://b:hunter2@c']"]
)
def test_so_are_those_inside_a_value_of_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"rollout_server_url: {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", [str(file)])
    assert "hunter2" not in str(caught.value)


def test_an_option_of_python_is_no_exception() -> None:
    with pytest.raises(ConfigError, match="token in a URL") as caught:
        SwiftConfig("sft", mlflow_tracking_uri=URLS[0])
    assert "hunter2" not in str(caught.value)


def test_nor_are_those_of_other_commands() -> None:
    with pytest.raises(ConfigError, match="token in a URL") as caught:
        export.COMMAND.parse(["--model", URLS[0], "--merge_lora", "true"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://mlflow:5000", "https://host/a@b", "http://10.0.0.1:8000/v1?tokens=5", "file:///x"]
)
def test_other_addresses_are_taken(url: str) -> None:
    assert (
        load_config("sft", ["--report_to", "mlflow", "--mlflow_tracking_uri", url]).trackers.mlflow_tracking_uri == url
    )


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", ["system", "chat_template", "model_name", "model_author"])
def test_a_url_in_a_text_for_the_model_is_part_of_the_text(name: str, url: str) -> None:
    text = f"Use curl {url} to ask."
    value = getattr(load_config("sft", [f"--{name}", text]).data, name)
    assert value in (text, (text,))


def test_so_are_those_in_texts_of_other_commands(tmp_path: Path) -> None:
    text = f"Use curl {URLS[0]} to ask."
    assert infer.COMMAND.parse(["--model", "m", "--system", text]).sections["conversation"].system == text
    words = ["--model", str(tmp_path), "--push_to_hub", "true", "--commit_message", text]
    assert export.COMMAND.parse(words).sections["upload"].commit_message == text


def test_the_variables_are_those_that_are_read() -> None:
    assert {*CREDENTIALS} <= {*OPTIONS} and KEY in CREDENTIALS["rollout_server_url"]
