"""Options of Megatron-LM and Megatron-SWIFT that training does not have, in the rows of
`absent.py`.

A field of Megatron-Core's TransformerConfig is listed only where `engine/options/extra_kwargs.py`, which has all of
them, would give another answer: what megaswift does not support is no value to set there.
"""

from __future__ import annotations

from megaswift.compat.names.absent import ANY, EITHER, LEAVE, OFF, ON, UNSET, ForeignOptionRow

_INFERENCE = "it applies to Megatron-LM's inference only"
_RL = "it applies to Megatron-LM's own reinforcement learning only"
_BERT = "BERT, T5, retrieval and vision pretraining are not supported"
_OTHER_MODEL = "it applies to BERT, T5, retrieval or vision pretraining only, which are not supported"
_RESILIENCE = "restarts are the launcher's: --max_restarts N"
_DATA = "data sets are text files or hub data sets, tokenized by the run"
_CHECKPOINT = "checkpoints are written in one format, torch_dist, before the next step"
_RESHARD = "a checkpoint can be resumed with another layout"
_TIMING = "it changes timing only, and the engine sets it"
_FSDP = "Megatron-FSDP is not used"
_NSYS = "--profile uses torch's profiler; others are started before the command"
_TRACE = "--profile records operations and their times"
_LOG = "metrics.jsonl has a fixed set of values for each logged step"
_INSTEAD = "megaswift pt, for a language model"
_TOKENIZER = "the tokenizer is loaded from the model's folder"
_BATCH = "the batch size does not change within a run"
_DISTILL = "distillation from saved logits is not supported"
_REST = "the schedule is given anew, and continues at the step of the checkpoint"

UNSUPPORTED_OF_MEGATRON: tuple[ForeignOptionRow, ...] = (
    # inference, reinforcement learning, other models
    ("use_legacy_static_engine inference_dynamic_batching decode_only_cuda_graphs enable_chunked_prefill", OFF,
     _INFERENCE, LEAVE),
    ("perform_rl_step", OFF, _RL, "megaswift grpo"),
    ("langrl_env_config", UNSET, _RL, "--environment FILE.py:Class"),
    ("output_bert_embeddings vision_pretraining bert_no_binary_head", OFF, _BERT, _INSTEAD),
    ("bert_embedder_type max_tokens_to_oom encoder_num_layers decoder_num_layers encoder_seq_length "
     "decoder_seq_length ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load "
     "bert_load titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path "
     "retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path indexer_batch_size "
     "indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction "
     "head_lr_mult vision_pretraining_type vision_backbone_type swin_backbone_type mask_type mask_factor "
     "iter_per_epoch mask_prob short_seq_prob sample_rate dino_local_img_size dino_local_crops_number "
     "dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer "
     "dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs", ANY, _OTHER_MODEL, ""),
    ("fim_data", OFF, "fill-in-the-middle rows are not made by the run", "write such rows into --dataset FILE"),
    ("fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
     "fim_suffix_token fim_pad_token fim_eod_token", ANY, "it applies to fim_data only, which is not supported", ""),
    ("export_kd_teacher_load export_kd_cfg export_kd_teacher_ckpt_format logits_save_dir logits_load_dir", UNSET,
     _DISTILL, LEAVE),
    ("logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype logits_load_decode_threads "
     "logits_load_prefetch_factor logits_load_msc_prefetch_depth logits_load_kd_loss_alpha "
     "logits_load_ignore_errors", ANY, "it applies to saved logits only, which are not supported", ""),
    # what the model's config.json decides
    ("use_rope_scaling", OFF, "the model's config.json sets the scaling of positions", "--rope_scaling JSON"),
    ("rope_scaling_factor rotary_seq_len_interpolation_factor yarn_original_max_position_embeddings yarn_beta_fast "
     "yarn_beta_slow yarn_correction_range_round_to_int", UNSET,
     "the model's config.json sets the scaling of positions", "--rope_scaling JSON"),
    ("position_embedding", OFF, "positions are rotary, or as the model's config.json says", LEAVE),
    ("relative_attention_num_buckets relative_attention_max_distance openai_gelu squared_relu "
     "quick_geglu onnx_safe rope_type q_lora_rank "
     "kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale mscale_all_dim "
     "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json spec "
     "hybrid_layer_pattern hybrid_override_pattern", UNSET,
     "the model's config.json sets the architecture", LEAVE),
    ("is_hybrid_model use_mamba_mem_eff_path", EITHER, "Mamba is not supported", ""),
    ("mtp_use_repeated_layer mtp_shared_weights mtp_standalone", OFF,
     "each layer for multi-token prediction has weights of its own, on the last stage", LEAVE),
    ("mtp_decoder_input_detach", OFF, "embedding, decoder and head are detached together", "--mtp_detach_heads true"),
    ("mtp_hybrid_override_pattern mtp_hsm", (*OFF, *UNSET), "the model's config.json sets the architecture", LEAVE),
    ("moe_use_upcycling", OFF, "a dense model is not turned into a mixture of experts", LEAVE),
    ("moe_upcycling_granularity", ANY, "it applies to moe_use_upcycling only, which is not supported", ""),
    ("init_method_xavier_uniform", OFF, "--random_init draws weights as the model's config.json says", LEAVE),
    ("vocab_extra_ids", ("0",), _TOKENIZER, "--new_special_tokens TOKEN..."),
    ("metadata_path special_tokens tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy "
     "tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast null_tokenizer_eod_id "
     "null_tokenizer_pad_id use_gigatoken pad_vocab_size sft_tokenizer_prompt_format trust_remote_tokenizer",
     ANY, _TOKENIZER, ""),
    ("tokenizer_hf_no_include_special_tokens", OFF, "special tokens are those of the tokenizer", LEAVE),
    ("beta_fast beta_slow original_max_position_embeddings", UNSET,
     "the model's config.json sets the scaling of positions", "--rope_scaling JSON"),
    ("cache_mla_latents mla_down_proj_fusion", OFF, "these kernels of latent attention are not used", LEAVE),
    # data
    ("mock_data", OFF, "a run trains on the rows of --dataset", "--dataset FILE with random text"),
    ("sft", ON, "megaswift sft trains on conversations", "megaswift pt"),
    ("data_args_path per_split_data_args_path per_dataset_sequences_path phase_transition_iterations", UNSET, _DATA,
     "--dataset FILE..."),
    ("test_data_path", UNSET, "there is no evaluation on a third data set", "--val_dataset FILE"),
    ("data_cache_path object_storage_cache_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap "
     "mmap_bin_files num_dataset_builder_threads mid_level_dataset_surplus allow_ambiguous_pad_tokens "
     "create_attention_mask_in_dataloader", ANY, _DATA, ""),
    ("dataloader_inter_document_masking", (*ON, *UNSET), "attention stays within a document",
     "--reset_attention_mask false, for indexed data"),
    ("multiple_validation_sets", OFF, "--val_dataset FILE... is one set", LEAVE),
    ("validation_set_names", UNSET, "--val_dataset FILE... is one set", LEAVE),
    ("full_validation", EITHER, "--eval_iters sets the number of batches; unset: all rows", ""),
    ("skip_train test_mode", OFF, "this command trains", LEAVE),
    # batches, schedules, optimizers
    ("rampup_batch_size step_batch_size_schedule", UNSET, _BATCH, LEAVE),
    ("decrease_batch_size_if_needed", OFF, _BATCH, LEAVE),
    ("iterations_to_skip start_eval_at_iter", UNSET, "no step is left out", LEAVE),
    ("wd_incr_steps", UNSET, "weight decay rises over all steps of the run", LEAVE),
    ("apply_wd_to_qk_layernorm", OFF, "weights of norms are not decayed", LEAVE),
    ("no_weight_decay_cond_type", UNSET, "weights of norms and biases are not decayed", LEAVE),
    ("override_opt_param_scheduler use_checkpoint_opt_param_scheduler", EITHER, _REST, ""),
    ("lr_decay_steps lr_warmup_steps", UNSET, "schedules have names of their own",
     "--warmup_steps N, --lr_decay_iters N or --wsd_decay_ratio FRACTION"),
    ("lr_wsd_decay_samples", UNSET, "the decay phase of wsd is a fraction of all steps", "--wsd_decay_ratio FRACTION"),
    ("warmup", UNSET, "warmup is in steps or a fraction of them", "--warmup_steps N or --warmup_ratio FRACTION"),
    ("decoupled_lr decoupled_min_lr", UNSET, "all weights have the same --learning_rate", LEAVE),
    ("lion_beta1 lion_beta2", UNSET, "Lion's decay rates are those of --adam_beta1 and --adam_beta2",
     "--adam_beta1 0.95 --adam_beta2 0.98"),
    ("optimizer_cuda_graph", OFF, "--cuda_graph_impl captures layers, not the optimizer", LEAVE),
    ("use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params", EITHER,
     "--optimizer_cpu_offload has one implementation", ""),
    ("dump_param_to_param_group_map", UNSET, _LOG, LEAVE),
    ("freeze_all_layers", OFF, "a run trains weights", "--freeze_parameters PATTERN"),
    ("check_for_nan_in_loss_and_grad check_for_nan_in_loss", ON,
     "steps with non-finite gradients are skipped and counted", LEAVE),
    ("check_for_large_grads check_for_spiky_loss", OFF, "steps with non-finite gradients only are skipped",
     "--max_grad_norm 1"),
    ("result_rejected_tracker_filename", UNSET, "steps are not run again to check results", LEAVE),
    ("rerun_mode", ("disabled", "validate_results"), "steps are not run again to check results", LEAVE),
    ("error_injection_rate", ("0",), "no errors are injected", LEAVE),
    ("error_injection_type fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types "
     "fault_injector_fault_probabilities fault_injector_fault_delay fault_injector_delay_start_iteration "
     "fault_injector_mtti_seconds fault_injector_offset_seconds fault_injector_seed", ANY,
     "no errors are injected", ""),
    # precision
    ("fp4 fp4_format", UNSET, "FP4 is not supported", "--fp8_format hybrid"),
    ("grad_reduce_in_bf16", OFF, "gradients are reduced in float32", LEAVE),
    ("fp16_lm_cross_entropy", OFF, "the loss is computed in float32", LEAVE),
    ("output_logit_dtype", (*UNSET, "fp32"), "the loss is computed in float32", LEAVE),
    ("bias_gelu_fusion gradient_reduce_div_fusion persist_layer_norm", EITHER,
     "fused kernels are selected by device and --transformer_impl", ""),
    ("no_persist_layer_norm", EITHER,
     "fused kernels are selected by device and --transformer_impl", ""),
    ("reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache", OFF, "FP8 keeps buffers of its own", LEAVE),
    ("te_precision_config_file kitchen_config_file kitchen_recipe_number", UNSET,
     "layers are not quantized by a file", "--fp8_format hybrid"),
    ("mamba_training_ssm_states_dtype", UNSET, "Mamba is not supported", LEAVE),
    # layout and data parallelism
    ("model_parallel_size", ("1", *UNSET), "each kind of parallelism has an option of its own",
     "--tensor_parallel_size N"),
    ("num_layers_per_virtual_pipeline_stage", UNSET, "interleaving is given as a number of stages",
     "--virtual_pipeline_parallel_size N"),
    ("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split", OFF,
     "the first and last stages have as many layers as the others, or as given",
     "--first_stage_layers N, --last_stage_layers N or --pipeline_layout LAYOUT"),
    ("cp_partition_mode", ("zigzag",), "context parallelism divides each document in zigzag", LEAVE),
    ("sequence_packing_scheduler", UNSET, "rows are packed by best fit", LEAVE),
    ("ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw suggested_communication_unit_size", ANY,
     "the engine sets the bucket size", ""),
    ("align_param_gather align_grad_reduce nccl_comm_warmup train_sync_interval use_layer_wise_param_layout "
     "high_priority_stream_groups create_all_gather_group use_nccl_ub disable_symmetric_registration "
     "gtp_remat_nccl_ub gtp_expert_remat_nccl_ub", ANY, _TIMING, ""),
    ("ddp_reduce_scatter_with_fp32_accumulation gtp_remat_reduce_scatter_with_fp32_accumulation", EITHER,
     "gradients are reduced in float32", ""),
    ("ddp_param_name_patterns_for_fp32_local_accumulation", ANY, "gradients are accumulated in float32", ""),
    ("ddp_average_in_collective", OFF, "gradients are summed, and divided once by the global count", LEAVE),
    ("overlap_param_gather_with_optimizer_step", OFF, "parameters are gathered after the optimizer's step",
     "--overlap_param_gather true"),
    ("num_distributed_optimizer_instances", ("1",), "the optimizer is sharded over all data-parallel ranks", LEAVE),
    ("use_torch_fsdp2", OFF, "FSDP2 is an engine of its own", "--engine fsdp2"),
    ("torch_fsdp2_no_reshard_after_forward", OFF, "--fsdp selects what is sharded", "--fsdp shard_grad_op"),
    ("megatron_fsdp_version outer_dp_sharding_strategy fsdp_double_buffer fsdp_manual_registration "
     "enable_full_sharding_in_hsdp megatron_fsdp_enable_fine_grained_param_gather "
     "megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_main_params_dtype "
     "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype strict_fsdp_dtensor_load", ANY, _FSDP, ""),
    ("fake_process_group lazy_mpu_init", OFF, "the launcher starts every process", LEAVE),
    ("use_tp_pp_dp_mapping", OFF, "ranks have Megatron-Core's default order", LEAVE),
    ("use_gloo_process_groups", EITHER, "host memory travels over one gloo group", ""),
    ("nccl_communicator_config_path sharp_enabled_group distributed_timeout_seconds_after_init", UNSET,
     "NCCL reads its settings from its environment variables", "set NCCL_* variables before the command"),
    ("use_sharp", OFF, "NCCL reads its settings from its environment variables",
     "set NCCL_COLLNET_ENABLE=1 before the command"),
    ("flight_recorder_dump_path", UNSET, "PyTorch's flight recorder reads environment variables",
     "set TORCH_FR_BUFFER_SIZE=2000 before the command"),
    ("flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace "
     "flight_recorder_include_only_active flight_recorder_extra_dump_on_exec", ANY,
     "PyTorch's flight recorder reads environment variables", ""),
    ("te_rng_tracker", EITHER, "--cuda_graph_impl selects generators that a graph can advance", ""),
    ("inference_rng_tracker", OFF, _INFERENCE, LEAVE),
    ("cuda_graph_scope cuda_graph_modules", (*UNSET, "full"), "whole layers are captured", LEAVE),
    ("data_parallel_random_init", (*UNSET, *OFF), "data-parallel ranks start from the same weights", LEAVE),
    ("use_megatron_fsdp", OFF, _FSDP, "--use_fsdp true (PyTorch FSDP2)"),
    # checkpoints
    ("ckpt_format dist_ckpt_format", (*UNSET, "torch_dist"), _CHECKPOINT, LEAVE),
    ("use_dist_ckpt", ON, _CHECKPOINT, LEAVE),
    ("auto_detect_ckpt_format", EITHER, _CHECKPOINT, LEAVE),
    ("ckpt_convert_format ckpt_convert_save", UNSET, _CHECKPOINT, "megaswift convert megatron-to-hf SRC DST"),
    ("use_persistent_ckpt_worker async_ckpt_use_cpu_shm", OFF, _CHECKPOINT, LEAVE),
    ("async_strategy async_ckpt_cpu_priority async_ckpt_io_priority dist_ckpt_workers", ANY,
     "async_save writes by one thread of each rank", ""),
    ("fully_parallel_save ckpt_fully_parallel_save fully_parallel_load ckpt_fully_parallel_load_exchange_algo "
     "ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_save_process_group "
     "ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure ckpt_pg_tensors_cache_path "
     "ckpt_pg_tensors_cache_create ckpt_drop_redundant_extra_state", ANY,
     "it changes the speed of checkpoints only, and the engine sets it", ""),
    ("dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient", EITHER, _RESHARD, ""),
    ("dist_ckpt_save_pre_mcore_014 ckpt_convert_update_legacy_dist_opt_format", OFF, _CHECKPOINT, LEAVE),
    ("dist_ckpt_strictness ckpt_load_validate_sharding_integrity", ANY, "a checkpoint must fit the model exactly", ""),
    ("save_optim save_tokenizer_assets", ON, "checkpoints contain all that a run needs",
     "--save_only_model true"),
    ("load_optim load_rng", ON, "a resumed run continues exactly", "--model DIR starts from its weights"),
    ("load_main_params_from_ckpt", OFF, "a resumed run continues exactly", LEAVE),
    ("save_retain_interval most_recent_k", (*UNSET, "-1"), "the newest checkpoints are kept", "--save_total_limit N"),
    ("save_params_interval save_activations_interval save_tokens_per_expert_interval save_wgrads_interval "
     "save_dgrads_interval", UNSET, _CHECKPOINT, "--save_steps N"),
    ("non_persistent_save_interval non_persistent_ckpt_type", UNSET, _CHECKPOINT, "--save_steps N"),
    ("non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo", ANY,
     "it applies to temporary checkpoints only, which are not supported", ""),
    ("ckpt_step override_ckpt_iteration", UNSET, "a checkpoint is named by its folder",
     "--resume_from_checkpoint OUT/checkpoints/step-N"),
    ("use_checkpoint_args use_mp_args_from_checkpoint_args", OFF, _RESHARD,
     "give OUT/config.yaml of the earlier run as the first argument"),
    ("use_tokenizer_model_from_checkpoint_args", ANY, _TOKENIZER, ""),
    ("exit_on_missing_checkpoint", ON, "a missing checkpoint is an error", LEAVE),
    ("replication verify_integrity", OFF, _CHECKPOINT, LEAVE),
    ("replication_jump replication_factor", ANY, "it applies to replication only, which is not supported", ""),
    # the run: restarts, logs, profiles
    ("inprocess_restart adlr_autoresume enable_ft_package calc_ft_timeouts", OFF, _RESILIENCE, "--max_restarts N"),
    ("adlr_autoresume_interval ft_num_warmup_iters inprocess_max_iterations", ANY, _RESILIENCE, ""),
    ("exit_duration_in_mins", UNSET, "a run has no time limit of its own; a signal makes it save and end",
     "timeout -s TERM SECONDS before the command"),
    ("exit_signal_handler exit_signal_handler_for_training", EITHER, "a run that gets a signal saves and ends", ""),
    ("exit_signal", (*UNSET, "sigterm", "15"), "SIGTERM, SIGINT, SIGHUP and SIGUSR1 make a run save and end", LEAVE),
    ("exit_signal_handler_for_dataloader", EITHER, "batches are read by threads of the run", ""),
    ("manual_gc_steps manual_gc_interval manual_gc_eval", ANY, "Python's automatic garbage collection stays on", ""),
    ("empty_unused_memory_level", ("0",), "PyTorch's memory cache is not emptied between steps", LEAVE),
    ("gpu_sniff_test_interval", UNSET, _LOG, LEAVE),
    ("use_pytorch_profiler", EITHER, "--profile uses torch's profiler", ""),
    ("use_nsys_profiler nvtx_ranges", OFF, _NSYS, "nsys profile megaswift ..., or --profile true"),
    ("record_memory_history pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack "
     "pytorch_profiler_collect_chakra record_shapes", OFF, _TRACE, LEAVE),
    ("memory_snapshot_path", ANY, _TRACE, ""),
    ("log_throughput log_progress log_memory_to_tensorboard log_device_memory_used log_throughput_to_tensorboard "
     "log_loss_scale_to_tensorboard", EITHER, "metrics.jsonl contains speed, memory and loss scale", ""),
    ("log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
     "log_world_size_to_tensorboard log_l2_norm_grad_to_tensorboard log_runtime_to_tensorboard "
     "log_max_attention_logit log_energy disable_straggler_on_startup set_level_for_all_loggers", OFF,
     _LOG, LEAVE),
    ("barrier_with_L1_time filter_warnings", EITHER, _LOG, ""),
    ("throughput_window_size timing_log_level timing_log_option tensorboard_log_interval memory_keys "
     "log_memory_interval runtime_time_unit logging_level modules_to_filter save_config_filepath "
     "straggler_ctrlr_port straggler_minmax_count", ANY, _LOG, ""),
    ("moe_routing_trace_path", UNSET, "the choice of experts is not recorded", LEAVE),
    ("moe_routing_trace_max_training_iters moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
     "moe_routing_trace_dump_weights", ANY, "it applies to recorded choices of experts only, which are not written",
     ""),
    ("one_logger one_logger_async otel_enabled run_workload_inspector_server", (*OFF, *UNSET),
     "trackers are tensorboard, wandb, swanlab, mlflow, trackio and prometheus", "--report_to wandb"),
    ("one_logger_project one_logger_run_name app_tag_run_name app_tag_run_version otel_service_name "
     "otel_span_groups", ANY, "it applies to trackers that are not supported", ""),
    ("enable_msc", OFF, "files are read from file systems", LEAVE),
    ("disable_msc", ON, "files are read from file systems", LEAVE),
    ("yaml_cfg", UNSET, "a YAML file of options is the first argument", "megaswift sft FILE.yaml"),
    ("enable_experimental", OFF, "experimental features of Megatron-Core are off", LEAVE),
)  # fmt: skip

NEWER_FIELDS: tuple[ForeignOptionRow, ...] = (
    ("batch_invariant_mode cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph "
     "enable_mhc_connections fused_residual_rmsnorm gdp_cutedsl_kernel high_priority_a2a_comm_stream "
     "moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference "
     "moe_paged_stash moe_permute_fusion_into_hybridep moe_single_grouped_bias moe_single_grouped_weight "
     "moe_use_grouped_tensor nccl_all_reduce_for_prefill overlap_dispatch_backward_with_experts_wgrad use_mup "
     "use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_transformer_engine_op_fuser", OFF,
     "the installed Megatron-Core has no such setting", LEAVE),
    ("flash_attention_version moe_expert_rank_capacity_factor moe_flex_dispatcher_num_sms moe_router_force_biased "
     "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size gtp_remat_opt_in_modules mup_base_head_dim "
     "mup_base_hidden_size", UNSET, "the installed Megatron-Core has no such setting", LEAVE),
    ("tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards mlp_chunks_for_training",
     ("1", *UNSET), "the installed Megatron-Core has no such setting", LEAVE),
    ("moe_router_quantile_balancing_ema delta_offload_bytes_across_pp_ranks", ("0",),
     "the installed Megatron-Core has no such setting", LEAVE),
    ("activation_offload_fraction mup_attn_scale_power mup_embedding_mult mup_output_mult mup_width_mult", ("1",),
     "the installed Megatron-Core has no such setting", LEAVE),
    ("moe_combine_bwd_dtype moe_dispatch_fwd_dtype", ("bf16",), "the installed Megatron-Core has no such setting",
     LEAVE),
    ("batch_invariant_backend fine_grained_offloading_max_inflight_offloads gdp_num_chunk_states_to_recompute "
     "gdp_num_householder moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
     "moe_hybridep_num_sms_preprocessing moe_paged_stash_buffer_size_factor_cpu "
     "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size", ANY,
     "it applies to settings that the installed Megatron-Core does not have", ""),
)  # fmt: skip
"""Fields of later versions of TransformerConfig, for where the installed one has none of the name."""

UNSUPPORTED_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"(mamba_)?inference_\w+|use_same_sampling_seed_across_dp_ranks|num_speculative_tokens", _INFERENCE),
    (
        r"rl_("
        r"consumption_granularity|default_temperature|default_top_k|default_top_p|"
        r"durable_rollout_bank|generation_lag|importance_sampling_truncation_coef|"
        r"inference_expert_model_parallel_size|inference_expert_tensor_model_parallel_size|"
        r"inference_logprobs_is_correction|inference_model_unified_memory_level|inference_parsers|"
        r"inference_pipeline_model_parallel_size|inference_tensor_model_parallel_size|"
        r"kv_cache_management_mode|max_inflight_requests|offload_inference_model_weights_when_idle|"
        r"offload_optimizer_during_inference|partial_rollouts|persist_cuda_graphs|profile|"
        r"profile_dir|prompts_per_eval|rollout_bank_dir|rollout_bank_max_bytes|sequence_packing_algo|"
        r"sequence_packing_max_sequences_per_bin|skip_bos_token|submission_granularity|"
        r"training_cuda_graphs|use_sequence_packing|verify_model_weights_swap"
        r")|grpo_(prompts_per_step|entropy_term_weight|filter_groups_with_same_reward)|refit_method",
        _RL,
    ),
    (r"inprocess_\w+", _RESILIENCE),
    (r"(fipo|real)_\w+", "it applies to FIPO and REAL only, which are not supported"),
    (r"(dsa|csa|mhc)_\w+", "it applies to attention and connections that no supported model has"),
    (r"fp4_(?!format)\w+", "it applies to FP4 only, which is not supported"),
)
"""Families of names, of which any value is accepted, and why."""
