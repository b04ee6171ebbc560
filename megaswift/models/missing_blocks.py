"""Language models of transformers that have a block which the native engine lacks: which block it is.

Owns the table and the advice that every model type without a family gets. Facts are those of transformers' source.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaswift.errors import Problem

TORCH_ENGINES = "use --engine auto, ddp, zero2 or fsdp2, which train any language model that transformers loads"
_INDEXER = "sparse attention, whose keys a lightning indexer chooses"
_MAMBA2 = "Mamba-2 layers"
_MAMBA = "Mamba layers"
_DELTA = "Kimi delta attention (KDA)"
_SHORT_CONVOLUTIONS = "short convolutions in place of attention"
_PARALLEL = "attention and MLP in parallel after one layer norm"
MISSING_BLOCKS: Mapping[str, str] = {
    "afmoe": "gates on the output of attention beside norms before and after",
    "axk2": _INDEXER,
    "bailing_hybrid": _DELTA,
    "bamba": _MAMBA2,
    "blt": "patches of bytes, whose borders a second model finds",
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "cohere2_moe": _PARALLEL,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "attention over compressed keys, hyper-connections and experts chosen by hashes",
    "diffllama": "differential attention",
    "dots3_note_text": _INDEXER,
    "falcon_h1": _MAMBA2,
    "falcon_mamba": _MAMBA,
    "gemma3n_text": "per-layer embeddings and several residual streams (AltUp)",
    "gemma4_text": "per-layer embeddings, heads of two widths and layers that share keys and values",
    "gemma4_unified_text": "heads of two widths and layers that share keys and values",
    "glm_moe_dsa": _INDEXER,
    "granitemoehybrid": _MAMBA2,
    "hy_v4": f"{_INDEXER}, and hyper-connections",
    "inkling_text": "learned biases of attention by distance, and short convolutions",
    "jamba": _MAMBA,
    "jetmoe": "experts of attention",
    "kimi_linear": _DELTA,
    "laguna": "gates on the output of attention, and numbers of heads that differ by layer",
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": _SHORT_CONVOLUTIONS,
    "lfm3": _SHORT_CONVOLUTIONS,
    "llama4_text": "chunked attention, and experts whose inputs are scaled",
    "longcat_flash": "two attentions in a layer, a shortcut around them and experts that compute nothing",
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "mimo_v2_flash": "sinks and numbers of key heads that only windowed layers have, and values of another width",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": "sparse attention, whose blocks of keys an indexer chooses",
    "nemotron_h": f"{_MAMBA2} between layers of attention alone and of MLPs alone",
    "olmo_hybrid": "gated delta nets that may turn their state around (negative eigenvalues)",
    "phimoe": "a router with a sparse mixer, whose choice is drawn at random",
    "qwen4_exp_text": "sparse attention, embeddings of n-grams and gated residuals",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "rwkv": "RWKV's linear attention",
    "xlstm": "xLSTM's matrix memories",
    "zamba": _MAMBA,
    "zamba2": _MAMBA2,
    "zaya": "compressed convolutional attention (CCA)",
}
"""model_type of config.json -> what the model has."""


def missing_block_problem(model_type: str) -> Problem | None:
    """Why the native engine does not train models of this type, and what does; None for a type that is not in the
    table."""
    block = MISSING_BLOCKS.get(model_type)
    if block is None:
        return None
    rule = f"is not a supported model family: it has {block}, which --engine megatron does not compute"
    return Problem(f"config.json, model_type {model_type!r}", rule, TORCH_ENGINES)
