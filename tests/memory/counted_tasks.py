"""Bytes of a step of preference learning, of reward models and of classifiers, counted on the engine's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.losses.contract import Batch
from megaswift.losses.options.preference import needs_reference
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import PAIRS
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes
from megaswift.parallel.layout import Layout
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.run.dataset_task import make_batch_transform
from megaswift.run.engines import make_engine, start_context
from megaswift.run.tasks import TASKS
from megaswift.trainers.batch_fields import with_field
from tests.memory.counted_ranks import CountedRun, Held, SavedBytes, _counters, full_rows
from tests.parity.cases import parse
from tests.parity.measure import build


@dataclass(frozen=True)
class TaskRun(CountedRun):
    """A run of a task on a model folder."""

    task: str = "dpo"

    def setup(self) -> tuple[SwiftConfig, Any, Layout]:
        """(the run's configuration, its model, its layout)."""
        case = parse(self.text)
        packed = {"packing": True} if case.packed else {"packing": False}
        cfg = SwiftConfig(task=self.task, model=str(self.folder), **(case.config() | packed | self.options))
        spec: ModelSpec = model_spec_for_task(cfg, self.folder)
        return cfg, spec, Layout.from_config(cfg.parallel, case.world)


@dataclass(frozen=True)
class CountedTask:
    """Bytes on a rank."""

    held: Held
    """After a step."""
    reference: int
    forward: int
    """Kept for the backward pass, when the first one begins."""
    scoring_peak: int = 0
    """Allocated at most in a forward pass before the step."""
    training_peak: int = 0
    """Allocated at most in the passes of one micro-batch."""


def task_batch(cfg: SwiftConfig, spec: ModelSpec) -> Batch:
    """A micro-batch of documents of max_length tokens, all with labels, and the fields of the task."""
    rows = cfg.train.per_device_train_batch_size
    documents = rows * (2 if cfg.task in PAIRS else 1)
    plain = full_rows(documents, cfg.data.max_length, packed=False)
    fields: dict[str, Tensor] = {}
    if cfg.task in PAIRS:
        fields["pairs"] = torch.arange(documents).view(-1, 2)
    elif cfg.task == "kto":
        fields = {"examples": torch.arange(documents), "label": torch.arange(documents) % 2 == 0}
    weights = plain.loss_weights
    if spec.scored:
        weights = torch.zeros_like(weights)
        weights[:, -1] = 1.0
        fields |= {} if cfg.task in PAIRS else {"label": (torch.arange(documents) % spec.labels)[:, None]}
    if not cfg.data.packing:
        return Batch(plain.input_ids, plain.labels, weights, plain.positions, plain.valid, fields=fields)
    bounds = torch.arange(documents + 1, dtype=torch.int32) * cfg.data.max_length
    flat = [t.reshape(1, -1) for t in (plain.input_ids, plain.labels, weights, plain.positions, plain.valid)]
    return Batch(*flat, cu_seqlens=bounds, fields=fields)


def count_task(rank: int, world: int, run: TaskRun) -> CountedTask:
    """Scores a batch by the reference, trains on it once and passes it again (on the ranks)."""
    case = parse(run.text)
    cfg, spec, layout = run.setup()
    context = start_context(cfg.replace(ddp_timeout=600, seed=11), layout)
    engine = make_engine(cfg, spec, run.folder, context)
    engine.load_hf(run.folder)
    if needs_reference(cfg) and not cfg.preference.precompute_ref_log_probs:
        engine.keep_reference(cfg.preference.offload_reference)
    loss = TASKS.get(cfg.task).loss(cfg)
    transform = make_batch_transform(cfg, _as_they_are, {})
    if cfg.preference.precompute_ref_log_probs:
        transform = None

    def prepared() -> list[Batch]:
        batches = [task_batch(cfg, spec)] * (case.total // case.dp)
        if cfg.preference.precompute_ref_log_probs:
            return with_field(batches, "reference", [torch.zeros(b.labels.shape) for b in batches])
        return batches if transform is None else transform.prepare(engine, batches, True)

    assert not engine.train_batch(prepared(), loss, 1e-3).skipped
    held = _held(engine)
    batches = prepared()
    count = SavedBytes(t for c in engine.plain for t in (*c.parameters(), *c.buffers()))
    with torch.autograd.graph.saved_tensors_hooks(count.pack, count.unpack):
        engine.accumulate(batches, loss)
    reference = 0 if engine.remembered is None else engine.remembered.bytes
    torch.distributed.barrier()
    context.close()
    assert count.forward is not None
    return CountedTask(held, reference, count.forward)


def count_offloaded(rank: int, world: int, job: tuple[TaskRun, frozenset[str]]) -> Held:
    """Bytes that stay on the device while a policy that has taken a step lends it to a sampler (on the ranks)."""
    from megaswift.losses.sft import CrossEntropy

    run, parts = job
    case = parse(run.text)
    engine, context = build(case, run.folder, world, **run.options)
    batch = full_rows(2, 64, packed=False)
    assert not engine.train_batch([batch] * (case.total // case.dp), CrossEntropy(), 1e-3).skipped
    engine.offload(parts)
    held = _held(engine)
    engine.onload()
    torch.distributed.barrier()
    context.close()
    return held


def count_task_peaks(rank: int, world: int, task: tuple[TaskRun, int]) -> CountedTask:
    """Allocations of a forward pass of the reference and of the passes of one micro-batch; the head's chunks hold so
    many bytes (on the ranks)."""
    run, chunk = task
    head_memory.CHUNK_SIZES["cpu"] = HeadChunkSizes(chunk, chunk, 1)
    cfg, spec, layout = run.setup()
    context = start_context(cfg.replace(ddp_timeout=600, seed=11), layout)
    engine = make_engine(cfg, spec, run.folder, context)
    engine.load_hf(run.folder)
    if needs_reference(cfg):
        engine.keep_reference()
    loss = TASKS.get(cfg.task).loss(cfg)
    transform = make_batch_transform(cfg, _as_they_are, {})
    batches = [task_batch(cfg, spec)]
    prepared = batches if transform is None else transform.prepare(engine, batches, True)
    engine.accumulate(prepared, loss)  # what is made once is there
    training = _peak(lambda: engine.accumulate(prepared, loss))
    scoring = 0 if transform is None else _peak(lambda: transform.prepare(engine, batches, True))
    context.close()
    return CountedTask(Held(0, 0, 0), 0, 0, scoring, training)


def _peak(work: Any) -> int:
    """Bytes that are allocated at most, by torch's own count (`counted_ranks.count_peak`)."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), profiler:
        work()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return max(accumulate(sizes))


def _as_they_are(batches: Any, over_global_batch: bool) -> list[Batch]:
    """In place of mismatched answers, which have as many tokens."""
    return [*batches]


def _held(engine: Any) -> Held:
    from megaswift.engine.megatron.optim.optimizer import optimizer_parts
    from megaswift.run.faults.out_of_memory import GRADIENTS, OPTIMIZER, WEIGHTS, tensor_memory_holders

    nf4 = sum(m.nbytes for c in engine.plain for m in c.modules() if type(m).__name__ == "NF4Matrix")
    found = tensor_memory_holders(torch.device("cpu"))
    counters = _counters(part.optimizer for part in optimizer_parts(engine.optimizer))
    return Held(found.get(WEIGHTS, 0) + nf4, found.get(GRADIENTS, 0), found.get(OPTIMIZER, 0) - counters)
