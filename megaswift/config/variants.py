"""Options of training that exist only with certain values of others: the facts that their `only_with` names.

A fact is a selector that is more than the value of one option: `engine` also follows from `--deepspeed`. A selector
with the value `ANY` rules out no option. `derived_rules.py` derives the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.bridge.adapters.options.checks import base_quantization_bits
from megaswift.config.derived_rules import Fact, Selectors
from megaswift.config.sections import OPTIONS, Sections
from megaswift.data.options.indexed import reads_indexed_data
from megaswift.engine.options.engine_checks import NATIVE, READS, engine_of_options, requested_engine
from megaswift.engine.options.optimizer_checks import can_shard_optimizer
from megaswift.losses.options.estimator_table import PLUGIN_ESTIMATORS
from megaswift.losses.options.loss_table import PLUGIN_LOSSES, loss_entries
from megaswift.losses.options.preference import beta_of, loss_types_of
from megaswift.options.option import ANY, Option, Wanted
from megaswift.options.tasks import RL
from megaswift.parallel.options.checks import has_grouped_gemm
from megaswift.trainers.options.evaluation_checks import (
    DATA_OPTIONS,
    best_model_matters,
    has_evaluation_data,
    has_evaluation_rows,
)
from megaswift.trainers.options.schedule_checks import reads_decay_steps
from megaswift.trainers.rl.options.checks import sends_weights_in_files
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_of,
    biasing_sampling_options,
    corrects_sampler_mismatch,
    kl_in_reward_of,
    policy_loss_of,
)


def _loss_types(c: Sections) -> Any:
    names = (policy_loss_of(c),) if c.task in RL else (c.preference.loss_type or loss_types_of(c))
    return ANY if any(entry in PLUGIN_LOSSES.values() for entry in loss_entries(c.task, names)) else names


def _estimator(c: Sections) -> Any:
    name = advantage_estimator_of(c)
    return ANY if name in PLUGIN_ESTIMATORS else name


def _reward_functions(c: Sections) -> tuple[str, ...]:
    """Return which built-in functions with options the run uses, also under TRL's names
    (`get_cosine_scaled_reward`)."""
    built_in = [name for name in c.rewards.reward_funcs if ":" not in name]  # a colon: FILE:FUNCTION of the user
    return tuple(short for short in _REWARDS_WITH_OPTIONS if any(short in name for name in built_in))


def _nodes(c: Sections) -> Any:
    """Return the number of machines on which torchrun starts processes. Other launchers have their own rules."""
    return (c.launch.nnodes or 1) if c.launch.launcher == "torchrun" else ANY


def _weight_bits(c: Sections) -> Any:
    """Return the bits of the frozen weights on a torch engine. The native engine is left to the selector `engine`."""
    return ANY if requested_engine(c) == NATIVE else base_quantization_bits(c)


def _engine_fix(wanted: Wanted) -> str:
    """Return the option that selects a wanted engine. Placeholders are filled when the rule is broken."""
    engine = wanted.values[0] if wanted.values else ""
    return {"megatron": "{to_megatron}", "fsdp2": "{to_fsdp2}"}.get(engine, "--engine ddp")


FACTS: dict[str, Fact] = {
    "engine": Fact(engine_of_options, READS, fix=_engine_fix, shows_value=True),
    "loss_type": Fact(_loss_types, ("loss_type",)),
    "advantage_estimator": Fact(_estimator, ("advantage_estimator",)),
    "beta": Fact(
        lambda c: beta_of(c) if c.task in RL else ANY,
        ("beta",),
        "beta is 0, so there is neither a KL penalty nor a reference model",
        "--beta 0.01",
    ),
    "kl_in_reward": Fact(kl_in_reward_of, ("beta", "kl_in_reward", "advantage_estimator")),
    "reward_funcs": Fact(_reward_functions, ("reward_funcs",)),
    "nnodes": Fact(_nodes, ("nnodes", "launcher")),
    "importance_sampling_correction": Fact(
        corrects_sampler_mismatch, ("importance_sampling_correction", "rollout_backend", "async_generation")
    ),
    "quantization_bit": Fact(_weight_bits, ("quantization_bit", "train_type", *READS)),
    "vision_model": Fact(lambda c: ANY, ("model",)),  # checked where the model's folder has been read
    "warmup": Fact(
        lambda c: c.schedule.warmup_steps or c.schedule.warmup_ratio,
        ("warmup_steps", "warmup_ratio"),
        "applies only to runs with a warmup",
        "--warmup_steps 100",
    ),
    "evaluation_data": Fact(
        has_evaluation_data,
        (*DATA_OPTIONS, "eval_tasks"),
        "needs evaluation data (--val_dataset or --split_dataset_ratio)",
        "--val_dataset FILE or --split_dataset_ratio 0.01",
    ),
    "evaluation_rows": Fact(
        has_evaluation_rows,
        DATA_OPTIONS,
        "needs evaluation data (--val_dataset or --split_dataset_ratio)",
        "--val_dataset FILE or --split_dataset_ratio 0.01",
    ),
    "best_model": Fact(
        best_model_matters,
        ("load_best_model_at_end", "save_strategy", "early_stopping_patience", "lr_scheduler_type"),
        "nothing depends on the best evaluation",
        "--load_best_model_at_end true",
    ),
    "sharded_optimizer": Fact(
        can_shard_optimizer, ("optimizer",), "Megatron-Core shards only the state of adam", "--optimizer adam"
    ),
    "grouped_gemm": Fact(
        has_grouped_gemm,
        ("moe_grouped_gemm", "train_type", "use_dora"),
        "is about the grouped GEMM, which is off with moe_grouped_gemm false, DoRA and train_type qlora",
        "--moe_grouped_gemm_impl auto",
    ),
    "decay_steps": Fact(
        reads_decay_steps,
        ("lr_scheduler_type", "warmup_ratio"),
        "the {lr_scheduler_type} schedule has no step at which it reaches a final learning rate",
        "--lr_scheduler_type cosine",
    ),
    "ray": Fact(
        lambda c: c.launch.launcher == "ray" or c.placement.on_ray,
        ("launcher", "sampler_engines", "environment_placement"),
        "nothing of the run is on Ray",
        "--launcher ray, or --sampler_engines 2",
    ),
    "sync_files": Fact(
        sends_weights_in_files,
        ("rollout_backend", "train_type", "rollout_lora", "sampler_engines"),
        "rollout_backend {rollout_backend} is not a server, and adapters are not sent separately",
        "--rollout_backend vllm_server, or --train_type lora",
    ),
    "indexed_data": Fact(
        reads_indexed_data, ("dataset",), "applies only to Megatron-LM's indexed data (PREFIX.idx)", "--dataset PREFIX"
    ),
    "rows_of_text": Fact(
        lambda c: not reads_indexed_data(c),
        ("dataset",),
        "indexed data are tokens already, cut into samples of max_length",
        "other data",
    ),
    "biased_sampling": Fact(
        biasing_sampling_options,
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        "completions are sampled from the policy's own distribution",
        "--top_p 0.9",
    ),
}
"""Facts by name. A selector that is not listed here is an option and has the option's value."""


def values_with(option: str, selector: str) -> tuple[str, ...]:
    """Return the listed values of a selector with which an option exists; empty: the option lists none."""
    wanted = OPTIONS[option].only_with.get(selector)
    return wanted.values if wanted else ()


_REWARDS_WITH_OPTIONS = tuple(dict.fromkeys(name for option in OPTIONS for name in values_with(option, "reward_funcs")))
SELECTORS = Selectors(OPTIONS, FACTS, lambda c, name: c.value(name))


def variant_note(option: Option, choices: Mapping[str, tuple[str, ...]]) -> str:
    """Return a note for `--help`: with which losses or estimators an option exists; empty: with all of them.

    Args:
        choices: Selector -> its values in the task.
    """
    for selector, values in choices.items():
        with_it = [name for name in values if name in values_with(option.name, selector)]
        without = [name for name in values if name not in with_it]
        if not with_it or not without:
            continue
        if selector == "loss_type" and len(without) < len(with_it):
            return f"not for {selector} {', '.join(without)}"
        return f"{selector} {', '.join(with_it)}"
    return ""
