"""Rules for options of distillation."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megaswift.config.rule import ConflictingOptions, IgnoredOption
from megaswift.config.sections import OPTIONS
from megaswift.options.tasks import DISTILLATION, GRPO
from megaswift.rollout.options.rollout import SERVERS, RolloutConfig
from megaswift.rollout.options.vllm_engine import VllmSamplerConfig
from megaswift.trainers.distillation.options.distillation import samples_in_training
from megaswift.trainers.rl.options.derived import advantage_estimator_entry_of

SAMPLING = tuple(
    field.name
    for section in (RolloutConfig, VllmSamplerConfig)
    for field in fields(section)
    if field.name != "temperature" and any(OPTIONS[field.name].belongs_to(task) for task in DISTILLATION)
)
"""Options that only sampling reads; the temperature is the divergence's too."""


def _reads_rows_alone(c: Any) -> bool:
    return c.task in DISTILLATION and not samples_in_training(c)


DISTILLATION_IGNORED: tuple[IgnoredOption, ...] = tuple(
    IgnoredOption(
        name,
        ("lmbda", "seq_kd"),
        _reads_rows_alone,
        "with lmbda 0 and without seq_kd every step trains on the rows' own answers",
        "--lmbda 0.5",
    )
    for name in SAMPLING
) + (
    IgnoredOption(
        "teacher_model",
        ("advantage_estimator",),
        lambda c: c.task in GRPO and not advantage_estimator_entry_of(c).teacher,
        "is read by the advantage estimator teacher_kl alone",
        "--advantage_estimator teacher_kl, or megaswift gkd",
    ),
    *(
        IgnoredOption(
            name,
            ("advantage_estimator",),
            lambda c: c.task in GRPO and advantage_estimator_entry_of(c).teacher,
            "the advantages of teacher_kl are a teacher's, without a reward",
            "another --advantage_estimator",
        )
        for name in ("reward_funcs", "reward_model", "environment")
    ),
)


def _asks_teacher(c: Any) -> bool:
    return c.task in GRPO and bool(advantage_estimator_entry_of(c).teacher)


def _distills(c: Any) -> Any:
    return c.distillation if c.task in DISTILLATION else None


DISTILLATION_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("advantage_estimator", "teacher_model"),
        lambda c: _asks_teacher(c) and c.distillation.teacher_model is None,
        "compares with a teacher, and none is given",
        "--teacher_model DIR",
    ),
    ConflictingOptions(
        ("dynamic_sample", "advantage_estimator"),
        lambda c: _asks_teacher(c) and c.rl.dynamic_sample,
        "looks for groups whose rewards differ, but teacher_kl has no rewards",
        "--dynamic_sample false",
    ),
    ConflictingOptions(
        ("teacher_model_server", "teacher_model"),
        lambda c: (d := _distills(c)) and d.teacher_model_server and (d.teacher_model or d.teacher_logits),
        "takes the place of a teacher in these processes and of one on disk",
        "keep one of them",
    ),
    ConflictingOptions(
        ("teacher_model_server", "gkd_logits_topk"),
        lambda c: (d := _distills(c)) and d.teacher_model_server and d.gkd_logits_topk is None,
        "sends its largest probabilities, and gkd_logits_topk says how many",
        "--gkd_logits_topk 20, which vLLM allows by default",
    ),
    ConflictingOptions(
        ("teacher_model_server", "temperature"),
        lambda c: (d := _distills(c)) and d.teacher_model_server and c.rollout.temperature != 1,
        "sends probabilities at temperature 1",
        "--temperature 1",
    ),
    ConflictingOptions(
        ("teacher_logits", "gkd_logits_topk"),
        lambda c: (d := _distills(c)) and d.teacher_logits and d.teacher_model and d.gkd_logits_topk is None,
        "keeps the teacher's largest probabilities, and gkd_logits_topk says how many",
        "--gkd_logits_topk 64",
    ),
    ConflictingOptions(
        ("teacher_logits", "lmbda"),
        lambda c: (d := _distills(c)) and d.teacher_logits and samples_in_training(c),
        "has the numbers of the rows alone, but steps train on completions",
        "--lmbda 0, without seq_kd",
    ),
    ConflictingOptions(
        ("teacher_logits", "streaming"),
        lambda c: (d := _distills(c)) and d.teacher_logits and c.data.streaming,
        "scores every row before training, which is not possible with a stream",
        "--streaming false",
    ),
    ConflictingOptions(
        ("seq_kd", "teacher_model"),
        lambda c: (d := _distills(c)) and d.seq_kd and d.teacher_model is None,
        "lets the teacher write, which has to be in these processes",
        "--teacher_model DIR",
    ),
    ConflictingOptions(
        ("packing", "lmbda"),
        lambda c: samples_in_training(c) and c.data.packing is True,
        "packs rows before training, but completions are sampled during it",
        "--packing false, or --lmbda 0 without seq_kd",
    ),
    ConflictingOptions(
        ("seq_kd", "rollout_backend", "sampler_engines"),
        lambda c: (
            c.task in DISTILLATION
            and c.distillation.seq_kd
            and (c.rollout.rollout_backend in SERVERS or c.placement.sampler_engines is not None)
        ),
        "lets the teacher write, but the servers hold the model that trains",
        "--rollout_backend vllm or transformers, without --sampler_engines",
    ),
    ConflictingOptions(
        ("max_completion_length", "max_length"),
        lambda c: samples_in_training(c) and c.rollout.max_completion_length >= c.data.max_length,
        "leaves no room for the prompt within max_length {max_length}",
        "use a larger --max_length, which counts prompt and completion",
    ),
)
