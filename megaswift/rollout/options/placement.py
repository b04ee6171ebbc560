"""Section `placement`: the parts of a run that are Ray actors beside the trainer's processes."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import is_set, option
from megaswift.options.tasks import RL, SAMPLED

IN_TRAINER = "trainer"
ON_CPUS = "cpu"


@dataclass(frozen=True)
class PlacementConfig:
    """Roles on Ray, outside of the trainer's processes"""

    sampler_engines: int | None = option(
        None,
        "Sampler engines as Ray actors, restarted when they fail; default: none",
        minimum=1,
        unit="engines",
        tasks=SAMPLED,
        metavar="N",
    )
    cpus_per_engine: int = option(
        1,
        "CPU cores reserved per sampler engine",
        minimum=1,
        unit="cores",
        tasks=SAMPLED,
        only_with={"sampler_engines": is_set()},
    )
    environment_placement: str = option(
        IN_TRAINER,
        "Where environments run: the trainer's processes, or Ray actors without a GPU",
        choices=(IN_TRAINER, ON_CPUS),
        tasks=RL,
        only_with={"environment": is_set()},
    )
    environment_workers: int = option(
        1,
        "Ray actors for environments, at least one per data-parallel replica",
        minimum=1,
        unit="workers",
        tasks=RL,
        only_with={"environment_placement": ON_CPUS},
    )

    @property
    def on_ray(self) -> bool:
        """Whether a part of the run is a Ray actor."""
        return self.sampler_engines is not None or self.environment_placement == ON_CPUS
