"""Section `profiling`: which steps of which ranks are profiled."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import one_of, option


@dataclass(frozen=True)
class ProfileConfig:
    """Profiling"""

    profile: bool = option(False, "Profile some steps: traces and a table of times in output_dir/profile")
    profile_step_start: int = option(
        2,
        "Profiling starts after this step",
        minimum=0,
        unit="steps",
        only_with={"profile": one_of(True, notice=True)},
        neutral=(2,),
    )
    profile_step_end: int = option(
        4,
        "Profiling ends after this step",
        minimum=1,
        unit="steps",
        only_with={"profile": one_of(True, notice=True)},
        neutral=(4,),
    )
    profile_ranks: tuple[int, ...] = option(
        (0,), "Ranks to profile", minimum=0, only_with={"profile": one_of(True, notice=True)}, neutral=((0,),)
    )
