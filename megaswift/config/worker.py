"""What a process has from the launcher that started it: torchrun, `accelerate launch` (torchrun inside) or `deepspeed`.

Owns the names of their variables, the word that some add to the command line, and which wishes of accelerate's have no effect here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaswift.errors import ConfigError, Problem

IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Set by all three. (RANK and WORLD_SIZE alone do not say so: some clusters count machines with them; LOCAL_RANK alone is a library's.)"""
COUNTS = {"nproc_per_node": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "nnodes": ("GROUP_WORLD_SIZE", "CROSS_SIZE")}
"""Our option and what it is for torchrun, for DeepSpeed's launcher."""
ACCELERATE_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", "--engine zero2 or --deepspeed FILE"),
    "ACCELERATE_USE_FSDP": ("--use_fsdp", "--engine fsdp2"),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", "--tp and --pp"),
}
"""What accelerate says to its Accelerator class, which no run here makes; and our own options for the same."""


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    return all(name in environ for name in IDENTITY)


def started(option: str, environ: Mapping[str, str]) -> int | None:
    """How many the launcher started: processes on this machine (`nproc_per_node`), machines (`nnodes`). None where it does not say."""
    return next((int(environ[name]) for name in COUNTS[option] if name in environ), None)


def without_local_rank(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line without `--local_rank N`, which `deepspeed` puts first and which only repeats LOCAL_RANK.

    -1 is what scripts of transformers write for "no launcher". ConfigError where the two say different things.
    """
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--local_rank", "--local-rank"):
            kept.append(word)
            continue
        if not equals:
            value = left.pop(0) if left else ""
        real = environ["LOCAL_RANK"] if is_worker(environ) else "0"
        if value not in (real, "-1"):
            rule = f"the launcher has set LOCAL_RANK={real}" if is_worker(environ) else "no launcher started this process"
            raise ConfigError(Problem(f"{flag} {value}".rstrip(), rule, "leave it out: the launcher says it itself"))
    return kept


def accelerate_engines(environ: Mapping[str, str]) -> list[Problem]:
    """Engines asked of accelerate: it only starts the processes, so its settings for them would be dropped in silence."""
    rule = "accelerate only starts the processes; the engine and its settings are megaswift's own options"
    return [Problem(f"accelerate launch {flag}", rule, f"accelerate launch --multi_gpu ..., with {own} after the script")
            for name, (flag, own) in ACCELERATE_ENGINES.items() if environ.get(name, "").lower() in ("true", "1")]


def accelerate_notices(environ: Mapping[str, str], alone: bool, dtype_said: bool) -> list[str]:
    """What else accelerate was told without effect. `alone`: the run is this one process."""
    found = []
    precision = environ.get("ACCELERATE_MIXED_PRECISION")
    if precision not in (None, "no") and not dtype_said:
        found.append(f"accelerate's --mixed_precision {precision} has no effect; --torch_dtype says how the run computes")
    if precision is not None and alone and not is_worker(environ) and "MASTER_PORT" in environ:
        found.append("accelerate started one process, as it does with --cpu whatever --num_processes says; for several: "
                     "accelerate launch --multi_gpu (on a CPU too), or torchrun")
    return found
