"""Rows of the reference documents that are run to their export on a tiny model: which, on how many processes, and what
is made smaller.

Owns the choice: one run of each kind of training. What a row says otherwise stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DENSE, EXPERTS = "qwen2", "qwen3_moe"
PREFERENCES = ("rm", "dpo", "cpo", "orpo")


@dataclass(frozen=True)
class Run:
    """A row by its label, and how it fits a small machine."""

    label: str
    ranks: int = 2
    model: str = DENSE
    task: str = ""
    """What the run trains where it is not the row's command."""
    smaller: dict[str, str] = field(default_factory=dict)
    """Options of the row with another value; the empty string: left out."""
    slow: bool = True


SHARED = {"--learning_rate": "1e-3", "--gradient_accumulation_steps": "1", "--warmup_ratio": "", "--eval_steps": ""}
"""Of every run: it has two steps."""
LAYOUT = {"--tensor_parallel_size": "2", "--pipeline_parallel_size": "2", "--tp": "2", "--pp": "2", "--cp": "2"}
ARCHITECTURE = {
    "--tensor-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--max-position-embeddings": "128",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
    **dict.fromkeys(("--save", "--train-iters", "--save-interval", "--seq-length", "--fp16"), ""),
}
RUNS = [
    Run("DDP with LoRA", slow=False),
    *(Run(name) for name in ("zero0", "zero1", "zero2", "zero3", "zero2 offload", "zero3 offload")),
    *(Run(name) for name in ("deepspeed beside fsdp", "fsdp", "fsdp full", "fsdp shard grad op", "fsdp no shard")),
    *(Run(name) for name in ("fsdp offload", "fsdp use orig params", "FSDP setting min_num_params 100000000")),
    Run("DeepSpeed file: transformers zero2"),
    Run("DeepSpeed file: transformers zero3"),
    *(Run(f"part of a DeepSpeed file: {name}") for name in ("limits", "gathered", "both")),
    Run("TP 4 x PP 8 on 32", 4, smaller=LAYOUT, slow=False),
    Run("context", 4, smaller={**LAYOUT, "--pp": "1"}),
    Run("chunks of a pipeline", smaller={**LAYOUT, "--tp": "1", "--gradient_accumulation_steps": "2"}),
    Run("experts", model=EXPERTS, smaller={"--tp": "1", "--ep": "2"}),
    *(Run(name, 1) for name in ("one GPU", "QLoRA", "QLoRA of the engines", "DoRA", "packing")),
    *(Run(name, 1) for name in ("names of old versions", "stability", "initial weights")),
    *(Run(name, 1) for name in ("full evaluation in bfloat16", "sequence packing", "workers", "float16")),
    *(Run(f"algorithm {name}", task=name) for name in ("rm", "dpo", "cpo", "orpo", "kto", "ppo")),
    Run("algorithm grpo", task="grpo", slow=False),
    Run("Megatron-LM's arguments", 4, smaller={**LAYOUT, **ARCHITECTURE}),
    *(Run(f"YAML: {name}") for name in ("ddp", "every setting", "experiment")),
]
"""On at most 4 processes of a CPU. The YAML files with a DeepSpeed file are left out: these DeepSpeed files ask for
float16, which DeepSpeed computes on few CPUs."""
