"""accelerate's settings of model parallelism, `megatron_lm_config` and `parallelism_config`, as options of the run.
Names and meanings: accelerate 1.15.

Owns the two tables. Settings of one process kind each, DeepSpeed and FSDP, are `accelerate_launch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megaswift.errors import Problem
from megaswift.options.sources import GivenOptionValue

MEGATRON = "ACCELERATE_USE_MEGATRON_LM"
PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
MEGATRON_PREFIX = "MEGATRON_LM_"
PARALLELISM_PREFIX = "PARALLELISM_CONFIG_"
PREFIXES = {"megatron_lm_config": MEGATRON_PREFIX, "parallelism_config": PARALLELISM_PREFIX}
"""Section of a file: the prefix of its variables; keys of the section may have it in lower case."""
OPTIONS_OF_MEGATRON = {
    "TP_DEGREE": "tensor_parallel_size",
    "PP_DEGREE": "pipeline_parallel_size",
    "NUM_MICRO_BATCHES": "gradient_accumulation_steps",
    "SEQUENCE_PARALLELISM": "sequence_parallel",
    "CONTEXT_PARALLEL_SIZE": "context_parallel_size",
    "EXPERT_MODEL_PARALLEL_SIZE": "expert_parallel_size",
    "EXPERT_TENSOR_PARALLEL_SIZE": "expert_tensor_parallel_size",
    "DECODER_LAST_PIPELINE_NUM_LAYERS": "last_stage_layers",
    "RECOMPUTE_METHOD": "recompute_method",
    "RECOMPUTE_NUM_LAYERS": "recompute_num_layers",
    "RECOMPUTE_GRANULARITY": "recompute_granularity",
    "USE_DISTRIBUTED_OPTIMIZER": "distributed_optimizer",
    "OPTIMIZER_CPU_OFFLOAD": "optimizer_cpu_offload",
    "USE_PRECISION_AWARE_OPTIMIZER": "precision_aware_optimizer",
    "NO_SAVE_OPTIM": "save_only_model",
    "GRADIENT_CLIPPING": "max_grad_norm",
    "ATTENTION_BACKEND": "attn_impl",
}
"""Without the prefix: the option. What is off, unset or 1 says nothing, but for `SAYS_WHEN_OFF`."""
SAYS_WHEN_OFF = ("SEQUENCE_PARALLELISM", "USE_DISTRIBUTED_OPTIMIZER", "GRADIENT_CLIPPING")
SETTLED_OF_MEGATRON = {
    "NO_LOAD_OPTIM": "a resumed run loads the optimizer's states; --model DIR starts from weights",
    "OVERLAP_CPU_OPTIMIZER_D2H_H2D": "copies of an offloaded optimizer are not overlapped",
    "EOD_MASK_LOSS": "loss masks follow the rows",
    "ATTENTION_DROPOUT": "config.json sets it",
    "HIDDEN_DROPOUT": "config.json sets it",
    "ATTENTION_SOFTMAX_IN_FP32": "softmax is computed in float32",
    "CALCULATE_PER_TOKEN_LOSS": "the loss is a mean over the label tokens of the global batch",
    "USE_ROTARY_POSITION_EMBEDDINGS": "config.json sets it",
}
"""What changes nothing here, and why."""
QUIET = ("ATTENTION_SOFTMAX_IN_FP32", "CALCULATE_PER_TOKEN_LOSS", "USE_ROTARY_POSITION_EMBEDDINGS")
"""Those that ask for what is so anyway."""
SIZES = {
    "TP_SIZE": "tensor_parallel_size",
    "CP_SIZE": "context_parallel_size",
    "SP_SIZE": "context_parallel_size",
}
"""Sizes in `parallelism_config`; a group of sequence parallelism splits sequences as context parallelism does here."""
_OFF = ("", "none", "no", "false", "0", "1")


def model_parallel_options(environ: Mapping[str, str]) -> Iterator[GivenOptionValue]:
    """The options that stand in both sections."""
    if _on(environ, MEGATRON):
        yield GivenOptionValue("engine", "megatron", "accelerate's distributed_type MEGATRON_LM")
        yield from _of_megatron(environ)
    if _on(environ, PARALLELISM):
        for key, option in SIZES.items():
            if (size := _size(environ, key)) > 1:
                yield GivenOptionValue(option, size, f"accelerate's {PARALLELISM_PREFIX.lower()}{key.lower()} {size}")
        if not splits_model(environ) and (shards := _size(environ, "DP_SHARD_SIZE")) > 1:
            word = "hybrid_shard" if _size(environ, "DP_REPLICATE_SIZE") > 1 else "full_shard"
            label = f"accelerate's {PARALLELISM_PREFIX.lower()}dp_shard_size {shards}"
            yield GivenOptionValue("fsdp", [word], label)


def _of_megatron(environ: Mapping[str, str]) -> Iterator[GivenOptionValue]:
    recomputes = environ.get(f"{MEGATRON_PREFIX}RECOMPUTE_GRANULARITY", "none").lower() not in _OFF
    if _on(environ, f"{MEGATRON_PREFIX}RECOMPUTE_ACTIVATIONS") and not recomputes:
        label = "accelerate's megatron_lm_recompute_activations"
        yield GivenOptionValue("recompute_granularity", "selective", label)
    for key, option in OPTIONS_OF_MEGATRON.items():
        text = environ.get(MEGATRON_PREFIX + key, "none").strip().lower()
        if text in ("", "none") or (text in _OFF and key not in SAYS_WHEN_OFF):
            continue
        if key == "SEQUENCE_PARALLELISM" and environ.get(f"{MEGATRON_PREFIX}TP_DEGREE", "1") == "1":
            continue
        yield GivenOptionValue(option, _typed(text), f"accelerate's {MEGATRON_PREFIX.lower()}{key.lower()} {text}")


def splits_model(environ: Mapping[str, str]) -> bool:
    """Whether tensors or sequences are split, which the native engine does, and FSDP does not here."""
    return _on(environ, PARALLELISM) and any(_size(environ, key) > 1 for key in SIZES)


def model_parallel_notices(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each setting that something else determines here."""
    if _on(environ, MEGATRON):
        for key, why in SETTLED_OF_MEGATRON.items():
            value = environ.get(MEGATRON_PREFIX + key, "none").lower()
            asks = value in ("false", "no") if key in QUIET else value not in ("", "none", "no", "false")
            if asks:
                yield f"accelerate's {MEGATRON_PREFIX.lower()}{key.lower()} {value} has no effect: {why}"
    if splits_model(environ) and any(_size(environ, f"DP_{key}_SIZE") > 1 for key in ("SHARD", "REPLICATE")):
        yield (
            "accelerate's data-parallel sizes have no effect: the processes that tensor and context parallelism leave "
            "are data-parallel, and the distributed optimizer shards its states over them"
        )


def refused_model_parallelism(environ: Mapping[str, str]) -> Iterator[Problem]:
    """What cannot be followed."""
    if _on(environ, MEGATRON) and _on(environ, f"{MEGATRON_PREFIX}USE_CUSTOM_FSDP"):
        rule = "is not supported: the native engine shards optimizer states, not weights"
        yield Problem("accelerate's megatron_lm_use_custom_fsdp", rule, "leave it out, or use distributed_type: FSDP")
    sizes = [key for key in ("CP_SIZE", "SP_SIZE") if _on(environ, PARALLELISM) and _size(environ, key) > 1]
    if len(sizes) > 1:
        rule = "conflicts with parallelism_config_cp_size: both split sequences"
        yield Problem("accelerate's parallelism_config_sp_size", rule, "keep one of the two")
    for prefix, flag in ((MEGATRON_PREFIX, MEGATRON), (PARALLELISM_PREFIX, PARALLELISM)):
        for name, text in environ.items() if _on(environ, flag) else ():
            key = name.removeprefix(prefix)
            number = name.startswith(prefix) and key.endswith(("_SIZE", "_DEGREE", "_LAYERS", "_BATCHES"))
            if number and text.lower() not in ("", "none") and not text.isdigit():
                yield Problem(f"accelerate's {name.lower()} {text}", "must be a whole number", "1")


def variables_of_section(name: str, section: Mapping[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` sets for a section of its file."""
    prefix = PREFIXES[name]
    return {
        prefix + key.upper().removeprefix(prefix): str(value) for key, value in section.items() if value is not None
    }


def unknown_keys(name: str, section: Mapping[str, Any]) -> list[str]:
    """Keys of a section that are read nowhere."""
    known = (
        (*OPTIONS_OF_MEGATRON, *SETTLED_OF_MEGATRON, "RECOMPUTE_ACTIVATIONS", "USE_CUSTOM_FSDP")
        if name == "megatron_lm_config"
        else (*SIZES, *PARALLELISM_SETTLED)
    )
    return [key for key in section if key.upper().removeprefix(PREFIXES[name]) not in known]


PARALLELISM_SETTLED = (
    *("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "CP_BACKEND", "SP_BACKEND", "CP_COMM_STRATEGY", "SP_SEQ_LENGTH"),
    *("SP_SEQ_LENGTH_IS_VARIABLE", "SP_ATTN_IMPLEMENTATION"),
)
"""How accelerate's own engines do it."""


def _typed(text: str) -> Any:
    if text in ("true", "yes", "false", "no"):
        return text in ("true", "yes")
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _size(environ: Mapping[str, str], key: str) -> int:
    text = environ.get(PARALLELISM_PREFIX + key, "1")
    return int(text) if text.isdigit() else 1


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("true", "1")
