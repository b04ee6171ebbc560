"""The formulas against counted bytes of more than 300 runs: weights, gradients and optimizer states exactly, kept
activations within 1%, the peak of a step within 2% in 95% of the rows and within 5% in all.

Covers: megaswift/memory/layer_activations.py, megaswift/memory/layer_passes.py, megaswift/memory/activation_bytes.py,
megaswift/memory/state_bytes.py, megaswift/memory/rank_parameters.py, megaswift/memory/microbatch_setup.py.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.memory.table import (
    AXES,
    HELD_OUT,
    Counted,
    Errors,
    TableRow,
    count_row,
    errors_of,
    make_folder,
    read_counts,
    rows,
    spec_of,
)
from tests.parity.pool import Pool

KEPT = 0.01
PEAK = 0.05
NEAR = 0.02
SHARE_NEAR = 0.95
SHARE_OF_OTHERS = 0.9
OUTSIDE = {("gpt_oss", "pp2 dp2 ep2 do"), ("gpt_oss", "cp2 dp2 do")}
"""Rows of the other seed beyond the limits: experts of a rank with 528 to 1,022 rows, which the formulas take to be
equal, and sinks of packed rows under context parallelism, of whose kept bytes 5% are missing."""
DEFAULT = (
    TableRow("qwen3_next-mtp", "dp2 do", options={"torch_dtype": "bfloat16"}),
    TableRow("deepseek_v3", "tp2 sp", options={"train_type": "lora", "lora_rank": 8}),
    TableRow("gpt_oss", "dp2 ep2 do"),
    TableRow("gemma3_text", "pp2", options={"recompute_granularity": "full"}),
    TableRow("gemma2", "single", options={"packing": True}),
    TableRow("moe", "single", options={"train_type": "qlora", "lora_rank": 8}),
)


def counted(row: TableRow, pool: Pool, folder: Path) -> list[Counted]:
    model = make_folder(row.family, folder / row.family)
    ranks: list[Counted] = pool.run(f"{count_row.__module__}:count_row", (row, model), row.world)
    return ranks


def check(row: TableRow, ranks: list[Counted]) -> Errors:
    errors = errors_of(row, ranks)
    assert (errors.weights, errors.gradients, errors.states) == (0, 0, 0), row
    assert abs(errors.kept) <= KEPT, row
    assert errors.step is None or abs(errors.step) <= PEAK, row
    return errors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table-models")


@pytest.mark.wide
def test_the_formulas_are_those_of_the_counted_runs() -> None:
    """All rows, as `scripts/memory_table.py` counted them."""
    counts = read_counts()
    assert len(counts) >= 300
    steps = [abs(step) for row, ranks in counts.items() if (step := check(row, ranks).step) is not None]
    assert sum(step <= NEAR for step in steps) / len(steps) >= SHARE_NEAR


def test_rows_of_another_seed() -> None:
    """They do not decide what the formulas have: all but the named ones within 5%, and 90% within 2%."""
    counts = read_counts(HELD_OUT)
    assert len(counts) >= 60 and not set(counts) & set(read_counts())
    steps = []
    for row, ranks in counts.items():
        errors = errors_of(row, ranks) if (row.family, row.layout) in OUTSIDE else check(row, ranks)
        assert (errors.weights, errors.gradients, errors.states) == (0, 0, 0), row
        assert errors.step is not None
        steps.append(abs(errors.step))
    assert sum(step <= NEAR for step in steps) / len(steps) >= SHARE_OF_OTHERS


@pytest.mark.wide
def test_rows_combine_the_choices() -> None:
    """The counted rows are those that the generator draws; every family and layout occurs, and pairs of settings do."""
    drawn = rows()
    assert set(drawn) == set(read_counts())
    assert {row.family for row in drawn} == set(AXES["family"])
    assert {row.layout for row in drawn} == set(AXES["layout"])
    worlds = {row.world for row in drawn}
    assert worlds == {1, 2, 4, 8}
    settings = [{(name, str(value)) for name, value in row.options.items()} for row in drawn]
    pairs = {pair for options in settings for pair in combinations(sorted(options), 2)}
    assert len(pairs) > 250
    assert any(spec_of(row.family).linear_layer_count and row.te for row in drawn)


@pytest.mark.process
@pytest.mark.parametrize("row", DEFAULT, ids=lambda row: f"{row.family} {row.layout}")
def test_counted_bytes(row: TableRow, pool: Pool, folders: Path) -> None:
    """Counted anew: delta nets with a layer for multi-token prediction, latent attention with adapters, sinks, a second
    rotary embedding, soft caps, NF4."""
    check(row, counted(row, pool, folders))


@pytest.mark.slow
@pytest.mark.process
def test_all_rows_on_torch_layers(pool: Pool, folders: Path) -> None:
    """Counted anew, row by row."""
    done = [check(row, counted(row, pool, folders)) for row in read_counts() if not row.te]
    assert len(done) > 150


@pytest.mark.slow
@pytest.mark.process
def test_all_rows_on_transformer_engine(te_pool: Pool, folders: Path) -> None:
    """On the test device."""
    done = [check(row, counted(row, te_pool, folders)) for row in read_counts() if row.te]
    assert len(done) > 100
