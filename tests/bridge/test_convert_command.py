"""The converters as users start them: help, options, exit codes, Ctrl-C.

Covers: megaswift/commands/convert.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift.cli import main
from megaswift.commands.convert import byte_size_argument, convert_command
from megaswift.errors import UserError
from tests.bridge.folders import make, tensors_of
from tests.sources import ROOT

ENVIRON = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("text", "value"), [("5GB", 5_000_000_000), ("512 MiB", 2**29), ("1000", 1000), ("1.5kb", 1500)]
)
def test_sizes(text: str, value: int) -> None:
    assert byte_size_argument(text) == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hf-to-megatrom"], "did you mean hf-to-megatron?"),
        (["hf-to-megatron", "a"], "DST"),
        (["hf-to-megatron", "a", "b", "--etpp", "2"], "did you mean --etp?"),
        (["hf-to-megatron", "a", "b", "--tp", "0"], "whole number"),
        (["megatron-to-hf", "a", "b", "--tp", "2"], "unrecognized arguments: --tp"),
        (["megatron-to-hf", "a", "b", "--max_shard_size", "5 apples"], "is not a size"),
        (["megatron-to-hf", "a", "b", "--dtype", "int8"], "invalid choice"),
    ],
)
def test_mistakes(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        convert_command(words)
    assert told in str(caught.value)


def test_there_and_back_with_options(folders: Path, tmp_path: Path) -> None:
    folder = make("dense", folders, torch.float32)
    assert convert_command(["hf-to-megatron", str(folder), str(tmp_path / "m"), "--tp", "2", "--pp", "2"]) == 0
    assert (
        convert_command(
            [
                "megatron-to-hf",
                str(tmp_path / "m"),
                str(tmp_path / "hf"),
                "--dtype",
                "bf16",
                "--max_shard_size",
                "100KB",
            ]
        )
        == 0
    )
    want = {n: t.bfloat16() for n, t in tensors_of(folder).items()}
    got = tensors_of(tmp_path / "hf")
    assert all(torch.equal(got[n], want[n]) for n in want) and got.keys() == want.keys()


@pytest.mark.process
@pytest.mark.slow
def test_scripts_and_command_are_the_same(folders: Path, tmp_path: Path) -> None:
    folder = make("moe", folders, torch.bfloat16)
    for words in (
        ["converters/hf_to_megatron.py", folder, tmp_path / "m"],
        ["converters/megatron_to_hf.py", tmp_path / "m", tmp_path / "a"],
        ["-m", "megaswift", "convert", "megatron-to-hf", tmp_path / "m", tmp_path / "b"],
    ):
        done = call(*words)
        assert done.returncode == 0 and f"wrote {words[-1]}" in done.stdout, done.stderr
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert a == b and all(torch.equal(t, tensors_of(folder)[n]) for n, t in tensors_of(tmp_path / "a").items())
    refused = call("converters/hf_to_megatron.py", folder, tmp_path / "m")
    assert refused.returncode == 2 and "already exists" in refused.stderr and "Traceback" not in refused.stderr
    assert "--max_shard_size" in call("converters/megatron_to_hf.py", "--help").stdout


@pytest.mark.process
def test_after_ctrl_c_the_same_command_resumes(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader of the source stops in the middle, until the signal comes."""
    folder = make("dense", folders, torch.float32)
    stops = (
        "import pathlib, sys, time\nfrom megaswift.bridge.hf import source as hf_safetensors_source\n"
        "from megaswift.commands.convert import run_converter_script\n"
        "plain = hf_safetensors_source.HfSource.slice\n"
        "calls = []\ndef read(*a):\n    calls.append(1)\n    if len(calls) == 20:\n"
        "        pathlib.Path(sys.argv[2] + '-stops').touch()\n        time.sleep(600)\n    return plain(*a)\n"
        "hf_safetensors_source.HfSource.slice = read\nraise SystemExit(run_converter_script('hf-to-megatron'))\n"
    )
    command = [sys.executable, "-c", stops, str(folder), str(tmp_path / "m")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRON,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    end = time.monotonic() + 300
    while not (tmp_path / "m-stops").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and "the same command resumes from there" in text and "Traceback" not in text, text
    assert not (tmp_path / "m").exists()
    assert (
        main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "m")]) == 0
        and "resuming: " in capsys.readouterr().err
    )
    assert main(["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf")]) == 0
    assert all(torch.equal(t, tensors_of(folder)[n]) for n, t in tensors_of(tmp_path / "hf").items())


@pytest.mark.parametrize("damage", ["missing", "truncated", "shape"])
def test_bad_sources_are_named(damage: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(make("dense", folders), tmp_path / "bad"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:
        save_file(
            {n: t[:-1].clone() if "norm" in n else t for n, t in load_file(shard).items()},
            shard,
            metadata={"format": "pt"},
        )
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "m")]) == 2
    told = capsys.readouterr().err
    assert shard.name in told and "Traceback" not in told and not (tmp_path / "m").exists()
