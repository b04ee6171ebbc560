"""Section `placement`: the parts of a run that are Ray actors beside the trainer's processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaswift.errors import Problem
from megaswift.options.option import is_set, option
from megaswift.options.option_json import json_object
from megaswift.options.tasks import RL, SAMPLED

IN_TRAINER = "trainer"
ON_CPUS = "cpu"
_TOKENS = "sampling relies on it"
_SYNC = "weight sync relies on it"
_PLACE = "each engine has one GPU of its node"
_ADDRESS = "an engine chooses a free port of the loopback interface, which nobody else reaches"
_OPTION = "another option sets it"
SGLANG_FIXED = {
    **dict.fromkeys(("enable_deterministic_inference", "skip_tokenizer_init", "speculative_algorithm"), _TOKENS),
    **dict.fromkeys(("model_path", "model", "quantization"), _SYNC),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "lora_target_modules"), _SYNC),
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size"), _PLACE),
    **dict.fromkeys(("dp_size", "data_parallel_size", "ep_size", "expert_parallel_size", "ep", "nnodes"), _PLACE),
    **dict.fromkeys(("host", "port", "api_key", "admin_api_key"), _ADDRESS),
    **dict.fromkeys(("dtype", "context_length", "max_running_requests", "trust_remote_code"), _OPTION),
}
"""Argument of SGLang's server, under each of its names -> why it is fixed."""


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
    sglang_engine_kwargs: str | None = option(
        None,
        "Other arguments of the engines' SGLang servers, as a JSON object",
        tasks=SAMPLED,
        metavar="JSON",
        only_with={"rollout_backend": "sglang", "sampler_engines": is_set()},
        neutral=(None,),
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

    @property
    def sglang_arguments(self) -> dict[str, Any]:
        """SGLang's own name -> value."""
        return json_object(self.sglang_engine_kwargs or "{}") or {}


def sglang_engine_problems(options: PlacementConfig) -> Iterator[Problem]:
    """Report a text that is no JSON object, and arguments that are fixed."""
    text = options.sglang_engine_kwargs
    if text is not None and json_object(text) is None:
        fix = "--sglang_engine_kwargs '{\"mem_fraction_static\": 0.8}'"
        yield Problem(f"--sglang_engine_kwargs {text}", "must be a JSON object", fix)
    for name in options.sglang_arguments:
        if (reason := SGLANG_FIXED.get(name.replace("-", "_"))) is not None:
            yield Problem(f"--sglang_engine_kwargs {name}", f"cannot be set: {reason}", "leave it out")
