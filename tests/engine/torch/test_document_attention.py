"""Layers of transformers models that attend document by document: the numbers of each document by itself, windows, soft
caps, sinks and shared prefixes among them; what the rule does not cover keeps transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, modeling_flash_attention_utils

from megaswift.engine.torch import document_attention
from megaswift.engine.torch.document_attention import attends_per_document, rows_of, set_per_document_attention
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.torch.model_check import single_row_batch_of_documents
from megaswift.errors import ConfigError
from megaswift.losses.contract import Batch
from tests.engine.torch.adapter_ranks import model_of
from tests.engine.torch.other_models import KINDS, write
from tests.engine.torch.test_any_architecture import fields, logprobs
from tests.parity.models import VARIANTS, VOCAB, config, randomize

DEFAULT: Any = SimpleNamespace(attn_impl="auto", torch_compile=False)
SHARED = 8
LENGTHS = (9, 14, 6)
QUICK = ("gpt_oss", "gemma2", "qwen2_moe", "phi3")
OTHERS = ("gpt_neox", "starcoder2", "cohere", "gemma", "nemotron", "persimmon", "olmo", "phi", "granitemoe")
"""Models of no family that attend per document."""


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


def with_prefix(documents: list[Tensor]) -> tuple[list[Tensor], Batch]:
    """Documents with the same first tokens, and their row: these tokens once, then what follows of each."""
    start = torch.randint(3, VOCAB, (SHARED,), generator=torch.Generator().manual_seed(3))
    row = single_row_batch_of_documents(start, *documents)
    starts = torch.tensor([0, *(SHARED for _ in documents)]).repeat_interleave(row.cu_seqlens.diff())
    prefixes = torch.tensor([-1, *(0 for _ in documents)])
    return [torch.cat([start, d]) for d in documents], replace(row, positions=row.positions + starts, prefixes=prefixes)


def check(model: Any, tested: bool) -> None:
    """Both kinds of rows against transformers on each document; `model` attends per document afterwards."""
    documents, own = drawn(), LossFieldsModel(model)
    whole, shared = with_prefix(documents)
    want, continued = ([logprobs(model, ids) for ids in some] for some in (documents, whole))
    set_per_document_attention(model, DEFAULT, tested)
    assert attends_per_document(model)
    for row, wanted, skipped in (
        (single_row_batch_of_documents(*documents), want, 0),
        (shared, [w[SHARED:] for w in continued], SHARED),
    ):
        with rows_of(row, model):
            found = fields(own, row)[0, skipped:].split(LENGTHS)
        worst = max(float((t[:-1] - w).abs().max()) for t, w in zip(found, wanted, strict=True))
        assert worst < 2e-5, worst


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v in QUICK else pytest.mark.slow) for v in VARIANTS if not v.endswith("-nf4")],
)
@pytest.mark.parametrize("joined", [0, 20, 256])
def test_families(variant: str, joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document by itself, the shorter ones together, and all of them together."""
    monkeypatch.setattr(document_attention, "JOINED", joined)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32).eval()
    randomize(model, 3)
    check(model, True)


@pytest.mark.wide
@pytest.mark.parametrize("variant", ["dense", "gemma2", "gpt_oss"])
def test_autocast(variant: str) -> None:
    """ddp in half precision: weights, and so angles, are float32 and products are not."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32)
    randomize(model, 3)
    set_per_document_attention(model, DEFAULT, True)
    ids, found = drawn()[1], []
    for half in (False, True):
        model.zero_grad()
        row = single_row_batch_of_documents(ids)
        with rows_of(row, model):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(input_ids=ids[None], labels=ids[None]).loss
            loss.backward()
        name = "model.layers.0.self_attn.k_proj.weight"
        found.append(dict(model.named_parameters())[name].grad.clone())
    assert torch.nn.functional.cosine_similarity(*(g.flatten() for g in found), dim=0) > 0.9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("others")
    return lambda kind: write(kind, root / kind)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_models(kind: str, folders: Callable[[str], Path]) -> None:
    check(model_of(folders(kind)).eval(), False)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OTHERS])
def test_models_that_keep_their_own(kind: str, folders: Callable[[str], Path]) -> None:
    """Or whose numbers would show the check of the engine that they must: no third way."""
    model = model_of(folders(kind)).eval()
    before, (document, *_) = model.config._attn_implementation, drawn()
    row = single_row_batch_of_documents(document)
    want = fields(LossFieldsModel(model), row)
    set_per_document_attention(model, DEFAULT, False)
    if not attends_per_document(model):
        assert model.config._attn_implementation == before
        return
    with rows_of(row, model):
        torch.testing.assert_close(fields(LossFieldsModel(model), row), want, rtol=0, atol=2e-5)


def dense(**options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config("dense", **options), dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "options", [{"attn_impl": "unfused"}, {"attn_impl": "flex"}, {"attn_impl": "flash"}, {"torch_compile": True}]
)
def test_other_attention_stays(options: dict[str, Any]) -> None:
    model = dense()
    set_per_document_attention(model, SimpleNamespace(**{**vars(DEFAULT), **options}), True)
    assert model.config._attn_implementation == "sdpa" and not attends_per_document(model)


def test_shared_prefixes_need_it() -> None:
    _, row = with_prefix(drawn())
    with pytest.raises(ConfigError, match="--prefix_sharing false"), rows_of(row, dense()):
        pass


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.parametrize("variant", ["dense", "gemma2", "gpt_oss"])
def test_rows_end_with_their_micro_batch(variant: str, tested: bool) -> None:
    """Also where it fails; outside, where a callback may call it, a model is transformers' own."""
    torch.manual_seed(0)
    model, (document, *_) = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32).eval(), drawn()
    want = logprobs(model, document)
    set_per_document_attention(model, DEFAULT, tested)
    with pytest.raises(ZeroDivisionError), rows_of(single_row_batch_of_documents(*drawn()), model):
        raise ZeroDivisionError
    torch.testing.assert_close(logprobs(model, document), want, rtol=0, atol=0)


def test_a_tested_model_asks_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask the positions of a micro-batch, on a GPU a wait, and make a mask."""
    model = dense()
    set_per_document_attention(model, DEFAULT, True)
    row = single_row_batch_of_documents(*drawn())
    with rows_of(row, model):
        want = fields(LossFieldsModel(model), row)
    monkeypatch.setattr(document_attention, "_packed_sequence_indices", None)
    with rows_of(row, model):
        torch.testing.assert_close(fields(LossFieldsModel(model), row), want, rtol=0, atol=0)


class HostReads(TorchDispatchMode):
    """How often the host reads a number of a tensor."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_transformers_own_masks_ask_no_positions(packed: bool) -> None:
    """Models that keep their own attention: the same masks, without a wait."""
    model, (document, *others) = dense(), drawn()
    row = single_row_batch_of_documents(document, *(others if packed else []))
    own = LossFieldsModel(model)
    with HostReads() as theirs:
        want = fields(own, row)
    with rows_of(row, model), HostReads() as ours:
        found = fields(own, row)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert theirs.count > ours.count == 0


@pytest.mark.parametrize("packed", [True, False])
def test_flash_attention_asks_no_positions(packed: bool) -> None:
    """transformers asks in every layer whether a batch of one row is packed."""
    documents = drawn()
    row = single_row_batch_of_documents(*documents[: 3 if packed else 1])
    for batch_size, positions in ((1, row.positions), (1, None), (2, row.positions)):
        want = modeling_flash_attention_utils._is_packed_sequence(positions, batch_size)
        with rows_of(row, dense()), HostReads() as reads:
            found = modeling_flash_attention_utils._is_packed_sequence(positions, batch_size)
        assert (bool(want), reads.count) == (found, 0)


def test_no_mask_no_other_attention() -> None:
    """Nothing to fall back on: the layer would lose its window, or attend to other documents."""
    model, (document, *_) = dense(), drawn()
    set_per_document_attention(model, DEFAULT, True)
    with rows_of(single_row_batch_of_documents(document), model):
        model.model.layers[1].self_attn.is_causal = False
        with pytest.raises(AssertionError, match="more than causal"):
            logprobs(model, document)


def attended(mask: Tensor | None, **options: Any) -> Tensor:
    """[1, 5, 1, 5]: which of five keys each query took, and how much."""
    zero, values = torch.zeros(1, 1, 5, 8), torch.nn.functional.pad(torch.eye(5), (0, 3))[None, None]
    module = torch.nn.Module()
    return document_attention._attention(module, zero, zero, values, mask, **options)[0][..., :5]


def test_what_is_more_than_causal_stays() -> None:
    """Attention both ways, and masks of other kinds, as transformers has them."""
    row = single_row_batch_of_documents(torch.arange(3), torch.arange(2))
    sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5, "config": SimpleNamespace(sliding_window=4)}
    model = dense()
    set_per_document_attention(model, DEFAULT, False)
    with rows_of(row, model):
        own = attended(None)[0, :, 0]
        torch.testing.assert_close(own[1], torch.tensor([0.5, 0.5, 0, 0, 0]))
        torch.testing.assert_close(own[3], torch.tensor([0, 0, 0, 1.0, 0]))
        torch.testing.assert_close(attended(None, is_causal=False)[0, :, 0], torch.full((5, 5), 0.2))
        seen = torch.eye(5, dtype=torch.bool)[None, None]
        torch.testing.assert_close(attended(seen)[0, :, 0], torch.eye(5))
        for usual in ({}, {"local_size": 4}):
            assert document_attention._mask(**sizes, **usual) is None
        more: tuple[dict[str, Any], ...] = (
            {"use_vmap": True, "allow_is_causal_skip": False},
            {"local_size": 3},
            {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False},
            {"attention_mask": torch.tensor([[True, True, True, True, False]])},
        )
        for unusual in more:
            assert document_attention._mask(**sizes, **unusual) is not None, unusual
