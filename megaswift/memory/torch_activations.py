"""Activations of transformers' own Llama and Qwen3 layers on a torch engine.

Owns the formulas, one line a tensor: t tokens, h hidden size, a and k the widths of queries and keys, f of the MLP; w
bytes of a product's operands, R bytes of the residual stream. DDP and ZeRO-0 compute in half precision by autocast:
weights and the residual stream stay in float32 (R = 4), each linear layer casts its own copy of the input and of the
weight, and keeps both. FSDP2 and ZeRO-1 to 3 cast whole units (R = w). Attention is SDPA or flash attention: no scores.
Counted in `tests/memory/test_torch_bytes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaswift.memory.activation_bytes import BATCH, ActivationBytes
from megaswift.memory.layer_activations import FC1, FC2, PROJECTION, QKV
from megaswift.memory.microbatch_setup import MicrobatchSetup

FAMILIES = ("llama", "qwen3")
"""Families whose layers these are."""
WHOLE_MODEL = ("ddp", "zero0")
"""Engines with all weights in float32 on every rank."""
GATHERING = ("zero3", "fsdp2")
"""Engines that gather weights unit by unit."""
REDUCING_EACH = ("zero1", "zero2")
"""Engines that copy a gradient to float32 to reduce it while the backward pass runs."""
LIVE_PARAMETERS = 10**9
"""Elements that ZeRO-3 keeps gathered beside the layer that computes (DeepSpeed's stage3_max_live_parameters)."""


@dataclass(frozen=True)
class TorchSetup:
    """One micro-batch of a torch engine on a rank."""

    setup: MicrobatchSetup
    kind: str
    """The engine's name."""

    @property
    def autocast(self) -> bool:
        """Return whether products are in half precision between float32 tensors."""
        return self.kind in WHOLE_MODEL and self.setup.width == 2

    @property
    def residual_width(self) -> int:
        """Bytes of an element between two layers."""
        return 4 if self.autocast else self.setup.width

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of a layer."""
        spec = self.setup.spec
        return spec.hidden_size * (2 * spec.attention_width + 2 * spec.kv_width + 3 * spec.ffn)

    @property
    def outer_weights(self) -> int:
        """Elements of embedding and head."""
        spec = self.setup.spec
        return spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)


def kept_by_torch_layer(one: TorchSetup, layer: int) -> dict[str, int]:
    """Returns the bytes that a decoder layer keeps for the backward pass, by tensor."""
    s = one.setup
    spec = s.spec
    t = s.tokens
    w = s.width
    a = spec.attention_width
    k = spec.kv_width
    full = s.parts.full
    # below the first adapter nothing needs a gradient
    first = layer == 0 and not full
    kept: dict[str, int] = {}
    if not first:
        kept |= _norm(one, "attention norm", t, spec.hidden_size, one.residual_width)
    kept |= _linear(one, layer, QKV, t * spec.hidden_size, ("q", "k", "v"), cast=True)
    if spec.qk_norm:
        kept |= _norm(one, "query norm", t * spec.heads, spec.head_dim, w)
        kept |= _norm(one, "key norm", t * spec.kv_heads, spec.head_dim, w)
    kept |= {"queries": w * t * a, "keys": w * t * k, "values": w * t * k}
    kept |= {"attention output": w * t * a, "log-sum-exp": 4 * t * spec.heads}
    kept |= _linear(one, layer, PROJECTION, t * a, ("o",), cast=False, held=True)
    kept |= _norm(one, "mlp norm", t, spec.hidden_size, one.residual_width)
    kept |= _linear(one, layer, FC1, t * spec.hidden_size, ("gate", "up"), cast=True)
    kept |= {"gate": w * t * spec.ffn, "activation": w * t * spec.ffn, "up": w * t * spec.ffn}
    kept |= _linear(one, layer, FC2, t * spec.ffn, ("down",), cast=False)
    if one.autocast:
        skipped = spec.hidden_size * (a + 2 * k) if first else 0
        adapters = [p for module in (QKV, PROJECTION, FC1, FC2) for p in s.adapters(layer, module)]
        kept["weights in half precision"] = w * (one.layer_weights - skipped)
        kept["weights of adapters"] = w * sum(s.parts.rank * sum(p.shape) for p in adapters)
    return kept


def _norm(one: TorchSetup, name: str, rows: int, width: int, element: int) -> dict[str, int]:
    """The input in float32, 1 / rms, and the normed rows before their product with the weight, if that trains."""
    normed = element * rows * width if one.setup.parts.full else 0
    return {f"{name} input": 4 * rows * width, f"{name} 1/rms": 4 * rows, f"{name} normed": normed}


def _linear(
    one: TorchSetup, layer: int, module: str, elements: int, names: Sequence[str], cast: bool, held: bool = False
) -> dict[str, int]:
    """The input of linear layers that share it.

    Args:
        cast: Whether autocast casts it, for each layer anew.
        held: Whether attention keeps it too.
    """
    s = one.setup
    if s.parts.full:
        copies = len(names) if cast and one.autocast else int(not held)
        return {f"{module} input": copies * s.width * elements}
    adapters = len(s.adapters(layer, module))
    if not adapters:
        return {}
    kept = {f"{module} adapters": adapters * s.tokens * s.parts.rank * s.width}
    if s.options.lora_dropout > 0:
        mask = 4 if one.autocast else s.width
        if s.kernels.cuda:
            mask = 1
        if layer == 0 and module == QKV:  # whose input needs no gradient
            mask = 0
        return kept | {f"{module} dropped": adapters * elements * (s.width + mask)}
    copies = adapters if one.autocast else int(not held)  # PEFT casts to float32 before autocast
    return kept | {f"{module} input": copies * s.width * elements}


def torch_activation_bytes(one: TorchSetup, microbatches: int) -> ActivationBytes:
    """Estimates the activations of a rank, the weights that it gathers and gradients that are not summed yet."""
    s = one.setup
    spec = s.spec
    layers = range(spec.num_layers)
    t = s.tokens
    h = spec.hidden_size
    r = one.residual_width
    full = s.parts.full
    per_layer = {layer: sum(kept_by_torch_layer(one, layer).values()) for layer in (0, 1)}
    whole = per_layer[0] + (len(layers) - 1) * per_layer[1]
    angles = 2 * s.positions * spec.rotated_width * r
    recomputes = s.options.model.recompute_granularity == "full"
    everything = angles + (len(layers) * t * h * r if recomputes else whole)
    final = sum(_norm(one, "final norm", t, h, r).values())
    # The head: logits, whose gradient takes their place, its input, and the gradients of its weight in the dtype of the
    # product, then in float32 where they are cast or sent so. The logits are gone under autocast then.
    trains = full or s.parts.trains(["lm_head.weight"])
    logits = t * spec.vocab_size * s.width
    kept_by_head = (t * h * s.width if full or one.autocast else 0) + t * h * s.width
    matrix = spec.vocab_size * h
    if one.autocast:
        kept_by_head += s.width * matrix
    weight = s.width * matrix if trains else 0
    in_float32 = 4 * matrix if trains else 0
    if one.autocast:
        head = kept_by_head + weight + max(logits, in_float32)
    else:
        head = kept_by_head + weight + logits + (in_float32 if one.kind in REDUCING_EACH else 0)
    layer_working = _working(one)
    gathered = _gathered(one)
    batches = BATCH * t * microbatches
    moments = [
        ActivationBytes(everything + final, 0, head, gathered, batches),
        ActivationBytes(everything, 0, 0, layer_working + gathered, batches),
    ]
    if recomputes:
        moments.append(ActivationBytes(everything, per_layer[1], 0, layer_working + gathered, batches))
    if one.kind == "fsdp2" and full:  # embedding and head are reduced at the end, in float32
        reduced = one.outer_weights * (2 * s.width + 4) + 4 * one.outer_weights // s.layout.world_size
        moments.append(ActivationBytes(0, 0, 0, reduced, batches))
    return max(moments, key=lambda moment: moment.total)


def _working(one: TorchSetup) -> int:
    """Gradients within the backward pass of an MLP, beside all that its layer keeps: of the down projection's output,
    and of its input and weight; or of the product's two factors."""
    s = one.setup
    spec = s.spec
    inner = s.width * s.tokens * spec.ffn
    output = s.tokens * spec.hidden_size * (one.residual_width + (s.width if one.autocast else 0))
    weight = s.width * spec.hidden_size * spec.ffn if s.parts.full else 0
    return output + max(inner + weight, 2 * inner)


def _gathered(one: TorchSetup) -> int:
    """FSDP2: embedding and head with their gradients throughout a pass, of layers one that computes and one ahead, the
    buffer that they arrive in, and the gradients of one in both precisions. ZeRO-3: as many weights as it keeps
    alive."""
    s = one.setup
    w = s.width
    if one.kind == "zero3":
        every = one.outer_weights + s.spec.num_layers * one.layer_weights
        return w * min(every, LIVE_PARAMETERS + one.layer_weights)
    if one.kind != "fsdp2":
        return 0
    gradients = one.layer_weights * (w + 4) + one.outer_weights * w if s.parts.full else 0
    return w * (one.outer_weights + 3 * one.layer_weights) + gradients
