"""`--megatron_extra_kwargs`: any field of Megatron-Core's TransformerConfig, beyond what megaswift has options for.

Owns which fields may be given: those that exist in the installed Megatron-Core and that megaswift does not set itself.
What such a field does to the numbers is not proven, and the run's summary says so. No torch: fields are read from
Megatron-Core's source.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import Problem, did_you_mean_hint

_PROVEN = "is set by megaswift: the proof of layouts depends on it"
OTHER_SCHEDULE = "changes how Megatron-Core's schedule calls the model, which the engine here does not support"
_MODEL = "follows from the model's config.json"
OPTION_OF_FIELD: dict[str, str] = {
    "tensor_model_parallel_size": "--tensor_parallel_size",
    "pipeline_model_parallel_size": "--pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "--virtual_pipeline_parallel_size",
    "context_parallel_size": "--context_parallel_size",
    "expert_model_parallel_size": "--expert_parallel_size",
    "expert_tensor_parallel_size": "--expert_tensor_parallel_size",
    "hierarchical_context_parallel_sizes": "--hierarchical_context_parallel_sizes",
    "sequence_parallel": "--sequence_parallel",
    "cp_comm_type": "--cp_comm_type",
    "overlap_p2p_comm": "--overlap_p2p_comm",
    **{
        name: f"--{name}"
        for name in (
            "tp_comm_overlap",
            "tp_comm_overlap_ag",
            "tp_comm_overlap_rs",
            "tp_comm_overlap_rs_dgrad",
            "tp_comm_bulk_dgrad",
            "tp_comm_bulk_wgrad",
            "tp_comm_bootstrap_backend",
        )
    },
    "num_layers_in_first_pipeline_stage": "--first_stage_layers",
    "num_layers_in_last_pipeline_stage": "--last_stage_layers",
    "pipeline_model_parallel_layout": "--pipeline_layout",
    "recompute_granularity": "--recompute_granularity",
    "recompute_method": "--recompute_method",
    "recompute_num_layers": "--recompute_num_layers",
    "recompute_modules": "--recompute_modules",
    "fp8": "--fp8_format",
    "fp8_recipe": "--fp8_recipe",
    "fp8_param": "--fp8_param_gather",
    "deterministic_mode": "--deterministic",
    "cuda_graph_impl": "--cuda_graph_impl",
    "cuda_graph_warmup_steps": "--cuda_graph_warmup_steps",
    "enable_cuda_graph": "--cuda_graph_impl",
    "external_cuda_graph": "--cuda_graph_impl",
    "attention_backend": "--attn_impl",
    "moe_token_dispatcher_type": "--moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend": "--moe_flex_dispatcher_backend",
    "moe_grouped_gemm": "--moe_grouped_gemm",
    "moe_permute_fusion": "--moe_permute_fusion",
    "moe_router_fusion": "--moe_router_fusion",
    "moe_shared_expert_overlap": "--moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm": "--overlap_moe_expert_parallel_comm",
    "moe_expert_capacity_factor": "--moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity": "--moe_pad_expert_input_to_capacity",
    "gradient_accumulation_fusion": "--gradient_accumulation_fusion",
    "moe_aux_loss_coeff": "--moe_aux_loss_coeff",
    "moe_z_loss_coeff": "--moe_z_loss_coeff",
    "params_dtype": "--torch_dtype",
    "bf16": "--torch_dtype bfloat16",
    "fp16": "--torch_dtype float16",
}
"""Field -> the option that sets it."""
SET_BY_ENGINE = (
    "activation_func",
    "apply_rope_fusion",
    "autocast_dtype",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "calculate_per_token_loss",
    "deallocate_pipeline_outputs",
    "enable_autocast",
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "masked_softmax_fusion",
    "moe_router_dtype",
    "mtp_num_layers",
    "no_sync_func",
    "param_sync_func",
    "perform_initialization",
    "pipeline_dtype",
    "timers",
    "use_cpu_initialization",
    "use_te_activation_func",
    "variable_seq_lengths",
)
"""Fields that the engine sets or depends on."""
ANOTHER_SCHEDULE = (
    "defer_embedding_wgrad_compute",
    "delay_wgrad_compute",
    "ep_overlap_early_attn_memory_release",
    "hybrid_context_parallel",
    "init_model_with_meta_device",
    "max_seqlen_per_dp_cp_rank",
    "mtp_standalone",
    "num_microbatches_with_partial_activation_checkpoints",
    "overlap_dispatch_backward_with_experts_wgrad",
    "use_ring_exchange_p2p",
    "wgrad_deferral_limit",
)
"""Fields that change what Megatron-Core's schedules ask of a forward step, of the data or of the model: schedule plans
(`return_schedule_plan`), a flag for recomputation, weight gradients computed apart, samples handed over by length."""
WHOLE_STEP = "full_iteration"
"""A value of `CAPTURED` with which Megatron-Core leaves the capture to its own training loop."""
CAPTURED = ("cuda_graph_scope", "cuda_graph_modules")


def _core() -> Path | None:
    """Megatron-Core's folder, without importing it."""
    found = importlib.util.find_spec("megatron")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return next((Path(folder) / "core" for folder in folders if (Path(folder) / "core").is_dir()), None)


@functools.cache
def transformer_config_fields() -> Mapping[str, str]:
    """Field -> annotation, of the installed Megatron-Core's TransformerConfig and its base; empty without it."""
    return {
        line.target.id: ast.unparse(line.annotation)
        for line in transformer_config_field_lines()
        if isinstance(line.target, ast.Name)
    }


@functools.cache
def transformer_config_field_lines() -> tuple[ast.AnnAssign, ...]:
    """The fields in Megatron-Core's source."""
    core = _core()
    lines = []
    for file in ("model_parallel_config.py", "transformer/transformer_config.py") if core is not None else ():
        tree = ast.parse((core / file).read_text(encoding="utf-8"))  # type: ignore[operator]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in ("ModelParallelConfig", "TransformerConfig"):
                lines += [line for line in node.body if isinstance(line, ast.AnnAssign)]
    return tuple(lines)


def extra_kwargs_values(given: Mapping[str, str]) -> dict[str, Any]:
    """Typed values: each as JSON, or the text itself."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def extra_kwargs_problems(given: Mapping[str, str], of_model: Mapping[str, Any]) -> list[Problem]:
    """The entries that cannot be set. `of_model`: the fields that the model's config.json decides."""
    fields = transformer_config_fields()
    problems = []
    for name, value in extra_kwargs_values(given).items():
        what = f"--megatron_extra_kwargs {json.dumps({name: value})}"
        if name in OPTION_OF_FIELD:
            problems.append(Problem(what, "has an option of its own", OPTION_OF_FIELD[name]))
        elif name in SET_BY_ENGINE:
            problems.append(Problem(what, _PROVEN, "leave it out"))
        elif name in ANOTHER_SCHEDULE or (name in CAPTURED and WHOLE_STEP in str(value)):
            problems.append(Problem(what, OTHER_SCHEDULE, "leave it out"))
        elif name in of_model:
            problems.append(Problem(what, _MODEL, "change config.json of the model"))
        elif name not in fields:
            hint = did_you_mean_hint(name, fields) or "give a field of TransformerConfig of the installed version"
            problems.append(Problem(what, "is not a field of Megatron-Core's TransformerConfig", hint))
        elif not _fits(value, fields[name]):
            problems.append(
                Problem(what, f"is not of the field's type, {fields[name]}", f'{{"{name}": VALUE}} of that type')
            )
    return problems


def _fits(value: Any, annotation: str) -> bool:
    """Return whether a JSON value can be of a field's type; other annotations are Megatron-Core's to check."""
    kinds = (("bool", bool), ("int", int), ("float", int | float), ("str", str), ("list", list), ("List", list))
    known = [kind for word, kind in kinds if word in annotation.replace("Optional", "").replace("Literal", "str")]
    if value is None:
        return "Optional" in annotation or "None" in annotation
    if not known:
        return True
    if isinstance(value, bool):
        return bool in known
    return any(isinstance(value, kind) for kind in known)
