"""Decides whether the samples of a step share rows (`--padding_free`), once the lengths of the samples are known.

Owns the default: with short samples each row of its own costs a GPU a small kernel launch and little work. Sharing rows
changes neither the samples of a step nor its loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.config.checks.engine import NATIVE, requested_engine
from megaswift.config.facts.batch_sizes import batch_plan
from megaswift.data.loader import BatchSource, DocumentRows, EvaluationSource, TokenStoreBatchSource
from megaswift.data.pack_samples_of_step import StepPacking
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.row_padding import needs_rows_of_full_length

SHORT = 4
"""Samples are short where their median is at most max_length / SHORT."""


def choose_step_packing(
    cfg: SwiftConfig,
    spec: ModelSpec,
    layout: Layout,
    source: BatchSource,
    evaluation: EvaluationSource | None,
) -> SwiftConfig:
    """The configuration with `padding_free` decided; the sources then pack. Says so where it was not asked for. The
    same on every rank."""
    asked = cfg.data.padding_free
    if asked is False or cfg.data.packing or cfg.task not in ("sft", "pt"):
        return cfg
    rows = source.data if isinstance(source, TokenStoreBatchSource) else None
    if not isinstance(rows, DocumentRows) or rows.towers is not None:
        if asked:
            log.info("--padding_free true: rows with images and streamed rows are padded")
        return cfg.replace(padding_free=False)
    median = int(np.median(rows.docs.length))
    shared = cfg.replace(padding_free=True)
    if not asked and (median * SHORT > cfg.data.max_length or any(_reasons_against(cfg, shared, spec, layout))):
        return cfg
    capacity = cfg.data.max_length * batch_plan(cfg.train, layout.dp).per_device
    packing = StepPacking(capacity, layout.pp, layout.pp if layout.vpp > 1 else 1)
    for held in (rows, None if evaluation is None else evaluation.data):
        if isinstance(held, DocumentRows):
            held.step_packing = packing
    if not asked and distributed.global_rank() == 0:
        log.info(
            f"the samples of a step are packed into rows of up to {capacity:,} tokens, because their median length is "
            f"{median:,}; the loss is the same (--padding_free false pads each sample)"
        )
    return shared


def _reasons_against(cfg: SwiftConfig, shared: SwiftConfig, spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Why it is no default here."""
    if cfg.task != "sft" or requested_engine(cfg) != NATIVE:
        yield "it was measured for sft on the native engine"
    elif needs_rows_of_full_length(cfg.model, cfg.parallel.tp_comm_overlap, layout):
        yield "buffers have the shape of padded rows"
    elif spec.experts:
        yield "auxiliary losses of routers are means over a micro-batch"
    else:
        from megaswift.trainers.engines import native_kernels

        if native_kernels(cfg, spec, layout) != native_kernels(shared, spec, layout):
            yield "other kernels would be needed"
