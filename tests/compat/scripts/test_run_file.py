"""The text of a migrated file: a comment at every line that changed, and nothing of the input outside of a value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megaswift.compat.scripts.migrated_run import MigratedOption
from megaswift.compat.scripts.run_file import LONGEST, run_file_text
from tests.compat.scripts.translated import loaded, translated

SCRIPT = """
NPROC_PER_NODE=2 swift sft --model some/model --tuner_type full --dataset a.jsonl --torch_dtype bf16 --max_length 64 \\
    --lazy_tokenize true --load_from_cache_file true --metric acc --learning_rate 1e-5
"""
FILE = """\
# From run.sh:2 (ms-swift), by megaswift migrate VERSION.
# Run it with:
#   NPROC_PER_NODE=2 megaswift sft migrated.yaml

task: sft
model: some/model
train_type: full  # --tuner_type full
dataset: [a.jsonl]
torch_dtype: bfloat16  # --torch_dtype bf16
max_length: 64
use_dataset_cache: true  # --load_from_cache_file true
learning_rate: 1.0e-05

# Defaults of ms-swift that differ from megaswift's:
"""


def test_a_file(tmp_path: Path) -> None:
    run = translated(SCRIPT, tmp_path)
    text = run_file_text(run, "migrated.yaml")
    first, rest = text.split("\n", 1)
    assert first.startswith("# From run.sh:2 (ms-swift), by megaswift migrate ")
    assert rest.startswith(FILE.split("\n", 1)[1])
    lines = text.splitlines()
    assert "num_train_epochs: 3  # default of ms-swift: 3; here: 1" in lines
    assert "gradient_accumulation_steps: 8  # default of ms-swift: chosen so that a step has at least 16 rows; " in text
    asked, left = (lines.index(t) for t in (
        "# For you to decide; these are not part of the run:",
        "# Left out, because they change nothing:",
    ))  # fmt: skip
    assert lines[asked + 1].startswith("# - --metric acc: is not an option; ") and asked < left
    assert lines[left + 1].startswith("# - --lazy_tokenize true: rows are tokenized before training")
    assert all(line.startswith("#") or not line or ": " in line for line in lines)


HOSTILE = (
    "x\nlearning_rate: 5",
    "x # y",
    "a: b",
    "[1, 2]",
    "&a *b !!python/object:os.system",
    "'\"\\",
    "\x1b[31mred",
    "null",
    "1e5",
    "yes",
    " blanks ",
    "%TAG",
    "x\u2028learning_rate: 5",
    "\x85learning_rate: 5",
)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_a_value_and_a_comment_a_comment(value: str, tmp_path: Path) -> None:
    quoted = "'" + value.replace("'", "'\"'\"'") + "'"
    script = f"X_{'Y'}={quoted} swift sft --model {quoted} --tuner_type full --no_such {quoted} --dataset {quoted}"
    run = translated(script, tmp_path)
    text = run_file_text(run, f"{value}.yaml")
    read = yaml.safe_load(text)
    assert read["task"] == "sft" and "learning_rate" not in read and set(read) == {"task", *run.options}
    c = loaded(run, tmp_path)
    assert c.value("model") == (None if value == "null" else value) and c.value("learning_rate") == 1e-5
    assert not any(ord(char) < 32 and char != "\n" for char in text)


def test_secrets_are_masked(tmp_path: Path) -> None:
    run = translated("swift sft --model m --hub_token hf_verysecret --api_key abcdefgh --dataset d", tmp_path)
    text = run_file_text(run, "f.yaml")
    assert "hf_verysecret" not in text and "abcdefgh" not in text and "hub_token" not in yaml.safe_load(text)
    assert "# - --hub_token: a secret is not copied; set it in the environment" in text.splitlines()


def test_long_comments_are_cut(tmp_path: Path) -> None:
    run = translated(f"swift sft --model m --no_such {'x' * 9999}", tmp_path)
    assert max(map(len, run_file_text(run, "f.yaml").splitlines())) < LONGEST + 10


def test_numbers(tmp_path: Path) -> None:
    run = translated("swift sft --model m --dataset d", tmp_path)
    for value in (1e-05, 3.0, 0.1, 1e12, 1 / 3):
        run.add(MigratedOption("max_grad_norm", value, "clip"))
        (tmp_path / "x.yaml").write_text(run_file_text(run, "x"))
        assert float(yaml.safe_load((tmp_path / "x.yaml").read_text())["max_grad_norm"]) == value


@pytest.mark.parametrize(
    "start", ["swift sft", "megatron sft", "trl sft", "torchrun --nproc_per_node 8 pretrain_gpt.py"]
)
def test_a_line_of_the_launch_that_the_loader_refuses_is_a_question(start: str, tmp_path: Path) -> None:
    run = translated(f"{start} --model m --dataset d --ray_address auto --lr 1e-4", tmp_path)
    assert loaded(run, tmp_path).optim.learning_rate == 1e-4
    (question,) = [line for line in run.open if line.startswith("ray_address: auto: ")]
    assert "would be ignored: nothing of the run is on Ray" in question and "ray_address" not in run.launch
