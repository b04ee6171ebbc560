"""Rows of a stream over real ranks: each is tokenized by one of them, and the batches are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaswift import distributed
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.stream.batches import StreamBatchSource
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer
from tests.parity.pool import Pool

ROWS, STEPS = 40, 12
"""Steps of 4 rows, or of 4 packed ones: more than one pass."""


def row(i: int, task: str) -> dict[str, Any]:
    """A conversation or a pair; every tenth pair cannot be used."""
    question, answer = f"question {i}", f"answer {i} " * (1 + i % 5)
    return (
        chat(question, answer)
        if task == "sft"
        else {"prompt": question, "chosen": answer, "rejected": answer if i % 10 == 7 else "no"}
    )


def stream(path: Path, geometry: LoaderGeometry, task: str, packing: bool) -> tuple[StreamBatchSource, list[int]]:
    """A stream, and how many texts were tokenized in each piece of work."""
    options = {
        "streaming": True,
        "packing": packing,
        "max_length": 256,
        "global_batch_size": 4,
        "strict": task == "sft",
    }
    cfg = config(path, str(path / "rows.jsonl"), task, **options)
    made: Any = build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), geometry, task)[0]
    encoder = made.contents.encoder if task == "sft" else made.contents.encoder._texts
    sizes, tokenize = list[int](), encoder.tokenize
    encoder.tokenize = lambda rendered: sizes.append(len(rendered)) or tokenize(rendered)
    return made, sizes


def steps(made: StreamBatchSource, count: int) -> list[Any]:
    """Tokens and weights of that many steps."""
    return [[(b.input_ids.tolist(), b.loss_weights.tolist()) for b in made.next()] for _ in range(count)]


def shared(rank: int, world: int, asked: tuple[Path, int, str, bool]) -> dict[str, Any]:
    """What a rank reads (on the ranks)."""
    path, dp, task, packing = asked
    geometry = LoaderGeometry(rank % dp, dp, 1, 4 // dp)
    dist.init_process_group("gloo")
    (made, sizes), (again, _) = stream(path, geometry, task, packing), stream(path, geometry, task, packing)
    made.spread = again.spread = distributed.map_over_ranks
    found = steps(made, STEPS)
    texts, state = sum(sizes), made.state_dict()
    again.load_state_dict(state)
    told = {"steps": found, "texts": texts, "stats": made.stats, "same": steps(again, 2) == steps(made, 2)}
    dist.destroy_process_group()
    return told


@pytest.mark.process
@pytest.mark.parametrize(("dp", "task", "packing"), [(2, "sft", False), (1, "sft", True), (1, "dpo", True)])
def test_each_row_is_tokenized_once(dp: int, task: str, packing: bool, tmp_path: Path, pool: Pool) -> None:
    """By ranks that train on different rows, and by ranks that train on the same."""
    jsonl(tmp_path / "rows.jsonl", [row(i, task) for i in range(ROWS)])
    ranks = pool.run("tests.trainers.test_shared_stream:shared", (tmp_path, dp, task, packing), 2)
    alone, sizes = stream(tmp_path, LoaderGeometry(0, 1, 1, 4), task, packing)
    for k, step in enumerate(steps(alone, STEPS)):
        first, second = (r["steps"][k] for r in ranks)
        assert sorted(map(str, step)) == sorted(map(str, first + second)) if dp == 2 else step == first == second
    texts = [r["texts"] for r in ranks]
    assert sum(texts) == sum(sizes) and max(texts) < 0.6 * sum(sizes)
    assert all(r["same"] and r["stats"] == alone.stats for r in ranks)


def test_a_malformed_row_of_another_rank_is_told_when_its_turn_comes(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "rows.jsonl",
        [*(chat(str(i), "a") for i in range(5)), {"messages": 3}, *(chat(str(i), "a") for i in range(6))],
    )
    made, _ = stream(tmp_path, LoaderGeometry(0, 1, 4), "sft", False)
    made.spread = lambda rows, work: [one for k in range(3) for one in work(rows[4 * k : 4 * k + 4])]
    made.options = type(made.options)(**{**vars(made.options), "shuffle": False})
    made.next()
    with pytest.raises(DataError, match=r"rows.jsonl:6: column messages"):
        made.next()
