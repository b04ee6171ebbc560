"""Rules about combinations of options, as tables: options without effect, conflicts, missing requirements.

Owns rules that need nothing but the options. What depends on model, machine or data is checked where these are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from megaswift.bridge.adapters.options.checks import ADAPTER_CLASHES
from megaswift.config.rule import ConflictingOptions, IgnoredOption, join_names
from megaswift.config.sections import OPTIONS, Sections
from megaswift.config.variants import SELECTORS
from megaswift.data.options.checks import DATA_CLASHES, DATA_IGNORED
from megaswift.data.options.loss_scale import loss_scale_problems
from megaswift.engine.options import fsdp_file
from megaswift.engine.options.cuda_graphs import CUDA_GRAPH_CLASHES
from megaswift.engine.options.engine_checks import AXES, ENGINE_CLASHES, ENGINE_IGNORED, TORCH_ONLY, engine_texts
from megaswift.engine.options.optimizer_checks import LOSS_SCALE_CLASHES, OPTIMIZER_CLASHES
from megaswift.engine.options.speed import SPEED_CLASHES
from megaswift.errors import Problem
from megaswift.launchers.options.checks import LAUNCH_CLASHES, LAUNCH_IGNORED
from megaswift.losses.options.preference_checks import PREFERENCE_CLASHES, PREFERENCE_IGNORED
from megaswift.losses.options.retrieval_checks import RETRIEVAL_CLASHES
from megaswift.models.options.capacity import EXPERT_CAPACITY_CLASHES
from megaswift.models.options.checks import MODEL_SOURCE_CLASHES, MODEL_SOURCE_IGNORED, MTP_CLASHES
from megaswift.options.tasks import RL
from megaswift.options.values import option_value_text
from megaswift.parallel.options.checks import MODEL_CLASHES
from megaswift.rollout.options.placement import sglang_engine_problems
from megaswift.rollout.options.vllm_engine import vllm_sampler_problems
from megaswift.trainers.distillation.options.checks import DISTILLATION_CLASHES, DISTILLATION_IGNORED
from megaswift.trainers.options.batch_sizes import batch_problems
from megaswift.trainers.options.checkpoint_checks import CHECKPOINT_CLASHES, CHECKPOINT_IGNORED
from megaswift.trainers.options.evaluation_checks import EVALUATION_CLASHES, EVALUATION_IGNORED
from megaswift.trainers.options.profiling_checks import PROFILE_CLASHES
from megaswift.trainers.options.schedule_checks import SCHEDULE_CLASHES, SCHEDULE_IGNORED
from megaswift.trainers.rl.options.checks import RL_CLASHES
from megaswift.trainers.rl.options.generation_batch import generation_batch_problems

IGNORED: tuple[IgnoredOption, ...] = (
    *SELECTORS.rules(),
    *SCHEDULE_IGNORED,
    *EVALUATION_IGNORED,
    *LAUNCH_IGNORED,
    *ENGINE_IGNORED,
    *PREFERENCE_IGNORED,
    *DISTILLATION_IGNORED,
    *DATA_IGNORED,
    *MODEL_SOURCE_IGNORED,
    *CHECKPOINT_IGNORED,
)

CLASHES: tuple[ConflictingOptions, ...] = (
    *MODEL_SOURCE_CLASHES,
    *MTP_CLASHES,
    *CHECKPOINT_CLASHES,
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
    *DISTILLATION_CLASHES,
    *RETRIEVAL_CLASHES,
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
        *sglang_engine_problems(c.placement),
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
        if r.option in c.given and wrong.isdisjoint((r.option, *r.reads)) and would_ignore(r, c):
            yield Problem(
                labels[r.option], f"would be ignored: {_fill(r.why, c)}", _way_out(r.fix, c) + ", or leave it out"
            )


def _clashes(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> Iterator[Problem]:
    for r in CLASHES:
        if wrong.isdisjoint(r.options) and r.when(c):
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
