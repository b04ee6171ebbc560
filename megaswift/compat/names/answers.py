"""Option names and values of other toolkits (ms-swift, Megatron-LM, TRL, transformers, accelerate) that do not exist
here, each with its replacement.

Owns the tables. A name that stands in none of them gets a guess only where it looks mistyped (`errors.nearest`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from megaswift.compat.names.neutral import NEUTRAL
from megaswift.compat.names.translated import PRECISIONS, RENAMED, SWITCHES
from megaswift.engine.options.optimizer import GALORE
from megaswift.options.values import FALSE, option_value_text

_GONE = "leave it out: "
_NOT_SERVED = "leave it out: megaswift does not support "
_OF_MODEL = "leave it out: the model's config.json (--model DIR) sets it"
_CUT = "--max_length, the limit for prompt plus completion"
_SYNC = "--rollout_sync_folder DIR"
_STREAMS = "--streaming true"
_TEACHER = "leave it out: a teacher computes with the run's own settings; --teacher_model, --teacher_tp, --teacher_pp"
_HUB = "--push_to_hub true with --hub_model_id, --hub_token, --hub_private_repo and --hub_strategy"
_TRACKER = (
    "--run_name, --wandb_project, --swanlab_project, --mlflow_experiment_name and --trackio_project name a run and its "
    "place; other settings of a tracker come from its own environment variables"
)
_EVAL = "--val_dataset FILE and --eval_steps N; benchmarks: --eval_tasks NAME..."

_MCORE = "megaswift convert megatron-to-hf SRC DST --hf_config DIR, DIR being the model's Hugging Face folder"

NAMES_ELSEWHERE: dict[str, str] = {
    # models and precision
    "tokenizer": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "tokenizer_name_or_path": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "tokenizer_model": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "tokenizer_type": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "vocab_file": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "merge_file": _GONE + "the tokenizer is loaded from the model folder (--model DIR)",
    "lora_dtype": _GONE + "adapters have the precision of --torch_dtype",
    "kt_config": _NOT_SERVED + "KTransformers",
    "local_repo_path": "--trust_remote_code true with --model DIR",
    "init_strategy": "--random_init true, or a checkpoint with all weights",
    "device_map": "--engine fsdp2 or --tensor_parallel_size N; device_map is an option of megaswift infer",
    "max_memory": "--engine fsdp2 or --tensor_parallel_size N; max_memory is an option of megaswift infer",
    "mcore_model": _MCORE + ", then --model DST",
    "mcore_adapter": _MCORE + ", then --adapters DST",
    "ref_load": _MCORE + ", then --ref_model DST",
    "mcore_ref_model": _MCORE + ", then --ref_model DST",
    "pretrained_checkpoint": "--model DIR, a Hugging Face model folder",
    "quantization_method": "--quantization_bit 4, or megaswift export --quantization_bit 4",
    "to_gguf": "convert the exported model with llama.cpp: python convert_hf_to_gguf.py OUT/hf",
    # what trains
    "teacher_adapters": "merge the adapters: megaswift export --merge_lora true, then --teacher_model DIR",
    "teacher_model_type": "--teacher_model DIR",
    "ref_adapters": "merge the adapters: megaswift export --merge_lora true, then --ref_model DIR",
    "reward_adapters": "merge the adapters: megaswift export --merge_lora true, then --reward_model DIR",
    # batches, length, schedule
    "train_batch_size": "--global_batch_size over all ranks, or --per_device_train_batch_size on each",
    "train_samples": "--max_steps N, or give --global_batch_size in the same place",
    "lr_warmup_samples": "--warmup_steps N, or give --global_batch_size in the same place",
    "lr_decay_samples": "--lr_decay_iters N, or give --global_batch_size in the same place",
    "lr_scheduler_kwargs": 'write a JSON object, such as {"num_cycles": 2}',
    "truncation_mode": "--truncation_strategy right or left",
    "train_sampling_strategy": "use random, sequential or group_by_length",
    "optim_args": "--galore_rank and the other GaLore options",
    "packing_length": "--max_length",
    "dataloader_type": "--shuffle, or --streaming true",
    # data
    "dataset_dir": _GONE
    + "--dataset names data files, not entries of LLaMA-Factory's dataset_info.json: give --dataset "
    "DIR/FILE_NAME; megaswift migrate FILE reads a LLaMA-Factory file with its dataset_info.json",
    "val_dataset_sample": "--val_dataset FILE#N",
    "train_dataset_sample": "--dataset FILE#N",
    "max_samples": "--dataset FILE#N",
    "dataset_test_split": "--val_dataset FILE, or NAME:SPLIT of a data set on a hub",
    "dataset_config": "--dataset NAME:CONFIG",
    "total_episodes": "--max_steps N, in updates",
    "metric": "--val_dataset FILE and --eval_steps N, which measure the loss",
    "stream": _STREAMS,
    # parallel layout and engines
    "num_virtual_stages_per_pipeline_rank": "--virtual_pipeline_parallel_size",
    "world_size": "--nproc_per_node",
    "num_processes": "--nproc_per_node on each node",
    "deepspeed_autotp_size": "--engine megatron --tensor_parallel_size N",
    "zero_stage": "--deepspeed zero1, zero2 or zero3",
    "data_parallel_sharding_strategy": "--fsdp full_shard or shard_grad_op",
    "host": _GONE + "it is an option of megaswift deploy",
    # evaluation, logs, checkpoints
    # preference learning and reinforcement learning
    "reward_model_plugin": "--reward_funcs FILE.py:function",
    "reward_model_type": "--reward_model DIR",
    "ref_model_type": "--ref_model DIR",
    "num_mini_batches": "--generation_batch_size N (completions per generation)",
    "num_sample_generations": _GONE + "completions are written to OUT/completions.jsonl",
    "num_generations_eval": _GONE + "evaluation also samples --num_generations completions",
    "max_prompt_length": _CUT,
    "vllm_group_port": _SYNC,
    "vllm_server_port": "--rollout_server_url http://HOST:PORT",
    "vllm_server_group_port": _SYNC,
    "kl_penalty": "--kl_estimator k1, k2 or k3",
    "num_infer_workers": "--rollout_backend vllm_server with --rollout_server_url URL...",
    "infer_backend": "--rollout_backend for reinforcement learning; otherwise an option of megaswift infer and deploy",
    "sampler_engine": "--rollout_backend, --sampler_engines N on Ray; infer_backend is an option of megaswift sample",
    "to_hf": "megaswift convert megatron-to-hf SRC DST",
    "to_mcore": "megaswift convert hf-to-megatron SRC DST",
}
"""What to do in place of an option that other toolkits have."""

PATTERNS: tuple[tuple[str, str], ...] = (
    ("padded_vocab_size|make_vocab_size_divisible_by", _OF_MODEL),
    (r"swanlab_\w+|wandb_\w+|trackio_\w+|project(_name)?", _TRACKER),
    (r"hub_\w+|push_to_hub_\w+", _HUB),
    (r"teacher_\w+|gkd_\w+|rlsd_\w+|sdar_\w+", _TEACHER),
    (r"galore_\w+", "--galore_rank, --galore_scale, --galore_update_proj_gap or --galore_proj_type"),
    (r"main_params_dtype", "--precision_aware_optimizer true"),
    (r"fp4_\w+", _NOT_SERVED + "FP4; --fp8_format hybrid"),
    (r"fp8_\w+", _NOT_SERVED + "this setting of FP8; --fp8_format and --fp8_recipe"),
    (r"vllm_\w+", _NOT_SERVED + "this setting of vLLM in the training process; start a server with it: "
     "--rollout_backend vllm_server"),
    (r"(sglang|lmdeploy)_\w+", "start a server with it: --rollout_backend sglang"),
    (r"eval_\w+", _EVAL),
)  # fmt: skip
"""Whole families of names, where the table has no line of their own."""

_LOMO = (
    "--optimizer adafactor or galore_adamw, which need little memory too: LOMO updates weights in the backward pass, "
    "before the gradient's norm is known"
)
_LOW_RANK = "--optimizer galore_adamw, whose states have a low rank; all gradients of a step are kept until its end"
_EIGHT_BITS = "--optimizer adamw_8bit, which is bitsandbytes'"
OTHER_OPTIMIZERS = (
    *("adamw_anyprecision", "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "adagrad"),
    *("rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "grokadamw", "stable_adamw"),
    *("adam_mini", "adamax", "nadam", "radam", "adadelta", "lamb", "onebitadam", "zerooneadam", "onebitlamb"),
    *("sinkhorn", "soap", "shampoo", "sophia", "badam", "dion"),
)
"""Names of transformers, torch, DeepSpeed and papers that have no counterpart."""
OTHER_ADAPTERS = (
    *("adamss", "beft", "c3a", "cartridge", "deft", "frod", "glora", "hira", "lily", "osf", "peanut", "poly", "psoft"),
    *("pvera", "shadow", "supertuning", "tinylora", "unilora", "xlora", "part", "restuning", "scetuning", "side"),
)
"""Names of PEFT and ms-swift that have no counterpart."""
_LENGTHENING = ("prompt", "prompt_tuning", "multitask_prompt_tuning", "prefix", "prefix_tuning", "p_tuning", "cpt")
_SOME_WEIGHTS = "--train_type full --freeze_parameters . --trainable_parameters "

VALUES_ELSEWHERE: dict[tuple[str, str], str] = {
    ("rlhf_type", "ppo_v2"): "megaswift ppo",
    ("task_type", "decision"): "--task_type seq_cls, whose labels are the choices: decision models are not supported",
    ("task_type", "prm"): "--task_type token_cls, which labels tokens: process reward models are not supported",
    ("task_type", "sequence_classification"): "--task_type seq_cls",
    ("task_type", "token_classification"): "--task_type token_cls",
    ("task_type", "rm"): "megaswift rm",
    ("ddp_backend", "mpi"): "leave it out: MPI needs a build of PyTorch with MPI, and megaswift does not use it",
    ("ddp_backend", "ccl"): "leave it out: oneCCL is for Intel devices, which megaswift does not support",
    ("ddp_backend", "xccl"): "leave it out: XCCL is for Intel GPUs, which megaswift does not support",
    ("ddp_backend", "hccl"): "leave it out: HCCL is for Ascend NPUs, which megaswift does not support",
    ("report_to", "all"): "--report_to tensorboard wandb swanlab mlflow trackio",
    ("attn_impl", "local"): "--attn_impl sdpa",
    **dict.fromkeys(
        (("attn_impl", name) for name in ("flash_4", "flash_attn4", "flash_attn_4", "flash_attention_4")),
        "--attn_impl flash: FlashAttention 4 is not supported",
    ),
    ("optimizer", "dist_muon"): "--optimizer muon, whose states are whole on every rank (engine ddp)",
    **dict.fromkeys((("optimizer", name) for name in ("lomo", "adalomo")), _LOMO),
    **dict.fromkeys(
        (("optimizer", name) for name in ("apollo", "apollo_adamw", "apollo_adamw_layerwise", "q_galore")), _LOW_RANK
    ),
    ("optimizer", "galore"): "--optimizer galore_adamw",
    ("optimizer", "lorap"): "--lorap_lr_ratio 16, which is LoRA+, with any optimizer",
    ("optimizer", "multimodal"): "leave it out: all parts use --learning_rate",
    ("optimizer", "muonclip"): "--optimizer muon: clipping of attention logits (QK-Clip) is not supported",
    ("optimizer", "adaptive_muon"): "--optimizer muon, whose states are whole on every rank (engine ddp)",
    **dict.fromkeys((("optimizer", f"{name}_layerwise") for name in GALORE), _LOW_RANK),
    **dict.fromkeys((("optimizer", name) for name in ("adamw_torch_4bit", "adamw_torch_8bit")), _EIGHT_BITS),
    **dict.fromkeys(
        (("optimizer", name) for name in ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")),
        "--optimizer adam with --lr_scheduler_type wsd: optimizers without a schedule are not supported",
    ),
    **dict.fromkeys(
        (("optimizer", name) for name in OTHER_OPTIMIZERS), "--optimizer adam: this optimizer is not supported"
    ),
    **dict.fromkeys(
        (("optimizer", name) for name in ("adamw_torch_xla", "adamw_torch_npu_fused")),
        "--optimizer adam: TPUs and Ascend NPUs are not supported",
    ),
    ("loss_type", "gspo"): "--importance_sampling_level sequence",
    ("loss_type", "gspo_token"): "--importance_sampling_level sequence_token",
    ("loss_type", "ppo"): "megaswift ppo",
    ("loss_type", "reinforce"): "--advantage_estimator reinforce_plus_plus",
    ("loss_type", "reinforce++"): "--advantage_estimator reinforce_plus_plus",
    ("advantage_estimator", "reinforce"): "--advantage_estimator reinforce_plus_plus",
    ("advantage_estimator", "reinforce++"): "--advantage_estimator reinforce_plus_plus",
    ("advantage_estimator", "reinforce++_baseline"): "--advantage_estimator reinforce_plus_plus",
    ("loss_type", "fipo"): "--loss_type grpo: FIPO is not supported",
    ("loss_type", "real"): "--loss_type grpo: REAL is not supported",
    ("lr_scheduler_type", "greedy"): "--lr_scheduler_type reduce_lr_on_plateau: GreedyLR is not supported",
    ("lr_scheduler_type", "onecycle"): "--lr_scheduler_type cosine with --warmup_ratio 0.3: OneCycle is not supported",
    ("lr_scheduler_type", "lrrangetest"): "--lr_scheduler_type constant: a range test is several runs here",
    **dict.fromkeys(
        (("train_type", name) for name in OTHER_ADAPTERS), "--train_type lora: this adapter is not supported"
    ),
    **dict.fromkeys(
        (("train_type", name) for name in (*_LENGTHENING, "adaption_prompt")),
        "--train_type lora: adapters that lengthen the input are not supported",
    ),
    ("train_type", "ln_tuning"): _SOME_WEIGHTS + "norm, which trains the norms themselves",
    ("train_type", "bitfit"): _SOME_WEIGHTS + "bias$",
    ("train_type", "freeze"): _SOME_WEIGHTS + "PATTERN...",
    ("train_type", "trainable_tokens"): "--train_type lora --modules_to_save embed_tokens",
    ("train_type", "galore"): "--train_type full --optimizer galore_adamw",
    ("train_type", "lisa"): "--train_type lora: training other layers in turn (LISA) is not supported",
    **{("train_type", name): f"--train_type lora --init_weights {name}" for name in ("pissa", "olora")},
    ("train_type", "loftq"): "--train_type qlora --init_weights loftq",
    **dict.fromkeys(
        (("train_type", name) for name in ("lora+", "lorap", "loraplus")), "--train_type lora --lorap_lr_ratio 16"
    ),
    ("train_type", "longlora"): (
        "--train_type lora with --rope_scaling yarn for longer contexts: the shifted attention of LongLoRA is not "
        "supported"
    ),
    ("train_type", "bone"): "--train_type miss, the adapter by which PEFT has replaced Bone",
    ("train_type", "reft"): "--train_type lora: interventions on hidden states (ReFT) are not supported",
    ("train_type", "llamapro"): (
        "--freeze_parameters . with --trainable_parameters PATTERN trains some layers of the model: new blocks between "
        "layers (LLaMA Pro) are not supported"
    ),
    ("train_type", "adapter"): "--train_type lora: bottleneck adapters behind each layer are not supported",
    ("train_type", "lora_llm"): "--train_type lora --freeze_vit true",
    ("torch_dtype", "int8"): "--quantization_bit 8",
    ("torch_dtype", "int4"): "--quantization_bit 4",
    ("torch_dtype", "fp8"): "--torch_dtype bfloat16 --fp8_format hybrid",
    ("torch_dtype", "float8"): "--torch_dtype bfloat16 --fp8_format hybrid",
}
"""What to say in place of another toolkit's value of an option."""


def foreign_option_advice(name: str, value: Any, known: Collection[str]) -> str:
    """Return what to do in place of another toolkit's option with this value; the empty string where it is none.

    `known`: the names that the command has; an advice that names others is of no use to it.
    """
    if name in PRECISIONS:
        off = str(value).strip().lower() in FALSE
        dtype = PRECISIONS[name]
        return f"leave it out: {dtype} is used only with --torch_dtype {dtype}" if off else (
            f"--torch_dtype {dtype}"
        )  # fmt: skip
    if name in NEUTRAL:
        return f"leave it out: {NEUTRAL[name].reason}"
    advice = _translation(name) or NAMES_ELSEWHERE.get(name)
    advice = advice or next((text for rule, text in PATTERNS if re.fullmatch(rule, name)), "")
    options = re.findall(r"--(\w+)", advice)
    if any(option not in known for option in options):
        return ""
    plain = (
        isinstance(value, str | int | float) and value is not True and re.fullmatch(r"--\w+", advice)
    )  # the same option by another name
    return f"{advice} {option_value_text(value)}" if plain else advice


def _translation(name: str) -> str:
    """Return how megaswift writes an option that is translated in training; other commands only name it."""
    if name in SWITCHES:
        option, value = SWITCHES[name]
        return f"--{option} {option_value_text(value)}"
    return f"--{RENAMED[name]}" if name in RENAMED and name not in NAMES_ELSEWHERE else ""


def foreign_value_advice(option: str, value: str) -> str:
    """Return what to say in place of another toolkit's value of an option; the empty string where it is none."""
    return VALUES_ELSEWHERE.get((option, value.strip().lower()), "")
