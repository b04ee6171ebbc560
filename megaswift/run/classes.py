"""The classes of a classifier's run: those of the options, of the model, or of the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megaswift import distributed, log
from megaswift.data.labeled.classes import class_names_in_rows
from megaswift.errors import ConfigError, Problem
from megaswift.folders.adapter import classifier_head_of_adapter
from megaswift.losses.options.classification import REGRESSION, default_problem_type
from megaswift.models.family import read_config_json
from megaswift.models.heads import class_names_of, head_of, with_head
from megaswift.models.spec import TOKEN_SCORE
from megaswift.run.plan import RunPlan


def with_classes(plan: RunPlan) -> RunPlan:
    """Return the plan of a run that knows its classes, in its options and in its model. Collective.

    Raises:
        DataError: Neither the options nor the model nor the rows say what classes there are.
    """
    data = plan.cfg.data
    tokens = plan.spec.head == TOKEN_SCORE
    config = read_config_json(plan.folder)
    classifies = head_of(config) == plan.spec.head

    # The names, and the number. Adapters to go on from have a head of their own.
    adapters = plan.cfg.lora.adapters
    head = None if adapters is None else classifier_head_of_adapter(Path(adapters))
    if head is not None and data.named_labels not in (None, len(head.names)):
        rule = f"have a head with {len(head.names)} classes, but the options name {data.named_labels}"
        raise ConfigError(Problem(f"--adapters {adapters}", rule, "leave --num_labels and --class_names out"))
    problem = data.problem_type or (head and head.problem_type) or (config.get("problem_type") if classifies else None)
    names = data.class_names or (head.names if head and head.named else ())
    if head is not None:
        data = replace(data, num_labels=len(head.names))
    numbers = not tokens and (problem == REGRESSION or problem is None and data.num_labels == 1)
    if not names and classifies:
        names = tuple(class_names_of(config))
    elif not names and not numbers:
        names = distributed.run_on_rank0(lambda: class_names_in_rows(data, tokens), hours=24)
        if names and distributed.global_rank() == 0:
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            log.info(f"{log.count_text(len(names), 'class')} in the rows: {shown}")
    count = len(names) or data.num_labels or 1

    # The options and the model that follow.
    known = {"num_labels": count, "class_names": list(names)}
    if not tokens:
        known["problem_type"] = problem or default_problem_type(count)
    spec = with_head(plan.spec, plan.spec.head, names or [f"LABEL_{i}" for i in range(count)])
    if not tokens:
        spec = replace(spec, hf_config={**spec.hf_config, "problem_type": known["problem_type"]})
    return replace(plan, cfg=plan.cfg.replace(**known), spec=spec)
