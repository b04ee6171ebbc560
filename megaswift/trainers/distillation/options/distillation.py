"""Section `distillation`: the teacher, its layout, and the completions that a step trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaswift.options.option import is_set, option
from megaswift.options.tasks import DISTILLATION, TAUGHT

INDEX = "index.json"
"""The file that makes a folder of a teacher's probabilities complete."""


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation"""

    teacher_model: str | None = option(
        None,
        "Teacher: folder or hub id of a model with the same tokenizer",
        aliases=("teacher_model_name_or_path",),
        tasks=TAUGHT,
        metavar="DIR",
        common=DISTILLATION,
    )
    lmbda: float = option(
        0.5,
        "Share of steps that train on completions of the model itself; 0: none",
        minimum=0,
        maximum=1,
        tasks=DISTILLATION,
        common=DISTILLATION,
    )
    seq_kd: bool = option(
        False, "In other steps train on completions of the teacher", tasks=DISTILLATION, common=DISTILLATION
    )
    sft_alpha: float = option(
        0.0,
        "Weight of an added cross-entropy on answers that the model did not write",
        minimum=0,
        tasks=DISTILLATION,
    )
    gkd_logits_topk: int | None = option(
        None,
        "Compare the teacher's N largest probabilities; default: the whole vocabulary",
        minimum=1,
        metavar="N",
        tasks=DISTILLATION,
    )
    teacher_model_server: str | None = option(
        None, "URL of a server with the teacher, in place of teacher_model", tasks=DISTILLATION, metavar="URL"
    )
    teacher_logits: str | None = option(
        None,
        "Folder of the teacher's probabilities: written with teacher_model, else read",
        tasks=DISTILLATION,
        metavar="DIR",
    )
    offload_teacher_model: bool = option(
        False,
        "Offload the teacher's weights to CPU memory when idle",
        tasks=TAUGHT,
        only_with={"teacher_model": is_set()},
    )
    teacher_tensor_parallel_size: int | None = option(
        None,
        "Tensor parallelism of the teacher; default: the run's",
        aliases=("teacher_tp",),
        minimum=1,
        unit="ranks",
        tasks=TAUGHT,
        only_with={"engine": "megatron", "teacher_model": is_set()},
    )
    teacher_pipeline_parallel_size: int | None = option(
        None,
        "Pipeline parallelism of the teacher; default: the run's",
        aliases=("teacher_pp",),
        minimum=1,
        unit="ranks",
        tasks=TAUGHT,
        only_with={"engine": "megatron", "teacher_model": is_set()},
    )
    teacher_context_parallel_size: int | None = option(
        None,
        "Context parallelism of the teacher; default: the run's",
        aliases=("teacher_cp",),
        minimum=1,
        unit="ranks",
        tasks=TAUGHT,
        only_with={"engine": "megatron", "teacher_model": is_set()},
    )
    teacher_expert_parallel_size: int | None = option(
        None,
        "Expert parallelism of the teacher; default: the run's if it has experts",
        aliases=("teacher_ep",),
        minimum=1,
        unit="ranks",
        tasks=TAUGHT,
        only_with={"engine": "megatron", "teacher_model": is_set()},
    )


def samples_in_training(c: Any) -> bool:
    """Return whether steps of distillation may train on sampled completions."""
    return c.task in DISTILLATION and (c.distillation.lmbda > 0 or c.distillation.seq_kd)
