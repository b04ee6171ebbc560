"""The tasks of embedding models and rerankers: rows are a query with its documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.groups.documents import GroupDataset
from megaswift.engine.protocol import Engine
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import TOKENS, Loss, RequestedModelOutputs
from megaswift.losses.options.retrieval import retrieval_loss_of
from megaswift.losses.retrieval.embedding import EmbeddingLoss
from megaswift.losses.retrieval.infonce import InfonceSettings
from megaswift.losses.retrieval.pairs import PairSettings
from megaswift.losses.retrieval.reranking import RerankerLoss
from megaswift.run.dataset_task import DatasetTask, attached, read_rows
from megaswift.run.plan import RunPlan
from megaswift.run.retrieval.texts import embedding_settings, group_texts, score_tokens, side_files
from megaswift.run.task import TaskData, TaskParts
from megaswift.trainers.batch_fields import PooledTokens
from megaswift.trainers.hook import Rate
from megaswift.trainers.hooks.evaluation import EvaluationMeasure
from megaswift.trainers.hooks.retrieval import EmbeddingMeasure
from megaswift.trainers.options.batch_sizes import batch_plan
from megaswift.trainers.schedule import count_steps


def embedding_loss(cfg: SwiftConfig) -> Loss:
    """Return the loss of an embedding model."""
    options = cfg.retrieval
    return EmbeddingLoss(
        retrieval_loss_of(cfg),
        InfonceSettings(
            options.infonce_temperature,
            options.infonce_use_batch,
            options.infonce_directions,
            options.infonce_false_negative_margin,
        ),
        PairSettings(options.contrastive_margin),
        options.matryoshka_dims,
        options.matryoshka_weights,
    )


def reranker_loss(cfg: SwiftConfig) -> Loss:
    """Return the loss of a reranker with a classifier's head."""
    return RerankerLoss(retrieval_loss_of(cfg), cfg.retrieval.listwise_temperature)


@dataclass(frozen=True)
class RetrievalTask(DatasetTask):
    """Documents are pooled, and compared within groups and over ranks."""

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Read tokenized groups."""
        tokenizer = plan.reader()
        if plan.cfg.task == "embedding":
            refuse_wide_matryoshka(plan)
        plan, data = read_rows(plan, self, group_texts(plan.cfg, plan.folder, tokenizer))
        refuse_nothing_to_compare(plan, data)
        if plan.cfg.task == "generative_reranker":
            loss = reranker_loss(plan.cfg)
            assert isinstance(loss, RerankerLoss)
            tokens = score_tokens(plan.cfg, tokenizer)
            needs = RequestedModelOutputs(fields=frozenset(), head=TOKENS, tokens=tokens)
            data = replace(data, loss=replace(loss, needs=needs))
        return plan, replace(data, total_steps=count_steps(plan.cfg.train, data.source))

    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Rate) -> TaskParts:
        """Mark the tokens that are pooled in each batch."""
        transform = PooledTokens(_pooling(plan))
        return attached(plan, data, engine, transform, before_counts=True)

    def side_files(self, plan: RunPlan, tokenizer: Any) -> Mapping[str, str]:
        """The files of sentence-transformers."""
        return side_files(plan.cfg, plan.folder, plan.spec.hidden_size, tokenizer)

    def measure(self, plan: RunPlan) -> EvaluationMeasure | None:
        """Measure embeddings over the whole evaluation set; rerankers are judged within each row."""
        if plan.cfg.task != "embedding":
            return None
        place = plan.context.coordinates
        speaks = place.tp == place.pp == place.cp == 0  # the other ranks of a replica have the same batches
        return EmbeddingMeasure(retrieval_loss_of(plan.cfg) == "infonce", speaks)


def _pooling(plan: RunPlan) -> str:
    return embedding_settings(plan.cfg, plan.folder).pooling if plan.cfg.task == "embedding" else "last"


def refuse_wide_matryoshka(plan: RunPlan) -> None:
    """ConfigError for a width of Matryoshka that the model does not have."""
    hidden = plan.spec.hidden_size
    wide = [width for width in plan.cfg.retrieval.matryoshka_dims if width > hidden]
    if wide:
        rule = f"is wider than the model's embeddings, which have {hidden} numbers"
        raise ConfigError(Problem(f"--matryoshka_dims {wide[0]}", rule, f"--matryoshka_dims {hidden}"))


def refuse_nothing_to_compare(plan: RunPlan, data: TaskData) -> None:
    """ConfigError where a loss is constant: infonce without a negative, or lists of one document."""
    cfg = plan.cfg
    rows = getattr(data.source, "data", None)
    if not isinstance(rows, GroupDataset):
        return
    loss = retrieval_loss_of(cfg)
    alone = batch_plan(cfg.train, plan.layout.dp).per_device * plan.layout.dp == 1
    if loss == "infonce" and rows.groups.width == 2 and (alone or not cfg.retrieval.infonce_use_batch):
        rule = "has nothing to compare a positive with: rows have no negatives, and "
        rule += "a micro-batch has a single row" if alone else "infonce_use_batch is false"
        fix = "--per_device_train_batch_size 16" if alone else "--infonce_use_batch true"
        raise ConfigError(Problem("--loss_type infonce", rule, f"{fix}, or rows with negatives"))
    if loss != "pointwise_reranker" and cfg.task != "embedding" and rows.groups.width == 1:
        rule = "compares the documents of a row, but every row has a single one"
        raise ConfigError(Problem(f"--loss_type {loss}", rule, "--loss_type pointwise_reranker"))
