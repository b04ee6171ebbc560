"""Attention of transformers models within the documents of their rows, through transformers' attention interface.

transformers tells packed documents apart by a mask of row x row, made from positions, which cannot say that several
documents share a prefix. Here each document attends by itself (`engine/document_attention.py`). The rows of a
micro-batch are known to every layer while `rows_of` lasts: over its forward pass, and over its backward pass, which may
compute layers again, on a thread of its own. Layers that the interface gives more than causal attention with a window,
a soft cap or sinks (chunks, attention both ways, biases) keep transformers' own.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_flash_attention_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megaswift.engine.document_attention import JOINED, AttentionRule, RowDocuments, attend_documents
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import Batch
from megaswift.models.options.model import ModelConfig

CHECKED = "per_document"
"""In place of transformers' `_attn_implementation` while `rows_of` lasts, for a model that is compared with it at
load."""
MASKLESS = "per_document_maskless"
"""The same for families, whose layers are known to be causal with windows, soft caps or sinks. transformers makes no
masks for a name without a mask function, and so asks no micro-batch's positions whether its rows are packed."""
SOFTCAPS_AND_SINKS = ("gemma2", "gpt_oss")
"""Model types whose attention transformers' sdpa has not, so that it computes them eagerly."""

LOOKED_UP = r"get_interface\(\s*self\.config\._attn_implementation\b"
"""In a model's code: its attention function is taken by name."""


class _RowsInProgress:
    """Those of the micro-batch whose forward or backward pass runs in this process."""

    documents: RowDocuments | None = None
    joined: RowDocuments | None = None
    """The same, short documents together."""
    packed = False
    """Whether positions begin anew, or jump, within a row."""


_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The attention of each model that attends per document: CHECKED or MASKLESS."""


@contextmanager
def rows_of(batch: Batch, model: nn.Module) -> Iterator[None]:
    """`batch`, in host memory, is the one whose forward and backward pass by `model` run within. Not nested. Outside,
    where callbacks may call it, the model attends as transformers has it. ConfigError for shared prefixes where the
    model cannot attend to them."""
    assert _RowsInProgress.documents is None, "one micro-batch at a time"
    bare: Any = unwrap_peft_model(model)
    if batch.prefixes is not None and not attends_per_document(bare):
        raise ConfigError(
            Problem("--prefix_sharing", "is not supported by this model's attention", "--prefix_sharing false")
        )
    documents = RowDocuments.of_batch(batch)
    joined = documents.join_short(JOINED)
    _RowsInProgress.documents = documents
    _RowsInProgress.joined = joined
    own = bare.config._attn_implementation
    bare.config._attn_implementation = _NAMES.get(bare, own)
    try:
        with _packing_known_on_host(batch):
            yield
    finally:
        _RowsInProgress.documents = _RowsInProgress.joined = None
        bare.config._attn_implementation = own


def _packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """In place of transformers' `find_packed_sequence_indices`, which asks the positions once a micro-batch whether
    they are of packed rows."""
    if not _RowsInProgress.packed:
        return None
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _is_packed_sequence(position_ids: Tensor | None, batch_size: int) -> bool:
    """In place of transformers' function, which asks them in every layer under flash attention, for batches of one."""
    return _RowsInProgress.packed and position_ids is not None and batch_size == 1


@contextmanager
def _packing_known_on_host(batch: Batch) -> Iterator[None]:
    """The same two functions for every micro-batch: compiled code is compiled again for others."""
    masks = masking_utils
    flash = modeling_flash_attention_utils
    own = masks.find_packed_sequence_indices, flash._is_packed_sequence
    masks.find_packed_sequence_indices = _packed_sequence_indices
    flash._is_packed_sequence = _is_packed_sequence
    _RowsInProgress.packed = batch.cu_seqlens is not None and bool((batch.positions.diff(dim=-1) != 1).any())
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, flash._is_packed_sequence = own


def attends_per_document(model: Any) -> bool:
    """Whether layers of a transformers model attend as described here."""
    return model in _NAMES


def attention_name(model: Any) -> str:
    """For the first screen."""
    name: str = getattr(model.config, "_attn_implementation", None) or ""
    return "per-document" if attends_per_document(model) else name.replace("_", "-")


def transformers_attention(config: Any) -> str:
    """The `_attn_implementation` of a model of this configuration that attends as transformers has it."""
    return "eager" if config.model_type in SOFTCAPS_AND_SINKS else "sdpa"


@contextmanager
def short_windows(model: nn.Module, most: int) -> Iterator[None]:
    """Sliding windows of a model see `most` keys at most: masks take theirs from the configuration, and layers hand on
    their own."""
    config: Any = model.config
    holders = [
        (holder, width)
        for holder in (config, *model.modules())
        if isinstance(width := getattr(holder, "sliding_window", None), int) and width > most
    ]
    for holder, _ in holders:
        holder.sliding_window = most
    try:
        yield
    finally:
        for holder, width in holders:
            holder.sliding_window = width


def is_code_of_folder(model: Any) -> bool:
    """Whether a model's class is not transformers' but of Python code in its folder."""
    return type(model).__module__.startswith("transformers_modules.")


def set_per_document_attention(model: Any, cfg: ModelConfig, tested: bool) -> None:
    """Has a transformers model attend per document, where its attention is torch's and goes through the interface.
    `tested`: it is known to do nothing else, and need not be compared."""
    if _can_attend_per_document(model, cfg):
        AttentionInterface.register(CHECKED, _attention)
        AttentionMaskInterface.register(CHECKED, _mask)
        AttentionInterface.register(MASKLESS, _maskless_attention)
        _NAMES[model] = MASKLESS if tested else CHECKED


def keep_transformers_attention(model: Any) -> None:
    """The inverse."""
    _NAMES.pop(model, None)


def _can_attend_per_document(model: Any, cfg: ModelConfig) -> bool:
    """Flash attention gets no mask, so a model of transformers that supports it says all about its attention in
    keywords. A compiled layer would be compiled again for each length of a document."""
    config = model.config
    return bool(
        cfg.attn_impl in ("auto", "sdpa")
        and config._attn_implementation == transformers_attention(config)
        and not cfg.torch_compile
        and not config.sub_configs
        and not is_code_of_folder(model)
        and getattr(config, "attention_chunk_size", None) is None
        and not (getattr(config, "attn_logit_softcapping", None) and getattr(config, "attention_dropout", 0.0))
        and model._supports_attention_backend
        and model._supports_flash_attn
        and model._can_set_attn_implementation()
        and not _branches_on_implementation(model)
    )


def _branches_on_implementation(model: Any) -> bool:
    """Whether the code of a model does more with the name of its attention than look it up: it then hands sdpa a mask
    of its own, and others something else."""
    code = inspect.getsource(sys.modules[type(model).__module__])
    return len(re.findall(r"\._attn_implementation\b", code)) > len(re.findall(LOOKED_UP, code))


def _mask(**arguments: Any) -> Tensor | None:
    """transformers' mask of a layer type; None where `_attention` needs none."""
    config = arguments.get("config")
    window = arguments.get("local_size")
    causal = "allow_is_bidirectional_skip" not in arguments and not arguments.get("use_vmap")
    windowed = window is None or window == getattr(config, "sliding_window", None)
    if causal and windowed and arguments.get("attention_mask") is None:
        return None
    return sdpa_mask(**arguments)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """([b, s, heads, d], no weights) from queries [b, heads, s, d], keys and values [b, key heads, s, d]; `options`:
    those of transformers' interface."""
    documents = _RowsInProgress.documents
    assert documents is not None, "only `rows_of` selects this function"
    if not _is_plain(module, attention_mask, options):
        assert options.get("s_aux") is None, "sinks need the documents of the rows"
        assert not documents.has_prefixes, "this layer cannot attend to shared prefixes"
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return _attend(documents, module, query, key, value, options), None


def _maskless_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`_attention` for layers that have no mask to fall back on."""
    documents = _RowsInProgress.documents
    assert documents is not None, "only `rows_of` selects this function"
    assert _is_plain(module, attention_mask, options), "a family's layer with more than causal attention"
    return _attend(documents, module, query, key, value, options), None


def _is_plain(module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether a layer's attention is causal but for what `AttentionRule` has."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return attention_mask is None and causal and options.get("position_bias") is None


def _attend(
    documents: RowDocuments, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    scale = options.get("scaling")
    # Qwen2-MoE of transformers 5.24 does not hand its layers' windows on
    window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
    rule = AttentionRule(
        query.shape[-1] ** -0.5 if scale is None else scale,
        window,
        options.get("softcap"),
        options.get("s_aux"),
        options.get("dropout", 0.0),
    )
    if rule.softcap is None and _RowsInProgress.joined is not None:
        documents = _RowsInProgress.joined
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as it would cast for torch's own attention
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    return attend_documents(query, key, value, documents, rule).transpose(1, 2).contiguous()
