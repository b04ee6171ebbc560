"""Models that are no family here, on the torch engine: as transformers computes them, or refused where they would learn
something else.

Covers: megaswift/engine/torch/model_check.py, megaswift/engine/torch/logit_fields.py,
megaswift/models/any_model.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import Handler, getLogger
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import warning_once

from megaswift.config import SwiftConfig
from megaswift.engine.document_attention import attend_documents
from megaswift.engine.torch import model_check
from megaswift.engine.torch.logit_fields import LossFieldsModel, labeled_columns
from megaswift.engine.torch.model import build_model
from megaswift.engine.torch.strategies import fsdp, table
from megaswift.errors import ConfigError
from megaswift.families import FAMILIES
from megaswift.losses.contract import Batch
from megaswift.models.any_model import spec_from_family_or_size_fields
from tests.engine.torch.adapter_ranks import CASE, Run, far, model_of, opened, plain
from tests.engine.torch.other_models import APART, ENCODERS, KINDS, MIXING, POSITIONS, config_of, write
from tests.parity.cases import parse
from tests.parity.models import VARIANTS, VOCAB, build, config, randomize
from tests.parity.pool import Pool
from tests.sources import ROOT

GO = "tests.engine.torch.adapter_ranks:go"
PACKED = parse("dense dp2 packed")
QUICK = ("gpt2", "opt", "mamba", "roberta", "bert-encoder")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("others")
    return lambda kind: write(kind, root / kind)


def test_none_is_a_family() -> None:
    """Except Qwen3-Next: transformers mixes its packed documents, which a class that is tested elsewhere would hide."""
    assert {model_type for model_type, _ in KINDS.values()} & {*FAMILIES.names()} == {"qwen3_next"}
    assert KINDS.keys() == {*APART, *MIXING, *ENCODERS}


def test_the_pages_count_them() -> None:
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| models without a family here")]
    compared = len(APART) + len(MIXING)
    for text in (f"{compared} kinds", f"({compared} of {compared})", f"({len(APART)})", f"({len(MIXING)}, by more"):
        assert text in row, text
    assert f"{len(ENCODERS)} encoders" in row
    assert f"compares {compared} architectures" in (ROOT / "docs/fallback.md").read_text(encoding="utf-8")


def logprobs(model: Any, ids: Tensor) -> Tensor:
    """Of a document without anything beside it, as transformers' own users call it."""
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]


def fields(model: LossFieldsModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        positions = None if batch.cu_seqlens is None else batch.positions
        labeled = batch.loss_weights != 0
    return model(batch.input_ids, positions, batch.labels, labeled, labeled_columns(labeled), {})[0]


@pytest.mark.wide
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in KINDS])
def test_documents_are_their_own(kind: str, folders: Callable[[str], Path]) -> None:
    """Padded rows give each document's own numbers; packed rows do, or are refused."""
    model = model_of(folders(kind)).eval()
    engine, drawn = LossFieldsModel(model), torch.Generator().manual_seed(2)
    docs = [torch.randint(3, VOCAB, (n,), generator=drawn) for n in (9, 14, 6)]
    want = [logprobs(model, ids) for ids in docs]
    if kind not in ENCODERS:
        for ids, own in zip(docs, want, strict=True):
            padded = model_check.single_row_batch_of_documents(torch.cat([ids, torch.zeros(5, dtype=torch.long)]))
            torch.testing.assert_close(fields(engine, padded)[0, : len(own)], own, rtol=0, atol=1e-5)
        together = fields(engine, model_check.single_row_batch_of_documents(*docs))[0].split([len(ids) for ids in docs])
        worst = max(float((t[:-1] - own).abs().max()) for t, own in zip(together, want, strict=True))
        assert worst < 1e-5 if kind in APART else worst > 1e-2, worst
    told = [str(p) for p in model_check._problems(partial(fields, engine), VOCAB, model_check.EXACT, True, kind)]
    if kind in APART:
        assert told == []
    else:
        said = "is not causal" if kind in ENCODERS else "its output for a document changes when others are packed"
        assert len(told) == 1 and said in told[0] and kind in told[0]
    if kind in MIXING:
        assert not list(model_check._problems(partial(fields, engine), VOCAB, model_check.EXACT, False, kind))
    assert model_check.learned_position_count(model) == POSITIONS.get(kind)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[] if v in ("gpt_oss", "gemma2") else pytest.mark.slow)
        for v in VARIANTS
        if not v.endswith("-nf4")
    ],
)
def test_families_separate_packed_documents_too(variant: str) -> None:
    """Whatever transformers' class does: those that mix are asked before they train, the others need not be."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32).eval()
    randomize(model, 3)
    engine, drawn = LossFieldsModel(model), torch.Generator().manual_seed(2)
    docs = [torch.randint(3, VOCAB, (n,), generator=drawn) for n in (9, 14, 6)]
    together = fields(engine, model_check.single_row_batch_of_documents(*docs))[0].split([len(ids) for ids in docs])
    worst = max(float((t[:-1] - logprobs(model, ids)).abs().max()) for t, ids in zip(together, docs, strict=True))
    assert worst > 1e-2 if model.config.model_type in model_check.LOSES_DOCUMENTS else worst < 2e-5, worst


def test_padding_is_no_news(folders: Callable[[str], Path]) -> None:
    """transformers warns of padding without a mask, once; here it is behind a row's end."""
    told: list[str] = []
    logger, ear = getLogger("transformers.modeling_utils"), Handler()
    ear.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(ear)
    logger.setLevel("WARNING")  # whatever a run before told transformers to say
    folder = folders("gpt2")
    made = build_model(
        folder,
        SwiftConfig(engine="ddp", model=str(folder)).model,
        0,
        True,
        spec_from_family_or_size_fields(folder),
        {},
        False,
    )
    warning_once.cache_clear()
    made(torch.tensor([[5, 6, made.config.pad_token_id]]))
    logger.warning("another")
    logger.removeHandler(ear)
    logger.setLevel("NOTSET")
    assert told == ["another"]


def test_units_that_are_none_are_refused(folders: Callable[[str], Path]) -> None:
    """FSDP's units by name; a name that no module has would leave the model in one."""
    model = model_of(folders("gpt2"))
    assert table.fsdp_unit_classes((), model) == {"GPT2Block"}
    assert table.fsdp_unit_classes(["GPT2MLP"], model) == {"GPT2MLP"}
    with pytest.raises(
        ConfigError,
        match=r"cls_to_wrap GPT2Blok: is not a module class of this GPT2LMHeadModel\n.*GPT2Block, the decoder layers",
    ):
        table.fsdp_unit_classes(["GPT2MLP", "GPT2Blok"], model)


@pytest.mark.parametrize(
    ("kind", "classes", "kept"),
    [
        ("bert", {"BertEmbeddings", "BertLayer"}, ["BertLayer", "BertLayer"]),  # its embeddings are the head's
        ("roberta", {"RobertaLayer", "RobertaOutput"}, ["RobertaLayer", "RobertaOutput"] * 2),
        ("gpt2", {"GPT2Model", "GPT2Block"}, ["GPT2Block", "GPT2Block"]),
    ],
)
def test_units_share_no_weight(
    kind: str, classes: set[str], kept: list[str], folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight in two of FSDP's units cannot be; the one around both has it."""
    model = model_of(folders(kind))
    capsys.readouterr()
    found = fsdp.units_without_tied_weights([m for m in model.modules() if type(m).__name__ in classes], model)
    assert [type(m).__name__ for m in found] == kept
    left = "".join(f"fsdp2: {name} shares weights with other modules" for name in classes - {*kept})
    assert left in (said := capsys.readouterr().err) and bool(left) == bool(said)


ENGINES = ("ddp", "zero2", "zero3", "fsdp2")


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(kind, engine, marks=[] if (kind, engine) == ("gpt2", "fsdp2") else [pytest.mark.slow])
        for kind in KINDS
        if kind not in ENCODERS
        for engine in ENGINES
    ],
)
def test_trains_as_in_plain_torch(
    kind: str, engine: str, folders: Callable[[str], Path], pool: Pool, tmp_path: Path
) -> None:
    """Three steps on 2 ranks, packed where the model can; the export is what trained, and transformers loads it."""
    folder = folders(kind)
    case = PACKED if kind in APART else CASE
    got, other = pool.run(GO, Run(folder, {"engine": engine, "max_length": 128}, export=tmp_path / "hf", case=case), 2)
    want = plain(model_of(folder))
    assert got.losses == other.losses == pytest.approx(want.losses, rel=1e-5)
    assert far(got.weights, want.weights) < 1e-4
    exported = dict(model_of(tmp_path / "hf").named_parameters())
    assert all(torch.equal(t, exported[n]) for n, t in got.weights.items())
    assert config_of(kind).model_type == model_of(tmp_path / "hf").config.model_type


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("mamba", {"packing": True}, "--packing true: is not supported by this model"),
        (
            "mamba",
            {"packing": True, "torch_dtype": "bfloat16", "engine": "fsdp2"},
            "--packing true: is not supported by this model",
        ),
        (
            "gpt_oss",
            {"packing": True, "attn_impl": "unfused"},
            "(?s)--packing true: is not supported.*--packing false, or --attn_impl auto, or --engine megatron",
        ),
        ("bert-encoder", {}, "is not causal: its output for a token depends on later tokens"),
        ("gpt2", {"max_length": 129}, "--max_length 129: exceeds the 128 learned positions"),
    ],
)
def test_refused_before_the_first_step(
    kind: str, options: dict[str, Any], said: str, folders: Callable[[str], Path], pool: Pool
) -> None:
    with pytest.raises(Exception, match=said):
        pool.run(GO, Run(folders(kind), {"engine": "ddp", "max_length": 128, **options}, last=0), 2)


def with_fields(folder: Path, more: dict[str, Any]) -> Path:
    """The model folder, with these fields in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return folder


@pytest.mark.process
def test_a_family_with_a_field_that_it_does_not_know_is_checked(pool: Pool, tmp_path: Path) -> None:
    """Gemma 3's embedding models attend both ways: the native engine refuses the field, transformers follows it."""
    folder = with_fields(build("gemma3_text", tmp_path / "model"), {"use_bidirectional_attention": True})
    with pytest.raises(Exception, match="is not causal"):
        pool.run(GO, Run(folder, {"engine": "ddp"}, last=0), 2)


def kernels(rank: int, world: int, run: Run) -> str:
    """How a policy's model attends once it is loaded (on the ranks). `save`: a fault is planted, scores that are not
    those of transformers."""
    factor = 2.0 if run.save else 1.0

    def attend(query: Tensor, *rest: Any) -> Tensor:
        return attend_documents(query * factor, *rest)

    with patch("megaswift.engine.torch.document_attention.attend_documents", attend):
        engine, context = opened(run.case, run, world)
    context.close()
    return engine.kernels


@pytest.mark.process
@pytest.mark.parametrize(
    ("engine", "ranks"),
    [("ddp", 1), *(pytest.param(engine, 2, marks=pytest.mark.slow) for engine in ("fsdp2", "zero3"))],
)
def test_own_attention_where_numbers_would_change(
    engine: str, ranks: int, folders: Callable[[str], Path], pool: Pool, tmp_path: Path
) -> None:
    run = Run(folders("gpt_neox"), {"engine": engine}, merges=True)
    target = f"{__name__}:kernels"
    assert "per-document attention" in pool.run(target, run, ranks)[0]
    assert "sdpa attention" in pool.run(target, replace(run, save=tmp_path), ranks)[0]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("olmoe", "sdpa"), pytest.param("phimoe", "sdpa", marks=pytest.mark.slow), ("starcoder2", "per-document")],
)
def test_windows_of_masks_and_layers_may_differ(kind: str, attention: str, pool: Pool, tmp_path: Path) -> None:
    """Longer than the documents that are compared. OLMoE's layers alone have one, PhiMoE's masks alone."""
    run = Run(with_fields(write(kind, tmp_path), {"sliding_window": 64}), {"engine": "ddp"})
    assert f"{attention} attention" in pool.run(f"{__name__}:kernels", run, 1)[0]


@pytest.mark.process
@pytest.mark.parametrize(
    ("variant", "more", "attention"),
    [
        ("gemma2", {"attention_dropout": 0.1}, "eager"),
        ("gemma2", {"note": "text"}, "per-document"),
        pytest.param("gpt_oss", {"note": "text"}, "per-document", marks=pytest.mark.slow),
    ],
)
def test_soft_caps_and_sinks_with_a_field_that_the_family_does_not_know(
    variant: str, more: dict[str, Any], attention: str, pool: Pool, tmp_path: Path
) -> None:
    """Compared with transformers' eager attention; with dropout on top of a soft cap that is the one to train with."""
    run = Run(with_fields(build(variant, tmp_path / "model"), more), {"engine": "ddp"}, last=1)
    assert f"{attention} attention" in pool.run(f"{__name__}:kernels", run, 1)[0]
    assert 0 < pool.run(GO, run, 2)[0].losses[0] < 10


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "starcoder2", "cohere"])
def test_shared_prompts_are_checked(kind: str, folders: Callable[[str], Path], pool: Pool) -> None:
    run = Run(folders(kind), {"engine": "ddp", "packing": True, "prefix_sharing": True}, merges=True)
    assert "per-document attention" in pool.run(f"{__name__}:kernels", run, 1)[0]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["gpt_neo", pytest.param("falcon-alibi", marks=pytest.mark.slow)])
def test_shared_prompts_are_refused(kind: str, folders: Callable[[str], Path], pool: Pool) -> None:
    run = Run(folders(kind), {"engine": "ddp", "packing": True, "prefix_sharing": True}, merges=True)
    with pytest.raises(Exception, match="--prefix_sharing true: is not supported by this model|--packing true"):
        pool.run(f"{__name__}:kernels", run, 1)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rounding_is_no_leak(engine: str, folders: Callable[[str], Path], pool: Pool) -> None:
    """In half precision the same numbers of a packed row and of one alone differ."""
    options = {"engine": engine, "max_length": 128, "torch_dtype": "bfloat16", "packing": True}
    got = pool.run(GO, Run(folders("gpt2"), options, last=1, case=PACKED), 2)[0]
    assert len(got.losses) == 1 and 0 < got.losses[0] < 10
