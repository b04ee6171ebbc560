"""Rules for `--profile`."""

from __future__ import annotations

from megaswift.config.rule import ConflictingOptions
from megaswift.errors import Problem
from megaswift.trainers.options.profiling import ProfileConfig

PROFILE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("profile_step_end", "profile_step_start"),
        lambda c: c.profiling.profile and c.profiling.profile_step_end <= c.profiling.profile_step_start,
        "must be larger than profile_step_start, or no step is profiled",
        "--profile_step_start 2 --profile_step_end 4",
    ),
    ConflictingOptions(
        ("profile_step_start", "max_steps"),
        lambda c: (
            c.profiling.profile
            and c.train.max_steps is not None
            and c.profiling.profile_step_start >= c.train.max_steps
        ),
        "profiling would start after the last step, so no step would be profiled",
        "--profile_step_start 0",
    ),
)


def profile_rank_problems(options: ProfileConfig, world_size: int) -> list[Problem]:
    """Ranks to profile that a run of so many processes does not have."""
    beyond = [rank for rank in options.profile_ranks if rank >= world_size]
    if not options.profile or not beyond:
        return []
    ranks = ", ".join(map(str, beyond))
    return [Problem(f"--profile_ranks {ranks}", f"this run has ranks 0 to {world_size - 1}", "--profile_ranks 0")]
