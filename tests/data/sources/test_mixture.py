"""Data sets mixed by weights: the order of `datasets.interleave_datasets`, by hand, stored and streamed, on any layout,
resumed anywhere, for every kind of task.

Covers: megaswift/data/stream/cursor.py, megaswift/data/options/checks.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import (
    build_train_and_eval_sources,
    load_document_splits,
    load_preference_splits,
)
from megaswift.data.sources import mixture
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.sources.mixture import Interleaving
from megaswift.data.stream.cursor import Cursor, StreamFractionalEpoch, read_from_cursor
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer
from tests.data.of_config import prompt_splits, row_places

STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
LENGTHS, WEIGHTS = (9, 4, 6), (5.0, 2.0, 3.0)


def huggingface(lengths: tuple[int, ...], weights: tuple[float, ...], strategy: str, seed: int) -> list[int]:
    """Rows, counted through the data sets, in the order of the `datasets` library."""
    firsts = [sum(lengths[:k]) for k in range(len(lengths))]
    rows = [datasets.Dataset.from_dict({"row": [*range(a, a + n)]}) for a, n in zip(firsts, lengths, strict=True)]
    shares = [w / sum(weights) for w in weights]
    mixed = datasets.interleave_datasets(rows, probabilities=shares, seed=seed, stopping_strategy=strategy)
    return list(mixed["row"])


@pytest.mark.wide
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_is_that_of_interleave_datasets(strategy: str) -> None:
    chance = random.Random(strategy)
    for _ in range(25):
        lengths = tuple(chance.randint(1, 40) for _ in range(chance.randint(1, 5)))
        weights, seed = tuple(0.05 + chance.random() for _ in lengths), chance.randint(0, 10**6)
        wanted = huggingface(lengths, weights, strategy, seed)
        assert Interleaving(weights, strategy, seed).rows(lengths).tolist() == wanted


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        (STRATEGIES[0], [0, 3, 4]),
        (STRATEGIES[1], [0, 3, 4, 3, 1, 2]),
        (STRATEGIES[2], [0, 3, 4, 1, 2]),
    ],
)
def test_a_pass_by_hand(strategy: str, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows (0 to 2) and two (3 and 4), drawn from the data sets 0 1 1 1 0 0 1."""
    draws = [0, 1, 1, 1, 0, 0, 1]
    monkeypatch.setattr(Interleaving, "sources", lambda self, start=0: iter(draws[start:]))
    assert Interleaving((1, 1), strategy, 0).rows([3, 2]).tolist() == rows


def test_draws_go_on_from_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = Interleaving((1.0, 2.0, 3.0), "first_exhausted", 5)
    take = lambda n, draws: [next(draws) for _ in range(n)]  # noqa: E731
    whole = take(100, mixing.sources())
    monkeypatch.setattr(mixture, "DRAWS", 7)
    assert all(take(20, mixing.sources(k)) == whole[k : k + 20] for k in range(80))


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Data sets of 9, 4 and 6 rows that say which they are."""
    count = iter(range(99))
    return [
        jsonl(tmp_path / f"{k}.jsonl", [{"text": str(next(count))} for _ in range(n)]) for k, n in enumerate(LENGTHS)
    ]


def source(tmp_path: Path, names: list[str], geometry: LoaderGeometry, **options: Any) -> Any:
    given = {"interleave_prob": WEIGHTS, "shuffle": False, "seed": 3} | options
    cfg = config(tmp_path, names, "pt", **given)
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen"), geometry, "pt")[0]


def texts(batches: list[Any]) -> list[int]:
    words = tokenizer("qwen")
    rows = [row[valid] for b in batches for row, valid in zip(b.input_ids, b.valid, strict=True) if valid.any()]
    return [int(words.decode(row, skip_special_tokens=True)) for row in rows]


@pytest.mark.wide
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_on_any_ranks_and_resumed_anywhere(
    tmp_path: Path, names: list[str], strategy: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaswift.data.stream.batches.BLOCK", 5)
    options = {"stopping_strategy": strategy, "streaming": streaming}
    epoch = huggingface(LENGTHS, WEIGHTS, strategy, 3)
    wanted = (epoch * 9)[:48]
    whole = source(tmp_path, names, LoaderGeometry(per_device=2), **options)
    states, seen = [], []
    for _ in range(24):
        states.append(json.loads(json.dumps(whole.state_dict())))
        seen += texts(whole.next())
    assert seen == wanted
    for k, state in enumerate(states[:22]):
        ranks = [source(tmp_path, names, LoaderGeometry(r, 2, 2), **options) for r in (0, 1)] if k % 5 == 0 else []
        for one in ranks:
            one.load_state_dict(state)
        if ranks:
            assert [t for one in ranks for t in texts(one.next())] == wanted[2 * k : 2 * k + 4]
    again = source(tmp_path, names, LoaderGeometry(per_device=2), **options)
    for k in random.Random(1).sample(range(24), 8):
        again.load_state_dict(states[k])
        assert texts(again.next()) == wanted[2 * k : 2 * k + 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_rows_and_repeated_rows_are_mixed(tmp_path: Path, names: list[str], strategy: str) -> None:
    """`#N` selects first; the mix is of what it has selected."""
    some = [f"{names[0]}#:3", f"{names[1]}#:6", names[2]]
    rows = [*range(3), *range(9, 13), 9, 10, *range(13, 19)]
    wanted = [rows[i] for i in huggingface((3, 6, 6), WEIGHTS, strategy, 3)]
    for streaming in (False, True):
        one = source(tmp_path, some, LoaderGeometry(), stopping_strategy=strategy, streaming=streaming)
        assert [t for _ in wanted for t in texts(one.next())] == wanted


def test_shuffled_epochs_have_the_same_rows(tmp_path: Path, names: list[str]) -> None:
    wanted = huggingface(LENGTHS, WEIGHTS, "all_exhausted", 3)
    one = source(tmp_path, names, LoaderGeometry(), stopping_strategy="all_exhausted", shuffle=True)
    first, second = ([t for _ in wanted for t in texts(one.next())] for _ in range(2))
    assert first != second and sorted(first) == sorted(second) == sorted(wanted) != first


def test_the_part_of_a_pass(names: list[str]) -> None:
    """By the data set that ends it; bytes of two digits count more than those of one."""
    files = [DatasetFiles(name, (Path(name),)) for name in names]
    for strategy in STRATEGIES:
        mixing, parts = Interleaving(WEIGHTS, strategy, 3), [0.0]
        for _, _, cursor in read_from_cursor(files, Cursor(), mixing):
            parts.append(StreamFractionalEpoch(files, mixing).at(cursor))
            if cursor.epoch == 1:
                break
        count = len(huggingface(LENGTHS, WEIGHTS, strategy, 3))
        assert parts[:-1] == sorted(parts[:-1]) and parts[count] == 1 and len(parts) == count + 2
        assert all(part < 1 for part in parts[:count]) and 1 <= parts[-1] < 2


def test_resuming_with_another_mix_is_refused(tmp_path: Path, names: list[str]) -> None:
    for streaming, words in ((True, r"--interleave_prob was \[5.0, 2.0, 3.0\]"), (False, "other rows are selected")):
        state = source(tmp_path, names, LoaderGeometry(), streaming=streaming).state_dict()
        other = source(tmp_path, names, LoaderGeometry(), streaming=streaming, interleave_prob=(1.0, 1.0, 1.0))
        with pytest.raises(DataError, match=words):
            other.load_state_dict(json.loads(json.dumps(state)))
    state = source(tmp_path, names, LoaderGeometry(), streaming=True).state_dict()
    for other in (
        source(tmp_path, names, LoaderGeometry(), streaming=True, interleave_prob=()),
        source(tmp_path, names, LoaderGeometry(), streaming=True, stopping_strategy="all_exhausted"),
    ):
        with pytest.raises(DataError, match="in the checkpoint"):
            other.load_state_dict(json.loads(json.dumps(state)))


def test_an_empty_data_set_is_named(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "1.jsonl").write_text("")
    for streaming in (True, False):
        with pytest.raises(DataError, match="1.jsonl: contains no rows"):
            one = source(tmp_path, names, LoaderGeometry(), streaming=streaming)
            for _ in range(20):
                one.next()


def test_no_row_is_held_out_and_trained_on(tmp_path: Path, names: list[str]) -> None:
    cfg = config(
        tmp_path, names, "pt", interleave_prob=WEIGHTS, stopping_strategy="all_exhausted", split_dataset_ratio=0.3
    )
    training, held_out = load_document_splits(cfg.data, cfg.train, tokenizer("qwen"), "pt")
    assert held_out is not None and not set(training.sample) & set(held_out.sample)
    assert len(training) > len(set(training.sample))
    assert len(set(training.sample) | set(held_out.sample)) == sum(LENGTHS)


def preference(tmp_path: Path, names: list[str], **options: Any) -> list[int]:
    cfg = config(tmp_path, names, "dpo", interleave_prob=WEIGHTS, data_seed=3, **options)
    units = load_preference_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), "dpo")[0]
    assert units.docs.sample[::2].tolist() == units.docs.sample[1::2].tolist() == units.values.tolist()
    return units.values.astype(int).tolist()


def prompts(tmp_path: Path, names: list[str], **options: Any) -> list[int]:
    cfg = config(
        tmp_path, names, "grpo", interleave_prob=WEIGHTS, data_seed=3, shuffle=False, reward_funcs=["format"], **options
    )
    read, _ = prompt_splits(cfg, tokenizer("qwen", "qwen2_5"), 1)
    assert row_places(cfg, tokenizer("qwen", "qwen2_5")) is not None
    return [read.at(place).number for _ in range(read.rows) for place in read.take()]


@pytest.mark.parametrize("rows_of", [preference, prompts])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pairs_and_prompts(tmp_path: Path, rows_of: Any, strategy: str) -> None:
    """Margins are the numbers of the rows."""
    first = np.cumsum([0, *LENGTHS])
    names = [
        jsonl(
            tmp_path / f"{k}.jsonl",
            [{**chat("q", f"yes {i}"), "rejected_response": "no", "margin": int(i)} for i in range(*first[k : k + 2])],
        )
        for k in range(3)
    ]
    assert rows_of(tmp_path, names, stopping_strategy=strategy) == huggingface(LENGTHS, WEIGHTS, strategy, 3)


def test_streamed_pairs(tmp_path: Path) -> None:
    names = [
        jsonl(tmp_path / f"{k}.jsonl", [{**chat("q", f"{k} {i}"), "rejected_response": "no"} for i in range(n)])
        for k, n in enumerate(LENGTHS)
    ]

    def batches(streaming: bool) -> Iterator[list[int]]:
        cfg = config(tmp_path, names, "dpo", interleave_prob=WEIGHTS, shuffle=False, streaming=streaming)
        words = tokenizer("qwen", "qwen2_5")
        one = build_train_and_eval_sources(cfg.data, cfg.train, words, LoaderGeometry(per_device=3), "dpo")[0]
        return (one.next()[0].input_ids.tolist() for _ in range(6))

    assert list(batches(True)) == list(batches(False))
