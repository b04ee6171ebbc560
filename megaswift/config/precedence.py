"""Precedence of sources.

A later source replaces the value of an option. Where two options state one thing and both cannot hold, the later one
counts. An option of an earlier source that has no effect because of a later one is left out. A notice names each option
that is dropped; any other contradiction is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megaswift.config.rules import CLASHES, IGNORED, options_dropped_with_notice, would_ignore
from megaswift.config.sections import Sections
from megaswift.options.given_options import GivenOptions
from megaswift.trainers.rl.options.generation_batch import BATCH_OPTIONS

BATCH = ("global_batch_size", "gradient_accumulation_steps")
"""Each follows from the other, so that no rule finds them in conflict."""
SAME_THING: tuple[tuple[str, ...], ...] = (
    BATCH,
    ("generation_batch_size", "steps_per_generation"),
    ("num_train_epochs", "max_steps"),
    ("max_steps", "warmup_steps"),
    ("warmup_steps", "warmup_ratio"),
    ("lr_warmup_init", "lr_warmup_init_ratio"),
    ("min_lr", "min_lr_ratio"),
    ("wsd_decay_steps", "wsd_decay_ratio"),
    ("val_dataset", "split_dataset_ratio", "data_split"),
    ("eval_steps", "eval_strategy"),
    ("save_steps", "save_strategy"),
    ("export_hf", "merge_lora"),
    ("export_hf", "push_to_hub"),
    ("add_version", "overwrite_output_dir"),
    ("shuffle", "group_by_length"),
    ("engine", "deepspeed", "use_fsdp", "fsdp", "fsdp_config"),
    ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
    ("nproc_per_node", "nnodes", "num_workers"),
    ("pipeline_layout", "first_stage_layers", "last_stage_layers"),
    ("moe_grouped_gemm", "moe_grouped_gemm_impl"),
    ("torch_compile_backend", "torch_compile_mode"),
    ("boft_block_size", "boft_block_num"),
)
"""Groups of options that state one thing under several names."""
KEPT = frozenset({"train_type", "model", "dataset", "output_dir", "resume_from_checkpoint"})
"""Options that only their own name replaces: without one the run would be another."""

_Resolved = Callable[[GivenOptions], Sections]


def drop_contradicted(given: GivenOptions, resolved: _Resolved) -> None:
    """Forget each option of an earlier source that a later source contradicts; a notice names both."""
    if len(set(given.weights.values())) < 2:
        return
    while (pair := next(_contradicted(given, resolved(given)), None)) is not None:
        old, new = pair
        if old not in given.compared or old not in BATCH_OPTIONS:
            given.notices.append(f"{given.typed[old].label} is not used because of {given.typed[new].label}")
        given.forget(old)


def drop_superfluous(given: GivenOptions, resolved: _Resolved) -> None:
    """Forget each option that changes nothing in this run; a notice names it."""
    for name, why in dict(options_dropped_with_notice(resolved(given), given.wrong)).items():
        given.notices.append(f"{given.typed[name].label} has no effect: {why}")
        given.forget(name)


def _contradicted(given: GivenOptions, sections: Sections) -> Iterator[tuple[str, str]]:
    """Pairs of an option of an earlier source and the one of a later source because of which it goes."""
    # Options without effect because of a later one, or because of an earlier one that states the same thing
    for rule in IGNORED:
        if would_ignore(rule, sections):
            for other in rule.reads:
                if _gives_way(given, sections, rule.option, other):
                    yield rule.option, other
                elif _state_one_thing(rule.option, other) and _gives_way(given, sections, other, rule.option):
                    yield other, rule.option
    # Options that cannot go together and state the same thing
    for clash in CLASHES:
        if clash.when(sections):
            for old in clash.options:
                for new in clash.options:
                    if _state_one_thing(old, new) and _gives_way(given, sections, old, new):
                        yield old, new
    for old, new in (BATCH, BATCH[::-1]):
        if _gives_way(given, sections, old, new):
            yield old, new


def _state_one_thing(one: str, other: str) -> bool:
    return any(one in group and other in group for group in SAME_THING)


def _gives_way(given: GivenOptions, sections: Sections, old: str, new: str) -> bool:
    """Whether `old` was given before `new`, and may be dropped."""
    if old == new or old in KEPT or old not in sections.given:
        return False
    if not {old, new} <= given.weights.keys() or {old, new} & (given.wrong | given.ambient):
        return False
    follows_launcher = not given.typed[old].spelling  # accelerate's settings
    return given.weights[old] < given.weights[new] and not follows_launcher
