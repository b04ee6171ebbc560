"""What a decoder layer keeps for the backward pass, tensor by tensor.

Owns the formulas, one line a tensor: b rows of s / cp tokens, t tokens in all (r = t / tp of them under sequence
parallelism), w bytes an element, h hidden size, a and k the widths of this rank's queries and keys, f and e the inner
widths of the MLP and of an expert on this rank, m rows of the experts' products. Attention is flash attention: no
scores are kept, but their log-sum-exp. Sources: the saved tensors of Transformer Engine's modules and of the torch
layers, counted in `tests/memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaswift.memory.microbatch_setup import TORCH, MicrobatchSetup

Kept = dict[str, int]
"""Bytes by tensor."""
QKV = "self_attention.linear_qkv"
PROJECTION = "self_attention.linear_proj"
ATTENTION_BLOCK = 1024
"""Queries of a block under a window (`engine/document_attention.py`)."""
FC1 = "mlp.linear_fc1"
FC2 = "mlp.linear_fc2"
EXPERT_FC1 = "mlp.experts.0.linear_fc1"
EXPERT_FC2 = "mlp.experts.0.linear_fc2"


def layer_input_bytes(setup: MicrobatchSetup) -> int:
    """Returns the bytes of the residual stream [s, b, h] between two layers: all that full recomputation keeps of a
    layer."""
    return setup.residual_tokens * setup.spec.hidden_size * setup.width


def kept_by_layer(setup: MicrobatchSetup, layer: int, recomputed: Sequence[str] = ()) -> Kept:
    """Returns the bytes that one layer keeps without recomputation, or with these submodules recomputed
    (`--recompute_modules`)."""
    moe = setup.spec.moe_layers[layer]
    attention = _attention(setup, layer)
    if "core_attn" in recomputed:
        attention |= _recomputed_attention(setup)
    block = _moe(setup, layer) if moe else _mlp(setup, layer)
    if "mlp" in recomputed and not moe:
        block = {"mlp input": layer_input_bytes(setup)}
    if "moe" in recomputed and moe:
        block = {name: size for name, size in block.items() if name.startswith("mlp norm")}
        block["experts' input"] = layer_input_bytes(setup)
    if "moe_act" in recomputed and moe:
        block.pop(f"{EXPERT_FC2} input", None)
    if "layernorm" in recomputed and moe:
        block.pop("router input", None)
    assert not attention.keys() & block.keys(), "each tensor has a name of its own"
    return attention | block


def _norm(setup: MicrobatchSetup, name: str, rows: int, width: int, trains: bool) -> Kept:
    """Input and 1 / rms; of torch's in half precision the input in float32, and the normed rows, if the weight trains,
    before their product with it."""
    elements = rows * width
    if setup.kernels.linear != TORCH:
        return {f"{name} input": elements * setup.width, f"{name} 1/rms": 4 * rows}
    kept = {f"{name} input": 4 * elements, f"{name} 1/rms": 4 * rows}
    return kept | ({f"{name} normed": setup.width * elements} if trains else {})


def _block_norms(setup: MicrobatchSetup, name: str) -> Kept:
    """The norm before attention or an MLP, and that of its output, where the model has them."""
    features = setup.spec.features
    rows = setup.residual_tokens
    hidden = setup.spec.hidden_size
    kept = _norm(setup, name, rows, hidden, setup.parts.full) if features.pre_norm else {}
    return kept | (_norm(setup, f"{name} of output", rows, hidden, setup.parts.full) if features.post_norm else {})


def _norm_over_all_heads(name: str, rows: int, width: int) -> Kept:
    """Ours under either kernels, in float32: input and normed rows, sum of squares and 1 / rms."""
    return {f"{name} input": 4 * rows * width, f"{name} normed": 4 * rows * width, f"{name} 1/rms": 8 * rows}


def _input(setup: MicrobatchSetup, layer: int, module: str, elements: int, shared: bool = False) -> Kept:
    """The input of a linear layer: kept for the gradient of its weight or of its adapters, whose dropout keeps a mask
    and a copy of its own. `shared`: another operation keeps the same tensor."""
    projections = setup.adapters(layer, module)
    full = setup.parts.full
    dropout = bool(projections) and setup.options.lora_dropout > 0
    kept: Kept = {}
    # Transformer Engine keeps the normed rows that it hands to an adapter
    handed = setup.kernels.linear != TORCH and module in (QKV, FC1)
    if not shared and (full or (bool(projections) and (handed or not dropout))):
        kept[f"{module} input"] = elements * setup.width
    if dropout:
        kept[f"{module} dropped"] = elements * (setup.width + (1 if setup.kernels.cuda else setup.width))
    return kept


def _adapter_products(setup: MicrobatchSetup, layer: int, modules: Mapping[str, int]) -> Kept:
    """Outputs of A [t, r], of each adapter; the A's of a layer that joins several, one matrix. `modules`: rows of the
    product."""
    rank = setup.parts.rank
    kept = 0
    for module, rows in modules.items():
        projections = setup.adapters(layer, module)
        kept += len(projections) * rows * rank * setup.width
        if len(projections) > 1:
            kept += len(projections) * rank * projections[0].shape[1] * setup.width
    return {f"adapters of {', '.join(modules)}": kept} if kept else {}


def _attention(setup: MicrobatchSetup, layer: int) -> Kept:
    if setup.spec.transformer.get("multi_latent_attention"):
        return _latent_attention(setup, layer)
    spec = setup.spec
    t = setup.tokens
    w = setup.width
    a = setup.head_width
    k = setup.kv_heads * spec.head_dim
    full = setup.parts.full
    torch_attention = setup.kernels.attention == TORCH
    kept = _block_norms(setup, "attention norm")
    kept |= _input(setup, layer, QKV, setup.residual_tokens * spec.hidden_size)
    if spec.qk_norm and spec.features.qk_norm_width == "all":
        kept |= _norm_over_all_heads("query norm", t, a) | _norm_over_all_heads("key norm", t, k)
    elif spec.qk_norm:
        kept |= _norm(setup, "query norm", t * setup.heads, spec.head_dim, full)
        kept |= _norm(setup, "key norm", t * setup.kv_heads, spec.head_dim, full)
    keys = t * k
    if torch_attention:
        kept["cosine and sine"] = 4 * w * setup.row_positions * int(spec.rotated_width * spec.rope.partial)
        keys = t * setup.layout.cp * a  # KV heads are repeated, and the whole sequence's are gathered
        if setup.layout.cp > 1 or (setup.options.shares_rows and setup.rows > 1):  # one document at a time
            kept["joined output"] = w * t * a
        if spec.qk_norm and w == 4:
            kept["key norm input"] = w * t * (a + 2 * k)  # a view of the joined projections, which no copy frees
    kept |= {"queries": w * t * a, "keys": w * keys, "values": w * keys, "attention output": w * t * a}
    kept["log-sum-exp"] = 4 * t * setup.heads
    kept |= _input(setup, layer, PROJECTION, t * a, shared=True)
    return kept | _adapter_products(setup, layer, {QKV: t, PROJECTION: t})


def mask_bytes(setup: MicrobatchSetup, layers: Sequence[int]) -> int:
    """The mask of torch's attention, where it is not plain causal: [queries, keys] in the dtype of the scores, once for
    all layers. Under context parallelism a rank's two runs of a sequence see 2 cp + 1 runs of keys (on a GPU such a
    mask takes no memory)."""
    cp = setup.layout.cp
    positions = setup.positions
    if setup.kernels.attention != TORCH or setup.spec.transformer.get("multi_latent_attention"):
        return 0
    if cp > 1:
        run = -(-positions // 2)
        return setup.width * run * run * (2 * cp + 1)
    window = setup.spec.transformer.get("window_size")
    if not window or not any(setup.windowed(layer) for layer in layers):
        return 0
    return setup.width * positions * min(positions, ATTENTION_BLOCK + window[0])


def _recomputed_attention(setup: MicrobatchSetup) -> Kept:
    """Recomputing attention keeps its inputs: no scores are saved that flash attention would not keep, and torch's
    values are then a view of the joined projections."""
    a = setup.head_width
    k = setup.kv_heads * setup.spec.head_dim
    unit = setup.width * setup.tokens
    return {"keys": unit * k, "values": unit * (a + 2 * k), "log-sum-exp": 0}


def _latent_attention(setup: MicrobatchSetup, layer: int) -> Kept:
    """Compressed queries, keys and values lie whole on every tensor-parallel rank."""
    spec = setup.spec
    r = setup.residual_tokens
    t = setup.tokens
    w = setup.width
    full = setup.parts.full
    queries = spec.latent_queries // setup.layout.tp
    values = setup.head_width
    kept = _block_norms(setup, "attention norm")
    kept |= {"down projections input": w * r * spec.hidden_size}
    if spec.q_rank:
        kept |= _norm(setup, "query norm", r, spec.q_rank, full) | {"query up input": w * r * spec.q_rank}
    kept |= _norm(setup, "latent norm", r, spec.kv_rank, full) | {"key and value up input": w * r * spec.kv_rank}
    kept |= {"queries": w * t * queries, "keys": w * t * queries, "values": w * t * values}
    kept |= {"attention output": w * t * values, "log-sum-exp": 4 * t * setup.heads}
    return kept


def first_width(setup: MicrobatchSetup, inner: int) -> int:
    """Outputs of an MLP's first matrix on this rank: gate and up, or one of the inner width."""
    return 2 * inner if setup.spec.gated else inner


def _mlp(setup: MicrobatchSetup, layer: int) -> Kept:
    spec = setup.spec
    t = setup.tokens
    r = setup.residual_tokens
    w = setup.width
    f = spec.ffn // setup.layout.tp
    kept = _block_norms(setup, "mlp norm")
    kept |= _input(setup, layer, FC1, r * spec.hidden_size)
    kept["inner"] = w * t * first_width(setup, f)
    kept |= _input(setup, layer, FC2, t * f)
    return kept | _adapter_products(setup, layer, {FC1: t, FC2: t})


def _moe(setup: MicrobatchSetup, layer: int) -> Kept:
    """The router's input, and of each token its rows in the experts; small: the router's numbers and the order of
    tokens."""
    spec = setup.spec
    r = setup.residual_tokens
    m = setup.expert_tokens
    w = setup.width
    e = spec.expert_ffn // setup.layout.etp
    torch_experts = setup.kernels.linear == TORCH
    kept = _block_norms(setup, "mlp norm")
    kept["router input"] = w * r * spec.hidden_size
    kept["router and order"] = r * (24 * spec.topk + 12 * spec.experts + 4)
    kept |= _input(setup, layer, EXPERT_FC1, m * spec.hidden_size)
    kept["inner"] = w * m * first_width(setup, e)
    kept |= _input(setup, layer, EXPERT_FC2, m * e)
    if torch_experts:  # before it is multiplied with the routing weights
        kept["unweighted activation"] = w * m * e
    if spec.shared_ffn:
        inner = spec.shared_ffn // setup.layout.tp
        kept["shared expert"] = w * setup.tokens * (first_width(setup, inner) + inner)
        if spec.transformer.get("moe_shared_expert_gate"):
            kept["shared expert output"] = w * r * spec.hidden_size
    if not setup.grouped_experts:
        return kept | _adapter_products(setup, layer, {EXPERT_FC1: m, EXPERT_FC2: m})
    return kept | _grouped_adapters(
        setup, layer, {EXPERT_FC1: (spec.hidden_size, setup.layout.etp), EXPERT_FC2: (e, 1)}
    )


def _grouped_adapters(setup: MicrobatchSetup, layer: int, modules: Mapping[str, tuple[int, int]]) -> Kept:
    """Adapters of all experts in grouped products: the scaled outputs of A. A rank that is no multiple of 16 bytes is
    filled up, in copies of A and B. `modules`: (inputs on this rank, ranks that split the outputs) of an expert's
    layer."""
    experts = setup.spec.experts // setup.layout.ep
    unit = 16 // setup.width
    rank = setup.parts.rank
    kept = 0
    width = -(-rank // unit) * unit
    for module, (inputs, ranks) in modules.items():
        for projection in setup.adapters(layer, module):
            copies = experts * (inputs + projection.shape[0] // ranks) if width > rank else 0
            kept += setup.width * width * (setup.expert_tokens + copies)
    return {"adapters": kept} if kept else {}
