"""Tasks that train on a data set: supervised, pretraining, preference and reward-model tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.data import build as data_sources
from megaswift.data.batches.loader import BatchSource, DocumentRows, EvaluationSource, TokenStoreBatchSource
from megaswift.data.batches.step_packing import StepPacking
from megaswift.data.groups.rows import GroupTexts
from megaswift.data.preference.collate import kto_kl_batches, labeled_documents, previous_in_global_batch
from megaswift.data.stream.batches import StreamBatchSource
from megaswift.data.tokenizer import score_padding_token
from megaswift.data.vision.processor import Processor, tokenizer_of_tokenizer_or_processor
from megaswift.engine.options.cuda_graphs import uses_cuda_graphs
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.engine.protocol import Engine
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import Batch
from megaswift.losses.kto import uses_delta, uses_kl
from megaswift.losses.options.kto_pairs import kto_pairs_over_global_batch
from megaswift.losses.options.preference import beta_of, loss_types_of, needs_reference
from megaswift.models.encoders import is_encoder
from megaswift.models.heads import with_pad_token_id
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import CLASSIFIERS, DISTILLATION, PROMPTED, SUPERVISED
from megaswift.parallel.layout import Layout
from megaswift.parallel.row_padding import needs_rows_of_full_length
from megaswift.run.checks.prefix_sharing import shares_prefixes
from megaswift.run.classes import with_classes
from megaswift.run.engines import native_kernels
from megaswift.run.plan import RunPlan
from megaswift.run.task import Task, TaskData, TaskParts
from megaswift.trainers.batch_fields import (
    BatchTransform,
    BcoReferencePoint,
    KtoBaseline,
    LastTokens,
    Mismatched,
    ReferenceLogprobs,
)
from megaswift.trainers.distillation.options.distillation import samples_in_training
from megaswift.trainers.hook import Rate
from megaswift.trainers.options.batch_sizes import batch_plan
from megaswift.trainers.reference_logprobs import PrecomputedReferenceLogprobs
from megaswift.trainers.schedule import count_steps


@dataclass(frozen=True)
class DatasetTask(Task):
    """Batches come from rows; the loss may read scores of a reference besides."""

    rows_of: str = ""
    """The task whose rows these are, if it is another one."""

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Read tokenized rows, and choose the packing of a step by them."""
        plan, data = read_rows(plan, self)
        cfg = choose_step_packing(plan.cfg, plan.spec, plan.layout, data.source, data.evaluation)
        if cfg.task in PROMPTED and shares_prefixes(cfg, plan.spec, plan.layout):
            data_sources.share_prompts((data.source, data.evaluation))
        return replace(plan, cfg=cfg), replace(data, total_steps=count_steps(cfg.train, data.source))

    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Rate) -> TaskParts:
        """Add to each batch what the loss reads besides its rows."""
        transform = make_batch_transform(plan.cfg, mismatched_answers(plan, data), data.reference)
        return attached(plan, data, engine, transform, before_counts=isinstance(transform, LastTokens))


def attached(
    plan: RunPlan, data: TaskData, engine: Engine, transform: BatchTransform | None, before_counts: bool
) -> TaskParts:
    """Return the parts of a task whose batches a transform completes; `before_counts`: before they are counted."""
    if isinstance(data.source, TokenStoreBatchSource):
        data.source.prepare_ahead = engine.prepare_ahead
        # Megatron-Core captures the graphs of backward passes at the end of the first step, in the mode in which no
        # other thread may allocate pinned memory
        data.source.alone = int(uses_cuda_graphs(plan.cfg))
    if transform is None:
        return TaskParts(data.source)
    hooks = [transform]
    return TaskParts(data.source, first_hooks=hooks, prepare=transform.prepare, prepare_before_counts=before_counts)


def read_rows(plan: RunPlan, task: DatasetTask, groups: GroupTexts | None = None) -> tuple[RunPlan, TaskData]:
    """Load the tokenizer, then build training and evaluation batches. Evaluation passes as many micro-batches at a time
    as a pipeline has stages.

    Args:
        plan: What the ranks have agreed on.
        task: The task of the run.
        groups: How rows become texts, for embedding models and rerankers.
    """
    # The classes of a classifier.
    if plan.cfg.task in CLASSIFIERS:
        plan = with_classes(plan)

    # The tokenizer; a model that scores conversations finds their ends by its padding token.
    reader = plan.reader()
    tokenizer = tokenizer_of_tokenizer_or_processor(reader)
    if plan.spec.scored and not is_encoder(plan.spec.hf_config):  # whose head reads the first token, or all of them
        config = {"vocab_size": plan.spec.vocab_size, **plan.spec.hf_config}
        padding = score_padding_token(tokenizer, config)
        spec = replace(
            plan.spec,
            hf_config=with_pad_token_id(plan.spec.hf_config, padding),
            features=replace(plan.spec.features, padding_token=padding),
        )
        plan = replace(plan, spec=spec)

    # The rows.
    cfg = plan.cfg
    source, evaluation = data_sources.build_train_and_eval_sources(
        cfg.data, cfg.train, reader, plan.geometry(), task.rows_of or cfg.task, task.prompt_labels, groups
    )
    if evaluation is not None:
        passes = eval_accumulation(cfg, plan.layout)
        evaluation = replace(evaluation, geometry=replace(evaluation.geometry, accumulation=passes))
    if isinstance(source, StreamBatchSource):
        source.spread = distributed.map_over_ranks

    # What a reference scores, where it is asked before training.
    once: dict[bool, EvaluationSource] = {}
    if isinstance(source, TokenStoreBatchSource):
        geometry = replace(source.geometry, accumulation=plan.layout.pp)
        once[True] = EvaluationSource(source.data, geometry, source.shape)
        if evaluation is not None:
            once[False] = evaluation
    processor = reader if isinstance(reader, Processor) else None
    return plan, TaskData(source, evaluation, (), tokenizer, processor, every_row_once=once)


def mismatched_answers(plan: RunPlan, data: TaskData) -> Mismatched:
    """Build the source of KTO's mismatched answers, in batches of the run's shape."""
    geometry = plan.geometry()
    place = plan.context.coordinates

    def mismatched(batches: Sequence[Batch], over_global_batch: bool) -> list[Batch]:
        answers = None
        if over_global_batch:
            first = place.tp == place.pp == place.cp == 0  # the other ranks of a replica have the same batches
            shares = distributed.all_gather_merged_dict({place.dp: labeled_documents(batches)} if first else {})
            answers = previous_in_global_batch([shares[rank] for rank in range(geometry.dp_size)], place.dp)
        shape = data_sources.padding_shape_of(data.tokenizer, geometry)
        return kto_kl_batches(batches, shape, plan.cfg.data.max_length, geometry.uniform, answers)

    return mismatched


SHORT = 4
"""Samples are short where their median is at most max_length / SHORT."""


def choose_step_packing(
    cfg: SwiftConfig,
    spec: ModelSpec,
    layout: Layout,
    source: BatchSource,
    evaluation: EvaluationSource | None,
) -> SwiftConfig:
    """Decide `padding_free`, with a notice where it was not asked for; the sources then pack, or cut a step into
    micro-batches of at most `max_tokens_per_batch`. The same on every rank."""
    if cfg.data.max_tokens_per_batch is not None:
        return limit_microbatches(cfg, cfg.data.max_tokens_per_batch, spec, layout, source, evaluation)
    asked = cfg.data.padding_free
    packs = (*SUPERVISED, *DISTILLATION)
    if asked is False or cfg.data.packing or cfg.task not in packs or samples_in_training(cfg):
        return cfg
    rows = source.data if isinstance(source, TokenStoreBatchSource) else None
    if not isinstance(rows, DocumentRows) or rows.towers is not None:
        if asked:
            log.info("--padding_free true: rows with images and streamed rows are padded")
        return cfg.replace(padding_free=False)
    median = int(np.median(rows.docs.length))
    try:
        shared = cfg.replace(padding_free=True)
    except ConfigError:  # another option needs rows that are padded
        return cfg
    if not asked and (median * SHORT > cfg.data.max_length or any(_reasons_against(cfg, shared, spec, layout))):
        return cfg
    capacity = cfg.data.max_length * batch_plan(cfg.train, layout.dp).per_device
    packing = StepPacking(capacity, layout.pp, layout.pp if layout.vpp > 1 else 1)
    _pack(packing, rows, evaluation)
    if not asked and distributed.global_rank() == 0:
        log.info(
            f"the samples of a step are packed into rows of up to {capacity:,} tokens, because their median length is "
            f"{median:,}; the loss is the same (--padding_free false pads each sample)"
        )
    return shared


def limit_microbatches(
    cfg: SwiftConfig,
    tokens: int,
    spec: ModelSpec,
    layout: Layout,
    source: BatchSource,
    evaluation: EvaluationSource | None,
) -> SwiftConfig:
    """Let the source cut a step into micro-batches of at most so many tokens: packed into one row, or padded where
    `padding_free` is false, or is not set and not possible without another objective or other kernels."""
    rows = source.data if isinstance(source, TokenStoreBatchSource) else None
    assert isinstance(source, TokenStoreBatchSource) and isinstance(rows, DocumentRows), "the rules refuse streams"
    padding_free = cfg.data.padding_free
    if padding_free is None:
        try:
            shared = cfg.replace(padding_free=True)
        except ConfigError:  # another option needs rows that are padded
            padding_free = False
        else:
            padding_free = not any(_reasons_against(cfg, shared, spec, layout))
    unit = source.shape.row_length(1)
    capacity = tokens // unit * unit
    longest = source.shape.row_length(int(rows.docs.length.max()))
    if capacity < longest:
        rule = f"is less than the longest sample takes: {longest}, in multiples of {unit} for this layout"
        raise ConfigError(Problem(f"--max_tokens_per_batch {tokens}", rule, f"--max_tokens_per_batch {longest}"))
    multiple = layout.pp if layout.vpp > 1 else 1
    packing = StepPacking(capacity, layout.pp, multiple, limited=True, padded=not padding_free)
    _pack(packing, rows, evaluation if padding_free else None)
    return cfg.replace(padding_free=padding_free)


def _pack(packing: StepPacking, rows: DocumentRows, evaluation: EvaluationSource | None) -> None:
    for held in (rows, None if evaluation is None else evaluation.data):
        if isinstance(held, DocumentRows):
            held.step_packing = packing


def _reasons_against(cfg: SwiftConfig, shared: SwiftConfig, spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Why it is no default here."""
    if cfg.task != "sft" or requested_engine(cfg) != NATIVE:
        yield "it was measured for sft on the native engine"
    elif needs_rows_of_full_length(cfg.model, cfg.parallel.tp_comm_overlap, layout):
        yield "buffers have the shape of padded rows"
    elif spec.experts:
        yield "auxiliary losses of routers are means over a micro-batch"
    elif native_kernels(cfg, spec, layout) != native_kernels(shared, spec, layout):
        yield "other kernels would be needed"


def eval_accumulation(cfg: SwiftConfig, layout: Layout) -> int:
    """Return how many micro-batches evaluation passes at a time: as many as a pipeline has stages; where KTO takes
    completions from the whole global batch, as many as hold the rows of a step."""
    if kto_pairs_over_global_batch(cfg, training=False):
        plan = batch_plan(cfg.train, layout.dp)
        return plan.per_device * plan.accumulation
    return layout.pp


def make_batch_transform(
    cfg: SwiftConfig, mismatched: Mismatched, known: Mapping[bool, PrecomputedReferenceLogprobs]
) -> BatchTransform | None:
    """Build what adds fields for this run's loss to batches; None where rows have all."""
    if cfg.task == "rm":
        return LastTokens()
    if not needs_reference(cfg):
        return None
    p = cfg.preference
    kind = loss_types_of(cfg)[0]
    moves = (p.ref_model_sync_steps if p.sync_ref_model else None, p.ref_model_mixup_alpha)
    if uses_kl(kind):
        return KtoBaseline(mismatched, partial(kto_pairs_over_global_batch, cfg), *moves)
    transform = BcoReferencePoint(beta_of(cfg), *moves) if uses_delta(kind) else ReferenceLogprobs(*moves)
    transform.known = known
    return transform
