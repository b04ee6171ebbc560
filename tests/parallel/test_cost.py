"""Parameter counts against Hugging Face's models, the FLOP rule against torch's counter, bytes by hand."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from megaswift.parallel.cost import Precision, flop_parameters, parameters, rank_bytes, stage_bytes, stage_parameters
from megaswift.parallel.layout import Layout
from megaswift.parallel.shape import ModelShape
from megaswift.parallel.stages import Split

BASE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            intermediate_size=48, max_position_embeddings=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[])


@dataclass(frozen=True)
class Model:
    kind: str
    extra: dict
    shape: dict


SHAPE = ModelShape(num_layers=4, hidden_size=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=96)
MOE = dict(experts=4, topk=2, expert_ffn=24, moe_layers=(True,) * 4)
MODELS = [
    Model("LlamaConfig", {}, {}),
    Model("LlamaConfig", {"tie_word_embeddings": True}, {"tied": True}),
    Model("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "linear_bias": True}),
    Model("Qwen2Config", {}, {"qkv_bias": True}),
    Model("Qwen3Config", {}, {"qk_norm": True}),
    Model("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, {**MOE, "expert_ffn": 48}),
    Model("Qwen3MoeConfig", EXPERTS, {**MOE, "qk_norm": True}),
    Model("Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [0, 3]}, {**MOE, "moe_layers": (False, True, True, False), "qk_norm": True}),
    Model("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40},
          {**MOE, "qkv_bias": True, "shared_ffn": 40, "shared_gate": True}),
]


def hf_model(model, device="meta"):
    torch = pytest.importorskip("torch")
    import transformers

    config = getattr(transformers, model.kind)(**{**BASE, "tie_word_embeddings": False, **model.extra})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.kind + "-".join(m.extra))
def test_parameters_are_those_of_hugging_face(model):
    shape = replace(SHAPE, **model.shape)
    hf = hf_model(model)
    assert parameters(shape) == sum(p.numel() for p in hf.parameters())
    dense = replace(shape, experts=shape.topk) if shape.experts else shape
    idle = (shape.experts - shape.topk) * shape.hidden_size * (shape.num_layers - shape.dense_layers)  # rows of the router stay
    embedding = 0 if shape.tied else hf.get_input_embeddings().weight.numel()
    assert flop_parameters(shape) == parameters(dense) + idle - embedding


@pytest.mark.parametrize("tied", [False, True])
def test_the_flop_rule_is_what_torch_counts(tied):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from megaswift.trainers.flops import FlopRule

    model = hf_model(Model("LlamaConfig", {"tie_word_embeddings": tied}, {}), "cpu")
    ids = torch.arange(32).view(2, 16)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    shape = replace(SHAPE, tied=tied)
    rule = FlopRule(flop_parameters(shape), shape.num_layers * shape.heads * shape.head_dim)
    norms = (2 * shape.num_layers + 1) * shape.hidden_size  # the rule counts them as if they were matrices, the counter not at all
    masked = rule.step(0, 2 * 16**2)  # eager attention also computes the half that is masked
    expected = rule.step(32, 2 * 16**2) + masked - 6 * norms * 32
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)


def test_stages_add_up_to_the_model():
    shape = replace(SHAPE, **MOE, qkv_bias=True)
    for pp, split in ((1, Split()), (2, Split()), (4, Split()), (2, Split(first=3)), (2, Split(custom="Et|t|t|tL"))):
        layout = Layout(pp, pp=pp, vpp=2 if split.custom else 1)
        assert sum(held.total for held in stage_parameters(shape, layout, 96, split)) == parameters(shape)


def test_a_tied_output_layer_is_copied_to_the_last_stage_only_across_stages():
    shape = replace(SHAPE, tied=True)
    assert sum(h.total for h in stage_parameters(shape, Layout(1), 96)) == parameters(shape)
    assert sum(h.total for h in stage_parameters(shape, Layout(2, pp=2), 96)) == parameters(shape) + 96 * 32


def test_tensor_and_expert_parallel_ranks_share_matrices_and_repeat_norms_and_routers():
    shape = replace(SHAPE, **MOE, qk_norm=True)
    layout = Layout(4, tp=2, ep=2, etp=2)
    (held,) = stage_parameters(shape, layout, 96)
    repeated = 4 * (2 * 32 + 2 * 8 + 4 * 32) + 32
    experts = 4 * 4 * 3 * 24 * 32
    assert held.experts == experts // 4
    assert held.dense == (parameters(shape) - experts - repeated) // 2 + repeated


def test_padding_of_the_vocabulary_is_held():
    (plain,), (padded,) = (stage_parameters(SHAPE, Layout(2, tp=2), rows) for rows in (96, 112))
    assert padded.total - plain.total == 2 * 8 * 32


@pytest.mark.parametrize(("precision", "per_weight", "state"), [
    (Precision("bfloat16"), 2, 12 / 4), (Precision("bfloat16", distributed_optimizer=False), 2, 12), (Precision("float32"), 4, 8 / 4),
    (Precision("float32", distributed_optimizer=False), 4, 8), (Precision("bfloat16", moments=1), 2, 8 / 4),
    (Precision("float32", moments=0), 4, 0),
])
def test_bytes_of_a_dense_rank(precision, per_weight, state):
    layout = Layout(8, tp=2, cp=2)
    (held,) = stage_parameters(SHAPE, layout, 96)
    (cost,) = stage_bytes(SHAPE, layout, 96, precision)
    assert (cost.weights, cost.gradients, cost.optimizer) == (held.total * per_weight, held.total * 4, held.total * state)
    assert cost.total == held.total * (per_weight + 4 + state)


def test_expert_state_is_split_over_the_copies_of_the_experts():
    layout = Layout(8, ep=4)
    (held,) = stage_parameters(replace(SHAPE, **MOE), layout, 96)
    assert held.dense % 8 == held.experts % 2 == 0
    assert rank_bytes(held, layout, Precision()).optimizer == 12 * (held.dense // 8 + held.experts // 2)


def test_shape_of_a_spec():
    transformer = dict(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=48,
                       num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, gated_linear_unit=True, add_qkv_bias=True,
                       add_bias_linear=False, qk_layernorm=True, normalization="RMSNorm")
    spec = SimpleNamespace(transformer=transformer, vocab_size=96, tied=False, moe_layers=(True,) * 4)
    assert ModelShape.of(spec) == replace(SHAPE, **MOE, qkv_bias=True, qk_norm=True)
    dense = SimpleNamespace(transformer={**transformer, "num_moe_experts": None}, vocab_size=96, tied=True, moe_layers=(False,) * 4)
    assert ModelShape.of(dense) == replace(SHAPE, qkv_bias=True, qk_norm=True, tied=True)
