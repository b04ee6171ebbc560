"""The surface that users' scripts rely on: names, aliases and defaults, frozen in a file beside this test.

Covers: megaswift/options/values.py.
"""

from pathlib import Path

import pytest

from megaswift.bridge.adapters.options.checks import FOUR_BITS
from megaswift.bridge.adapters.options.methods import OWNERS
from megaswift.config import SwiftConfig
from megaswift.config.sections import NAMES, OPTIONS, SECTION_ALIASES, SECTIONS
from megaswift.options.values import option_value_text

GOLDEN = Path(__file__).with_name("surface.txt")

DESIGN = {
    "tp": "tensor_parallel_size",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "micro_batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
    "train_iters": "max_steps",
    "clip_grad": "max_grad_norm",
    "tuner_type": "train_type",
    "dtype": "torch_dtype",
    "dp": "data_parallel_size",
}
"""Spellings that the design promises."""


LIMITS = {"minimum": ">=", "above": ">", "maximum": "<=", "below": "<"}


def surface() -> list[str]:
    """Every option on a line: section, names, default, and what limits its values and tasks."""
    lines = []
    for o in OPTIONS.values():
        parts = [f"{o.section}  {' '.join(o.names)}  = {option_value_text(o.default)}"]
        parts += [f"{sign} {o.details[key]}" for key, sign in LIMITS.items() if key in o.details]  # type: ignore[literal-required]
        parts += ["or a fraction of all steps"] if o.details.get("fraction") else []
        parts += [f"unset: {' '.join(o.details['unset'])}"] if "unset" in o.details else []
        parts += [f"choices: {' '.join(o.details['choices'])}"] if "choices" in o.details else []
        parts += [f"choices of {task}: {' '.join(c)}" for task, c in o.details.get("choices_of", {}).items()]
        parts += (
            [f"also: {' '.join(map('='.join, o.details['spellings'].items()))}"] if "spellings" in o.details else []
        )
        parts += [f"tasks: {' '.join(sorted(o.details['tasks']))}"] if "tasks" in o.details else []
        lines.append("  | ".join(parts))
    return lines


def without_sections(lines: list[str]) -> list[str]:
    """The lines of a surface, sorted; options may move between sections."""
    return sorted(line.partition("  ")[2] for line in lines)


def test_surface_is_frozen() -> None:
    """A change here is one that users see; then write the new text to surface.txt and say so in the release notes."""
    assert without_sections(surface()) == without_sections(GOLDEN.read_text().splitlines())


@pytest.mark.parametrize("alias, name", DESIGN.items())
def test_promised_aliases(alias: str, name: str) -> None:
    assert NAMES[alias] == name


TEACHER_AXES = ("tensor", "pipeline", "context", "expert")
SPELLED = {
    "loss_scale": "last_round+hermes",
    "data_split": "98,2,0",
    "reranker_template": "{query}{document}",
    "infonce_directions": ["query_to_doc", "doc_to_query"],
}


def other_value(name: str) -> object:
    """A legal value of an option that is not its default."""
    o = OPTIONS[name]
    if name in SPELLED:
        return SPELLED[name]
    if name == "init_weights":
        return "pissa"
    if name in ("vllm_engine_kwargs", "sglang_engine_kwargs", "vllm_limit_mm_per_prompt"):
        return '{"a": 1}'
    if name == "device_memory":
        return "80GiB"
    if name == "fsdp_config":
        return str(Path(__file__).resolve().parents[2] / "configs" / "fsdp" / "fsdp2.json")
    if name == "hostfile":
        return str(Path(__file__).with_name("one_host.txt"))
    if name in ("initial_loss_scale", "min_loss_scale"):
        return 2.0
    if o.kind == "bool":
        return not o.default
    if o.choices:
        fitting = [c for c in o.choices if c != o.default and c != "none"]
        choice = fitting[0] if fitting else o.choices[0]
        return [choice] if o.kind == "list" else choice
    number = max(2, int(o.details.get("minimum", 2)))
    part = min(max(0.25, 2 * o.details.get("above", 0), o.details.get("minimum", 0)), o.details.get("maximum", 2))
    return {
        "numbers": [0.5],
        "integers": [number],
        "int": number,
        "float": part,
        "text": "x",
        "list": ["x"],
        "map": {"a": "b"},
    }[o.kind]


NEEDS = (
    {
        **dict.fromkeys(("data_split", "eod_mask_loss", "reset_attention_mask"), {"dataset": ["1", "x"]}),
        "use_chat_template": {"task_type": "seq_cls"},
        "interleave_prob": {"dataset": ["x"]},
        "stopping_strategy": {"dataset": ["x"], "interleave_prob": [0.5]},
        "reset_position_ids": {"dataset": ["1", "x"], "reset_attention_mask": True},
        **dict.fromkeys(("wsd_decay_ratio", "wsd_decay_steps"), {"lr_scheduler_type": "wsd"}),
        "wsd_decay_style": {"lr_scheduler_type": "wsd"},
        "lr_num_cycles": {"lr_scheduler_type": "cosine_with_restarts"},
        "lr_power": {"lr_scheduler_type": "polynomial"},
        "lr_warmup_init": {"warmup_steps": 3, "learning_rate": 10.0},
        "sgd_momentum": {"optimizer": "sgd"},
        **dict.fromkeys(("mtp_loss_scaling_factor", "mtp_detach_heads"), {"mtp_num_layers": 1}),
        **dict.fromkeys(
            ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders"),
            {"precision_aware_optimizer": True},
        ),
        "fp8_recipe": {"fp8_format": "hybrid"},
        **dict.fromkeys(
            ("offload_teacher_model", *(f"teacher_{axis}_parallel_size" for axis in TEACHER_AXES)),
            {"teacher_model": "t"},
        ),
        "seq_kd": {"teacher_model": "t"},
        "teacher_logits": {"lmbda": 0},
        "teacher_model_server": {"gkd_logits_topk": 2},
        "contrastive_margin": {"loss_type": "contrastive"},
        "listwise_temperature": {"loss_type": "listwise_reranker"},
        "matryoshka_weights": {"matryoshka_dims": [2]},
        "recompute_method": {"recompute_granularity": "full"},
        "recompute_num_layers": {"recompute_granularity": "full"},
        "recompute_modules": {"recompute_granularity": "selective"},
        "cp_comm_type": {"cp": 2},
        "hierarchical_context_parallel_sizes": {"cp": 4, "cp_comm_type": "a2a+p2p"},
        "sequence_parallel": {"tp": 2},
        "overlap_param_gather": {"overlap_grad_reduce": True},
        "eval_steps": {"val_dataset": "v"},
        "eval_strategy": {"val_dataset": "v"},
        "hub_model_id": {"push_to_hub": True},
        "profile_step_start": {"profile": True, "profile_step_end": 9},
        "profile_step_end": {"profile": True, "profile_step_start": 0},
        "profile_ranks": {"profile": True},
        "device_memory": {"fit": True},
        "preemption_interval": {"preemption_command": "true"},
        "straggler_ratio": {"log_straggler": True},
        "hub_token": {"push_to_hub": True},
        "hub_private_repo": {"push_to_hub": True},
        "hub_revision": {"push_to_hub": True},
        **dict.fromkeys(
            ("plateau_factor", "plateau_patience", "plateau_threshold", "plateau_threshold_mode", "plateau_cooldown"),
            {"lr_scheduler_type": "reduce_lr_on_plateau", "val_dataset": "v", "eval_steps": 1},
        ),
        "eval_on_start": {"val_dataset": "v"},
        **dict.fromkeys((name for name in OPTIONS if name.startswith("eval_tasks_")), {"eval_tasks": ["t"]}),
        "ignore_data_skip": {"resume_from_checkpoint": "latest"},
        "lr_warmup_init_ratio": {"warmup_steps": 3},
        "wsd_stable_steps": {"lr_scheduler_type": "wsd"},
        "start_weight_decay": {"end_weight_decay": 0.5, "weight_decay_incr_style": "linear"},
        "end_weight_decay": {"start_weight_decay": 0.5, "weight_decay_incr_style": "linear"},
        "weight_decay_incr_style": {"start_weight_decay": 0.5, "end_weight_decay": 0.6},
        "hub_strategy": {"push_to_hub": True, "save_only_model": True},
        "load_best_model_at_end": {"val_dataset": "v", "eval_steps": 1, "save_steps": 1},
        "metric_for_best_model": {"val_dataset": "v", "eval_steps": 1, "early_stopping_patience": 1},
        "greater_is_better": {"val_dataset": "v", "eval_steps": 1, "early_stopping_patience": 1},
        "early_stopping_patience": {"val_dataset": "v", "eval_steps": 1},
        "early_stopping_threshold": {"val_dataset": "v", "eval_steps": 1, "early_stopping_patience": 1},
        "eval_iters": {"val_dataset": "v"},
        "per_device_eval_batch_size": {"val_dataset": "v"},
        "streaming": {"max_steps": 3},
        "save_total_limit": {"save_steps": 1},
        "node_rank": {"nnodes": 3, "master_addr": "h"},
        "nnodes": {"node_rank": 1, "master_addr": "h"},
        "master_addr": {"nnodes": 2, "node_rank": 1},
        "master_port": {"nproc_per_node": 2},
        "max_restarts": {"nproc_per_node": 2},
        "rdzv_timeout": {"nnodes": 2, "node_rank": 0, "master_addr": "h"},
        "min_lr": {"lr": 0.5},
        "overlap_p2p_comm": {"pp": 2, "vpp": 2},
        "fsdp": {"engine": "fsdp2"},
        "fsdp_transformer_layer_cls_to_wrap": {"engine": "fsdp2"},
        "fsdp_min_num_params": {"engine": "fsdp2"},
        "fsdp_backward_prefetch": {"engine": "fsdp2"},
        "fsdp_forward_prefetch": {"engine": "fsdp2"},
        "optimizer_cpu_offload": {},
        "optimizer_offload_fraction": {"optimizer_cpu_offload": True},
        "ref_model_mixup_alpha": {"sync_ref_model": True},
        "ref_model_sync_steps": {"sync_ref_model": True},
        "discopop_tau": {"loss_type": "discopop"},
        "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
        "simpo_gamma": {"loss_type": "simpo"},
        "desirable_weight": {"micro_batch_size": 2},
        "undesirable_weight": {"micro_batch_size": 2},
        "use_liger": {"engine": "ddp"},
        "torch_compile": {"engine": "ddp"},
        "neftune_noise_alpha": {"engine": "ddp"},
        "torch_compile_backend": {"engine": "ddp", "torch_compile": True},
        "torch_compile_mode": {"engine": "ddp", "torch_compile": True},
    }
    | {
        name: {"engine": "ddp", "optimizer": "galore_adamw"}
        for name in (
            "galore_rank",
            "galore_update_proj_gap",
            "galore_scale",
            "galore_proj_type",
            "galore_target_modules",
        )
    }
    | {name: {"engine": "ddp", "freeze_aligner": False} for name in ("freeze_vit", "freeze_llm")}
    | {name: {"engine": "ddp", "optimizer": "muon"} for name in NAMES if name.startswith("muon_")}
    | {"freeze_aligner": {"engine": "ddp"}, "max_pixels": {"engine": "ddp"}}
    | {"vit_gradient_checkpointing": {"engine": "ddp"}}
    | {f"{part}_lr": {"engine": "ddp", f"freeze_{part}": False} for part in ("vit", "aligner")}
    | {name: {"loss_type": "clip_cov"} for name in ("clip_cov_ratio", "clip_cov_lb")}
    | {"clip_cov_ub": {"loss_type": "clip_cov", "clip_cov_lb": 0.1}}
    | {name: {"loss_type": "kl_cov"} for name in ("kl_cov_ratio", "kl_cov_coef")}
    | {"pass_at_k": {"advantage_estimator": "pass_at_k"}}
    | {"partial_rollouts": {"max_staleness": 4}}
    | {"staleness_strategy": {"max_staleness": 4, "rollout_backend": "vllm_server"}}
    | {
        name: {"train_type": "lora"}
        for name in (
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "lorap_lr_ratio",
            "init_weights",
            "use_rslora",
            "use_dora",
            "target_modules",
            "target_parameters",
            "modules_to_save",
            "adapters",
            "merge_lora",
            "rollout_lora",
        )
    }
    | {
        name: {"launcher": "ray", "num_workers": 2}
        for name in ("ray_address", "use_gpu", "cpus_per_worker", "placement_strategy")
    }
    | {"launcher": {"num_workers": 2}, "num_workers": {"launcher": "ray"}}
    | {name: {"train_type": owners[0], "engine": "ddp"} for name, owners in OWNERS.items()}
    | {name: {"train_type": "qlora", "engine": "ddp"} for name in FOUR_BITS}
    | {
        "trainable_parameters": {"freeze_parameters": ["."]},
        "init_r": {"train_type": "adalora", "engine": "ddp", "target_r": 1},
        "quantization_bit": {"train_type": "lora", "engine": "ddp"},
        "peft_config": {"train_type": "road", "engine": "ddp"},
    }
    | {name: {"loss_type": "vespo"} for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")}
    | {name: {"loss_type": "sapo"} for name in ("sapo_temperature_pos", "sapo_temperature_neg")}
    | {name: {"beta": 0.1} for name in ("kl_in_reward", "use_bias_correction_kl", "offload_reference")}
    | {"kl_controller": {"beta": 0.1, "kl_in_reward": True}}
    | {name: {"kl_controller": "adaptive", "beta": 0.1, "kl_in_reward": True} for name in ("target_kl", "kl_horizon")}
    | {name: {"allow_biased_sampling": True} for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    | {"allow_biased_sampling": {"top_k": 5}, "gamma": {"advantage_estimator": "reinforce_plus_plus"}}
    | {name: {"reward_funcs": ["cosine"]} for name in NAMES if name.startswith("cosine_")}
    | {name: {"reward_funcs": ["repetition"]} for name in ("repetition_n_grams", "repetition_max_penalty")}
    | {
        "soft_max_length": {"reward_funcs": ["soft_overlong"], "soft_cache_length": 1},
        "soft_cache_length": {"reward_funcs": ["soft_overlong"]},
        "generation_batch_size": {"num_generations": 2},
        "max_tokens_per_batch": {"max_length": 1},
        "moe_flex_dispatcher_backend": {"moe_token_dispatcher_type": "flex"},
        "kl_estimator": {"beta": 0.1},
    }
    | {
        name: {"use_vllm": True}
        for name in (
            "vllm_gpu_memory_utilization",
            *(name for name in OPTIONS if name.startswith("vllm_")),
            "importance_sampling_mode",
            "importance_sampling_clip_max",
            "importance_sampling_clip_min",
            "importance_sampling_filter_max",
            "importance_sampling_filter_min",
        )
    }
    | {
        name: {"rollout_backend": "sglang"}
        for name in ("rollout_server_url", "rollout_server_timeout", "rollout_sync_folder")
    }
    | {
        name: {"rollout_backend": "vllm_server"}
        for name in ("rollout_weight_transport", "rollout_changed_weights_only")
    }
    | {name: {"reward_funcs": ["code"]} for name in ("code_timeout", "code_memory", "allow_unsafe_code")}
    | {
        "whiten_advantages": {"advantage_estimator": "rloo"},
        "fp8_param_gather": {"fp8_format": "hybrid"},
        "cuda_graph_warmup_steps": {"cuda_graph_impl": "local"},
        "moe_pad_expert_input_to_capacity": {"moe_expert_capacity_factor": 1.25},
        "max_resample_times": {"dynamic_sample": True},
        "layout": {"global_batch_size": 64},
        "planned_gpu": {"layout": "auto", "global_batch_size": 64},
        "max_turns": {"environment": "e.py:E"},
        "cpus_per_engine": {"sampler_engines": 2},
        "sglang_engine_kwargs": {"rollout_backend": "sglang", "sampler_engines": 2},
        "environment_placement": {"environment": "e.py:E"},
        "environment_workers": {"environment": "e.py:E", "environment_placement": "cpu"},
        "reward_weights": {"reward_funcs": ["format"]},
    }
    | {
        name: {"pp": 2}
        for name in ("virtual_pipeline_parallel_size", "first_stage_layers", "last_stage_layers", "pipeline_layout")
    }
    | {
        name: {"report_to": [name.partition("_")[0]]}
        for name, option in OPTIONS.items()
        if option.section == "trackers" and "report_to" in option.only_with
    }
    | {"tp_comm_overlap": {"tp": 2}}
    | {
        name: {"tp": 2, "tp_comm_overlap": True}
        for name in NAMES
        if name.startswith("tp_comm_") and name != "tp_comm_overlap"
    }
)


@pytest.mark.wide
@pytest.mark.parametrize("spelling", sorted(NAMES))
def test_every_spelling_sets_its_option(spelling: str) -> None:
    name = NAMES[spelling]
    value = other_value(name)
    task = OPTIONS[name].details.get("tasks", ("sft",))[0]
    cfg = SwiftConfig(task=task, **{spelling: value}, **NEEDS.get(name, {}))
    expected = tuple(value) if isinstance(value, list) else value
    assert cfg.value(name) == expected
    assert name in cfg.given


@pytest.mark.parametrize("heading", [*SECTIONS, *SECTION_ALIASES])
def test_every_heading_groups(heading: str) -> None:
    assert SwiftConfig(**{heading: {"lr": 0.5}}).optim.learning_rate == 0.5


def test_every_option_has_a_line() -> None:
    for o in OPTIONS.values():
        assert 5 < len(o.help) < 80 and not o.help.endswith("."), o.name
