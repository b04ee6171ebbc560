"""What the reference documents of other toolkits tell their readers to type, as data: options with the values given
there, files, Python configurations. Written anew; models and rows are made locally under the same names.

`answer` is a part of what a user is told where a row is not accepted. Commands of other programs (nvidia-smi, kubectl,
nc) are no rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.compat.files.whole_deepspeed_files import WHOLE_FILES

SEVEN_B = "--model Qwen/Qwen2.5-7B-Instruct --dataset some/rows#500"
SEVENTY_TWO_B = "--model Qwen/Qwen2.5-72B-Instruct --dataset some/rows#50 --train_type lora"
LORA = f"{SEVEN_B} --train_type lora"
VISION = "--model Qwen/Qwen2.5-VL-7B-Instruct --dataset some/rows"
RUN = (
    "--num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-4 "
    "--lora_rank 8 --lora_alpha 32 --target_modules all-linear --gradient_accumulation_steps 8 --eval_steps 50 "
    "--save_steps 50 --save_total_limit 2 --logging_steps 5 --max_length 2048 --warmup_ratio 0.05 "
    "--dataloader_num_workers 4 --torch_dtype bfloat16"
)
TWO, FOUR, EIGHT = ({"NPROC_PER_NODE": n} for n in "248")
MACHINES = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NPROC_PER_NODE": "8"}
MACHINES_32 = {**MACHINES, "NNODES": "4"}
SECOND = {**MACHINES, "NODE_RANK": "1"}
NVME = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True}
WARMUP_FILE = WHOLE_FILES["a warmup from above 0"].content
ZERO3_FILE = WHOLE_FILES["transformers zero3"].content
PROFILE: dict[str, Any] = {
    "zero_optimization": {"stage": 2},
    "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True},
}
PARTS_OF_FILES: dict[str, dict[str, Any]] = {
    name: {"zero_optimization": {"stage": 3, **settings}}
    for name, settings in {
        "limits": {
            "stage3_max_live_parameters": 5e8,
            "stage3_max_reuse_distance": 5e8,
            "stage3_prefetch_bucket_size": 5e8,
        },
        "gathered": {"stage3_gather_16bit_weights_on_model_save": True},
        "both": {"stage3_gather_16bit_weights_on_model_save": True, "stage3_max_live_parameters": 1e9},
    }.items()
}
FSDP_SETTINGS: list[dict[str, Any]] = [
    {"fsdp_version": 1},
    {"fsdp_version": 2},
    {"min_num_params": 100_000_000},
    {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    {"backward_prefetch": "backward_pre"},
    {"backward_prefetch": "backward_post"},
    {"forward_prefetch": True},
    {"limit_all_gathers": True},
    {"limit_all_gathers": False},
    {"use_orig_params": True},
    {"sync_module_states": True},
    {"cpu_ram_efficient_loading": True},
]
WRAP = "--fsdp_transformer_layer_cls_to_wrap Qwen2DecoderLayer"


@dataclass(frozen=True)
class Row:
    """One thing that a reader types, or a file that a reader writes."""

    label: str
    words: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    task: str = "sft"
    yaml: dict[str, Any] | None = None
    """A configuration file, before `words`."""
    deepspeed: dict[str, Any] | None = None
    """A DeepSpeed file: `DS.json` in `words` or in the YAML file."""
    answer: str = ""
    """Not accepted: what the problem's rule or fix says."""


def commands(environ: dict[str, str], **rows: str) -> list[Row]:
    """Rows of commands: label -> options."""
    return [Row(label.replace("_", " "), words, environ) for label, words in rows.items()]


DDP_AND_ZERO = [
    *commands(
        FOUR,
        DDP_with_LoRA=f"{LORA} {RUN} --system helpful",
        torchrun=f"{LORA} --torch_dtype bfloat16 --per_device_train_batch_size 1 --gradient_accumulation_steps 8",
        zero0=f"{LORA} --deepspeed zero0",
        zero1=f"{LORA} --deepspeed zero1",
        zero2=f"{LORA} --deepspeed zero2",
        zero3=f"{LORA} --deepspeed zero3",
        zero2_offload=f"{LORA} --deepspeed zero2_offload",
        zero3_offload=f"{LORA} --deepspeed zero3_offload",
        default_zero2=f"{LORA} --deepspeed default-zero2",
        deepspeed_beside_fsdp=f"{LORA} --deepspeed zero2 --fsdp auto_wrap {WRAP} --torch_dtype bfloat16",
        fsdp=f'{LORA} --use_fsdp --fsdp "full_shard auto_wrap" --torch_dtype bfloat16',
        fsdp_full=f'{SEVEN_B} --train_type full --use_fsdp --fsdp "full_shard auto_wrap" {WRAP} --learning_rate 1e-5',
        fsdp_shard_grad_op=f"{LORA} --fsdp shard_grad_op",
        fsdp_no_shard=f"{LORA} --fsdp no_shard",
        fsdp_hybrid=f"{LORA} --fsdp hybrid_shard",
        fsdp_hybrid_zero2=f"{LORA} --fsdp hybrid_shard_zero2",
        fsdp_offload=f'{LORA} --fsdp "full_shard offload"',
        fsdp_use_orig_params=f"{LORA} --use_fsdp --fsdp full_shard --fsdp_use_orig_params true",
        two_processes_as_in_the_guide=f"{LORA} {RUN} --lora_dropout 0.05",
        QLoRA_by_train_type=f"{LORA.replace(' lora', ' qlora')} --lora_rank 8",
        gradient_checkpointing=f"{LORA} --gradient_checkpointing",
        checkpointing_zero3_offload=f"{LORA} --gradient_checkpointing true --deepspeed zero3_offload --max_length 1024",
    ),
    *(
        Row(
            f"DeepSpeed file: {name}",
            f"{LORA} --deepspeed DS.json",
            {"NPROC_PER_NODE": str(file.world)},
            deepspeed=file.content,
        )
        for name, file in WHOLE_FILES.items()
    ),
    Row("two machines", SEVENTY_TWO_B + " --deepspeed zero3 --gradient_accumulation_steps 16", MACHINES),
    Row(
        "a float16 file in a bfloat16 run",
        f"{LORA} --deepspeed DS.json --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 "
        "--learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear "
        "--gradient_accumulation_steps 8 --output_dir output_deepspeed --system helpful",
        TWO,
        deepspeed=WARMUP_FILE,
        answer="conflicts with the compute dtype bfloat16 --torch_dtype float16",
    ),
    *(
        Row(
            f"two machines by options, machine {rank}",
            f"{LORA} --deepspeed DS.json --nnodes 2 --node_rank {rank} --master_addr 127.0.0.1 --master_port 29500 "
            "--output_dir /shared/output_multinode --per_device_train_batch_size 1 --gradient_accumulation_steps 16",
            deepspeed=WARMUP_FILE,
            answer='"gradient_accumulation_steps": 8 conflicts with the run, which uses 16',
        )
        for rank in (0, 1)
    ),
    *commands(
        TWO,
        float16_DDP=f"{LORA} --torch_dtype float16 --engine ddp",
        float16_ZeRO=f"{LORA} --torch_dtype float16 --deepspeed zero2",
        float16_FSDP=f"{LORA} --torch_dtype float16 --fsdp full_shard",
    ),
    *(
        Row(f"FSDP setting {name} {value}", f"{LORA} --fsdp full_shard --fsdp_config DS.json", TWO, deepspeed=content)
        for content in FSDP_SETTINGS
        for name, value in content.items()
    ),
    *(
        Row(f"part of a DeepSpeed file: {name}", f"{LORA} --deepspeed DS.json", TWO, deepspeed=content)
        for name, content in PARTS_OF_FILES.items()
    ),
    Row(
        "weights on a drive",
        f"{LORA} --deepspeed DS.json",
        TWO,
        deepspeed={"zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME}},
    ),
    Row(
        "optimizer states on a drive",
        f"{LORA} --deepspeed DS.json",
        TWO,
        deepspeed={"zero_optimization": {"stage": 3, "offload_optimizer": NVME}},
    ),
    Row("a profile", f"{LORA} --deepspeed_config DS.json", FOUR, deepspeed=PROFILE),
    Row("the second machine, a file", SEVENTY_TWO_B + " --deepspeed DS.json", SECOND, deepspeed=ZERO3_FILE),
    Row("the second machine", f"{SEVENTY_TWO_B} --deepspeed zero3 --max_length 2048 --lora_rank 8", SECOND),
    Row("nnodes alone", f"{LORA} --nnodes 2", answer="master_addr"),
]
USE_CASES = [
    *commands(
        {},
        one_GPU=f"{LORA} {RUN} --gradient_checkpointing true",
        QLoRA=f"{LORA} --quantization_bit 4 --lora_rank 64 --lora_alpha 16 --lora_dtype bf16 --torch_dtype bfloat16",
        QLoRA_of_the_engines=f"{LORA} --quantization_bit 4",
        names_of_old_versions="--model_type qwen2_5 --model_id_or_path Qwen/Qwen2.5-7B-Instruct --sft_type lora "
        "--dataset some/rows --use_rslora --lora_rank 8 --lora_alpha 16 --num_train_epochs 6 --dtype bf16",
        vision_language="--model OpenGVLab/InternVL2-8B-hf --dataset some/rows --sft_type lora --dtype bf16",
        liger=f"{LORA} --use_liger true",
        float16=f"{LORA} --torch_dtype float16",
        workers=f"{LORA} --dataloader_num_workers 8 --dataloader_pin_memory true",
        compile=f"{LORA} --torch_compile true",
        flash_attention=f"{LORA} --attn_impl flash_attn",
        sequence_packing=f"{LORA} --sequence_packing true",
        packing=f"{LORA} --packing true --dataset_num_proc 8 --gradient_accumulation_steps 8",
        stability=f"{LORA} --learning_rate 5e-5 --max_grad_norm 0.5 --seed 42",
        drop_last=f"{LORA} --dataloader_drop_last true",
        freeze_vit=f"{VISION} --freeze_vit true --vit_gradient_checkpointing false",
        output=f"{LORA} --save_on_each_node false --save_total_limit 3",
        experiment_name=f"{LORA} --experiment_name run-4",
        deepspeed_config=f"{LORA} --deepspeed_config zero2",
        backend_nccl=f"{LORA} --ddp_backend nccl",
        backend_gloo=f"{LORA} --ddp_backend gloo",
        ddp_timeout=f"{LORA} --ddp_timeout 1800",
        find_unused=f"{LORA} --ddp_find_unused_parameters false",
        full_evaluation=f"{LORA} --fp16 true --fp16_opt_level O1 --fp16_full_eval true",
        full_evaluation_in_bfloat16=f"{LORA} --bf16 true --bf16_full_eval true",
        DoRA=f"{LORA} --use_dora true",
        GaLore=f"{SEVEN_B} --train_type full --use_galore true",
        GPTQ_model="--model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 --dataset some/rows --train_type lora",
        initial_weights=f"{LORA} --init_weights pissa",
        rope_scaling=LORA + """ --rope_scaling '{"rope_type": "yarn", "factor": 4.0}'""",
        push_to_hub=f"{LORA} --push_to_hub true --hub_model_id me/model --hub_private_repo true",
        two_data_sets=f"{LORA} --dataset AI-ModelScope/alpaca-gpt4-data-zh#500 AI-ModelScope/alpaca-gpt4-data-en#500",
        prefetch=f"{LORA} --dataloader_num_workers 8 --dataloader_prefetch_factor 2",
    ),
    *(Row(f"backend {name}", f"{LORA} --ddp_backend {name}", answer="leave it out") for name in ("mpi", "ccl", "hccl")),
    Row(
        "InternVL in its original layout",
        "--model_type internvl2-8b --model_id_or_path OpenGVLab/InternVL2-8B --dataset some/rows --sft_type lora",
        answer="OpenGVLab/InternVL3-8B-hf",
    ),
    Row("no data set", "--model Qwen/Qwen2.5-72B-Instruct --train_type lora", answer="is missing"),
    Row("a checkpoint that is not there", f"{LORA} --resume_from_checkpoint OUT/checkpoints/latest", answer="latest"),
    Row("precision twice", f"{LORA} --fp16 true --bf16 true", answer="keep one of the two"),
    Row("images packed", f"{VISION} --packing true"),
    Row("hostfile", f"{LORA} --deepspeed zero2 --hostfile hosts"),
    Row("flash_attn2", f"{LORA} --attn_impl flash_attn2"),
    Row("flash_attn3", f"{LORA} --attn_impl flash_attn3"),
    Row("batch size 0", f"{LORA} --per_device_train_batch_size 0", answer="per_device_train_batch_size 1"),
    Row("train", f"{LORA} --algorithm sft", task="train"),
    *(
        Row(f"algorithm {name}", f"{LORA} --algorithm {name}{more}", task="train")
        for name, more in {
            "rm": "",
            "dpo": "",
            "cpo": "",
            "orpo": "",
            "kto": " --per_device_train_batch_size 4",
            "ppo": " --reward_model Qwen/Qwen2.5-reward",
            "grpo": " --reward_funcs format --num_generations 2 --per_device_train_batch_size 2",
        }.items()
    ),
]
MEGATRON = [
    Row(
        "TP 4 x PP 8 on 32",
        "--model Qwen/Qwen3-32B --dataset some/rows --tensor_parallel_size 4 --pipeline_parallel_size 8 --train_type "
        "lora --torch_dtype bfloat16 --per_device_train_batch_size 1 --learning_rate 1e-4",
        MACHINES_32,
    ),
    Row(
        "the layout of a YAML file",
        "--model Qwen/Qwen3-32B --dataset some/rows",
        {**MACHINES, "NNODES": "8"},
        "rlhf",
        yaml={
            "parallel": {"tp": 4, "pp": 8, "dp": 2, "cp": 1},
            "train_type": "dpo",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 16,
            "learning_rate": 1e-5,
        },
    ),
    Row(
        "Megatron-LM's arguments",
        "--model meta/llama-2 --dataset some/rows --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--num-layers 32 --hidden-size 512 --num-attention-heads 64 --seq-length 2048 --max-position-embeddings 32768 "
        "--micro-batch-size 4 --global-batch-size 512 --train-iters 50 --lr 1.5e-4 --lr-decay-style cosine --min-lr "
        "1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --fp16 --save-interval 10000 --save out",
        MACHINES_32,
        "pt",
    ),
    Row(
        "another model's sizes",
        "--model meta/llama-2 --dataset some/rows --num-layers 96",
        {},
        "pt",
        answer="the architecture comes from config.json",
    ),
    Row(
        "chunks of a pipeline",
        "--model Qwen/Qwen3-32B --dataset some/rows --tp 2 --pp 4 --virtual_pipeline_size 2 "
        "--gradient_accumulation_steps 8",
        EIGHT,
    ),
    Row("context", "--model Qwen/Qwen3-32B --dataset some/rows --tp 4 --pp 2 --cp 4 --sequence_parallel", MACHINES_32),
    Row("experts", "--model Qwen/Qwen3-30B-A3B --dataset some/rows --tp 2 --ep 8 --etp 1", MACHINES),
    Row("the run's own checkpoints", "--model meta/llama-2 --dataset some/rows --save out --load out", {}, "pt"),
    Row(
        "a file of indexed data",
        "--model meta/llama-2 --data-path /nowhere/text",
        {},
        "pt",
        answer="no such file or folder",
    ),
    *(
        Row(f"Megatron-LM's {name}", f"{SEVEN_B} --{name} FILE", {}, "pt", answer="tokenizer is loaded from the model")
        for name in ("vocab-file", "merge-file")
    ),
]


def training(deepspeed: str | None = None, **options: Any) -> dict[str, Any]:
    """A file with its options below `training`."""
    zero = {"distributed_strategy": "deepspeed", "deepspeed": {"config_path": "DS.json"}} if deepspeed else {}
    return {"training": {**zero, **options}}


LOADER = {"batch_size": 8, "num_workers": 4, "pin_memory": True}
YAML: dict[str, tuple[dict[str, Any], str | None]] = {
    "auto": (training(distributed_strategy="auto"), None),
    "ddp": (
        training(
            distributed=True,
            distributed_strategy="ddp",
            dataloader=LOADER,
            gradient_accumulation_steps=4,
            mixed_precision="bf16",
            max_grad_norm=1.0,
        ),
        None,
    ),
    "ddp in float16": (training(distributed=True, distributed_strategy="ddp", mixed_precision="fp16"), None),
    "deepspeed": (
        training("zero2", distributed=True, dataloader={**LOADER, "batch_size": 4}, gradient_accumulation_steps=8),
        "zero2",
    ),
    "every setting": (
        training(
            distributed=True,
            distributed_backend="nccl",
            find_unused_parameters=False,
            ddp_bucket_cap_mb=25,
            ddp_broadcast_buffers=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            fp16=False,
            bf16=True,
            gradient_checkpointing=True,
            dataloader_num_workers=4,
            dataloader_pin_memory=True,
            dataloader_drop_last=True,
        ),
        None,
    ),
    "memory": (training(gradient_checkpointing=True, bf16=True, per_device_train_batch_size=2), None),
    "memory with deepspeed": (
        training("zero3", per_device_train_batch_size=1, gradient_accumulation_steps=16),
        "zero3",
    ),
    "communication": (training(find_unused_parameters=False, ddp_bucket_cap_mb=25, dataloader_pin_memory=True), None),
    "learning rate": (training(learning_rate=5e-5, warmup_ratio=0.1, lr_scheduler_type="cosine"), None),
    "learning rate with deepspeed": (training("zero2", learning_rate=3e-5, warmup_ratio=0.1), "zero2"),
    "without a section": (
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "gradient_checkpointing": True,
            "bf16": True,
        },
        None,
    ),
    "seed": ({"seed": 42}, None),
    "experiment": (
        training(
            experiment_name="sft-4",
            save_steps=500,
            save_total_limit=3,
            logging_steps=50,
            report_to=["tensorboard", "wandb"],
        ),
        None,
    ),
    "full evaluation": (training(fp16=True, fp16_opt_level="O1", fp16_full_eval=False), None),
    "loader": (
        training(distributed_strategy="deepspeed", dataloader_num_workers=4, dataloader_pin_memory=True),
        None,
    ),
    "prefetch": ({"dataloader_num_workers": 8, "dataloader_pin_memory": True, "dataloader_prefetch_factor": 2}, None),
    "saving": (training(save_strategy="steps", save_steps=1000), None),
    "out of memory": (training(per_device_train_batch_size=2, mixed_precision="fp16"), None),
}
REFUSED_YAML = {"memory with deepspeed": '"train_micro_batch_size_per_gpu": 4 conflicts with the run, which uses 1'}
FILES_OF_YAML = [
    Row(
        f"YAML: {name}",
        SEVEN_B,
        {} if zero else FOUR,
        yaml=content,
        deepspeed=WHOLE_FILES[f"numbers {zero}"].content if zero else None,
        answer=REFUSED_YAML.get(name, ""),
    )
    for name, (content, zero) in YAML.items()
]
"""The DeepSpeed files are those of the documents, whose batch is that of one process."""
ROWS: list[Row] = [*DDP_AND_ZERO, *USE_CASES, *MEGATRON, *FILES_OF_YAML]
