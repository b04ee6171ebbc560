"""Model types that are encoders: tiny models of transformers of each, a text alone and beside padding, of the longest
length and beyond, and which parameters have gradients in each task.

Covers: megaswift/models/encoders.py, megaswift/bridge/new_head.py, megaswift/engine/torch/encoder_parts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaswift.bridge.new_head import POOLER, encoder_head_names
from megaswift.engine.torch.encoder_parts import freeze_pooler, head_module_names, label_scores, padding_mask
from megaswift.models.encoders import AFTER_PADDING, FROM_ZERO, encoder_of, is_encoder
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE

TYPES = (*FROM_ZERO, *AFTER_PADDING)
POSITIONS = 24
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TYPE: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "electra": {"embedding_size": 16},
    "gte": {"rope_parameters": None},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "nomic_bert": {"head_dim": 8},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
}
NO_LIMIT = {"deberta-v2", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "nomic_bert", "roformer"}
"""Types without a table of positions, so that a longer text is no error; the model is not made for it."""


def tiny(kind: str, auto: str = "AutoModel") -> Any:
    import transformers

    torch.manual_seed(2)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=40,
        max_position_embeddings=POSITIONS,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        cls_token_id=0,
        sep_token_id=2,
        **{**SIZES, **{k: v for k, v in OF_TYPE.get(kind, {}).items() if v is not None}},
    )
    return getattr(transformers, auto).from_config(config)


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 40, (1, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", TYPES)
def test_padding_is_not_seen_and_the_limit_is_the_models(kind: str) -> None:
    model = tiny(kind).eval()
    encoder = encoder_of(model.config.to_dict())
    assert encoder is not None and encoder.longest is not None
    text = ids(9)
    row = torch.cat([text, torch.full((1, 5), 1)], 1)
    mask = padding_mask(torch.arange(14)[None] < 9)
    with torch.no_grad():
        alone = model(input_ids=text, attention_mask=torch.ones_like(text)).last_hidden_state
        padded = model(input_ids=row, attention_mask=mask).last_hidden_state[:, :9]
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)
        empty = model(input_ids=torch.full((1, 6), 1), attention_mask=padding_mask(torch.zeros(1, 6, dtype=torch.bool)))
        assert empty.last_hidden_state.isfinite().all()
        full = ids(encoder.longest)
        model(input_ids=full, attention_mask=torch.ones_like(full))
        beyond = ids(encoder.longest + 1)
        if kind not in NO_LIMIT:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=beyond, attention_mask=torch.ones_like(beyond))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("head", [NO_HEAD, SCORE, TOKEN_SCORE])
def test_all_that_trains_has_a_gradient(kind: str, head: str) -> None:
    auto = {NO_HEAD: "AutoModel", SCORE: "AutoModelForSequenceClassification"}.get(
        head, "AutoModelForTokenClassification"
    )
    model = tiny(kind, auto)
    freeze_pooler(model, head)
    out = model(input_ids=ids(7), attention_mask=torch.ones(1, 7, dtype=torch.long))
    vectors = out.last_hidden_state if head == NO_HEAD else label_scores(out.logits, torch.arange(7))
    (vectors * torch.randn(vectors.shape)).sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    # What a folder may lack is the head, and what trains whole beside adapters has it all.
    names = [name for name, _ in model.named_parameters()]
    new = encoder_head_names(model, names)
    modules = head_module_names(model, head)
    assert bool(modules) == (head != NO_HEAD)
    if head != NO_HEAD:
        assert all({*name.split(".")} & {*modules, POOLER} for name in new)
    assert not any(".layer" in name for name in new)


def test_what_is_none() -> None:
    assert not is_encoder({"model_type": "qwen3"}) and not is_encoder({"model_type": "t5"})
    assert not is_encoder({"model_type": "bert", "is_decoder": True})
    assert is_encoder({"model_type": "bert", "is_decoder": False})
    published = {"model_type": "xlm-roberta", "max_position_embeddings": 8194, "pad_token_id": 1}  # bge-m3
    encoder = encoder_of(published)
    assert encoder is not None and encoder.longest == 8192
