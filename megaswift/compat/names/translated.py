"""Names and values of other toolkits that megaswift writes in another way, as data."""

from __future__ import annotations

from typing import Any

from megaswift.config.sections import NAMES

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Switches of transformers, TRL and Megatron-LM."""
CACHED = {"cached_dataset": "dataset", "cached_val_dataset": "val_dataset"}
"""ms-swift's options of cached data, and what their folders are entries of."""
RENAMED = {
    "cast_lm_head_to_fp32": "fp32_lm_head",
    "chat_template_path": "chat_template",
    "test_split_size": "split_dataset_ratio",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    "model_id": "model",
    "sft_type": "train_type",
    "finetuning_type": "train_type",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "warmup_min_lr": "lr_warmup_init",
    "warmup_num_steps": "warmup_steps",
    "gradient_clipping": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "neftune_alpha": "neftune_noise_alpha",
    "packing_num_proc": "dataset_num_proc",
    "num_workers_per_gpu": "dataloader_num_workers",
    "dataset_name": "dataset",
    "dataset_dir": "dataset",
    "train_dataset": "dataset",
    "train_data": "dataset",
    "train_file": "dataset",
    "eval_dataset": "val_dataset",
    "validation_dataset": "val_dataset",
    "validation_file": "val_dataset",
    "eval_data": "val_dataset",
    "eval_limit": "eval_iters",
    "sequence_parallel_size": "context_parallel_size",
    "virtual_pipeline_size": "virtual_pipeline_parallel_size",
    "num_gpus": "nproc_per_node",
    "gpus": "nproc_per_node",
    "num_nodes": "nnodes",
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "deepspeed_config": "deepspeed",
    "ds_config": "deepspeed",
    "dpo_beta": "beta",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "teacher_model_server_url": "teacher_model_server",
    "loss_top_k": "gkd_logits_topk",
    "reward_model_path": "reward_model",
    "reward_model_name_or_path": "reward_model",
    "dataset_streaming": "streaming",
    "val_size": "split_dataset_ratio",
    "enable_liger_kernel": "use_liger",
    "freeze_vision_tower": "freeze_vit",
    "freeze_multi_modal_projector": "freeze_aligner",
    "freeze_language_model": "freeze_llm",
    "additional_target": "modules_to_save",
    "lora_modules_to_save": "modules_to_save",
    "lambda": "lam",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "grpo_group_size": "num_generations",
    "grpo_kl_beta": "beta",
    "grpo_clamp_eps_lower": "epsilon",
    "grpo_clamp_eps_upper": "epsilon_high",
    "grpo_iterations": "num_iterations",
}
"""Another toolkit's name -> the option of the same meaning and the same values."""
INTERVALS = {"eval_strategy": "eval_steps", "save_strategy": "save_steps"}
"""Options that unset an interval by the value `no`."""
SAMPLES = {"train_samples": "max_steps", "lr_warmup_samples": "warmup_steps", "lr_decay_samples": "lr_decay_iters"}
"""Megatron-LM's lengths in samples -> the option in steps of `global_batch_size`, which must stand beside it."""
TASK_SPELLINGS = ("training_task", "algorithm", "stage")
"""Names of the task in other files."""
SWITCHES = {
    "flash_attn": ("attn_impl", "flash"),
    "use_flash_attn": ("attn_impl", "flash"),
    "use_flash_attention": ("attn_impl", "flash"),
    "load_in_4bit": ("quantization_bit", 4),
    "load_in_8bit": ("quantization_bit", 8),
    "use_peft": ("train_type", "lora"),
    "use_lora": ("train_type", "lora"),
    "lora": ("train_type", "lora"),
    "qlora": ("train_type", "qlora"),
    "use_galore": ("optimizer", "galore_adamw"),
    "activation_checkpointing": ("recompute_granularity", "full"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "checkpoint_activations": ("recompute_granularity", "full"),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "fsdp_activation_checkpointing": ("recompute_granularity", "full"),
    "sequence_packing": ("packing", True),
    "mlp_padding_free": ("packing", True),
    "use_ray": ("launcher", "ray"),
    "moe_enable_deepep": ("moe_token_dispatcher_type", "flex"),
    "resume": ("resume_from_checkpoint", "latest"),
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "disable_jit_fuser": ("jit_fuser", False),
    "disable_tp_comm_overlap_ag": ("tp_comm_overlap_ag", False),
    "disable_tp_comm_overlap_rs": ("tp_comm_overlap_rs", False),
    "disable_tp_comm_bulk_dgrad": ("tp_comm_bulk_dgrad", False),
    "disable_tp_comm_bulk_wgrad": ("tp_comm_bulk_wgrad", False),
}
"""Another toolkit's switch -> the option and the value that it means; switched off it means nothing."""
VALUES: dict[tuple[str, str], tuple[str, Any]] = {
    **{(name, "true"): meaning for name, meaning in SWITCHES.items()},
    **{(name, "true"): ("torch_dtype", dtype) for name, dtype in PRECISIONS.items()},
    **{("mixed_precision", name): ("torch_dtype", dtype) for name, dtype in PRECISIONS.items()},
    ("tuner_type", "bone"): ("train_type", "miss"),
    ("deepspeed", "default-zero2"): ("deepspeed", "zero2"),
    ("deepspeed", "default-zero3"): ("deepspeed", "zero3"),
    ("mixed_precision", "false"): ("torch_dtype", "float32"),
    ("bf16", "false"): ("torch_dtype", "float32"),
    ("save_safetensors", "false"): ("export_hf", False),
    ("no_save_rng", "true"): ("save_rng", False),
    ("no_save_rng", "false"): ("save_rng", True),
    ("overwrite_cache", "true"): ("use_dataset_cache", False),
    ("overwrite_cache", "false"): ("use_dataset_cache", True),
    ("freeze_parameters_ratio", "1"): ("freeze_parameters", ["."]),
    ("freeze_parameters_ratio", "1.0"): ("freeze_parameters", ["."]),
    ("train_sampling_strategy", "group_by_length"): ("group_by_length", True),
    ("train_sampling_strategy", "random"): ("shuffle", True),
    ("train_sampling_strategy", "sequential"): ("shuffle", False),
    ("truncation_mode", "keep_start"): ("truncation_strategy", "right"),
    ("truncation_mode", "keep_end"): ("truncation_strategy", "left"),
    ("loss_type", "nll"): ("enable_dft_loss", False),
    ("loss_type", "chunked_nll"): ("enable_dft_loss", False),
    ("loss_type", "dft"): ("enable_dft_loss", True),
    ("sleep_level", "0"): ("rollout_sleep", False),
    ("sleep_level", "1"): ("rollout_sleep", True),
    ("sleep_level", "2"): ("rollout_sleep", True),
}
"""Another toolkit's name and value -> option and value; true and false stand for all their spellings."""
SCHEDULER_ARGUMENTS = {
    "num_cycles": "lr_num_cycles",
    "power": "lr_power",
    "lr_end": "min_lr",
    "min_lr": "min_lr",
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "warmup_lr_rate": "lr_warmup_init_ratio",
    "num_decay_steps": "wsd_decay_steps",
    "num_stable_steps": "wsd_stable_steps",
    "decay_type": "wsd_decay_style",
    "warmup_type": "warmup_type",
    "factor": "plateau_factor",
    "patience": "plateau_patience",
    "threshold": "plateau_threshold",
    "threshold_mode": "plateau_threshold_mode",
    "cooldown": "plateau_cooldown",
    "mode": "greater_is_better",
}
"""Keys of `lr_scheduler_kwargs`."""
SCHEDULER_DEFAULTS = (("num_cycles", 0.5), ("eps", 1e-8), *((name, None) for name in SCHEDULER_ARGUMENTS))
"""Entries that ask for nothing: the cosine schedule of transformers is half a wave."""
SCHEDULER_KEY = "unknown key of lr_scheduler_kwargs"
DATALOADER_KEY = "unknown key of dataloader"
KNOWN_KEYS = {
    SCHEDULER_KEY: ", ".join(key for key, option in SCHEDULER_ARGUMENTS.items() if option in NAMES),
    DATALOADER_KEY: "batch_size, shuffle, num_workers, pin_memory",
}
"""What stands for an entry of a mapping that no option answers to -> the keys that have one."""
JSON_TEXTS = ("rope_scaling", "vllm_engine_kwargs", "vllm_limit_mm_per_prompt", "vllm_speculative_config")
"""Options whose JSON may be written as a mapping in a file."""
NOTICED = ("truncation_mode", "dataset_text_field", "chat_template_kwargs", "lora", "qlora")
"""Names that are translated to another option with another value, which a notice shows."""
WEIGHTS_ONLY = ("resume_only_model", "finetune")
"""Switches with which a checkpoint to resume from is weights to start from."""
