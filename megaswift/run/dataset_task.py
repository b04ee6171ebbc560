"""Tasks that train on a data set: supervised, pretraining, preference and reward-model tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megaswift import distributed
from megaswift.config.checks.cuda_graphs import uses_cuda_graphs
from megaswift.config.parts.data import PROMPTED
from megaswift.data import build_batch_sources as data_sources
from megaswift.data.collate_preference_batches import kto_kl_batches, labeled_documents, previous_in_global_batch
from megaswift.data.load_tokenizer import score_padding_token
from megaswift.data.loader import EvaluationSource, TokenStoreBatchSource
from megaswift.data.stream_batches import StreamBatchSource
from megaswift.data.vision_processor import Processor, tokenizer_of_tokenizer_or_processor
from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Batch
from megaswift.models.scalar_head import with_pad_token_id
from megaswift.run.plan import RunPlan
from megaswift.run.task import Task, TaskData, TaskParts
from megaswift.trainers.batch_fields import LastTokens, Mismatched, make_batch_transform
from megaswift.trainers.hooks.evaluation import eval_accumulation
from megaswift.trainers.prefix_sharing import shares_prefixes
from megaswift.trainers.schedule import count_steps
from megaswift.trainers.step_packing import choose_step_packing


@dataclass(frozen=True)
class DatasetTask(Task):
    """Batches come from rows; the loss may read scores of a reference besides."""

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Tokenized rows, and the packing of a step where that is chosen by them."""
        plan, data = read_rows(plan, self)
        cfg = choose_step_packing(plan.cfg, plan.spec, plan.layout, data.source, data.evaluation)
        if cfg.task in PROMPTED and shares_prefixes(cfg, plan.spec, plan.layout):
            data_sources.share_prompts((data.source, data.evaluation))
        return replace(plan, cfg=cfg), replace(data, total_steps=count_steps(cfg, data.source))

    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Callable[[int], float]) -> TaskParts:
        """What the loss reads besides, added to each batch."""
        if isinstance(data.source, TokenStoreBatchSource):
            data.source.prepare_ahead = engine.prepare_ahead
            # Megatron-Core captures the graphs of backward passes at the end of the first step, in the mode in which no
            # other thread may allocate pinned memory
            data.source.alone = int(uses_cuda_graphs(plan.cfg))
        transform = make_batch_transform(plan.cfg, mismatched_answers(plan, data), data.reference)
        if transform is None:
            return TaskParts(data.source)
        first = isinstance(transform, LastTokens)
        return TaskParts(data.source, first_hooks=[transform], prepare=transform.prepare, prepare_before_counts=first)


def read_rows(plan: RunPlan, task: Task) -> tuple[RunPlan, TaskData]:
    """Tokenizer, then training and evaluation batches. Evaluation passes as many micro-batches at a time as a pipeline
    has stages."""
    # The tokenizer; a model that scores conversations finds their ends by its padding token.
    reader = plan.reader()
    tokenizer = tokenizer_of_tokenizer_or_processor(reader)
    if plan.spec.scored:
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
        cfg.data, cfg.train, reader, plan.geometry(), cfg.task, task.prompt_labels
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
    """What gives KTO's other answers, in batches of the run's shape."""
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
