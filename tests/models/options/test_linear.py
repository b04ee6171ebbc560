"""Models with gated delta nets, axis by axis: what the table in docs/families.md says is what the checks say.

Covers: megaswift/models/options/linear.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.config import load_config
from megaswift.errors import UserError
from megaswift.models.options.linear import BLOCKS, GATED_DELTA_NET, BlockAxis
from megaswift.run.checks.prefix_sharing import reason_against_prefix_sharing
from megaswift.run.checks.preflight import preflight
from tests.hybrid_folders import write_hybrid
from tests.trainers.inputs import write_conversations

ASKED = {
    "QLoRA": ("sft", "--train_type qlora"),
    "FP8": ("sft", "--fp8_format hybrid"),
    "CUDA graphs": ("sft", "--cuda_graph_impl local"),
    "prefix sharing": ("dpo", "--prefix_sharing true"),
    "`--fit`": ("sft", "--fit true --device_memory 80GiB"),
    "tensor parallelism": ("sft", "--tp 2"),
    "sequence parallelism": ("sft", "--tp 2 --sequence_parallel true"),
    "pipeline and virtual pipeline": ("sft", "--pp 2 --vpp 2"),
    "context parallelism": ("sft", "--tp 2 --cp 2"),
    "data parallelism, distributed optimizer": ("sft", "--distributed_optimizer true"),
    "expert and expert tensor parallelism": ("sft", "--ep 2 --etp 2"),
    "packed rows": ("sft", "--packing true"),
    "recomputation, full and selective": ("sft", "--recompute_granularity full"),
    "Transformer Engine's layers": ("sft", "--transformer_impl auto"),
    "LoRA": ("sft", "--train_type lora"),
}
RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


@pytest.fixture
def inputs(folder: Path, tmp_path: Path) -> list[str]:
    data = write_conversations(tmp_path / "data.jsonl", rows=4)
    words = f"--model {folder} --dataset {data} --output_dir {tmp_path / 'out'} --engine megatron"
    return f"{words} --max_length 64 --gradient_accumulation_steps 2".split()


def problems(task: str, words: list[str]) -> Iterator[str]:
    try:
        preflight(load_config(task, words), RANKS)
    except UserError as error:
        yield from (str(problem) for problem in error.problems)


@pytest.mark.parametrize("row", GATED_DELTA_NET, ids=lambda row: row.axis)
def test_every_axis(row: BlockAxis, inputs: list[str]) -> None:
    task, words = ASKED[row.axis]
    found = list(problems(task, [*inputs, *words.split()]))
    if row.refused:
        named = [text for text in found if text.startswith(f"--{row.option} ") and row.refused in text]
        assert len(named) == 1 and row.option in words, found
    else:
        assert found == []


def test_blocks_have_the_same_axes() -> None:
    assert all([row.axis for row in rows] == [row.axis for row in GATED_DELTA_NET] for rows in BLOCKS.values())


def test_prompts_are_not_shared_unless_asked(folder: Path, inputs: list[str]) -> None:
    """By default, too; other models share them."""
    from megaswift.families import load_spec

    cfg = load_config("dpo", inputs)
    assert "state after their prompt" in reason_against_prefix_sharing(cfg, load_spec(folder), 1)


@pytest.mark.parametrize(
    ("words", "rule", "fix"),
    [
        ("--tp 1 --cp 8", "4 key heads of gated delta nets are not divisible by --tp 1 x --cp 8 = 8", "--cp 4"),
        ("--tp 4 --cp 2", "4 key heads of gated delta nets are not divisible by --tp 4 x --cp 2 = 8", "--cp 1"),
    ],
)
def test_key_heads_are_whole(words: str, rule: str, fix: str, inputs: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        preflight(load_config("sft", [*inputs, *words.split()]), 8)
    (problem,) = refused.value.problems
    assert rule in str(problem) and fix in problem.fix and "nearest layout that works" in problem.fix


def test_a_refusal_ends_with_2_before_a_model_is_built(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("megaswift.engine.megatron")
    built: list[int] = []
    monkeypatch.setattr("megaswift.run.build.make_engine", lambda *_: built.append(1))
    with pytest.raises(SystemExit) as ended:
        main(["sft", *inputs, "--fp8_format", "hybrid"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and not built and "projections were not compared in FP8" in told
