"""`megaswift migrate` as a user types it: files, exit codes, messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.cli import COMMANDS, main, usage
from megaswift.commands.migrate import EXIT_OPEN
from megaswift.commands.migrate import main as migrate
from megaswift.config import load_config
from megaswift.errors import ConfigError

COMPLETE = (
    "NPROC_PER_NODE=2 swift sft --model some/model --tuner_type full --dataset a.jsonl --max_length 64 --output_dir o\n"
)
OPEN = "swift pt --model $MODEL --dataset a.jsonl --max_length 64\n"


def test_exit_codes_and_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "done.sh").write_text(COMPLETE)
    (tmp_path / "open.sh").write_text(OPEN)
    assert main(["migrate", str(tmp_path / "done.sh")]) == 0
    text = capsys.readouterr().out
    (tmp_path / "out.yaml").write_text(text)
    assert "NPROC_PER_NODE=2 megaswift sft done.yaml" in text
    assert load_config("sft", [str(tmp_path / "out.yaml")], environ={}).value("max_length") == 64
    assert migrate([str(tmp_path / "open.sh")]) == EXIT_OPEN == 3
    assert "- model: $MODEL: the script does not set $MODEL" in capsys.readouterr().out
    assert main(["migrate", str(tmp_path / "none.sh")]) == 2
    assert "none.sh: cannot be read: No such file" in capsys.readouterr().err


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "both.sh").write_text(COMPLETE + OPEN)
    (tmp_path / "more.yaml").write_text(
        "rlhf_type: dpo\nmodel: some/model\nmax_length: 8\ndataset: a.jsonl\nlr: 1e-6\n"
    )
    files = [str(tmp_path / name) for name in ("both.sh", "more.yaml")]
    out = tmp_path / "new" / "folder"
    assert migrate([*files, "--output_dir", str(out)]) == 3
    assert sorted(os.listdir(out)) == ["both-1.yaml", "both-2.yaml", "more.yaml"]
    c = load_config(None, [str(out / "more.yaml")], environ={})
    assert (c.task, c.value("learning_rate"), c.value("packing"), c.value("use_hf")) == ("dpo", 1e-6, None, False) or (
        c.value("packing") is False
    )
    said = capsys.readouterr()
    assert "both-1.yaml (both.sh:1: complete)" in said.out + said.err
    with pytest.raises(ConfigError, match="exists"):
        migrate([*files, "--output_dir", str(out)])
    assert migrate([*files, "--output_dir", str(out), "--overwrite"]) == 3
    with pytest.raises(ConfigError, match=r"several commands: both.sh:1, both.sh:2"):
        migrate([files[0]])
    assert migrate([files[1], "--output", str(tmp_path / "one.yaml")]) == 0
    assert f"megaswift dpo {tmp_path / 'one.yaml'}" in (tmp_path / "one.yaml").read_text()


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.sh").write_text(COMPLETE)
    files = [str(tmp_path / folder / "train.sh") for folder in ("a", "b")]
    assert migrate([*files, "--output_dir", str(tmp_path / "out")]) == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["train.yaml", "train_2.yaml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no command of ms-swift"),
        (b"echo hello\n", "has no command of ms-swift"),
        (b"swift sft --model \0m\n", "NUL bytes"),
        (b"\xff\xfe\x00swift", "cannot be read"),
        (b"#" * (1 << 20) + b"\nswift sft", "larger than 1 MiB"),
        (b"A=x\n" + b"A=$A$A\n" * 40 + b"swift sft --model $A", "expands to more than"),
    ],
)
def test_unreadable_input(content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.sh").write_bytes(content)
    assert main(["migrate", str(tmp_path / "x.sh")]) == 2 and message in capsys.readouterr().err
    (tmp_path / "good.sh").write_text(COMPLETE)
    assert (
        main(["migrate", str(tmp_path / "x.sh"), str(tmp_path / "good.sh"), "--output_dir", str(tmp_path / "o")]) == 2
    )
    assert (tmp_path / "o" / "good.yaml").is_file(), "the others are written"


@pytest.mark.parametrize("name", ["x.yaml", "x.json"])
def test_unreadable_configuration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("{")
    assert main(["migrate", str(tmp_path / name)]) == 2 and name in capsys.readouterr().err


def test_a_command_without_a_task_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.sh").write_text("swift rlhf --rlhf_type ppo_v2 --model m\n" + COMPLETE)
    assert migrate([str(tmp_path / "x.sh"), "--output_dir", str(tmp_path / "o")]) == 3
    assert "x.sh:1: not translated" in capsys.readouterr().err and os.listdir(tmp_path / "o") == ["x-2.yaml"]


def test_commands_that_do_not_train_become_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "i.sh").write_text(
        "CUDA_VISIBLE_DEVICES=0 swift infer --model 'my model' --temperature 0 --adapters out/checkpoint-9 "
        "--hub_token hf_abcdef --no_such_option 3 --system $TEXT --max_new_tokens 64\n"
    )
    assert migrate([str(tmp_path / "i.sh"), "--output_dir", str(tmp_path / "o")]) == 3
    text = (tmp_path / "o" / "i.sh").read_text()
    (command,) = [line for line in text.replace(" \\\n   ", "").splitlines() if line and not line.startswith("#")]
    words = "CUDA_VISIBLE_DEVICES=0 megaswift infer --model 'my model' --temperature 0 --adapters out/checkpoint-9"
    assert command == f"{words} --max_new_tokens 64"
    assert "# - --no_such_option 3: is not an option of megaswift infer" in text and "does not set $TEXT" in text
    assert "# - --hub_token: a secret is not copied; set it in the environment" in text and "hf_abcdef" not in text
    assert "out/checkpoint-9: no such" in text, "a note: the folder may be there where it runs"
    (tmp_path / "e.sh").write_text("swift export --model m --output_dir d --quantization_bit 4 --adapters a\n")
    capsys.readouterr()
    assert migrate([str(tmp_path / "e.sh")]) in (0, 3) and "megaswift export" in capsys.readouterr().out
    (tmp_path / "r.sh").write_text("swift rollout --model m\n")
    assert migrate([str(tmp_path / "r.sh")]) == 3 and "vllm serve" in capsys.readouterr().err


def test_an_input_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\nrlhf_type: dpo\nmax_length: 4\n")
    with pytest.raises(ConfigError, match="is a file to translate"):
        migrate([str(tmp_path / "x.yaml"), "--output_dir", str(tmp_path), "--overwrite"])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "migrate" in COMMANDS and "  migrate " in usage()
    with pytest.raises(SystemExit) as ended:
        main(["migrate", "--help"])
    assert ended.value.code == 0 and "Exit code: 0" in capsys.readouterr().out
