"""Metrics of embeddings over a whole evaluation set, against sentence-transformers' and scipy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from megaswift.losses.contract import ModelOutputs
from megaswift.losses.retrieval.groups import POOLING
from megaswift.trainers.hooks.retrieval import (
    EmbeddedGroups,
    EmbeddingMeasure,
    correlation_metrics,
    ranking_metrics,
)
from tests.losses.retrieval.batches import make


def unit(generator: np.random.Generator, count: int) -> np.ndarray:
    """Vectors of length 1."""
    vectors = generator.normal(size=(count, 4)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_rankings() -> None:
    """Queries with several positives, documents in several rows."""
    generator = np.random.default_rng(0)
    queries, corpus = unit(generator, 30), unit(generator, 60)
    groups = EmbeddedGroups()
    relevant: dict[str, set[str]] = {}
    for _ in range(50):
        q, *d = generator.integers(0, 30), *generator.choice(60, 3, replace=False)
        groups.texts.append([b"q%d" % q, *(b"d%d" % i for i in d)])
        groups.vectors.append(np.stack([queries[q], *(corpus[i] for i in d)]))
        groups.values.append(np.array([np.nan, 1, 0, 0], np.float32))
        relevant.setdefault(f"q{q}", set()).add(f"d{d[0]}")
    used = {text.decode() for texts in groups.texts for text in texts[1:]}
    evaluator = InformationRetrievalEvaluator(
        {q: q for q in relevant},
        {d: d for d in used},
        relevant,
        precision_recall_at_k=[1, 5, 10],
        mrr_at_k=[10],
        ndcg_at_k=[10],
    )

    class Model:
        """Looks vectors up."""

        def encode(self, texts: list[str]) -> torch.Tensor:
            named = {"q": queries, "d": corpus}
            return torch.from_numpy(np.stack([named[t[0]][int(t[1:])] for t in texts]))

    model: Any = Model()
    q_ids, d_ids = list(relevant), sorted(used)
    scores = (model.encode(q_ids) @ model.encode(d_ids).T).numpy()
    ranked = [[{"corpus_id": d_ids[j], "score": float(row[j])} for j in np.argsort(-row)] for row in scores]
    evaluator.queries_ids = q_ids
    expected = evaluator.compute_metrics(ranked)
    found = ranking_metrics(groups)
    assert found["mrr@10"] == pytest.approx(expected["mrr@k"][10])
    assert found["ndcg@10"] == pytest.approx(expected["ndcg@k"][10], abs=1e-6)
    for k in (1, 5, 10):
        assert found[f"recall@{k}"] == pytest.approx(expected["recall@k"][k])


def test_equal_vectors_gain_nothing() -> None:
    same = np.ones((3, 2), np.float32)
    groups = EmbeddedGroups([[b"q", b"p", b"n"]], [same], [np.array([np.nan, 1, 0], np.float32)])
    found = ranking_metrics(groups)
    assert found["recall@1"] == 0 and found["mrr@10"] == 0.5 and found["recall@5"] == 1
    assert ranking_metrics(EmbeddedGroups()) == {}


def test_correlations() -> None:
    generator = np.random.default_rng(1)
    vectors = [unit(generator, 2) for _ in range(40)]
    labels = generator.integers(0, 4, 40) / 4
    groups = EmbeddedGroups([[b"a", b"b"]] * 40, vectors, [np.array([np.nan, label], np.float32) for label in labels])
    cosines = [float(v[0] @ v[1]) for v in vectors]
    found = correlation_metrics(groups)
    assert found["pearson_cosine"] == pytest.approx(stats.pearsonr(cosines, labels)[0])
    assert found["spearman_cosine"] == pytest.approx(stats.spearmanr(cosines, labels)[0])
    assert correlation_metrics(EmbeddedGroups([[b"a", b"b"]] * 2, vectors[:2], groups.values[:1] * 2)) == {}


@pytest.mark.parametrize("packed", [False, True])
def test_groups_of_batches(packed: bool) -> None:
    """Each document's text and vector; fillers and other ranks of a replica do not count."""
    made = make([3, 2, 0], [[np.nan, 1, 0]] * 2, packed=packed)
    batch = POOLING["last"](made.batch)
    ids = torch.arange(batch.input_ids.numel()).view_as(batch.input_ids) * batch.valid

    class Engine:
        """Returns the hidden states of the batch."""

        def score(self, batches: Any, needs: Any) -> list[ModelOutputs]:
            assert needs.head == "hidden"
            return [ModelOutputs(vectors=made.vectors.detach()) for _ in batches]

    from dataclasses import replace

    engine: Any = Engine()
    batch = replace(batch, input_ids=ids)
    measure, silent = EmbeddingMeasure(True, True), EmbeddingMeasure(True, False)
    for one in (measure, silent):
        one.begin()
        one.add(engine, [batch])
    assert [len(texts) for texts in measure.groups.texts] == [3, 2]
    assert len({text for texts in measure.groups.texts for text in texts}) == 5
    vectors = np.concatenate(measure.groups.vectors)
    for vector, rows in zip(vectors, made.rows, strict=True):
        last = rows[-1].detach()
        np.testing.assert_allclose(vector, (last / last.norm()).numpy(), rtol=1e-6)
    assert not silent.groups.texts
    assert set(measure.metrics()) == {"recall@1", "recall@5", "recall@10", "mrr@10", "ndcg@10"}
