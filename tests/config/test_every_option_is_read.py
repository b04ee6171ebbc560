"""Every option is read by something that acts on it: an option that is only parsed, checked or shown would be accepted
without effect.

Covers: megaswift/config/sections.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaswift.config.sections import OPTIONS
from tests.sources import ROOT

PACKAGE = ROOT / "megaswift"
DECIDES = {
    "config": "checks options and derives their defaults",
    "compat": "writes options",
    "run/summary.py": "shows options",
    "run/checks/preflight.py": "checks options",
    "run/checks/devices.py": "checks options",
}
"""Parts of the package in which a read has no effect on the run, and what they do instead."""
METHODS = "bridge/adapters/options/methods.py"
SAMPLER = "rollout/options/vllm_engine.py"
IN_CONFIG = {
    **dict.fromkeys(("init_r", "target_r", "tinit", "tfinal", "deltaT", "oft_block_size"), METHODS),
    **dict.fromkeys(("d_initial", "projection_prng_key", "n_frequency"), METHODS),
    **dict.fromkeys(
        ("num_generations", "generation_batch_size", "steps_per_generation", "num_iterations"),
        "trainers/rl/options/generation_batch.py",
    ),
    "importance_sampling_correction": "trainers/rl/options/derived.py",
    "whiten_advantages": "trainers/rl/options/derived.py",
    "metric_for_best_model": "trainers/options/evaluation_checks.py",
    "fsdp_config": "engine/options/fsdp_file.py",
    "use_fsdp": "engine/options/engine_checks.py",
    "hostfile": "compat/files/hostfile.py",
    "reset_position_ids": "data/options/indexed.py",
    **dict.fromkeys(("vllm_enforce_eager", "vllm_limit_mm_per_prompt", "vllm_engine_kwargs"), SAMPLER),
    "sglang_engine_kwargs": "rollout/options/placement.py",
    "allow_biased_sampling": "trainers/rl/options/checks.py",
}
"""Options that the configuration turns into other values, and where; the last one only permits what would be
refused."""
BY_PREFIX = ("enable_prefix_caching", "disable_cascade_attn", "mm_processor_cache_gb")
"""Options of vLLM that `rollout/options/vllm_engine.py` reads under their names without `vllm_`."""
COMPARED = ("megatron_architecture", "ddp_backend")
"""Options that preflight compares with the model or the machine: they ask for what happens, or are refused."""


def acting_names() -> set[str]:
    """Names that the package reads outside of the parts in `DECIDES`."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        declares = "options" in place.removesuffix(".py").split("/")
        if not declares and not any(place == part or place.startswith(f"{part}/") for part in DECIDES):
            found |= names_in(file)
    return found


def names_in(file: Path) -> set[str]:
    """Attributes and quoted names."""
    return {a or b for a, b in re.findall(r"\.(\w+)\b(?! *=[^=])|[\"'](\w+)[\"']", file.read_text(encoding="utf-8"))}


def test_something_acts_on_each() -> None:
    acting = acting_names()
    known = {*IN_CONFIG, *COMPARED, *(f"vllm_{name}" for name in BY_PREFIX)}
    idle = [name for name in OPTIONS if name not in acting and name not in known]
    assert not idle, f"parsed, and read by nothing: {idle}"


def test_the_exceptions_are_read_where_they_say() -> None:
    assert all(name in names_in(PACKAGE / file) for name, file in IN_CONFIG.items())
    assert set(BY_PREFIX) <= names_in(PACKAGE / SAMPLER)
    checks = ("preflight.py", "devices.py")
    assert set(COMPARED) <= set().union(*(names_in(PACKAGE / "run/checks" / file) for file in checks))
