"""`--megatron_extra_kwargs`: fields of Megatron-Core's own dataclass, none that megaswift decides.

Covers: megaswift/engine/megatron/transformer_config.py.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch

import megaswift.engine.megatron  # noqa: F401 (before megatron.core)
from megaswift.compat.names.megatron_lm import UNSUPPORTED_OF_MEGATRON
from megaswift.compat.names.neutral import neutral_option
from megaswift.compat.names.transformer_config import OF_MODEL, transformer_config_option
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES
from megaswift.engine.options.extra_kwargs import (
    ANOTHER_SCHEDULE,
    OPTION_OF_FIELD,
    SET_BY_ENGINE,
    extra_kwargs_problems,
    extra_kwargs_values,
    transformer_config_fields,
)
from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.models.published.moe import QWEN1_5_MOE_A2_7B
from megaswift.models.published.table import QWEN3_0_6B
from megaswift.run.summary import extra_kwargs_text

SPEC = family_of(QWEN3_0_6B).spec(QWEN3_0_6B)


def made(**options: Any) -> Any:
    """Megatron-Core's configuration of a run with these options."""
    from megaswift.parallel.layout import Layout
    from tests.engine.megatron.config_of import transformer_config_of

    raw = options.pop("raw", QWEN3_0_6B)
    spec, cfg = family_of(raw).spec(raw), SwiftConfig(task="sft", model="x", **options)
    return transformer_config_of(cfg, spec, Layout.from_config(cfg.parallel, 1))


def test_values_reach_megatron_core() -> None:
    words = ["--model", "x", "--dataset", "d.jsonl", "--megatron_extra_kwargs"]
    cfg = load_config("sft", [*words, '{"fp32_residual_connection": true, "moe_layer_recompute": false}'], environ={})
    assert extra_kwargs_values(cfg.model.megatron_extra_kwargs) == {
        "fp32_residual_connection": True,
        "moe_layer_recompute": False,
    }
    assert "fp32_residual_connection true" in extra_kwargs_text(cfg.model) and not extra_kwargs_text(
        SwiftConfig().model
    )
    assert not made().fp32_residual_connection
    assert made(megatron_extra_kwargs={"fp32_residual_connection": True}).fp32_residual_connection
    assert made(megatron_extra_kwargs='{"heterogeneous_block_specs": false}').hidden_size == SPEC.hidden_size


def test_what_megatron_core_rejects_is_the_options_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        made(megatron_extra_kwargs={"cuda_graph_impl": "no such"})
    assert "--megatron_extra_kwargs" in caught.value.message() and "Megatron-Core rejects" in caught.value.message()


def test_what_is_fused_stands_on_the_first_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-Core's configuration and the gradients' way say."""
    from types import SimpleNamespace

    from megaswift.engine.megatron.layers.implementation import TORCH, TRANSFORMER_ENGINE
    from megaswift.engine.megatron.transformer_config import overlap_capture_fusion_text

    torchs: Any = SimpleNamespace(linear=TORCH)
    transformer_engine: Any = SimpleNamespace(linear=TRANSFORMER_ENGINE)
    config = made()
    assert overlap_capture_fusion_text(config, torchs) == ""
    config.apply_rope_fusion = config.bias_activation_fusion = True
    assert overlap_capture_fusion_text(config, torchs) == ", fused: activation, rope"
    assert overlap_capture_fusion_text(config, transformer_engine) == ", fused: activation, rope, gradient accumulation"
    config = made(gradient_accumulation_fusion=False)
    assert overlap_capture_fusion_text(config, transformer_engine) == ""
    config.cuda_graph_impl, config.cuda_graph_warmup_steps = "local", 2
    captured = ", layers captured in CUDA graphs after 2 passes"
    assert overlap_capture_fusion_text(config, transformer_engine) == captured
    monkeypatch.setattr("megatron.core.jit.jit_fuser", torch.compile)
    compiled = ", fused: pointwise functions (torch.compile)"
    assert overlap_capture_fusion_text(config, transformer_engine) == captured + compiled


@pytest.mark.parametrize("launches", [True, False])
def test_what_needs_triton_s_kernels_is_off_without_a_compiler(launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine sorts tokens by a Triton kernel; the fusions that are compiled code stay."""
    from megaswift.engine.megatron import transformer_config as module
    from megaswift.engine.megatron.layers.implementation import TRANSFORMER_ENGINE, LayerImplementationChoice

    monkeypatch.setattr(module, "triton_launches", lambda: launches)
    spec, cfg = family_of(QWEN1_5_MOE_A2_7B).spec(QWEN1_5_MOE_A2_7B), SwiftConfig(task="sft", model="x")
    choice = LayerImplementationChoice(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, "asked for")
    fields = module._kernels(spec, cfg.model, False, choice, True)
    assert fields["moe_permute_fusion"] is launches and fields["apply_rope_fusion"] and fields["bias_activation_fusion"]


def test_the_first_screen_gives_no_empty_reason() -> None:
    """QLoRA multiplies with torch's products because of its weights, and attends with Transformer Engine for none."""
    from megaswift.engine.megatron.layers.implementation import (
        TORCH,
        TRANSFORMER_ENGINE,
        LayerImplementationChoice,
    )

    plain = LayerImplementationChoice(TORCH, TRANSFORMER_ENGINE, "weights in NF4")
    assert str(plain) == "torch (weights in NF4), attention: transformer_engine"
    own = LayerImplementationChoice(TRANSFORMER_ENGINE, TORCH, "asked for", ("soft caps",))
    assert str(own) == "transformer_engine (asked for), attention: torch (soft caps)"


def test_bf16_main_gradients_of_other_weights() -> None:
    """torch_dtype auto is float32 on a CPU."""
    aware: dict[str, Any] = {"precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
    from megaswift.engine.megatron.transformer_config import check_main_grads_dtype

    check_main_grads_dtype("bf16", made(**aware, torch_dtype="bfloat16").params_dtype)
    with pytest.raises(ConfigError) as caught:
        check_main_grads_dtype("bf16", made(**aware).params_dtype)
    assert "--main_grads_dtype bf16" in caught.value.message() and "float32" in caught.value.message()


@pytest.mark.parametrize(
    ("given", "rule", "fix"),
    [
        ({"calculate_per_token_loss": False}, "is set by megaswift", "leave it out"),
        ({"context_parallel_size": 2}, "has an option of its own", "--context_parallel_size"),
        ({"num_layers": 4}, "config.json", "change config.json of the model"),
        ({"fp32_residual_conection": True}, "is not a field", "did you mean fp32_residual_connection?"),
        *(
            ({name: True}, "changes how Megatron-Core's schedule calls the model", "leave it out")
            for name in ANOTHER_SCHEDULE
        ),
        ({"cuda_graph_scope": ["full_iteration"]}, "changes how Megatron-Core's schedule", "leave it out"),
        ({"fp32_residual_connection": "yes"}, "is not of the field's type, bool", ""),
        ({"moe_input_jitter_eps": True}, "is not of the field's type", ""),
        ({"fp32_residual_connection": None}, "is not of the field's type", ""),
    ],
)
def test_fields_that_cannot_be_set(given: dict[str, Any], rule: str, fix: str) -> None:
    texts = {name: json.dumps(value) for name, value in given.items()}
    (problem,) = extra_kwargs_problems(texts, SPEC.transformer)
    assert rule in problem.rule and fix in problem.fix and next(iter(given)) in problem.what


def test_the_schedules_call_a_forward_step_in_no_other_way() -> None:
    """Every argument with which the installed Megatron-Core calls `forward_step_func` beyond the two that every step
    has, by the field on which it depends."""
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    beyond = {
        argument.arg if isinstance(argument, ast.keyword) else ast.unparse(argument)
        for module in (combined_1f1b, schedules)
        for call in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "forward_step_func"
        for argument in (*call.args[2:], *call.keywords)
    }
    fields = {
        "return_schedule_plan": "overlap_moe_expert_parallel_comm",
        "checkpoint_activations_microbatch": "num_microbatches_with_partial_activation_checkpoints",
    }
    assert beyond == set(fields) and set(fields.values()) <= {*ANOTHER_SCHEDULE, "overlap_moe_expert_parallel_comm"}


def test_fields_of_schedules_given_as_options() -> None:
    """The advice is the option, not --megatron_extra_kwargs."""
    option = transformer_config_option("overlap_moe_expert_parallel_comm")
    assert option is not None and not option.accepts("true")
    assert option.otherwise == "--overlap_moe_expert_parallel_comm"
    assert extra_kwargs_problems({"cuda_graph_scope": '["attn"]'}, {}) == []


@pytest.mark.parametrize("value", ["0.1", "1", "null"])
def test_values_of_the_type(value: str) -> None:
    assert extra_kwargs_problems({"moe_input_jitter_eps": value}, {}) == []


@pytest.mark.parametrize("raw", [QWEN3_0_6B, QWEN1_5_MOE_A2_7B])
def test_no_field_of_the_engine_is_open(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the engine gives to Megatron-Core has an option, is refused, or is the model's."""
    from megaswift.engine.megatron import transformer_config as module

    seen: dict[str, Any] = {}

    real = module.TransformerConfig

    def recorded(**fields: Any) -> Any:
        seen.update(fields)
        return real(**fields)

    recorded.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "TransformerConfig", recorded)
    made(raw=raw, recompute_granularity="full", cp=1)
    known = {*OPTION_OF_FIELD, *SET_BY_ENGINE, *family_of(raw).spec(raw).transformer}
    assert set(seen) - known == set() and len(seen) > 40


def test_the_tables_name_fields_and_options() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert set(transformer_config_fields()) >= {f.name for f in dataclasses.fields(TransformerConfig)}
    assert set(OPTION_OF_FIELD) | set(SET_BY_ENGINE) <= set(transformer_config_fields())
    assert all(option.split()[0].removeprefix("--") in NAMES for option in OPTION_OF_FIELD.values())


def test_no_answer_hides_another() -> None:
    """A row of the unsupported options names a field only for an answer of its own."""
    listed = {name for names, *_ in UNSUPPORTED_OF_MEGATRON for name in names.split()} & {*transformer_config_fields()}
    assert "test_mode" in listed and not listed & {*OF_MODEL, *OPTION_OF_FIELD}
    assert [name for name in listed if neutral_option(name) == transformer_config_option(name)] == []
    assert [name for name in OF_MODEL if neutral_option(name) is not None] == []
