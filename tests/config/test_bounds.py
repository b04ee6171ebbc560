"""What is absurd, nested without end or secret: one message, at once, and without the secret.

Covers: megaswift/options/option.py, megaswift/base/redaction.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaswift.commands.convert import convert_command
from megaswift.config import SwiftConfig, load_config
from megaswift.deploy import COMMAND as DEPLOY
from megaswift.errors import ConfigError, WeightsError
from megaswift.families import load_spec
from megaswift.models.family import read_config_json
from megaswift.models.published.table import LLAMA_3_1_8B


@contextmanager
def at_once(seconds: float = 5.0) -> Iterator[None]:
    """At most so many seconds of this thread's processor time, which other processes do not lengthen."""
    began = time.thread_time()
    yield
    assert time.thread_time() - began < seconds


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("sft", list(argv), environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    "words, part",
    [
        (f"--seed {2**70}", f"must be >= 0 and <= {2**62}\n    try: --seed {2**62}"),
        (f"--data_seed {2**63}", f"must be >= 0 and <= {2**62}"),
        (f"--max_length {2**60}", f"must be <= {2**53}"),
        (f"--lora_rank {10**400}", "must be a finite number"),
        ("--columns " + '{"a":' * 5000, "is not valid JSON"),
    ],
)
def test_absurd_values(words: str, part: str) -> None:
    assert part in refused(*words.split(" ", 1))
    assert load_config("sft", ["--seed", str(2**62)], environ={}).train.seed == 2**62


BOMB = (
    "a: &a ["
    + "x," * 9
    + "x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9))
)


@pytest.mark.wide
@pytest.mark.parametrize(
    "name, text, part",
    [
        ("bomb.yaml", BOMB, "contains more than 20,000 values, with its aliases expanded"),
        ("own.yaml", "dataset: &a [*a]\n", "contains more than 20,000 values"),
        ("many.yaml", "a: 1\n" * 100_000, "contains more than 20,000 values"),
        ("deep.yaml", "dataset: " + "[" * 20_000, "is nested too deeply"),
        ("block.yaml", "\n".join(" " * i + "a:" for i in range(1000)), "is nested too deeply"),
        ("long.yaml", "x" * (2 << 20), "is larger than 1 MiB"),
        ("digits.yaml", "seed: " + "1" * 5000, "contains a value that cannot be read"),
        ("date.yaml", "seed: 2026-99-99", "contains a value that cannot be read"),
        ("deep.json", '{"dataset": ' + "[" * 100_000, "is nested too deeply"),
        ("digits.json", '{"seed": ' + "1" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_files_without_end(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with at_once():
        assert part in refused(str(tmp_path / name))


def test_an_alias_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("dataset: &rows [a.jsonl]\nval_dataset: *rows\n")
    assert load_config("sft", [str(tmp_path / "run.yaml")], environ={}).data.val_dataset == ("a.jsonl",)


SECRET = "hf_TooManyKnowIt"


@pytest.mark.parametrize(
    "name", ["hf_token", "hub-access-token", "api_keyy", "wandb_api_key", "aws_secret", "PASSWORD"]
)
def test_no_message_repeats_a_secret(tmp_path: Path, name: str) -> None:
    for words in ([f"--{name}", SECRET], [f"--{name}={SECRET}"], [f"--{name}", SECRET, SECRET, "--lr", SECRET]):
        text = refused(*words)
        assert SECRET not in text and f"--{name} ***: is not an option" in text
    for file, text in (("r.yaml", f"{name}: {SECRET}"), ("r.json", json.dumps({"model": {name: SECRET}}))):
        (tmp_path / file).write_text(text)
        assert SECRET not in refused(str(tmp_path / file))
    with pytest.raises(ConfigError) as caught:
        SwiftConfig(**{name.replace("-", "_"): SECRET})
    assert SECRET not in str(caught.value) and "***" in str(caught.value)


def test_a_known_secret_is_masked_in_training(tmp_path: Path) -> None:
    """Where it is a mistake, beside another mistake, from a file."""
    other = "hf_AndThisOneToo"
    text = refused("--push_to_hub", "true", "--hub_token", SECRET, other)
    assert SECRET not in text and other not in text and "***" in text
    text = refused("--push_to_hub", "true", "--hub_token", SECRET, "--hub_token", other, "--lr", "x")
    assert SECRET not in text and other not in text
    (tmp_path / "r.yaml").write_text(f"hub_token: {SECRET}\npush_to_hub: true\nhub_model_id: [{SECRET}, b]\n")
    assert SECRET not in refused(str(tmp_path / "r.yaml"))


def test_a_known_secret_is_masked_in_other_commands() -> None:
    for words in (["--api_key", SECRET, "--prot", "1"], ["--hf_token", SECRET], ["--api_key", SECRET, SECRET]):
        with pytest.raises(ConfigError) as caught:
            DEPLOY.parse(["--model", "m", *words])
        assert SECRET not in str(caught.value)


def test_converters_mask_secrets_too() -> None:
    for words in (["--hf_token", SECRET], [f"--hf-token={SECRET}"], ["--dtipe", "7", "--api_key", SECRET, SECRET]):
        with pytest.raises(ConfigError) as caught:
            convert_command(["hf-to-megatron", "a", "b", *words])
        assert SECRET not in str(caught.value) and "***" in str(caught.value)


def test_what_is_no_secret_is_shown() -> None:
    for words in ("--eos_token </s>", "--max_new_tokenss 77", "--projection_prng_keyy 5"):
        assert words in refused(*words.split())


SIZES = ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"]


@pytest.mark.parametrize(
    "key, value",
    [*((key, value) for key in SIZES for value in (2**62, 2**30)), ("max_position_embeddings", 2**40)],
)
def test_sizes_beyond_any_model(tmp_path: Path, key: str, value: int) -> None:
    config = dict(LLAMA_3_1_8B) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal = f"{key}.*(must be at most|is larger than in any known model)"
    with at_once(), pytest.raises(WeightsError, match=refusal):
        load_spec(tmp_path)


def test_a_config_json_without_end(tmp_path: Path) -> None:
    for text, part in (
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "cannot be read"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(WeightsError, match=part):
            read_config_json(tmp_path)
