"""Groups of documents from rows to micro-batches: tokens as the tokenizer makes them, truncation, `#rows`, splits.

Covers: megaswift/data/groups/encode.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from megaswift.config import SwiftConfig
from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.loader import EvaluationSource, TokenStoreBatchSource
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.groups.documents import GroupDataset
from megaswift.data.groups.rows import GroupTexts
from megaswift.errors import DataError
from megaswift.losses.contract import Batch
from tests.data.makers import tokenizer

END = "<|endoftext|>"
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")


def ended_tokenizer() -> Any:
    """A tokenizer that puts a token behind each text, as Qwen3-Embedding's does."""
    made = tokenizer("qwen")
    end = made.convert_tokens_to_ids(made.pad_token)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {made.pad_token}", special_tokens=[(made.pad_token, end)]
    )
    return made


def write(folder: Path, negatives: list[int]) -> Path:
    """A file with a row for each number of negatives."""
    path = folder / "rows.jsonl"
    rows = [
        {"anchor": f"{WORDS[i % 8]} {i}", "positive": f"the {WORDS[i % 8]}", "negative": [f"no {k}" for k in range(n)]}
        for i, n in enumerate(negatives)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sources(path: Path, texts: GroupTexts, geometry: LoaderGeometry, **options: Any) -> tuple[Any, Any, Any]:
    """(tokenizer, training source, evaluation source)."""
    made = ended_tokenizer()
    cache = str(path.parent / "cache")
    cfg = SwiftConfig(task="embedding", dataset=[str(path)], dataset_cache_dir=cache, shuffle=False, **options)
    return made, *build_train_and_eval_sources(cfg.data, cfg.train, made, geometry, "embedding", groups=texts)


def documents_of(batch: Batch) -> list[list[int]]:
    """The tokens of each document of a batch."""
    if batch.cu_seqlens is None:
        return [ids[valid].tolist() for ids, valid in zip(batch.input_ids, batch.valid, strict=True)]
    edges = batch.cu_seqlens.tolist()
    spans = zip(edges[:-1], edges[1:], strict=True)
    return [batch.input_ids[0, a:b][batch.valid[0, a:b]].tolist() for a, b in spans]


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_of_two_ranks(tmp_path: Path, packing: bool) -> None:
    path = write(tmp_path, [2, 0, 1, 3, 0])
    texts = GroupTexts("paired", query_prompt="find ")
    seen: list[list[list[int]]] = []
    for rank in range(2):
        geometry = LoaderGeometry(rank, 2, 1, 2, doc_multiple=4, row_multiple=8, uniform=True)
        made, source, _ = sources(path, texts, geometry, packing=packing)
        assert isinstance(source, TokenStoreBatchSource)
        batches = source.next()
        assert len({batch.input_ids.shape for batch in batches}) == 1
        for batch in batches:
            assert batch.fields["documents"].shape == batch.fields["values"].shape == (1, 5)
            places = batch.fields["documents"][0]
            documents = documents_of(batch)
            seen.append([documents[place] for place in places.tolist() if place >= 0])
            count = int((places >= 0).sum())
            assert torch.isnan(batch.fields["values"][0, 0]) and batch.fields["values"][0, 1] == 1
            assert not batch.fields["values"][0, 2:count].any()
    order = [seen[0], seen[2], seen[1], seen[3]]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, group in zip(rows, order, strict=False):
        expected = [made("find " + row["anchor"])["input_ids"], made(row["positive"])["input_ids"]]
        expected += [made(text)["input_ids"] for text in row["negative"]]
        assert group == expected and all(ids[-1] == made.pad_token_id for ids in group)


def test_evaluation_is_filled_up_with_empty_groups(tmp_path: Path) -> None:
    _, source, evaluation = sources(
        write(tmp_path, [1, 0, 2]),
        GroupTexts("paired"),
        LoaderGeometry(1, 2, 1),
        val_dataset=[str(tmp_path / "rows.jsonl")],
    )
    assert isinstance(evaluation, EvaluationSource) and isinstance(source.data, GroupDataset)
    first, last = ([*batches] for batches in evaluation.eval_batches())
    assert (first[0].fields["documents"][0] >= 0).sum() == 2
    assert (last[0].fields["documents"] == -1).all() and not last[0].valid.any()


def test_texts_are_cut_before_their_end_or_rows_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, [1, 0, 2])
    long = "word " * 50
    path.write_text(path.read_text() + json.dumps({"anchor": "a", "positive": long}) + "\n")
    geometry = LoaderGeometry()
    made, source, _ = sources(path, GroupTexts("paired"), geometry, max_length=16)
    assert len(source.data) == 3 and source.data.docs.counted["deleted"] == 1
    cut = GroupTexts("paired", cut="right", max_length=16)
    _, source, _ = sources(path, cut, geometry, max_length=16, truncation_strategy="right")
    ids = source.data.read(3)[0][1][0].tolist()
    assert ids == made(long, truncation=True, max_length=16)["input_ids"] and ids[-1] == made.pad_token_id
    with pytest.raises(DataError, match="tokens, --max_length is 16"):
        sources(path, GroupTexts("paired"), geometry, max_length=16, truncation_strategy="raise")
    with pytest.raises(DataError, match="none of 4 rows remains"):
        sources(path, GroupTexts("paired"), geometry, max_length=2)


def test_a_reranker_s_text_keeps_what_follows_the_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"anchor": "q", "positive": "word " * 50}) + "\n")
    texts = GroupTexts(template="{query} : {document} = yes ?", cut="right", max_length=20)
    _, source, _ = sources(path, texts, LoaderGeometry(), max_length=20, truncation_strategy="right")
    made = ended_tokenizer()
    ids = source.data.read(0)[0][0][0].tolist()
    assert len(ids) == 20
    behind = made(" = yes ?", add_special_tokens=False)["input_ids"]
    assert ids[-len(behind) - 1 :] == [*behind, made.pad_token_id]


def test_rows_are_taken_whole_and_held_out_whole(tmp_path: Path) -> None:
    path = write(tmp_path, [2, 0, 1, 3, 0, 1])
    made, source, evaluation = sources(path, GroupTexts("paired"), LoaderGeometry(), split_dataset_ratio=0.5)
    kept, held = source.data.groups, evaluation.data.groups
    assert sorted([*np.diff(kept.bounds), *np.diff(held.bounds)]) == sorted([4, 2, 3, 5, 2, 3])
    assert not {*kept.docs.sample} & {*held.docs.sample}
    cfg = SwiftConfig(
        task="embedding",
        dataset=[f"{path}#8", str(path)],
        interleave_prob=[1, 1],
        stopping_strategy="all_exhausted_without_replacement",
        dataset_cache_dir=str(tmp_path / "cache"),
    )
    source, _ = build_train_and_eval_sources(
        cfg.data, cfg.train, made, LoaderGeometry(), "embedding", groups=GroupTexts("paired")
    )
    assert len(source.data) == 14
    for row in range(14):
        documents, values = source.data.read(row)
        assert np.isnan(values[0]) and values[1] == 1 and len({sample for _, _, sample in documents}) == 1


def test_padding_alone_for_nothing() -> None:
    empty: Any = GroupDataset(None, True, 3)  # type: ignore[arg-type]
    batch = empty.batches([[(), ()]], PaddingShape(2, 4, 0), True)[0]
    assert batch.fields["documents"].tolist() == [[-1] * 3] * 2 and not batch.valid.any()
