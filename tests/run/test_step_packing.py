"""Samples of a step in shared rows: when that is chosen, and that a run is the same as with padded samples."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs, write_model
from tests.trainers.runs import run

pytestmark = pytest.mark.process
SAYS = "the samples of a step are packed into rows of up to"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Answers of 1 to 60 characters: rows of a step that hold one to many samples."""
    folder = tmp_path_factory.mktemp("inputs")
    words = write_inputs(folder, "1e-3")
    write_model(folder / "model", layers=4)
    draw = random.Random(5)
    rows = []
    for _ in range(96):
        text = "".join(draw.choice("abcdefghij 0123456789") for _ in range(round(60 * draw.random() ** 3) + 1))
        rows.append({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": text}]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return words[: words.index("--per_device_train_batch_size")] + ["--lr", "1e-3"]


def lines(out: Path) -> list[dict[str, Any]]:
    """What both ways have to have alike."""
    names = ("step", "loss", "grad_norm", "tokens", "label_tokens", "eval_loss", "epoch")
    return [{name: line[name] for name in names if name in line} for line in read_lines(out / "metrics.jsonl")]


def assert_alike(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=2e-5), (a, b)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--pp 2 --vpp 2", 2),
        pytest.param("", 2, marks=pytest.mark.slow),
        pytest.param("--tp 2 --sequence_parallel true", 2, marks=pytest.mark.slow),
        pytest.param("--cp 2", 2, marks=pytest.mark.slow),
        pytest.param("--engine ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_the_run_is_the_same(layout: str, ranks: int, inputs: list[str], tmp_path: Path) -> None:
    """Losses, norms, tokens and evaluations, and the rest of the run from a checkpoint of the other way."""
    words = (
        *("--max_length", 96, "--global_batch_size", 24, "--max_steps", 6, "--save_steps", 3, "--report_to", "none"),
        *("--per_device_train_batch_size", 2, "--split_dataset_ratio", 0.1, "--eval_steps", 3, *layout.split()),
    )
    asked = ("--padding_free", "true") if "ddp" in layout else ()
    packed, padded, resumed = (tmp_path / name for name in ("packed", "padded", "resumed"))
    text = run(inputs, packed, *words, *asked, ranks=ranks)
    assert (SAYS in text) == (not asked)
    text = run(inputs, padded, *words, "--padding_free", "false", ranks=ranks)
    assert SAYS not in text
    assert_alike(lines(packed), lines(padded))
    if "pp" in layout:
        return
    step = padded / "checkpoints" / "step-3"
    text = run(inputs, resumed, *words, *asked, "--resume_from_checkpoint", step, ranks=ranks)
    assert_alike(lines(resumed), [line for line in lines(packed) if line["step"] > 3])
    assert "differs from the checkpoint's run: padding_free False -> True\n" in text
    again = (*words, *asked, "--resume_from_checkpoint", packed / "checkpoints" / "step-3")
    assert "differs" not in run(inputs, tmp_path / "again", *again, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--padding_free false", 2),
        ("--padding_free true --pp 2", 2),
        ("--engine ddp", 2),
        ("--engine zero2", 2),
        ("--padding_free false --tp 2", 2),
    ],
)
def test_a_limit_of_tokens_leaves_the_run_as_it_is(layout: str, ranks: int, inputs: list[str], tmp_path: Path) -> None:
    """Losses, norms, tokens and evaluations, and the rest of the run from a checkpoint without the limit."""
    words = (
        *("--max_length", 96, "--global_batch_size", 24, "--max_steps", 4, "--save_steps", 2, "--report_to", "none"),
        *("--split_dataset_ratio", 0.1, "--eval_steps", 2, "--per_device_train_batch_size", 2),
    )
    limited, fixed, resumed = (tmp_path / name for name in ("limited", "fixed", "resumed"))
    text = run(inputs, limited, *words, *layout.split(), "--max_tokens_per_batch", 200, ranks=ranks)
    assert "24 rows a step, at most 2,304 tokens, in micro-batches of at most 200 on each of" in " ".join(text.split())
    layout = layout.replace("--padding_free true", "").replace("--padding_free false", "")
    run(inputs, fixed, *words, *layout.split(), "--padding_free", "false", ranks=ranks)
    assert_alike(lines(limited), lines(fixed))
    if "tp" in layout:
        step = fixed / "checkpoints" / "step-2"
        words = (*words, *layout.split(), "--max_tokens_per_batch", 100, "--resume_from_checkpoint", step)
        run(inputs, resumed, *words, ranks=ranks)
        assert_alike(lines(resumed), [line for line in lines(limited) if line["step"] > 2])


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ((), True),
        (("--max_length", 32), False),
        (("--max_length", 64, "--packing", "true"), False),
        (("--padding_free", "false"), False),
        (("--engine", "ddp"), False),
    ],
    ids=str,
)
def test_when_it_is_chosen(options: tuple[object, ...], packs: bool, inputs: list[str], tmp_path: Path) -> None:
    words = ("--global_batch_size", 4, "--max_steps", 1, "--report_to", "none", "--save_strategy", "no")
    words = (*words, *options, *(() if "--max_length" in options else ("--max_length", 2048)))
    assert (SAYS in run(inputs, tmp_path / "out", *words, ranks=1)) == packs


def test_the_median_is_at_most_a_quarter_of_max_length(inputs: list[str], tmp_path: Path) -> None:
    """By the median that the message names: at four times its length, and not below it."""
    words = ("--global_batch_size", 4, "--max_steps", 1, "--report_to", "none", "--save_strategy", "no")
    text = run(inputs, tmp_path / "long", *words, "--max_length", 2048, ranks=1)
    (median,) = re.findall(r"because their median length is (\d+)", text)
    for length in (4 * int(median), 4 * int(median) - 1):
        text = run(inputs, tmp_path / str(length), *words, "--max_length", length, ranks=1)
        assert (SAYS in text) == (length == 4 * int(median)), length


def test_asked_for_with_long_samples(inputs: list[str], tmp_path: Path) -> None:
    """`--padding_free true` packs whatever the lengths are; metrics say how many tokens a step has."""
    words = ("--max_length", 32, "--global_batch_size", 8, "--max_steps", 2, "--report_to", "none")
    run(inputs, tmp_path / "a", *words, "--padding_free", "true", ranks=1)
    run(inputs, tmp_path / "b", *words, ranks=1)
    assert_alike(lines(tmp_path / "a"), lines(tmp_path / "b"))
