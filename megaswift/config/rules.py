"""Rules about combinations of options, as tables: options without effect, conflicts, missing requirements.

Owns rules that need nothing but the options. What depends on model, machine or data is checked where these are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megaswift.config.checks.adapter import ADAPTER_CLASHES
from megaswift.config.checks.capacity import EXPERT_CAPACITY_CLASHES
from megaswift.config.checks.cuda_graphs import CUDA_GRAPH_CLASHES
from megaswift.config.checks.data import DATA_CLASHES, DATA_IGNORED
from megaswift.config.checks.engine import AXES, ENGINE_CLASHES, ENGINE_IGNORED, TORCH_ONLY, engine_texts
from megaswift.config.checks.evaluation import EVALUATION_CLASHES, EVALUATION_IGNORED
from megaswift.config.checks.float16 import LOSS_SCALE_CLASHES
from megaswift.config.checks.launch import LAUNCH_CLASHES, LAUNCH_IGNORED
from megaswift.config.checks.layout import MODEL_CLASHES
from megaswift.config.checks.optimizer import OPTIMIZER_CLASHES, OPTIMIZER_IGNORED
from megaswift.config.checks.preference import PREFERENCE_CLASHES, PREFERENCE_IGNORED
from megaswift.config.checks.profiling import PROFILE_CLASHES
from megaswift.config.checks.rl import RL_CLASHES, RL_IGNORED
from megaswift.config.checks.schedule import SCHEDULE_CLASHES, SCHEDULE_IGNORED
from megaswift.config.checks.speed import SPEED_CLASHES
from megaswift.config.facts import fsdp_file
from megaswift.config.facts.batch_sizes import batch_problems
from megaswift.config.facts.generation_batch import generation_batch_problems
from megaswift.config.facts.hub_ids import names_hub_dataset
from megaswift.config.facts.loss_scale import loss_scale_problems
from megaswift.config.parts.data import RL
from megaswift.config.parts.sampler import vllm_sampler_problems
from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption, join_names
from megaswift.config.sections import OPTIONS, Sections
from megaswift.config.values import option_value_text
from megaswift.config.variants import variant_rules
from megaswift.errors import Problem


def _is_folder(c: Sections) -> bool:
    return c.model.model is not None and Path(c.model.model).is_dir()


_HUB = "applies only to hub IDs, but the model is a local folder"
_HUB_DATA = "applies only to hub IDs, but model and data are local"


def _uses_no_hub(c: Sections) -> bool:
    return (
        _is_folder(c)
        and not c.train.push_to_hub
        and not any(names_hub_dataset(entry) for entry in (*c.data.dataset, *c.data.val_dataset))
    )


def _exports_no_model(c: Sections) -> bool:
    return c.model.train_type != "full" and not c.lora.merge_lora


IGNORED: tuple[IgnoredOption, ...] = (
    *variant_rules(),
    *SCHEDULE_IGNORED,
    *EVALUATION_IGNORED,
    IgnoredOption("model_revision", ("model",), _is_folder, _HUB, "--model ORGANIZATION/NAME"),
    IgnoredOption(
        "use_hf", ("model", "push_to_hub", "dataset"), _uses_no_hub, _HUB_DATA, "--model ORGANIZATION/NAME", (True,)
    ),
    IgnoredOption(
        "num_train_epochs",
        ("max_steps",),
        lambda c: c.train.max_steps is not None,
        "max_steps {max_steps} already sets the length of the run",
        ONE_OF,
        notice=True,
    ),
    IgnoredOption(
        "save_total_limit",
        ("save_steps", "save_strategy"),
        lambda c: c.train.save_steps is None and c.train.save_strategy not in ("epoch", "best"),
        "needs save_steps; without it only one checkpoint is written, at the end",
        "--save_steps 500",
        notice=True,
    ),
    IgnoredOption(
        "export_hf",
        ("train_type", "merge_lora"),
        _exports_no_model,
        "with train_type {train_type} the export is OUT/adapter; OUT/hf is written only with merge_lora",
        "--merge_lora true",
    ),
    IgnoredOption(
        "trainable_parameters",
        ("train_type", "freeze_parameters", "freeze_vit", "freeze_aligner", "freeze_llm"),
        lambda c: (
            c.model.train_type == "full"
            and not c.model.freeze_parameters
            and not (c.model.freeze_vit or c.model.freeze_aligner or c.model.freeze_llm)
        ),
        "no weights are frozen",
        "--freeze_parameters . to train these weights only",
    ),
    *LAUNCH_IGNORED,
    *ENGINE_IGNORED,
    *PREFERENCE_IGNORED,
    *RL_IGNORED,
    *OPTIMIZER_IGNORED,
    *DATA_IGNORED,
)

CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("precision_aware_optimizer", "distributed_optimizer"),
        lambda c: c.optim.precision_aware_optimizer and not c.parallel.distributed_optimizer,
        "needs distributed_optimizer",
        "--distributed_optimizer true",
    ),
    ConflictingOptions(
        ("optimizer_cpu_offload", "optimizer"),
        lambda c: c.optim.optimizer_cpu_offload and c.optim.optimizer != "adam",
        "offloads Adam's moments, but the optimizer is {optimizer}",
        "--optimizer_cpu_offload false",
    ),
    ConflictingOptions(
        ("overwrite_output_dir", "resume_from_checkpoint"),
        lambda c: c.train.overwrite_output_dir and c.train.resume_from_checkpoint,
        "would delete the run that resume_from_checkpoint continues",
        ONE_OF,
    ),
    ConflictingOptions(
        ("add_version", "overwrite_output_dir"),
        lambda c: c.train.add_version and c.train.overwrite_output_dir,
        "writes to a new folder, which contains no run to replace",
        ONE_OF,
    ),
    ConflictingOptions(
        ("async_save", "save_only_model"),
        lambda c: c.train.async_save and c.train.save_only_model,
        "writes the optimizer's states in the background, and save_only_model leaves them out",
        ONE_OF,
    ),
    ConflictingOptions(
        ("save_only_model", "max_restarts"),
        lambda c: c.train.save_only_model and c.launch.max_restarts,
        "conflicts with max_restarts: a restart resumes with the optimizer's states",
        ONE_OF,
    ),
    ConflictingOptions(
        ("random_init", "train_type"),
        lambda c: c.model.random_init and c.model.train_type != "full",
        "adapters on random weights would be useless: the base model could not be loaded again",
        "--random_init false",
    ),
    ConflictingOptions(
        ("train_type", "transformer_impl"),
        lambda c: c.model.train_type == "qlora" and c.model.transformer_impl == "transformer_engine",
        "Transformer Engine's layers do not support NF4 weights",
        "--transformer_impl torch",
    ),
    ConflictingOptions(
        ("merge_lora", "export_hf"),
        lambda c: c.model.train_type != "full" and c.lora.merge_lora and not c.train.export_hf,
        "writes OUT/hf, which export_hf false disables",
        ONE_OF,
    ),
    *SCHEDULE_CLASHES,
    *EVALUATION_CLASHES,
    *PROFILE_CLASHES,
    *MODEL_CLASHES,
    *CUDA_GRAPH_CLASHES,
    *EXPERT_CAPACITY_CLASHES,
    *LAUNCH_CLASHES,
    *ENGINE_CLASHES,
    *ADAPTER_CLASHES,
    *PREFERENCE_CLASHES,
    *RL_CLASHES,
    *OPTIMIZER_CLASHES,
    *SPEED_CLASHES,
    *LOSS_SCALE_CLASHES,
    *DATA_CLASHES,
)


def ignored_option_names(c: Sections) -> set[str]:
    """Options that play no part in this configuration; a written-out configuration leaves them out."""
    return {r.option for r in IGNORED if r.when(c)} | {o.name for o in OPTIONS.values() if not o.belongs_to(c.task)}


def broken_option_rules(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> list[Problem]:
    """Every rule that is broken. `labels`: how the user wrote each given option; `wrong`: options whose value is a
    mistake already."""
    return [
        *_wrong_task(c, labels),
        *_ignored(c, labels, wrong),
        *_clashes(c, labels, wrong),
        *_batch(c, labels, wrong),
        *fsdp_file.fsdp_file_options(c).problems,
        *vllm_sampler_problems(c.vllm),
        *loss_scale_problems(c, labels, wrong),
    ]


def _wrong_task(c: Sections, labels: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(c.given):
        option = OPTIONS[name]
        if not option.belongs_to(c.task):
            yield Problem(
                labels[name],
                f"has no effect in {c.task}; it applies to {', '.join(option.details['tasks'])}",
                "leave it out",
            )


def would_ignore(rule: IgnoredOption, c: Sections) -> bool:
    """Whether the user gave the rule's option a value that would have no effect."""
    mine = rule.option in c.given and OPTIONS[rule.option].belongs_to(c.task)
    return mine and c.value(rule.option) not in rule.neutral and bool(rule.when(c))


def options_dropped_with_notice(c: Sections, wrong: Collection[str]) -> Iterator[tuple[str, str]]:
    """Given options that a rule leaves out with a notice, each with the reason."""
    for r in IGNORED:
        if r.notice and not {r.option, *r.reads} & set(wrong) and would_ignore(r, c):
            yield r.option, _fill(r.why, c)


def _ignored(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> Iterator[Problem]:
    for r in IGNORED:
        if not wrong & {r.option, *r.reads} and would_ignore(r, c):
            yield Problem(
                labels[r.option], f"would be ignored: {_fill(r.why, c)}", _way_out(r.fix, c) + ", or leave it out"
            )


def _clashes(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> Iterator[Problem]:
    for r in CLASHES:
        if not wrong & set(r.options) and r.when(c):
            name = next((n for n in r.options if n in c.given), r.options[0])
            what = labels.get(name, f"--{name} {option_value_text(c.value(name))}")
            why = _fill(r.why, c)
            first = r.options[0]
            if name != first and c.value(first) is not None and c.value(first) is not False:
                why = f"{first} defaults to {option_value_text(c.value(first))}: {why}"
            yield Problem(what, why, _way_out(r.fix, c))


def _batch(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> Iterator[Problem]:
    reads = {"per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "data_parallel_size"}
    if not wrong & reads:
        problems = list(batch_problems(c.train, c.parallel.data_parallel_size, labels))
        yield from problems
        if (
            c.task in RL
            and not problems
            and not wrong & {"generation_batch_size", "steps_per_generation", "num_generations"}
        ):
            yield from generation_batch_problems(c, labels)


def _way_out(fix: str, c: Sections) -> str:
    """A rule's fix. Another engine needs the options to go that it does not have, too."""
    text = _fill(fix, c)
    for engine, names in (("--engine ddp", AXES), ("--engine megatron", TORCH_ONLY)):
        given = [f"--{name}" for name in names if c.value(name) != OPTIONS[name].default]
        text = text.replace(engine, f"{engine} without {join_names(given)}", 1) if given else text
    return text


def _fill(text: str, c: Sections) -> str:
    if "{" not in text:
        return text
    values = {name: option_value_text(c.value(name)) or "not set" for name in OPTIONS}
    return text.format_map(values | engine_texts(c))
