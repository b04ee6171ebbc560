"""Checks assumptions of training on the model itself: it is causal, packed documents do not see each other, and each of
them sees its shared prefix.

Rows have no attention mask (`logit_fields.py`). An encoder that is not configured as a decoder would see the
tokens that it predicts. Many models do not separate packed documents by their positions: state space models and linear
attention carry a state from one document into the next; older models build their mask without the positions, or compute
the positions themselves. Training then runs, and the loss falls, but the model learns something else. Tests hold the
families to Hugging Face. Any other model is checked once, before its first step, on rows of a few tokens; so is a
family whose class in transformers does not separate documents. Another model attends per document only where its
numbers are then those of transformers' own attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megaswift import log
from megaswift.engine.torch import document_attention
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.model import is_tested_class
from megaswift.engine.torch.state import EngineState
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import HIDDEN, SCORES, Batch, ModelOutputs, RequestedModelOutputs
from megaswift.models.any_model import dropout_fields
from megaswift.models.encoders import is_encoder
from megaswift.models.spec import VOCABULARY

BEFORE = 10
"""Tokens of the other document in the same row."""
DOCUMENT = 14
"""Tokens of the document under test."""
END = 4
"""Tokens at the end of the document under test that are replaced."""
WINDOW = 5
"""The window of layers with longer ones, while a document's numbers are compared: fewer tokens than the document
has."""
LOSES_DOCUMENTS = ("gpt_oss", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families whose packed documents reach each other in transformers 5.24: gpt_oss's mask ignores the positions, unless
documents attend by themselves, and so do the states of gated delta nets without flash-linear-attention."""
EXACT = 1e-3
"""Relative change that counts as rounding in float32."""
ROUNDED = 0.1
"""Relative change that counts as rounding in half precision; a leak is as large as the change."""

Score = Callable[[Sequence[Batch], RequestedModelOutputs], list[ModelOutputs]]
_TokenReader = Callable[[Batch], Tensor]
"""A batch of one row to a number a token [1, s]: a label's log-probability, or the value of a scalar head."""


def check_causality_and_packing(engine: EngineState, score: Score) -> None:
    """ConfigError where training would learn something else than it says. Collective, and nothing of the model
    changes.

    Args:
        score: The engine's.
    """
    # Models that the tests cover are trusted, unless they share prefixes or are known to mix packed documents.
    spec = engine.spec
    settings = engine.settings
    known = is_tested_class(spec, unwrap_peft_model(engine.fields.model))
    shares = settings.shares_prefixes
    doubtful = not known or shares or (settings.shares_rows and spec.family in LOSES_DOCUMENTS)
    reads_both_ways = is_encoder(spec.hf_config) and spec.head != VOCABULARY
    if engine.fields.has_tower or reads_both_ways or not doubtful:
        return
    needs = RequestedModelOutputs()
    if spec.head != VOCABULARY:
        needs = RequestedModelOutputs(fields=frozenset(), head=SCORES if spec.scored else HIDDEN)

    def read(batch: Batch) -> Tensor:
        outputs = score([batch], needs)[0]
        numbers = outputs.logprobs if needs.head is None else outputs.vectors
        assert numbers is not None, "the check was requested"
        return numbers.float().cpu()

    # Compare the numbers of a document alone, changed, and next to others.
    label = f"{engine.build.model.model}, model_type {spec.family}"
    longest = learned_position_count(unwrap_peft_model(engine.fields.model))
    with engine.most_exact():
        limit = EXACT if engine.dtype == torch.float32 else ROUNDED
        if not known:
            _keep_per_document_attention_if_same(engine, read, limit)
        problems = [*_problems(read, spec.vocab_size, limit, settings.shares_rows, label)]
        if not problems and shares:
            problems += _prefix_problems(engine, read, limit, label)
    # Positions that the model has no embedding for.
    if longest is not None and settings.max_length > longest:
        problems.append(
            Problem(
                f"--max_length {settings.max_length}",
                f"exceeds the {longest} learned positions of this model",
                f"--max_length {longest}",
            )
        )
    # Families of the native engine have a further way out.
    if problems and known:
        auto = "" if engine.build.model.attn_impl == "auto" else ", or --attn_impl auto"
        separates = f"{auto}, or --engine megatron, which separates packed documents"
        problems = [replace(p, fix=f"{p.fix}{separates}") for p in problems]
    if problems:
        raise ConfigError(problems)


def _keep_per_document_attention_if_same(engine: EngineState, read: _TokenReader, limit: float) -> None:
    """Back to transformers' attention where a document's numbers are not those that this gives. Under short windows: a
    layer may not hand its window on, or hand on one that its mask has not."""
    model: Any = unwrap_peft_model(engine.fields.model)
    if not document_attention.attends_per_document(model):
        return
    document, ended = (single_row_batch_of_documents(ids) for ids in _document_and_other_end(engine.spec.vocab_size))
    with document_attention.short_windows(model, WINDOW):
        found = read(document)
        other = read(ended)
        document_attention.keep_transformers_attention(model)
        differs = _differs(found, read(document), limit * _apart(found, other))
    if differs:
        log.info(f"{type(model).__name__} keeps transformers' attention: per document its numbers are others")
    else:
        document_attention.set_per_document_attention(model, engine.build.model, False)


def _document_and_other_end(vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (DOCUMENT + END,), generator=torch.Generator().manual_seed(0))
    return tokens[:DOCUMENT], torch.cat([tokens[: DOCUMENT - END], tokens[DOCUMENT:]])


def _prefix_problems(engine: EngineState, read: _TokenReader, limit: float, model: str) -> Iterator[Problem]:
    """What is wrong with two documents that share all but their ends."""
    bare: Any = unwrap_peft_model(engine.fields.model)
    if not document_attention.attends_per_document(bare) or dropout_fields(bare.config.to_dict()):
        rule = f"is not supported by this model's attention, or with its dropout ({model})"
        yield Problem("--prefix_sharing true", rule, "leave it out")
        return
    both = _document_and_other_end(engine.spec.vocab_size)
    shared = DOCUMENT - END - 1
    apart = [read(single_row_batch_of_documents(ids))[:, shared:] for ids in both]
    row = single_row_batch_of_documents(both[0][:shared], *(ids[shared:] for ids in both))
    assert row.cu_seqlens is not None
    starts = torch.tensor([0, shared, shared]).repeat_interleave(row.cu_seqlens.diff())
    found = read(replace(row, positions=row.positions + starts, prefixes=torch.tensor([-1, 0, 0])))
    together = found[:, shared:].chunk(2, dim=1)
    limits = limit * _apart(*apart)
    if any(_differs(one, other, limits) for one, other in zip(apart, together, strict=True)):
        yield Problem(
            "--prefix_sharing true",
            f"is not supported by this model ({model}): its output changes when the start of a document is shared",
            "leave it out",
        )


def _problems(read: _TokenReader, vocab: int, limit: float, packing: bool, model: str) -> Iterator[Problem]:
    """What is wrong with a model of so many tokens."""
    tokens = torch.randint(vocab, (BEFORE + DOCUMENT + END,), generator=torch.Generator().manual_seed(0))
    before, document, end = tokens.split((BEFORE, DOCUMENT, END))
    alone = read(single_row_batch_of_documents(document))
    ended = read(single_row_batch_of_documents(torch.cat([document[:-END], end])))
    same = DOCUMENT - END - 1  # the label after these is exchanged too
    if _differs(alone[:, :same], ended[:, :same], limit * _apart(alone, ended)):
        yield Problem(
            f"--model {model}",
            "is not causal: its output for a token depends on later tokens",
            'use a causal language model; for an encoder, set "is_decoder": true in config.json',
        )
        return
    if packing:
        separate = read(single_row_batch_of_documents(before, document))[:, BEFORE:]
        joined = read(single_row_batch_of_documents(torch.cat([before, document])))[:, BEFORE:]
        # of a row of another length
        rounding = _apart(
            alone[:, :-1], read(single_row_batch_of_documents(torch.cat([document, end])))[:, : DOCUMENT - 1]
        )
        if _differs(alone, separate, max(limit * _apart(alone, joined), 3 * rounding)):
            yield Problem(
                "--packing true",
                f"is not supported by this model ({model}): its output for a document changes when others are packed "
                "with it",
                "--packing false",
            )


def learned_position_count(model: nn.Module) -> int | None:
    """How many a model has a learned vector for; None where positions need none."""
    tables = [
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and re.search(r"(^|\.)(wpe|\w*pos\w*)$", name)
    ]
    return min((m.num_embeddings - int(getattr(m, "offset", 0)) for m in tables), default=None)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _differs(a: Tensor, b: Tensor, most: float) -> bool:
    return not _apart(a, b) <= most  # not a number: it does


def single_row_batch_of_documents(*documents: Tensor) -> Batch:
    """One row, packed where there are several documents; every token but a document's last has a label."""
    rows = [_document(ids) for ids in documents]
    if len(rows) == 1:
        return rows[0]
    names = ("input_ids", "labels", "loss_weights", "positions", "valid")
    joined: dict[str, Any] = {name: torch.cat([getattr(m, name) for m in rows], 1) for name in names}
    bounds = [0, *torch.tensor([len(ids) for ids in documents]).cumsum(0).tolist()]
    return replace(rows[0], **joined, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def _document(ids: Tensor) -> Batch:
    weights = torch.ones(1, len(ids))
    weights[0, -1] = 0.0
    return Batch(
        ids[None], ids.roll(-1)[None], weights, torch.arange(len(ids))[None], torch.ones(1, len(ids), dtype=torch.bool)
    )
