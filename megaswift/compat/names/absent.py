"""Options of ms-swift, TRL and transformers that training does not have, by what they are about.

Owns the rows: names, the values that ask for what happens anyway, why megaswift has no such option, and what to do
instead. `neutral.py` reads them. Rows without values accept any value: they set something that a switch,
which is refused, would have to turn on.
"""

from __future__ import annotations

ForeignOptionRow = tuple[str, tuple[str, ...], str, str]
"""Names; accepted values in lower case (none: any); a fact; the fix for another value."""

ANY: tuple[str, ...] = ()
OFF = ("false",)
ON = ("true",)
EITHER = ("true", "false")
UNSET = ("none", "", "[]", "{}")
LEAVE = "leave it out"
_JINJA = "--chat_template FILE.jinja"
_SERVER = "start a server with it: --rollout_backend vllm_server"
_EVALUATION = "evaluation measures the loss and the metrics of the task"
_PREPROCESSOR = "set it in the model's preprocessor_config.json"
OTHER_TASKS = (
    "megaswift rm trains a reward model; classifiers, embedding models and rerankers are not supported, and without "
    "this option a run trains a language model"
)

UNSUPPORTED: tuple[ForeignOptionRow, ...] = (
    # models and templates
    ("max_model_len", UNSET, "--max_length limits rows, and --rope_scaling scales positions to it", "--max_length N"),
    ("reward_model_revision ref_model_revision", UNSET, "reward and reference models are folders",
     "download the revision, and give its folder"),
    ("model_kwargs", UNSET, "settings of images and videos come from the model's preprocessor_config.json",
     _PREPROCESSOR),
    ("enable_npu_model_patch", EITHER, "models are not patched", LEAVE),
    ("template_backend", ("jinja",), "conversations use the tokenizer's chat template", _JINJA),
    ("response_prefix", UNSET, "a prompt ends as the chat template ends it", _JINJA),
    ("preserve_thinking", UNSET, "the chat template selects the reasoning that stays in a conversation", _JINJA),
    ("disable_ignore_empty_think", ON, "an empty block of reasoning is trained on like the rest of the answer",
     LEAVE),
    ("is_binary_loss_scale", (*UNSET, *EITHER), "the weights of --loss_scale say whether all are 0 or 1", LEAVE),
    ("norm_bbox", UNSET, "coordinates in rows are not scaled", "write coordinates as the model expects them"),
    ("reward_template", UNSET, "a reward model uses its tokenizer's chat template", LEAVE),
    ("skip_megatron_init", OFF, "the engine initializes Megatron-Core", LEAVE),
    ("language_model_only", OFF, "all parts of a vision-language model are loaded",
     "--freeze_vit true --freeze_aligner true"),
    ("vit_attn_impl", UNSET, "--attn_impl applies to all parts of a model", "--attn_impl sdpa"),
    ("vit_gradient_checkpointing_kwargs activation_checkpointing_kwargs", ANY,
     "recomputation gives the same gradients either way", ""),
    ("apply_dsa_kernel_fusion use_fused_mhc linear_decoupled_in_proj", OFF,
     "these kernels and layouts of weights are not used", LEAVE),
    ("bridge_backend", ANY, "the family's tables convert weights", ""),
    ("save_missing_weights", OFF, "every weight of the model is saved", LEAVE),
    ("max_shard_size", ("5gb",), "exported files have at most 5 GB", LEAVE),
    ("use_cache", OFF, "training keeps no keys and values of earlier tokens", LEAVE),
    ("liger_kernel_config", UNSET, "--use_liger true uses all of liger-kernel's layers for the model", LEAVE),
    ("hqq_axis", UNSET, "--quantization_bit quantizes with bitsandbytes, not HQQ", "--quantization_bit 4"),
    ("bnb_4bit_quant_storage", (*UNSET, "uint8"), "weights in 4 bits are stored as uint8", LEAVE),
    ("task_type", ("causal_lm", *UNSET), "a run trains a language model", OTHER_TASKS),
    # options themselves
    ("load_args load_data_args", OFF, "options come from the command line and one YAML file",
     "give OUT/config.yaml of the earlier run as the first argument"),
    ("ignore_args_error", OFF, "unknown options are errors", LEAVE),
    ("use_swift_lora", OFF, "adapters have PEFT's format", LEAVE),
    # data
    ("shuffle_buffer_size", ANY, "a stream keeps the order of its files, and other data sets are shuffled whole", ""),
    ("download_mode", ("reuse_dataset_if_exists",), "a data set is downloaded once",
     "delete it from the hub's cache folder to download it again"),
    ("disable_auto_column_mapping", OFF, "columns are found by the names of the row formats",
     "--columns FROM=TO renames columns"),
    ("custom_dataset_info", UNSET, "a data set is a file, a folder or a hub ID",
     "--dataset PATH, and --columns FROM=TO"),
    ("template_mode", ANY, "tokenized rows are cached by content, for any task", ""),
    ("length_column_name", ANY, "lengths are counted in tokens, after tokenization", ""),
    ("data_sharding", EITHER, "the ranks of a step divide one global batch", LEAVE),
    ("accelerator_config", UNSET, "batches are made without accelerate's data loader", LEAVE),
    ("dataloader_multiprocessing_context", ANY, "--dataloader_num_workers starts threads, not processes", ""),
    ("dataloader_in_order", ON, "batches keep their order", LEAVE),
    # sampling
    ("num_beams", ("1",), "completions are sampled, without beam search", LEAVE),
    ("stop stop_words stop_strings", UNSET,
     "a completion ends with the model's end-of-sequence token or at --max_completion_length", LEAVE),
    ("logprobs", OFF, "it applies to inference only", LEAVE),
    ("top_logprobs structured_outputs_regex", UNSET, "it applies to inference only", LEAVE),
    ("vllm_pipeline_parallel_size vllm_data_parallel_size", ("1",), "every process samples with a whole model",
     _SERVER),
    ("vllm_enable_expert_parallel", OFF, "every process samples with a whole model", _SERVER),
    ("vllm_disable_custom_all_reduce", EITHER, "vLLM runs on one device in each process", LEAVE),
    ("vllm_quantization", UNSET, "vLLM in the training process has the policy's weights, which change in every step",
     "start a server that quantizes weights as it loads them: --rollout_backend vllm_server"),
    ("vllm_speculative_config", UNSET, "log-probabilities of completions are those of plain sampling", _SERVER),
    ("vllm_reasoning_parser", UNSET, "rewards get the whole completion, reasoning included", LEAVE),
    ("vllm_use_async_engine", (*UNSET, *EITHER), "the sampler selects vLLM's engine", LEAVE),
    ("move_model_batches enable_flattened_weight_sync", ANY, "weights are sent one tensor at a time", ""),
    # reinforcement learning
    ("local_rollout_forward_batch_size", ANY, "completions are scored in the micro-batches of training", ""),
    ("missing_eos_penalty", (*UNSET, "0"), "only reward functions change rewards",
     "subtract it in a reward function: --reward_funcs FILE.py:function"),
    ("seq_kd", OFF, "distillation from a teacher (GKD) is not supported", LEAVE),
    ("mcore_ref_adapter", UNSET, "a reference model is a folder of whole weights",
     "merge the adapters: megaswift export --merge_lora true, then --ref_model DIR"),
    ("log_rollout_offpolicy_metrics", OFF, "metrics.jsonl has the metrics of docs/rl.md only", LEAVE),
    ("calculate_KL", (*UNSET, *OFF), "the KL divergence is measured where a reference model is used", "--beta X"),
    ("log_entropy", EITHER, "metrics.jsonl contains the mean entropy", LEAVE),
    ("router_replay_mode", ("disabled",), "training routes tokens to experts anew", LEAVE),
    ("use_gym_env", OFF, "an environment is a class in a Python file", "--environment FILE.py:Class"),
    ("gym_env", UNSET, "an environment is a class in a Python file", "--environment FILE.py:Class"),
    ("completion_length_limit_scope", ("per_round",),
     "--max_length limits all turns together, and --max_completion_length each completion", "--max_length N"),
    ("advantage_reweight", UNSET, "advantages are not weighted by a teacher", LEAVE),
    ("chord_sft_dataset chord_sft_per_device_train_batch_size chord_mu_warmup_steps chord_mu_decay_steps "
     "chord_mu_peak chord_mu_valley chord_enable_phi_function", (*UNSET, *OFF), "CHORD is not supported", LEAVE),
    ("colocate_groups device_groups ray_exp_name", UNSET,
     "--launcher ray starts every process of a run with the same role",
     "--nproc_per_node N; for samplers on GPUs of their own: --rollout_backend vllm_server"),
    # what trains
    ("adapter_act adapter_length", ANY, "it applies to train_type adapter only, which is not supported", ""),
    ("lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma", ANY,
     "it applies to LoRA-GA only, which is not supported", ""),
    ("adalora_beta1 adalora_beta2", ("0.85",), "AdaLoRA averages sensitivities with 0.85", LEAVE),
    ("muon_split_qkv", ON, "queries, keys and values are matrices of their own", LEAVE),
    ("muon_no_split_qkv", OFF, "queries, keys and values are matrices of their own", LEAVE),
    ("muon_scale_mode", ("spectral",), "updates are scaled by 0.2 sqrt(max(rows, columns))", LEAVE),
    ("muon_extra_scale_factor", ("0.2",), "updates are scaled by 0.2 sqrt(max(rows, columns)), to AdamW's size",
     "--learning_rate X"),
    ("muon_scalar_optimizer", ("adam",), "parameters other than matrices are AdamW's", LEAVE),
    ("muon_coefficient_type", ("quintic",), "torch's Muon has the quintic iteration", LEAVE),
    ("muon_fp32_matmul_prec muon_tp_mode muon_use_syrk", ANY, "torch's Muon iterates in bfloat16 on whole matrices",
     ""),
    ("galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant", OFF,
     "GaLore has one optimizer, and no quantized projections", "--optimizer galore_adamw"),
    ("galore_proj_bits galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size", ANY,
     "it applies to quantized GaLore only, which is not supported", ""),
    ("lisa_activated_layers", ("0",), "LISA is not supported", "--train_type lora"),
    ("lisa_step_interval", ANY, "it applies to LISA only, which is not supported", ""),
    ("reft_layers reft_layer_key reft_rank reft_intervention_type reft_args", ANY,
     "it applies to train_type reft only, which is not supported", ""),
    ("llamapro_num_new_blocks llamapro_num_groups", ANY,
     "it applies to train_type llamapro only, which is not supported", ""),
    ("mrl_dims", UNSET, "embedding tasks are not supported", LEAVE),
    ("enable_dft_loss", OFF, "the loss of a token is its cross-entropy", LEAVE),
    ("enable_channel_loss", OFF, "the loss is not logged by channel", LEAVE),
    ("zero_hpz_partition_size", UNSET, "DeepSpeed's secondary shards (ZeRO++) are not used", LEAVE),
    ("freeze_parameters_ratio", ("0", *UNSET), "frozen weights are named, and 1 freezes all of them",
     "--freeze_parameters 'embed_tokens' 'layers\\.[0-9]\\.', for the first ten layers"),
    ("offload_teacher_model", OFF, "distillation from a teacher (GKD) is not supported", LEAVE),
    # the run
    ("create_checkpoint_symlink", OFF, "OUT/checkpoints/latest.json names the newest checkpoint", LEAVE),
    ("hub_always_push", OFF, "an upload ends before the next one begins", "--hub_strategy every_save"),
    ("eval_delay", ("0",), "evaluation begins after --eval_steps steps", "--eval_steps N"),
    ("callbacks", UNSET, "a run has no callbacks of the user", LEAVE),
    ("restore_callback_states_from_checkpoint", EITHER, "a run has no callbacks of the user", LEAVE),
    ("acc_strategy", ("token",), "accuracy is measured on tokens", LEAVE),
    ("predict_with_generate do_predict", OFF, _EVALUATION, "megaswift infer --val_dataset FILE on the result"),
    ("prediction_loss_only batch_eval_metrics", EITHER, _EVALUATION, LEAVE),
    ("eval_metric eval_dataset_args include_for_metrics", UNSET, _EVALUATION,
     "run an evaluation harness on OUT/hf"),
    ("eval_use_evalscope", OFF, _EVALUATION, "run an evaluation harness on OUT/hf"),
    ("eval_generation_config", ANY, "it applies to benchmarks only, which are not run in training", ""),
    ("eval_do_concat_batches eval_use_gather_object", EITHER, "evaluation accumulates sums only", LEAVE),
    ("use_flash_ckpt", OFF, "checkpoints are written before the next step", LEAVE),
    ("enable_jit_checkpoint", EITHER, "a run that is interrupted by a signal saves a checkpoint", LEAVE),
    ("torch_empty_cache_steps", UNSET, "PyTorch's memory cache is not emptied between steps",
     "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command"),
    ("auto_find_batch_size", OFF, "the batch size does not change within a run",
     "--per_device_train_batch_size 1 and --gradient_accumulation_steps N"),
    ("log_level", ("passive", "info"), "messages have one level", LEAVE),
    ("log_level_replica", ANY, "only rank 0 writes messages", ""),
    ("log_on_each_node", EITHER, "only rank 0 writes messages", LEAVE),
    ("logging_nan_inf_filter", EITHER, "metrics.jsonl has the loss of every logged step as it was", LEAVE),
    ("skip_memory_metrics", EITHER, "metrics.jsonl contains the peak memory", LEAVE),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", UNSET, "Trackio is not supported",
     "--report_to tensorboard, wandb, swanlab or mlflow"),
    ("swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email "
     "swanlab_smtp_server swanlab_smtp_port", UNSET, "a run sends no notifications",
     "act on the exit code of the command"),
    ("swanlab_email_language", ANY, "a run sends no notifications", ""),
    ("wandb_save_dir", UNSET, "files of Weights & Biases are written to OUT/wandb", "--output_dir OUT"),
    ("tensorboard_queue_size", ANY, "TensorBoard's writer sets the size of its queue", ""),
    ("use_cpu no_cuda", OFF, "a run uses GPUs where there are any",
     "set CUDA_VISIBLE_DEVICES to nothing before the command"),
    ("parallelism_config", UNSET, "each kind of parallelism has an option of its own",
     "--tensor_parallel_size N or --context_parallel_size N"),
    ("ddp_static_graph", (*UNSET, *OFF), "DDP's static graph is not used", LEAVE),
    ("debug", UNSET, "transformers' debugging of values and TPUs is not used", LEAVE),
)  # fmt: skip
