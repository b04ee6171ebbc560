"""Counts what a decoder layer keeps for the backward pass, tensor by tensor.

Owns the formulas, one line a tensor: b rows of s / cp tokens, t tokens in all (r = t / tp of them under sequence
parallelism), w bytes an element, h hidden size, a and k the widths of this rank's queries and keys, f and e the inner
widths of the MLP and of an expert on this rank, m rows of the experts' products. Attention is flash attention: no
scores are kept, but their log-sum-exp. Sources: the saved tensors of Transformer Engine's modules and of the torch
layers, counted in `tests/memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaswift.memory.microbatch_setup import TORCH, MicrobatchSetup
from megaswift.models.spec import LINEAR, WINDOW

Kept = dict[str, int]
"""Bytes by tensor."""
QKV = "self_attention.linear_qkv"
PROJECTION = "self_attention.linear_proj"
FC1 = "mlp.linear_fc1"
FC2 = "mlp.linear_fc2"
EXPERT_FC1 = "mlp.experts.0.linear_fc1"
EXPERT_FC2 = "mlp.experts.0.linear_fc2"
SHARED_FC1 = "mlp.shared_experts.linear_fc1"
SHARED_FC2 = "mlp.shared_experts.linear_fc2"
QUERY = "self_attention.linear_q_proj"
QUERY_DOWN = "self_attention.linear_q_down_proj"
QUERY_UP = "self_attention.linear_q_up_proj"
LATENT_DOWN = "self_attention.linear_kv_down_proj"
LATENT_UP = "self_attention.linear_kv_up_proj"
IN_PROJ = "self_attention.in_proj"
OUT_PROJ = "self_attention.out_proj"
BEHIND_ATTENTION = "norm behind attention"
BEHIND_MLP = "norm behind the mlp"
NORMED = (QKV, FC1, QUERY_UP, LATENT_UP, IN_PROJ)
"""Products that begin with a norm."""
QUICK_GELU = "quick_gelu"
SINK_COLUMNS = 8
"""Columns that torch's attention with sinks adds to heads (`engine/document_attention.py`)."""
DELTA_CHUNK = 64
"""Tokens of a chunk of a gated delta net (`engine/gated_delta.py`)."""
DELTA_NET = (
    "convolution",
    "units",
    "steps",
    "decays",
    "keys and queries",
    "sides",
    "system",
    "scores",
    "reads and writes",
    "corrections and states",
    "gated norm",
    "projections",
)
"""What a gated delta net keeps between its projections."""


def layer_input_bytes(setup: MicrobatchSetup) -> int:
    """Returns the bytes of the residual stream [s, b, h] between two layers: all that full recomputation keeps of a
    layer."""
    return setup.residual_tokens * setup.spec.hidden_size * setup.width


def kept_by_layer(setup: MicrobatchSetup, layer: int, recomputed: Sequence[str] = ()) -> Kept:
    """Returns the bytes that one layer keeps without recomputation, or with these submodules recomputed
    (`--recompute_modules`), in the order of its forward pass."""
    attention = kept_by_attention(setup, layer, "core_attn" in recomputed)
    block = kept_by_block(setup, layer, recomputed)
    assert not attention.keys() & block.keys(), "each tensor has a name of its own"
    return attention | block


def kept_by_block(setup: MicrobatchSetup, layer: int, recomputed: Sequence[str] = ()) -> Kept:
    """Returns the bytes that the MLP or the experts of a layer keep, with the norms around them."""
    moe = setup.spec.moe_layers[layer]
    block = _moe(setup, layer) if moe else _mlp(setup, layer)
    if "mlp" in recomputed and not moe:
        block = {"mlp input": layer_input_bytes(setup)}
    if "moe" in recomputed and moe:
        block = {name: size for name, size in block.items() if name.startswith(("mlp norm", BEHIND_MLP))}
        block["experts' input"] = layer_input_bytes(setup)
    if "moe_act" in recomputed and moe:
        block.pop(f"{EXPERT_FC2} input", None)
    if "layernorm" in recomputed and moe:
        block.pop("router input", None)
    return block


def _norm(setup: MicrobatchSetup, name: str, rows: int, width: int, trains: bool) -> Kept:
    """Input and 1 / rms; of torch's in half precision the input in float32, and the normed rows, if the weight trains,
    before their product with it. A weight centered at 0 is multiplied in float32."""
    elements = rows * width
    if setup.kernels.linear != TORCH:
        return {f"{name} input": elements * setup.width, f"{name} 1/rms": 4 * rows}
    kept = {f"{name} input": 4 * elements, f"{name} 1/rms": 4 * rows}
    normed_width = 4 if setup.spec.transformer.get("layernorm_zero_centered_gamma") else setup.width
    return kept | ({f"{name} normed": normed_width * elements} if trains else {})


def hidden_norm_bytes(setup: MicrobatchSetup) -> int:
    """Returns the bytes that a norm of the residual stream keeps."""
    return sum(_norm(setup, "norm", setup.residual_tokens, setup.spec.hidden_size, setup.parts.full).values())


def _norm_before(setup: MicrobatchSetup, name: str) -> Kept:
    """The norm before attention or an MLP, where the model has one."""
    if not setup.spec.features.pre_norm:
        return {}
    return _norm(setup, name, setup.residual_tokens, setup.spec.hidden_size, setup.parts.full)


def _norm_behind(setup: MicrobatchSetup, name: str) -> Kept:
    """The norm of what attention or an MLP gives, where the model has one."""
    if not setup.spec.features.post_norm:
        return {}
    return _norm(setup, name, setup.residual_tokens, setup.spec.hidden_size, setup.parts.full)


def _norm_over_all_heads(name: str, rows: int, width: int, trains: bool) -> Kept:
    """Ours under either kernels, in float32: input, sum of squares and 1 / rms, and if the weight trains the normed
    rows."""
    kept = {f"{name} input": 4 * rows * width, f"{name} 1/rms": 8 * rows}
    return kept | ({f"{name} normed": 4 * rows * width} if trains else {})


def keeps_input(setup: MicrobatchSetup, layer: int, module: str) -> bool:
    """Returns whether a linear layer keeps its input as it is: for the gradient of its weight or of its adapters, whose
    dropout keeps a copy instead."""
    if setup.parts.full:
        return True
    # Transformer Engine keeps the normed rows that it hands to an adapter
    handed = (
        setup.kernels.linear != TORCH and module in NORMED and (setup.spec.features.pre_norm or module == LATENT_UP)
    )
    return bool(setup.adapters(layer, module)) and (handed or not setup.options.lora_dropout)


def _input(setup: MicrobatchSetup, layer: int, module: str, elements: int, shared: bool = False) -> Kept:
    """The input of a linear layer, and of its adapters' dropout a mask and a copy of its own. `shared`: another
    operation keeps the same tensor."""
    kept = {f"{module} input": 0}
    if not shared and keeps_input(setup, layer, module):
        kept[f"{module} input"] = elements * setup.width
    if setup.adapters(layer, module) and setup.options.lora_dropout > 0:
        kept[f"{module} input dropped"] = elements * (setup.width + (1 if setup.kernels.cuda else setup.width))
    return kept


def _adapter_products(setup: MicrobatchSetup, layer: int, modules: Mapping[str, int], alike: int = 1) -> Kept:
    """Outputs of A [t, r], of each adapter, which tensor-parallel ranks divide behind a row-parallel layer; the A's of
    a layer that joins several, one matrix. `modules`: rows of the product, of all layers where several are `alike`."""
    rank = setup.parts.rank
    kept = 0
    for module, rows in modules.items():
        projections = setup.adapters(layer, module)
        kept += len(projections) * rows * rank * setup.width
        if len(projections) > 1:
            kept += alike * len(projections) * rank * projections[0].shape[1] * setup.width
    return {f"adapters of {', '.join(modules)}": kept} if kept else {}


def kept_by_attention(setup: MicrobatchSetup, layer: int, again: bool) -> Kept:
    """Returns the bytes that the attention of a layer keeps, with the norms around it.

    Args:
        again: Whether what lies between its projections is computed again.
    """
    spec = setup.spec
    if spec.layer_kinds[layer].mixer == LINEAR:
        return _delta_net(setup, layer) | (_recomputed_core(setup, layer) if again else {})
    if spec.transformer.get("multi_latent_attention"):
        return _latent_attention(setup, layer, again)
    t = setup.tokens
    w = setup.width
    a = setup.head_width
    k = setup.kv_heads * spec.head_dim
    full = setup.parts.full
    kept = _norm_before(setup, "attention norm")
    kept |= _input(setup, layer, QKV, setup.residual_tokens * spec.hidden_size)
    kept |= _adapter_products(setup, layer, {QKV: t})
    if spec.qk_norm and spec.features.qk_norm_width == "all":
        kept |= _norm_over_all_heads("query norm", t, a, full) | _norm_over_all_heads("key norm", t, k, full)
    elif spec.qk_norm:
        kept |= _norm(setup, "query norm", t * setup.heads, spec.head_dim, full)
        kept |= _norm(setup, "key norm", t * setup.kv_heads, spec.head_dim, full)
    kept |= _cosine_and_sine(setup, layer)
    if _norms_a_view(setup):
        kept["key norm input"] = w * t * joined_width(setup)
        if setup.kv_heads == 1:  # queries are then a view too
            kept["query norm input"] = 0
    kept |= _core(setup, layer) | (_recomputed_core(setup, layer) if again else {})
    gated = bool(spec.transformer.get("attention_output_gate"))
    if gated:
        kept |= {"attention output": w * t * a, "output gate": 4 * t * a}
    own = bool(kept.get("attention output")) and not gated and not setup.joins_runs(layer)
    kept |= _input(setup, layer, PROJECTION, t * a, shared=own)
    kept |= _adapter_products(setup, layer, {PROJECTION: setup.residual_tokens})
    return kept | _norm_behind(setup, BEHIND_ATTENTION)


def _norms_a_view(setup: MicrobatchSetup) -> bool:
    """Return whether the norm of keys keeps the joined projections whole, of which no copy to float32 takes the keys
    alone."""
    features = setup.spec.features
    per_head = setup.spec.qk_norm and features.qk_norm_width == "head" and not features.changes_rotated_queries
    return setup.kernels.attention == TORCH and setup.width == 4 and per_head


def joined_width(setup: MicrobatchSetup) -> int:
    """Return the width of queries, keys, values and output gates on this rank."""
    spec = setup.spec
    queries = 2 if spec.transformer.get("attention_output_gate") else 1
    return queries * setup.head_width + 2 * setup.kv_heads * spec.head_dim


def _rotates(setup: MicrobatchSetup, layer: int) -> bool:
    skipped = setup.spec.transformer.get("no_rope_freq")
    return not (skipped and skipped[layer])


def _cosine_and_sine(setup: MicrobatchSetup, layer: int) -> Kept:
    """Return the bytes of a layer's cosine and sine, where no kernel rotates by the angles themselves."""
    spec = setup.spec
    if setup.rotates_in_a_kernel or not _rotates(setup, layer):
        return {}
    width = int(spec.rotated_width * spec.rope.partial)
    return {"cosine and sine": 4 * setup.width * setup.row_positions * width}


def _core(setup: MicrobatchSetup, layer: int) -> Kept:
    """Attention between its projections: queries, keys, values, log-sum-exp, and where a kernel keeps it, its
    output."""
    spec = setup.spec
    t = setup.tokens
    w = setup.width
    a = setup.head_width
    if setup.kernels.attention != TORCH:
        keys = t * setup.kv_heads * spec.head_dim
        kept = {"queries": w * t * a, "keys": w * keys, "values": w * keys, "attention output": w * t * a}
        return kept | {"log-sum-exp": 4 * t * setup.heads}
    keys = t * setup.layout.cp * a  # KV heads are repeated, and the whole sequence's are gathered
    if spec.features.attention_softcap is not None:  # keeps its inputs only
        return {"queries": w * t * a, "keys": w * keys, "values": w * keys}
    if spec.transformer.get("softmax_type", "vanilla") != "vanilla":
        return _core_with_sinks(setup, layer)
    view = not _rotates(setup, layer) and not spec.qk_norm and setup.kv_heads == 1  # of the joined projections
    queries = t * (joined_width(setup) if view else a)
    kept = {"queries": w * queries, "keys": w * keys, "values": w * keys, "attention output": w * t * a}
    return kept | {"log-sum-exp": 4 * t * setup.heads}


def _core_with_sinks(setup: MicrobatchSetup, layer: int) -> Kept:
    """Return the bytes of torch's attention with sinks.

    Heads are wider by some columns; keys and values have a row more for each run of queries, and so have queries
    without a mask (`engine/document_attention.py`).
    """
    w = setup.width
    runs = setup.runs(layer)
    width = setup.heads * (setup.spec.head_dim + SINK_COLUMNS)
    rows = sum(queries + (0 if masked else 1) for queries, _, masked in runs)
    keys = sum(keys + 1 for _, keys, _ in runs)
    kept = {"queries": w * rows * width, "keys": w * keys * width, "values": w * keys * width}
    return kept | {"padded output": w * rows * width, "log-sum-exp": 4 * rows * setup.heads}


def _delta_net(setup: MicrobatchSetup, layer: int) -> Kept:
    """A gated delta net in torch's products (`engine/gated_delta.py`), on the whole rows of this rank's key heads.
    Kernels of flash-linear-attention keep less."""
    spec = setup.spec
    w = setup.width
    ranks = setup.layout.tp * setup.layout.cp
    groups = spec.linear_groups // ranks
    heads = spec.linear_heads // ranks
    dk = spec.linear_key_width
    dv = spec.linear_value_width
    rows, length = (1, setup.rows * setup.positions) if setup.packed else (setup.rows, setup.positions)
    length *= setup.layout.cp
    t = rows * length
    n = -(-length // DELTA_CHUNK)  # chunks of a row, the last filled up
    tokens = rows * n * DELTA_CHUNK
    channels = groups * 2 * dk + heads * dv
    kept = _norm_before(setup, "attention norm")
    kept |= _input(setup, layer, IN_PROJ, setup.residual_tokens * spec.hidden_size)
    kept |= _adapter_products(setup, layer, {IN_PROJ: setup.tokens})
    gaps = (spec.linear_taps - 1) * rows * (setup.rows if setup.packed else 1)
    projected = channels + heads * (dv + 2)
    whole = groups == 1 and not setup.packed  # the input of the convolution is then a view of the projections
    copies = channels * (2 if setup.packed else 1)  # with zeros between documents
    kept["convolution"] = w * (channels * (t + gaps) + (projected if whole else copies) * t)
    full = setup.parts.full
    half = w < 4  # then what is computed in float32 is a copy
    kept["units"] = 4 * t * (2 * groups * (dk + 1) if half else channels + 2 * groups)
    kept["steps"] = (4 * (2 if full else 1) + w) * t * heads
    kept["decays"] = 4 * tokens * heads * (2 * DELTA_CHUNK + 3) + n * DELTA_CHUNK * DELTA_CHUNK
    operands = 2 if groups == rows == 1 else 6  # copies in the shape of batched products
    kept["keys and queries"] = 4 * tokens * groups * (operands * dk + 2 * DELTA_CHUNK)
    kept["sides"] = 4 * tokens * heads * (dv + 1)
    kept["system"] = 4 * tokens * heads * (DELTA_CHUNK + dk + dv)
    kept["scores"] = 4 * tokens * heads * DELTA_CHUNK
    kept["reads and writes"] = 4 * tokens * heads * 2 * dk
    kept["corrections and states"] = 4 * tokens * heads * dv + 4 * rows * n * heads * dk * dv
    kept["gated norm"] = t * heads * (dv * (4 * (4 if half else 3) + (w if full else 0)) + 4)
    if not half and not whole:
        kept["projections"] = w * t * projected
    kept |= _input(setup, layer, OUT_PROJ, setup.tokens * spec.linear_values // setup.layout.tp)
    kept |= _adapter_products(setup, layer, {OUT_PROJ: setup.residual_tokens})
    return kept | _norm_behind(setup, BEHIND_ATTENTION)


def mask_bytes(setup: MicrobatchSetup, layers: Sequence[int]) -> int:
    """The masks of torch's attention, where it is not plain causal: [queries, keys] in the dtype of the scores, once
    for all layers. Under context parallelism a rank's two runs of a sequence see 2 cp + 1 runs of keys (on a GPU such a
    mask takes no memory)."""
    spec = setup.spec
    if setup.kernels.attention != TORCH or spec.features.attention_softcap is not None:
        return 0
    if spec.transformer.get("multi_latent_attention"):
        return 0
    sinks = spec.transformer.get("softmax_type", "vanilla") != "vanilla"
    found: dict[tuple[int, int], int] = {}
    for layer in setup.alike(layers):
        kind = spec.layer_kinds[layer].mixer
        if kind == WINDOW:
            masked = [(queries, keys) for queries, keys, masked in setup.runs(layer) if masked]
            found |= {(queries, keys): queries * (keys + sinks + -(keys + sinks) % 8) for queries, keys in masked}
        elif kind != LINEAR and setup.layout.cp > 1:
            run = -(-setup.positions // 2)
            found[run, 0] = run * run * (2 * setup.layout.cp + 1)
    return setup.width * sum(found.values())


def _recomputed_core(setup: MicrobatchSetup, layer: int) -> Kept:
    """Recomputing attention keeps its inputs: no scores are saved that flash attention would not keep, and torch's
    values are then a view of the joined projections."""
    spec = setup.spec
    a = setup.head_width
    k = setup.kv_heads * spec.head_dim
    unit = setup.width * setup.tokens
    if spec.layer_kinds[layer].mixer == LINEAR:
        heads = spec.linear_heads // setup.layout.tp
        groups = spec.linear_groups // setup.layout.tp
        width = 2 * groups * spec.linear_key_width + 2 * heads * spec.linear_value_width + 2 * heads
        return dict.fromkeys(DELTA_NET, 0) | {"convolution": unit * width}
    nothing = dict.fromkeys(("attention output", "padded output", "probabilities", "log-sum-exp"), 0)
    if spec.transformer.get("multi_latent_attention"):
        queries = spec.latent_queries // setup.layout.tp
        return nothing | {"queries": unit * queries, "keys": unit * queries, "values": unit * a}
    values = 0 if _norms_a_view(setup) else unit * joined_width(setup)
    keys = unit * k if _rotates(setup, layer) or spec.qk_norm else 0  # else a view of the joined projections too
    return nothing | {"queries": unit * a, "keys": keys, "values": values}


def _latent_attention(setup: MicrobatchSetup, layer: int, again: bool) -> Kept:
    """Compressed queries, keys and values lie whole on every tensor-parallel rank."""
    spec = setup.spec
    r = setup.residual_tokens
    t = setup.tokens
    w = setup.width
    full = setup.parts.full
    values = t * setup.head_width
    kept = _norm_before(setup, "attention norm")
    down = [LATENT_DOWN, QUERY_DOWN if spec.q_rank else QUERY]
    inputs = [_input(setup, layer, module, r * spec.hidden_size) for module in down]
    kept |= _once(inputs, "input", "down projections input")
    kept |= _norm(setup, "latent norm", r, spec.kv_rank, full)
    if setup.kernels.linear == TORCH and w == 4:  # a view of the down projection, which no copy frees
        kept["latent norm input"] = 4 * r * spec.latent_width
    kept |= _input(setup, layer, LATENT_UP, r * spec.kv_rank)
    if spec.q_rank:
        kept |= _norm(setup, "query norm", r, spec.q_rank, full) | _input(setup, layer, QUERY_UP, r * spec.q_rank)
    kept |= _cosine_and_sine(setup, layer)
    kept |= _latent_core(setup) | (_recomputed_core(setup, layer) if again else {})
    kept |= _input(setup, layer, PROJECTION, values, shared=bool(kept.get("attention output")))
    modules = {LATENT_DOWN: r, LATENT_UP: t, PROJECTION: r}
    modules |= {QUERY_DOWN: r, QUERY_UP: t} if spec.q_rank else {QUERY: t}
    kept |= _adapter_products(setup, layer, modules)
    return kept | _norm_behind(setup, BEHIND_ATTENTION)


def _once(kept: Sequence[Kept], ending: str, name: str) -> Kept:
    """Tensors of several modules, of which those whose names end so are one."""
    joined: Kept = {}
    for part in kept:
        joined |= {name if tensor.endswith(f" {ending}") else tensor: size for tensor, size in part.items()}
    return joined


def _latent_core(setup: MicrobatchSetup) -> Kept:
    """Torch's attention on a CPU computes unequal widths of keys and values without a kernel: in float32, and keeps the
    probabilities."""
    spec = setup.spec
    t = setup.tokens
    w = setup.width
    queries = spec.latent_queries // setup.layout.tp
    values = setup.head_width
    cp = setup.layout.cp
    if setup.kernels.attention == TORCH and not setup.kernels.cuda:
        run = setup.positions // 2 if cp > 1 else setup.positions
        seen = setup.rows * run * (2 * cp + 1 if cp > 1 else 1)  # keys of all runs of queries
        kept = {"queries": 4 * t * queries, "keys": 4 * seen * queries, "values": 4 * seen * values}
        if cp > 1 and w == 4:  # a view of keys and values, which ranks exchange joined
            kept["values"] = 4 * t * cp * (queries + values)
        return kept | {"probabilities": 4 * setup.heads * run * seen}
    keys = t * cp if setup.kernels.attention == TORCH else t
    kept = {"queries": w * t * queries, "keys": w * keys * queries, "values": w * keys * values}
    return kept | {"attention output": w * t * values, "log-sum-exp": 4 * t * setup.heads}


def first_width(setup: MicrobatchSetup, inner: int) -> int:
    """Outputs of an MLP's first matrix on this rank: gate and up, or one of the inner width."""
    return 2 * inner if setup.spec.gated else inner


def _mlp(setup: MicrobatchSetup, layer: int) -> Kept:
    spec = setup.spec
    t = setup.tokens
    r = setup.residual_tokens
    w = setup.width
    f = spec.ffn // setup.layout.tp
    kept = _norm_before(setup, "mlp norm")
    kept |= _input(setup, layer, FC1, r * spec.hidden_size)
    kept |= _adapter_products(setup, layer, {FC1: t})
    kept["inner"] = w * t * first_width(setup, f)
    kept |= _input(setup, layer, FC2, t * f)
    kept |= _adapter_products(setup, layer, {FC2: r})
    return kept | _norm_behind(setup, BEHIND_MLP)


def _moe(setup: MicrobatchSetup, layer: int) -> Kept:
    """The router's input, and of each token its rows in the experts; small: the router's numbers and the order of
    tokens."""
    spec = setup.spec
    r = setup.residual_tokens
    m = setup.expert_tokens
    w = setup.width
    e = spec.expert_ffn // setup.layout.etp
    torch_experts = setup.kernels.linear == TORCH
    kept = _norm_before(setup, "mlp norm")
    kept["router input"] = w * r * spec.hidden_size
    kept |= _shared_expert(setup, layer)
    kept["router and order"] = r * (24 * spec.topk + 12 * spec.experts + 4)
    kept |= _input(setup, layer, EXPERT_FC1, m * spec.hidden_size)
    kept |= _expert_adapters(setup, layer, EXPERT_FC1, spec.hidden_size, setup.layout.etp)
    kept["inner"] = w * m * first_width(setup, e)
    in_parts = spec.transformer["activation_func"] == QUICK_GELU
    if in_parts:  # the bounded gate, its sigmoid, their product, and the other half of the inner rows
        kept["activation"] = 4 * w * m * e
    if torch_experts or in_parts:  # before it is multiplied with the routing weights
        kept["unweighted activation"] = w * m * e
    kept |= _input(setup, layer, EXPERT_FC2, m * e)
    kept |= _expert_adapters(setup, layer, EXPERT_FC2, e, 1)
    if spec.linear_bias and setup.torch_experts and setup.grouped_experts:
        kept["biases of rows"] = w * m * spec.hidden_size
    return kept | _norm_behind(setup, BEHIND_MLP)


def _shared_expert(setup: MicrobatchSetup, layer: int) -> Kept:
    spec = setup.spec
    if not spec.shared_ffn:
        return {}
    t = setup.tokens
    inner = spec.shared_ffn // setup.layout.tp
    kept = {"shared expert": setup.width * t * first_width(setup, inner)}
    kept |= _input(setup, layer, SHARED_FC1, setup.residual_tokens * spec.hidden_size, shared=True)
    kept |= _input(setup, layer, SHARED_FC2, t * inner)
    if spec.transformer.get("moe_shared_expert_gate"):
        kept["shared expert output"] = setup.width * setup.residual_tokens * spec.hidden_size
    return kept | _adapter_products(setup, layer, {SHARED_FC1: t, SHARED_FC2: setup.residual_tokens})


def _expert_adapters(setup: MicrobatchSetup, layer: int, module: str, inputs: int, ranks: int) -> Kept:
    """Adapters of all experts, in grouped products: the scaled outputs of A. A rank that is no multiple of 16 bytes is
    filled up, in copies of A and B. `inputs` of an expert's layer on this rank, whose outputs so many ranks split."""
    experts = setup.spec.experts // setup.layout.ep
    if not setup.grouped_experts:
        return _adapter_products(setup, layer, {module: setup.expert_tokens}, experts)
    unit = 16 // setup.width
    rank = setup.parts.rank
    width = -(-rank // unit) * unit
    kept = 0
    for projection in setup.adapters(layer, module):
        copies = experts * (inputs + projection.shape[0] // ranks) if width > rank else 0
        kept += setup.width * width * (setup.expert_tokens + copies)
    return {f"adapters of {module}": kept} if kept else {}
