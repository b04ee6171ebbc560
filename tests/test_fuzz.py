"""A short run of every fuzz target, with fixed seeds; the long one is `scripts/fuzz.py`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.errors import DataError
from scripts import fuzz

TARGETS, SEEDS = fuzz.tables()
FEW = {"tokenizer.json": 8, "chat_template.jinja": 8, "tokenizer_config.json": 8, "special_tokens_map.json": 8}
"""Executions of targets that take some 20 ms each; of the others 40."""


@pytest.mark.wide
@pytest.mark.parametrize("name", list(TARGETS))
def test_mutated_inputs_end_in_our_own_errors(name: str) -> None:
    done, findings = fuzz.run([name], seed=17, seconds=30, most=FEW.get(name, 40))
    assert done[name] == FEW.get(name, 40)
    assert not findings, f"{findings[0].what}\n{findings[0].data[:2000]!r}"


@pytest.mark.parametrize("name", [name for name, _ in fuzz.importlib.import_module("tests.fuzz_targets").TARGETS])
def test_the_first_seed_of_a_target_is_a_good_input(name: str) -> None:
    """Mutations of inputs that are refused for another reason would test nothing."""
    assert SEEDS[name]
    for seed in SEEDS[name]:
        TARGETS[name](seed)  # raises where the seed is refused


def test_findings_are_what_is_not_ours() -> None:
    def refuses(data: bytes) -> None:
        raise DataError("no")

    def fails(data: bytes) -> None:
        raise KeyError("x")

    def grows(data: bytes) -> None:
        assert len(bytearray(1 << 31)) > 0

    def stays(data: bytes) -> None:
        while True:
            pass

    assert fuzz.execute("t", refuses, b"") is None and fuzz.execute("t", len, b"") is None
    for target, said in ((fails, "KeyError"), (stays, "no end in 0.1 s")):
        found = fuzz.execute("t", target, b"data", seconds=0.1)
        assert found is not None and said in found.what and found.data == b"data"


def test_mutations_are_of_the_tree_and_repeat_with_the_seed() -> None:
    value = json.dumps({"a": [1, {"b": "c"}], "d": {"e": None}}).encode()
    some = [fuzz.mutated(value, random.Random(i)) for i in range(300)]
    assert some == [fuzz.mutated(value, random.Random(i)) for i in range(300)]
    assert len(set(some)) > 200

    def parses(data: bytes) -> bool:
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            return False
        return True

    assert 150 < sum(map(parses, some)) < 280


@pytest.mark.process
def test_the_script(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/fuzz.py", "--seconds", "0.2", "--out", str(tmp_path / "out"), "--target"]
    ran = subprocess.run([*command, "adapter_config.json"], capture_output=True, text=True)
    assert ran.returncode == 0 and "0 findings of 0 kinds (seed 0)" in ran.stdout and not (tmp_path / "out").exists()
