"""`megaswift simulate`: what it prints and writes, and mistakes.

Covers: megaswift/commands/simulate.py, megaswift/simulator/report.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.parallel.layout import Layout
from megaswift.simulator.calls import Group
from megaswift.simulator.report import group_axes
from tests.memory.counted_ranks import CONFIG
from tests.parity.pool import shared
from tests.simulator import planted


def simulate(_: int, __: int, words: list[str]) -> int:
    """In a process of its own."""
    return main(["simulate", *words])


def simulate_faulty(_: int, __: int, words: list[str]) -> int:
    """The same, where a rank reduces a row more."""
    planted.shape()
    return main(["simulate", *words])


@pytest.mark.process
@pytest.mark.slow
def test_ranks_that_do_not_fit_together(tmp_path: Path) -> None:
    """Exit code 1."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = [str(tmp_path / "config.json"), "--world", "2", "--tp", "2", "--max_length", "64", "--steps", "1"]
    assert shared("").run(f"{__name__}:simulate_faulty", words, 1) == [1]
    text = shared("").logged(f"{__name__}:simulate_faulty", words, 1)
    assert "1 place where ranks do not fit together" in text and text.count("tests/simulator/planted.py:") == 2
    assert "float32[4]" in text and "float32[5]" in text


@pytest.mark.process
def test_a_run(tmp_path: Path) -> None:
    """The screen and the file of a tiny model on eight ranks: four classes, a bubble by the formula, bytes by hand."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "simulation.json"
    words = f"{tmp_path / 'config.json'} --world 8 --tp 2 --pp 2 --max_length 64 --gradient_accumulation_steps 4"
    text = shared("").logged(f"{__name__}:simulate", [*words.split(), "--gpus_per_node", "4", "--output", str(file)], 1)
    found = json.loads(file.read_text())
    assert "4 ranks simulated (0, 1, 4, 5)" in text and "fit those of the other ranks" in text
    assert found["disagreements"] == [] and sorted(found["ranks"]) == ["0", "1", "4", "5"]
    assert found["bubble"] == pytest.approx(1 / 5) and "20.0% bubble" in text
    first = found["ranks"]["0"]
    calls = [first["kinds"][n] for n in first["calls"]]
    sent = [c for c in calls if c["operation"] == "send" and c["step"] == 2]
    # 64 tokens on two sequence-parallel ranks, 128 wide, in bfloat16, to the next node
    assert [c["sent"] for c in sent] == [["bfloat16[32, 1, 128]"]] * 4
    assert first["link_bytes"]["network"] >= 4 * 32 * 128 * 2 > 0
    assert {c["group"] for c in calls} == {"all", "tp", "dp", "pp"}
    assert [entry[0] for entry in first["memory"]][0] == "start-up" and len(first["memory"]) == 1 + 2 * 9
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Qwen/Qwen3-8B --world 6 --tp 4", ("requires a multiple of 4", "--world")),
        ("Qwen/Qwen3-8B --world 8 --tp 3", ("--tp 3",)),
        ("Qwen/Qwen3-8B --world 8 --pp 8 --vpp 7", ("--vpp 7",)),
        ("Qwen/Qwen3-9B --world 8", ("a published model", "qwen3-8b")),
        ("Qwen/Qwen3-8B --world 8 --task grpo", ("task grpo", "cannot be simulated")),
        ("Qwen/Qwen3-8B --world 8 --train_type qlora", ("qlora", "is not simulated")),
        ("Qwen/Qwen3-8B --world 8 --engine fsdp2", ("--engine fsdp2",)),
        ("Qwen/Qwen3-8B --world 8 --ranks 0,8", ("8 is no rank of 8",)),
        ("Qwen/Qwen3-8B --world 8 --gpu h101", ("is not in the table of GPUs", "--hardware FILE")),
        ("Qwen/Qwen3-8B", ("--world", "is missing")),
        ("--world 8", ("needs a model or a run's file",)),
        ("Qwen/Qwen3-8B --world 0", ("is not a positive number",)),
        ("Qwen/Qwen3-8B --world 8 --output a.txt", (".json",)),
        ("Qwen/Qwen3-8B --world 8 --global_batch_size 12", ("12",)),
    ],
)
def test_mistakes(words: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """One message with what is wrong, before anything is built; exit code 2."""
    assert main(["simulate", *words.split()]) == 2
    done = capsys.readouterr()
    assert all(text in done.out + done.err for text in expected), done.err


def test_names_of_groups() -> None:
    """By the axes along which the ranks differ."""
    experts = Layout(32, tp=2, pp=2, ep=4)
    assert group_axes(Group("1", tuple(experts.group("ep", 0))), experts) == "ep"
    assert group_axes(Group("2", tuple(experts.group("tp-cp-dp", 0))), experts) == "tp-dp = ep-edp"
    layout = Layout(32, tp=2, cp=2, pp=2)
    for axes in ("tp", "cp", "dp", "pp", "cp-dp", "tp-cp"):
        assert group_axes(Group("1", tuple(layout.group(axes, 0))), layout) == axes
    assert group_axes(Group("0", tuple(range(32))), layout) == "all"
    assert group_axes(Group("5", (0, 5, 9)), layout) == "0, 5, 9"
