"""How long the rows of micro-batches are: what a layout and FP8 products need of their lengths.

Leaves out the padding itself (`data/batches/collate.py`).
"""

from __future__ import annotations

import math

from megaswift.models.options.model import ModelConfig
from megaswift.parallel.layout import Layout


def row_padding_multiple(layout: Layout, fp8: int) -> int:
    """Rows are padded to it: 2 CP chunks of equal length, TP equal parts of each rank's share, `fp8` tokens a rank for
    FP8 products."""
    tp = layout.tp if layout.sequence_parallel else 1
    share = math.lcm(tp, 2 if layout.cp > 1 else 1)
    return layout.cp * math.lcm(share, fp8 * tp)


def fp8_token_multiple(model: ModelConfig, sequence_parallel: bool = False) -> int:
    """Tokens of which FP8 products need a multiple (Megatron-Core's `get_fp8_align_size`); 1 without FP8.

    With sequence parallelism ranks exchange quantized blocks: Transformer Engine gathers whole ones only.
    """
    if model.fp8_format is None:
        return 1
    if model.fp8_recipe == "blockwise" and sequence_parallel:
        return 128
    return 32 if model.fp8_recipe == "mxfp8" else 16


def needs_rows_of_full_length(model: ModelConfig, tp_comm_overlap: bool, layout: Layout) -> bool:
    """Whether every row of training is padded to max_length: where buffers or graphs have one shape, or ranks exchange
    tokens of experts whose number they do not tell each other."""
    buffers = tp_comm_overlap and layout.tp > 1
    padded_exchange = model.moe_pad_expert_input_to_capacity and layout.ep * layout.etp > 1
    return buffers or model.uses_cuda_graphs or padded_exchange


def full_microbatch_tokens(rows: int, max_length: int, row_multiple: int, layout: Layout) -> int:
    """Tokens of a micro-batch on one context-parallel rank where every row is padded to max_length.

    Args:
        rows: Rows of a micro-batch.
        row_multiple: `row_padding_multiple` of the run.
    """
    row = -(-max_length // row_multiple) * row_multiple
    return rows * row // layout.cp
