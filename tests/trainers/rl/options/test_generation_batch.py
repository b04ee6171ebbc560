"""Completions of a generation, by hand: prompts x completions each = optimizer steps x global batch."""

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.trainers.rl.options.generation_batch import GenerationBatchPlan, generation_batch_plan


@pytest.mark.parametrize(
    "task, options, dp, plan",
    [
        ("grpo", {"gbs": 16}, 2, (16, 2, 8, 1, 1)),
        (
            "grpo",
            {"gbs": 16, "num_generations": 4, "generation_batch_size": 64, "num_iterations": 3},
            2,
            (64, 16, 4, 4, 3),
        ),
        (
            "grpo",
            {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 4},
            2,
            (16, 4, 4, 2, 1),
        ),
        ("ppo", {"gbs": 6, "num_ppo_epochs": 4}, 2, (6, 6, 1, 1, 4)),
    ],
)
def test_plan(task: str, options: dict, dp: int, plan: tuple[int, ...]) -> None:
    made = generation_batch_plan(SwiftConfig(task=task, **options), dp)
    assert made == GenerationBatchPlan(*plan) and made.steps == plan[3] * plan[4]
    assert made.prompts * made.generations == made.completions


@pytest.mark.parametrize(
    "options, dp, part",
    [
        (
            {"gradient_accumulation_steps": 1},
            4,
            "--global_batch_size 4: is not a multiple of num_generations 8, which is the default: some prompts would "
            "have fewer completions\n"
            "    try: --global_batch_size 8",
        ),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_generations": 4},
            2,
            "steps_per_generation 3: 3 passes of 2 completions are 6, which is not a multiple of the 4 completions "
            "of a global batch\n"
            "    try: --steps_per_generation 2",
        ),
    ],
)
def test_what_only_the_number_of_ranks_tells(options: dict, dp: int, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generation_batch_plan(SwiftConfig(task="grpo", **options), dp)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"gbs": 12}, "gbs=12: is not a multiple of num_generations 8"),
        ({"gbs": 11}, "try: --global_batch_size 8"),
        ({"gbs": 12}, "try: --global_batch_size 16"),
        ({"gbs": 12, "dp": 4, "micro_batch_size": 3}, "try: --global_batch_size 24"),
        ({"gbs": 12, "num_generations": 5}, "gbs=12: is not a multiple of num_generations 5: some prompts"),
        ({"gbs": 16, "generation_batch_size": 24}, "try: --generation_batch_size 32"),
        ({"generation_batch_size": 20}, "try: --generation_batch_size 16"),
        (
            {"dp": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 5},
            "try: --steps_per_generation 2",
        ),
    ],
)
def test_what_is_told_at_once(options: dict, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SwiftConfig(task="grpo", **options)
    assert part in str(caught.value)


def test_what_is_not_known_yet_is_no_mistake() -> None:
    """3 passes of 4 completions: right on two ranks, wrong on one, and how many there are is not known yet."""
    options = {"task": "grpo", "steps_per_generation": 3, "micro_batch_size": 4}
    made = SwiftConfig(**options)
    assert (made.rl.steps_per_generation, made.train.per_device_train_batch_size) == (3, 4)
    assert (
        generation_batch_plan(made, 2)
        == generation_batch_plan(SwiftConfig(**options, dp=2), 2)
        == GenerationBatchPlan(24, 3, 8, 3, 1)
    )
    for told in (lambda: generation_batch_plan(made, 1), lambda: SwiftConfig(**options, dp=1)):
        with pytest.raises(
            ConfigError, match="3 passes of 4 completions are 12, which is not a multiple of num_generations 8"
        ):
            told()


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 8),
        ({"num_generations": 6, "per_device_train_batch_size": 4}, 3),
        ({"per_device_train_batch_size": 16}, None),
        ({"gbs": 16}, None),
        ({"task": "ppo"}, None),
        ({"task": "ppo", "num_generations": 4}, 4),
        ({"task": "sft"}, None),
    ],
)
def test_a_run_without_batch_options_fills_its_groups_on_any_number_of_ranks(options: dict, passes: int | None) -> None:
    made = SwiftConfig(**{"task": "grpo", **options})
    assert made.train.gradient_accumulation_steps == passes and "gradient_accumulation_steps" not in made.given
    said = [n for n in made.notices if n.startswith(f"gradient_accumulation_steps is {passes}, since no batch size")]
    assert len(said) == (passes is not None)
    if made.task != "sft" and "gbs" not in options:
        for dp in (1, 2, 3, 8):
            assert generation_batch_plan(made, dp).batches == 1


def test_other_batch_options_replace_the_default_passes() -> None:
    made = SwiftConfig(task="grpo", dp=1).replace(num_generations=4)
    assert made.train.gradient_accumulation_steps == 4
    assert made.replace(global_batch_size=12).train.gradient_accumulation_steps is None


def test_other_tasks_have_no_generations() -> None:
    assert SwiftConfig(task="sft", gbs=3).train.global_batch_size == 3
    with pytest.raises(ConfigError, match="gbs=3: is not a multiple of num_generations 8"):
        SwiftConfig(task="grpo", gbs=3)


def test_partial_rollouts_take_more_than_a_generation() -> None:
    """Otherwise no draw is under way at a sync: the next generation waits for the only one, and none is overtaken."""
    options = {"task": "grpo", "global_batch_size": 8, "num_iterations": 2, "partial_rollouts": True}
    options |= {"staleness_strategy": "drop", "rollout_backend": "vllm_server", "rollout_server_url": ("http://x",)}
    assert generation_batch_plan(SwiftConfig(max_staleness=3, **options), 1).steps == 2
    with pytest.raises(ConfigError, match="a generation takes 2 steps, so no completion") as error:
        generation_batch_plan(SwiftConfig(max_staleness=2, **options), 1)
    assert "--partial_rollouts true" in str(error.value) and "--staleness_strategy drop" in str(error.value)


def test_a_deterministic_run_knows_the_weights_of_every_draw() -> None:
    """Up to one generation of staleness; beyond it they depend on timing, unless completions are read."""
    options = {"task": "grpo", "global_batch_size": 8, "num_iterations": 2, "deterministic": True}
    for given in ({"max_staleness": 2}, {"async_generation": True}, {"max_staleness": 3, "replay_rollouts": "saved"}):
        assert generation_batch_plan(SwiftConfig(**given, **options), 1).steps == 2
    with pytest.raises(ConfigError, match="--deterministic true: conflicts with max_staleness 3") as error:
        generation_batch_plan(SwiftConfig(max_staleness=3, **options), 1)
    assert "--max_staleness 2" in str(error.value)
