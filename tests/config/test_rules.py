"""Each row of the tables fires when it should, stays silent when its condition is met, and waits for mended values.

Covers: megaswift/config/rules.py.
"""

import pytest

from megaswift.bridge.adapters.options.checks import ADAPTER_CLASHES
from megaswift.config import SwiftConfig
from megaswift.config.rules import CLASHES, IGNORED
from megaswift.config.sections import OPTIONS
from megaswift.data.options.indexed import INDEXED_DATA_CLASHES
from megaswift.engine.options.engine_checks import ENGINE_CLASHES
from megaswift.engine.options.optimizer_checks import LOSS_SCALE_CLASHES, OPTIMIZER_CLASHES
from megaswift.engine.options.speed import SPEED_CLASHES
from megaswift.engine.options.te import NEED_TRANSFORMER_ENGINE, missing_transformer_engine_problems
from megaswift.launchers.options.checks import LAUNCH_CLASHES
from megaswift.losses.options.preference_checks import PREFERENCE_CLASHES
from megaswift.models.options.capacity import EXPERT_CAPACITY_CLASHES
from megaswift.parallel.options.checks import FIT_CLASHES
from megaswift.trainers.options.evaluation_checks import EVALUATION_CLASHES
from megaswift.trainers.options.profiling_checks import PROFILE_CLASHES
from megaswift.trainers.rl.options.checks import RL_CLASHES
from tests.config.refusals import assert_contradiction, assert_idle, problems

IDLE = [
    # given, what makes it count
    ("--moe_grouped_gemm_impl torch --moe_grouped_gemm false", "--moe_grouped_gemm_impl torch"),
    ("--moe_permute_fusion --transformer_impl torch", "--moe_permute_fusion"),
    ("--moe_router_fusion --transformer_impl torch", "--moe_router_fusion"),
    ("--min_lr 1e-6 --lr_scheduler_type constant", "--min_lr 1e-6 --lr_scheduler_type linear"),
    ("--min_lr_ratio 0.1 --lr_scheduler_type constant", "--min_lr_ratio 0.1"),
    ("--lr_decay_iters 9 --lr_scheduler_type constant", "--lr_decay_iters 9"),
    ("--wsd_decay_steps 2", "--wsd_decay_steps 2 --lr_scheduler_type wsd"),
    (
        "--wsd_decay_ratio 0.2 --wsd_decay_steps 2 --lr_scheduler_type wsd",
        "--wsd_decay_ratio 0.2 --lr_scheduler_type wsd",
    ),
    ("--wsd_decay_ratio 0.2", "--wsd_decay_ratio 0.2 --lr_scheduler_type wsd"),
    ("--cuda_graph_warmup_steps 2", "--cuda_graph_warmup_steps 2 --cuda_graph_impl local"),
    ("--fp8_recipe delayed", "--fp8_recipe delayed --fp8_format e4m3"),
    ("--fp8_param_gather", "--fp8_param_gather --fp8_format e4m3"),
    ("--recompute_method uniform", "--recompute_method uniform --recompute_granularity full"),
    (
        "--recompute_num_layers 2 --recompute_granularity selective",
        "--recompute_num_layers 2 --recompute_granularity full",
    ),
    (
        "--recompute_modules mlp --recompute_granularity full",
        "--recompute_modules mlp --recompute_granularity selective",
    ),
    ("--model_revision v1 --model /", "--model_revision v1 --model organization/name"),
    ("--use_hf false --model /", "--use_hf false --model organization/name"),
    ("--cp_comm_type p2p", "--cp_comm_type p2p --cp 2"),
    (
        "--hierarchical_context_parallel_sizes 2 2 --cp 4",
        "--hierarchical_context_parallel_sizes 2,2 --cp 4 --cp_comm_type a2a+p2p",
    ),
    ("--sequence_parallel", "--sequence_parallel --tp 2"),
    ("--tp_comm_overlap", "--tp_comm_overlap --tp 2"),
    *(
        (f"--{option}", f"--{option} --tp_comm_overlap --tp 2")
        for option in (
            "tp_comm_overlap_cfg f",
            "tp_comm_bootstrap_backend gloo",
            "tp_comm_overlap_ag false",
            "tp_comm_overlap_rs false",
            "tp_comm_overlap_rs_dgrad",
            "tp_comm_bulk_dgrad",
            "tp_comm_bulk_wgrad",
        )
    ),
    (
        "--moe_flex_dispatcher_backend hybridep",
        "--moe_flex_dispatcher_backend hybridep --moe_token_dispatcher_type flex",
    ),
    ("--vpp 2", "--vpp 2 --pp 2"),
    ("--first_stage_layers 0", "--first_stage_layers 0 --pp 2"),
    ("--last_stage_layers 3", "--last_stage_layers 3 --pp 2"),
    ("--pipeline_layout Et|tL", "--pipeline_layout Et|tL --pp 2"),
    ("--overlap_p2p_comm", "--overlap_p2p_comm --pp 2 --vpp 2"),
    ("--data_seed 3 --shuffle false", "--data_seed 3 --shuffle false --dataset a#3"),
    ("--data_seed 3 --shuffle false", "--data_seed 3 --shuffle false --dataset a b --interleave_prob 1 2"),
    ("--stopping_strategy all_exhausted", "--stopping_strategy all_exhausted --dataset a b --interleave_prob 1 2"),
    ("--dataset_cache_dir d --streaming --max_steps 1", "--dataset_cache_dir d"),
    ("--dataset_num_proc 2 --streaming --max_steps 1", "--dataset_num_proc 2"),
    (
        "--dataset_cache_dir d --streaming --max_steps 1",
        "--dataset_cache_dir d --streaming --max_steps 1 --val_dataset v",
    ),
    (
        "--dataset_num_proc 2 --streaming --max_steps 1",
        "--dataset_num_proc 2 --streaming --max_steps 1 --val_dataset v",
    ),
    ("--dataloader_num_workers 2 --streaming --max_steps 1", "--dataloader_num_workers 2"),
    ("--num_train_epochs 2 --max_steps 1", "--num_train_epochs 2"),
    ("--group_by_length --packing", "--group_by_length"),
    ("--padding_free false --packing", "--padding_free false"),
    ("--save_total_limit 2 --save_strategy no", "--save_total_limit 2"),
    ("--wsd_decay_style linear", "--wsd_decay_style linear --lr_scheduler_type wsd"),
    ("--lr_num_cycles 2", "--lr_num_cycles 2 --lr_scheduler_type cosine_with_restarts"),
    ("--lr_power 2", "--lr_power 2 --lr_scheduler_type polynomial"),
    *(
        (
            f"--plateau_{words}",
            f"--plateau_{words} --lr_scheduler_type reduce_lr_on_plateau --val_dataset v --eval_steps 5",
        )
        for words in ("factor 0.5", "patience 2", "threshold 0.1", "threshold_mode abs", "cooldown 1")
    ),
    ("--lr_warmup_init 1e-7", "--lr_warmup_init 1e-7 --warmup_steps 3"),
    ("--lr_warmup_init_ratio 0.1", "--lr_warmup_init_ratio 0.1 --warmup_steps 3"),
    ("--wsd_stable_steps 4", "--wsd_stable_steps 4 --lr_scheduler_type wsd"),
    ("--start_weight_decay 0.1", "--start_weight_decay 0.1 --end_weight_decay 0.2 --weight_decay_incr_style linear"),
    ("--end_weight_decay 0.1", "--end_weight_decay 0.1 --start_weight_decay 0 --weight_decay_incr_style cosine"),
    (
        "--weight_decay 0.2 --start_weight_decay 0.1 --end_weight_decay 0.2 --weight_decay_incr_style linear",
        "--weight_decay 0.2",
    ),
    ("--warmup_ratio 0.1 --warmup_steps 3", "--warmup_ratio 0.1"),
    ("--lora_rank 4", "--lora_rank 4 --train_type lora"),
    ("--lora_alpha 4", "--lora_alpha 4 --train_type lora"),
    ("--lora_dropout 0.1", "--lora_dropout 0.1 --train_type lora --adapters a"),
    ("--use_rslora", "--use_rslora --train_type lora"),
    ("--use_dora", "--use_dora --train_type lora"),
    ("--target_modules q_proj", "--target_modules q_proj --train_type lora"),
    ("--target_parameters e", "--target_parameters e --train_type lora"),
    ("--modules_to_save lm_head", "--modules_to_save lm_head --train_type lora"),
    ("--adapters a", "--adapters a --train_type lora"),
    ("--merge_lora", "--merge_lora --train_type lora"),
    ("--lora_rank 4 --train_type lora --adapters a", "--lora_rank 4 --train_type lora"),
    ("--lora_alpha 4 --train_type lora --adapters a", "--lora_alpha 4 --train_type lora"),
    ("--use_rslora --train_type lora --adapters a", "--use_rslora --train_type lora"),
    ("--use_dora --train_type lora --adapters a", "--use_dora --train_type lora"),
    ("--target_modules q_proj --train_type lora --adapters a", "--target_modules q_proj --train_type lora"),
    ("--target_parameters e --train_type lora --adapters a", "--target_parameters e --train_type lora"),
    ("--modules_to_save lm_head --train_type lora --adapters a", "--modules_to_save lm_head --train_type lora"),
    ("--export_hf true --train_type lora", "--export_hf true --train_type lora --merge_lora"),
    ("--freeze_parameters embed --train_type lora", "--freeze_parameters embed"),
    ("--trainable_parameters embed --train_type lora", "--trainable_parameters embed --freeze_parameters ."),
    ("--vit_lr 1e-6 --engine ddp", "--vit_lr 1e-6 --freeze_vit false --engine ddp"),
    ("--aligner_lr 1e-6 --engine ddp", "--aligner_lr 1e-6 --freeze_aligner false --engine ddp"),
    ("--trainable_parameters_regex embed", "--trainable_parameters_regex embed --freeze_vit true --engine ddp"),
]

CLASHING = [
    ("max_completion_length", "gkd --max_length 512 --teacher_model t"),
    ("advantage_estimator", "grpo --advantage_estimator teacher_kl"),
    ("dynamic_sample", "grpo --advantage_estimator teacher_kl --teacher_model t --dynamic_sample"),
    ("teacher_model_server", "gkd --teacher_model_server http://t --teacher_model t --gkd_logits_topk 2"),
    ("teacher_model_server", "gkd --teacher_model_server http://t"),
    ("teacher_model_server", "gkd --teacher_model_server http://t --gkd_logits_topk 2 --temperature 2"),
    ("teacher_logits", "gkd --teacher_logits d --teacher_model t --lmbda 0"),
    ("teacher_logits", "gkd --teacher_logits d"),
    ("teacher_logits", "gkd --teacher_logits d --lmbda 0 --streaming --max_steps 2"),
    ("seq_kd", "gkd --seq_kd"),
    ("seq_kd", "gkd --seq_kd --teacher_model t --rollout_backend vllm_server"),
    ("packing", "gkd --packing true --teacher_model t"),
    ("async_save", "--async_save --save_only_model"),
    ("truncation_strategy", "--truncation_strategy split"),
    ("interleave_prob", "--interleave_prob 1 2 --dataset a"),
    ("interleave_prob", "--interleave_prob 1 0 --dataset a b"),
    ("interleave_prob", "pt --interleave_prob 1 2 --dataset 1 a"),
    *(
        ("cuda_graph_impl", f"--cuda_graph_impl local {more}")
        for more in (
            "--packing",
            "--recompute_granularity full",
            "--context_parallel_size 2",
            "--freeze_parameters embed",
            "--fp8_format hybrid",
            "--tp_comm_overlap --tp 2",
            "--torch_dtype float16",
        )
    ),
    ("use_chat_template", "--use_chat_template false"),
    ("num_labels", "seq_cls --num_labels 3 --class_names a b"),
    ("class_names", "seq_cls --class_names a b a"),
    ("num_labels", "seq_cls --num_labels 1 --problem_type single_label_classification"),
    ("num_labels", "token_cls --num_labels 1"),
    ("streaming", "embedding --streaming --max_steps 1"),
    ("truncation_strategy", "reranker --truncation_strategy left"),
    ("matryoshka_weights", "embedding --matryoshka_dims 2 4 --matryoshka_weights 1"),
    ("matryoshka_dims", "embedding --matryoshka_dims 4 4"),
    ("infonce_directions", "embedding --infonce_directions doc_to_query"),
    ("reranker_template", "reranker --reranker_template {query}"),
    ("positive_token", "generative_reranker --negative_token yes"),
    ("split_dataset_ratio", "--split_dataset_ratio 0.1 --val_dataset v"),
    ("split_dataset_ratio", "--split_dataset_ratio 0.1 --streaming --max_steps 1"),
    ("streaming", "--streaming"),
    ("group_by_length", "--group_by_length --streaming --max_steps 1"),
    ("group_by_length", "--group_by_length --shuffle false"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 100"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 4096 --packing"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 4096 --streaming --max_steps 1"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 4096 --fit"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 4096 --cuda_graph_impl local --padding_free false"),
    ("max_tokens_per_batch", "--max_tokens_per_batch 4096 --tp_comm_overlap --tp 2"),
    (
        "max_tokens_per_batch",
        "--max_tokens_per_batch 4096 --moe_expert_capacity_factor 1.25 --moe_pad_expert_input_to_capacity --ep 2",
    ),
    ("pipeline_layout", "--pipeline_layout Et|tL --pp 2 --first_stage_layers 1"),
    ("overlap_param_gather", "--overlap_param_gather --overlap_grad_reduce --distributed_optimizer false"),
    ("overlap_param_gather", "--overlap_param_gather"),
    ("overlap_p2p_comm", "--overlap_p2p_comm false --pp 2 --vpp 2"),
    ("overlap_p2p_comm", "--overlap_p2p_comm --pp 2"),
    ("precision_aware_optimizer", "--precision_aware_optimizer --distributed_optimizer false"),
    ("tp_comm_overlap", "--tp_comm_overlap --tp 2 --sequence_parallel false"),
    ("tp_comm_overlap", "--tp_comm_overlap --tp 2 --transformer_impl torch"),
    ("tp_comm_overlap", "--tp_comm_overlap --tp 2 --fp8_format hybrid --fp8_recipe blockwise"),
    ("tp_comm_bulk_wgrad", "--tp_comm_overlap --tp 2 --train_type lora --tp_comm_bulk_wgrad"),
    ("tp_comm_bulk_dgrad", "--tp_comm_overlap --tp 2 --freeze_parameters embed --tp_comm_bulk_dgrad"),
    (
        "recompute_modules",
        "--recompute_granularity selective --recompute_modules core_attn layernorm --fp8_format e4m3",
    ),
    ("recompute_modules", "--recompute_granularity selective --recompute_modules moe_act --moe_grouped_gemm false"),
    (
        "recompute_modules",
        "--recompute_granularity selective --recompute_modules moe_act --train_type lora --use_dora",
    ),
    ("fp8_format", "--fp8_format hybrid --transformer_impl torch"),
    *(
        ("fp8_param_gather", f"--fp8_format hybrid --fp8_param_gather {more}")
        for more in (
            "--fp8_recipe mxfp8",
            "--train_type lora",
            "--distributed_optimizer false",
            "--precision_aware_optimizer",
            "--torch_dtype float32",
            "--freeze_parameters embed",
        )
    ),
    ("moe_grouped_gemm", "--moe_grouped_gemm --train_type qlora"),
    ("moe_grouped_gemm_impl", "--moe_grouped_gemm_impl te --transformer_impl torch"),
    *(
        ("moe_grouped_gemm_impl", f"--moe_grouped_gemm_impl torch {more}")
        for more in (
            "--fp8_format hybrid",
            "--recompute_granularity selective --recompute_modules moe_act",
        )
    ),
    ("enable_dft_loss", "--enable_dft_loss true --mtp_num_layers 1"),
    *(
        ("mtp_num_layers", f"--mtp_num_layers 1 {more}")
        for more in (
            "--fp8_format hybrid",
            "--cuda_graph_impl local",
            "--tp_comm_overlap --tp 2 --sp",
        )
    ),
    ("moe_permute_fusion", "--moe_permute_fusion --moe_token_dispatcher_type allgather"),
    ("moe_router_fusion", "--moe_router_fusion --moe_expert_capacity_factor 1.5"),
    ("moe_shared_expert_overlap", "--moe_shared_expert_overlap --moe_token_dispatcher_type allgather"),
    ("moe_expert_capacity_factor", "--moe_expert_capacity_factor 1.5 --moe_token_dispatcher_type allgather"),
    ("overlap_moe_expert_parallel_comm", "--overlap_moe_expert_parallel_comm --moe_token_dispatcher_type allgather"),
    ("overlap_moe_expert_parallel_comm", "--overlap_moe_expert_parallel_comm --recompute_granularity full"),
    ("overlap_moe_expert_parallel_comm", "--overlap_moe_expert_parallel_comm --moe_shared_expert_overlap"),
    ("overlap_moe_expert_parallel_comm", "--overlap_moe_expert_parallel_comm --mtp_num_layers 1"),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap_moe_expert_parallel_comm --cuda_graph_impl local --padding_free false",
    ),
    ("overlap_moe_expert_parallel_comm", "--overlap_moe_expert_parallel_comm --freeze_parameters x"),
    ("attn_impl", "--attn_impl flash --transformer_impl torch"),
    ("overwrite_output_dir", "--overwrite_output_dir --resume_from_checkpoint latest"),
    ("add_version", "--add_version true --overwrite_output_dir"),
    ("lr_warmup_init", "--lr_warmup_init 1 --warmup_steps 3"),
    ("lr_warmup_init_ratio", "--lr_warmup_init_ratio 0.1 --lr_warmup_init 1e-6 --warmup_steps 3"),
    ("weight_decay_incr_style", "--weight_decay_incr_style linear --start_weight_decay 0.1"),
    ("save_only_model", "--save_only_model --max_restarts 2 --nproc_per_node 2"),
    ("model_name", "--model_name a b c"),
    ("random_init", "--random_init --train_type lora"),
    ("moe_grouped_gemm", "--moe_grouped_gemm --train_type lora --use_dora"),
    ("train_type", "--train_type qlora --transformer_impl te"),
    ("fp8_format", "--train_type qlora --fp8_format hybrid"),
    ("merge_lora", "--merge_lora --train_type lora --export_hf false"),
    ("warmup_steps", "--warmup_steps 9 --max_steps 5"),
    ("min_lr", "--min_lr 0.1"),
    ("min_lr_ratio", "--min_lr_ratio 0.1 --min_lr 1e-6"),
    ("lr_decay_iters", "--lr_decay_iters 5 --warmup_steps 5"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize(
    "words",
    [
        "--overlap_param_gather --overlap_grad_reduce",
        "--recompute_granularity selective --recompute_modules layernorm",
        (
            "--recompute_granularity selective --recompute_modules layernorm moe_act --fp8_format e4m3 --fp8_recipe "
            "blockwise"
        ),
        "--recompute_granularity selective --recompute_modules moe_act --moe_grouped_gemm",
    ],
)
def test_what_goes_together(words: str) -> None:
    assert problems(words) == []


@pytest.mark.parametrize("more", ["--train_type qlora", "--train_type lora --use_dora"])
def test_experts_that_are_not_grouped(more: str) -> None:
    [problem] = problems(f"--moe_grouped_gemm_impl torch {more}")
    assert (
        problem.startswith("--moe_grouped_gemm_impl torch") and "off with moe_grouped_gemm false, DoRA and" in problem
    )


def test_every_row_is_tried() -> None:
    clashes = (
        *ENGINE_CLASHES,
        *EVALUATION_CLASHES,
        *PROFILE_CLASHES,
        *FIT_CLASHES,
        *LAUNCH_CLASHES,
        *ADAPTER_CLASHES,
        *PREFERENCE_CLASHES,
        *RL_CLASHES,
        *OPTIMIZER_CLASHES[:-1],
        *SPEED_CLASHES,
        *LOSS_SCALE_CLASHES,
        *INDEXED_DATA_CLASHES,
        *EXPERT_CAPACITY_CLASHES,
    )
    own = [r for r in CLASHES if r not in clashes]
    assert sorted(name for name, _ in CLASHING) == sorted(r.options[0] for r in own)
    known = set(OPTIONS)
    assert all({r.option, *r.reads} <= known for r in IGNORED) and all(set(r.options) <= known for r in CLASHES)
    assert not any("leave it out" in r.fix for r in IGNORED), "the message adds it"


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


@pytest.mark.parametrize(
    "words",
    [
        "--vpp 1",
        "--sp false",
        "--min_lr 0 --lr_scheduler_type constant",
        "--warmup_ratio 0 --warmup_steps 2",
        "--precision_aware_optimizer false --optimizer sgd",
        "--eval_steps none",
        "--node_rank 0",
    ],
)
def test_a_value_that_says_off_is_no_mistake(words: str) -> None:
    assert problems(words) == []


def test_options_of_another_task() -> None:
    for words in ("--system x", "--loss_scale all", "--chat_template x"):
        assert problems(words) == [] and "has no effect in pt; it applies to sft" in problems(words, "pt")[0]
    assert problems("--truncation_strategy split", "pt") == []


def test_a_rule_waits_for_a_mended_value() -> None:
    assert len(problems("--wsd_decay_ratio 0.2 --lr_scheduler_type wsdd")) == 1


def test_what_needs_transformer_engine() -> None:
    cfg = SwiftConfig(
        precision_aware_optimizer=True,
        fp8_format="hybrid",
        fp8_recipe="tensorwise",
        moe_grouped_gemm_impl="te",
        moe_permute_fusion=True,
        moe_router_fusion=True,
        transformer_impl="te",
        attn_impl="flash",
        cp=2,
        cp_comm_type="a2a",
        recompute_granularity="selective",
        recompute_modules="layernorm",
    )
    found = missing_transformer_engine_problems(cfg, installed=False)
    graphs = SwiftConfig(cuda_graph_impl="local", packing=False)  # excludes recomputation and FP8
    found += missing_transformer_engine_problems(graphs, installed=False)
    assert len(found) == len(NEED_TRANSFORMER_ENGINE)
    assert "--precision_aware_optimizer true" in found[0].what and "Transformer Engine's fused Adam" in found[0].rule
    assert (
        missing_transformer_engine_problems(cfg, installed=True)
        == []
        == missing_transformer_engine_problems(SwiftConfig(), installed=False)
    )


def test_torch_layers_ignore_no_option_in_silence() -> None:
    cfg = SwiftConfig(transformer_impl="torch", cp=2, cp_comm_type="a2a")
    assert [p.what for p in missing_transformer_engine_problems(cfg, installed=True)] == ["--cp_comm_type a2a"]
    cfg = SwiftConfig(transformer_impl="torch", cp=2, cp_comm_type="p2p")  # asked for, and not what the torch layers do
    assert [p.what for p in missing_transformer_engine_problems(cfg, installed=True)] == ["--cp_comm_type p2p"]
    assert missing_transformer_engine_problems(SwiftConfig(transformer_impl="torch", cp=2), installed=True) == []


def test_own_attention_ignores_no_option_in_silence() -> None:
    """Options of the part that uses torch's modules are refused, with the reason; those of other parts are not."""
    cfg = SwiftConfig(cp=2, cp_comm_type="p2p", moe_grouped_gemm_impl="te")
    found = missing_transformer_engine_problems(cfg, True, {"attention": "soft caps on attention scores"})
    assert [p.what for p in found] == ["--cp_comm_type p2p"]
    assert "torch's modules for attention (soft caps on attention scores)" in found[0].rule
    assert [p.what for p in missing_transformer_engine_problems(cfg, True, {"products": "weights in NF4"})] == [
        "--moe_grouped_gemm_impl transformer_engine"
    ]
