"""What a model's description says of its layers."""

from __future__ import annotations

import json
from dataclasses import replace

from megaswift.families import family_of
from megaswift.models.published.moe import GPT_OSS_20B
from megaswift.models.published.table import LLAMA_3_1_8B
from megaswift.models.spec import FULL, LINEAR, WINDOW, LayerKind, ModelSpec
from megaswift.models.weights.rules import ReplicatedRule
from megaswift.models.weights.table import expand_weight_table


def test_kinds_of_layers() -> None:
    dense = family_of(LLAMA_3_1_8B).spec(LLAMA_3_1_8B)
    assert set(dense.layer_kinds) == {LayerKind(FULL, False)} and len(dense.layer_kinds) == 32
    windows = family_of(GPT_OSS_20B).spec(GPT_OSS_20B)
    assert windows.layer_kinds[:3] == (LayerKind(WINDOW, True), LayerKind(FULL, True), LayerKind(WINDOW, True))
    everywhere = replace(dense, transformer={**dense.transformer, "window_size": (7, 0)})
    assert set(everywhere.layer_kinds) == {LayerKind(WINDOW, False)}


def mixed() -> ModelSpec:
    """Two layers with a linear state, of which the second has experts, then one with attention and experts."""
    spec = family_of(GPT_OSS_20B).spec(GPT_OSS_20B)
    transformer = {**spec.transformer, "num_layers": 3, "moe_layer_freq": [0, 1, 1]}
    transformer = {k: v for k, v in transformer.items() if not k.startswith("window")}
    return replace(spec, transformer=transformer, features=replace(spec.features, linear_layers=(True, True, False)))


def test_a_scope_holds_for_its_layers() -> None:
    scopes = ("layer", "attention", "linear", "dense", "moe")
    rules = [ReplicatedRule(f"{scope}.{{L}}", ("x",), ("hidden_size",), scope) for scope in scopes]
    found = [rule.megatron.replace("{L}", str(layer)) for rule, layer, _ in expand_weight_table(rules, mixed())]
    assert found == [
        *("layer.0", "linear.0", "dense.0"),
        *("layer.1", "linear.1", "moe.1"),
        *("layer.2", "attention.2", "moe.2"),
    ]
    assert [kind.mixer for kind in mixed().layer_kinds] == [LINEAR, LINEAR, FULL]


def test_kinds_survive_json() -> None:
    again = ModelSpec.from_dict(json.loads(json.dumps(mixed().to_dict())))
    assert again.layer_kinds == mixed().layer_kinds and again.features == mixed().features
