"""How long the rows of micro-batches are: what a layout and FP8 products need of their lengths.

Leaves out the padding itself (`data/collate.py`).
"""

from __future__ import annotations

import math

from megaswift.config import SwiftConfig
from megaswift.config.batch_arithmetic import batch_plan
from megaswift.config.cuda_graph_rules import uses_cuda_graphs
from megaswift.parallel.layout import Layout


def row_padding_multiple(layout: Layout, fp8: int) -> int:
    """Rows are padded to it: 2 CP chunks of equal length, TP equal parts of each rank's share, `fp8` tokens a rank for
    FP8 products."""
    tp = layout.tp if layout.sequence_parallel else 1
    share = math.lcm(tp, 2 if layout.cp > 1 else 1)
    return layout.cp * math.lcm(share, fp8 * tp)


def fp8_token_multiple(cfg: SwiftConfig, sequence_parallel: bool = False) -> int:
    """Tokens of which FP8 products need a multiple (Megatron-Core's `get_fp8_align_size`); 1 without FP8.

    With sequence parallelism ranks exchange quantized blocks: Transformer Engine gathers whole ones only.
    """
    if cfg.model.fp8_format is None:
        return 1
    if cfg.model.fp8_recipe == "blockwise" and sequence_parallel:
        return 128
    return 32 if cfg.model.fp8_recipe == "mxfp8" else 16


def needs_rows_of_full_length(cfg: SwiftConfig, layout: Layout) -> bool:
    """Whether every row of training is padded to max_length: where buffers or graphs have one shape, or ranks exchange
    tokens of experts whose number they do not tell each other."""
    padded_exchange = cfg.model.moe_pad_expert_input_to_capacity and layout.ep * layout.etp > 1
    return cfg.parallel.tp_comm_overlap and layout.tp > 1 or uses_cuda_graphs(cfg) or padded_exchange


def full_microbatch_tokens(cfg: SwiftConfig, layout: Layout) -> int:
    """Tokens of a micro-batch on one context-parallel rank where every row is padded to max_length."""
    unit = row_padding_multiple(layout, fp8_token_multiple(cfg, layout.sequence_parallel))
    row = -(-cfg.data.max_length // unit) * unit
    return batch_plan(cfg.train, layout.dp).per_device * row // layout.cp
