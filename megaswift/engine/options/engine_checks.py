"""Determines the engine of a configuration, and rejects options that apply only to another engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaswift.bridge.adapters.options.methods import METHODS
from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption
from megaswift.config.sections import OPTIONS, Sections
from megaswift.engine.options.engine import FSDP_STRATEGIES, NOTHING_WRAPPED, ZERO
from megaswift.engine.options.optimizer import EVERYWHERE, is_elementwise_plugin
from megaswift.engine.options.zero_file import (
    FilledDeepspeedConfig,
    deepspeed_auto_values,
    deepspeed_label,
    deepspeed_preset,
    fill_deepspeed_auto,
    matching_deepspeed_preset,
    read_deepspeed_json,
)
from megaswift.engine.options.zero_keys import READ_AHEAD_ON_A_DRIVE, offload_parts_on_a_drive
from megaswift.errors import ConfigError
from megaswift.options.option import but_not, one_of

NATIVE = "megatron"
AUTO = "auto"
AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)
FSDP_ONLY = tuple(name for name, o in OPTIONS.items() if o.only_with.get("engine") == one_of("fsdp2"))
TORCH_ONLY = tuple(
    name
    for name, o in OPTIONS.items()
    if o.only_with.get("engine") == but_not("megatron") and o.section != "quantization"
)
"""Options that only torch engines have; giving one selects such an engine."""
_IMPLY_TORCH = {*TORCH_ONLY, "train_type", "quantization_bit", "optimizer", "attn_impl"}
"""Options of which some values, where given, only torch engines serve."""
VISION_ONLY = tuple(name for name, o in OPTIONS.items() if "vision_model" in o.only_with)
READS = ("engine", "deepspeed", "use_fsdp", "fsdp", "fsdp_config")
"""Options that name an engine, the last four by being given."""


def requested_engine(c: Sections) -> str:
    """The requested engine, by name or by an option that implies one."""
    if "engine" in c.given:
        return c.engine.engine
    if c.engine.deepspeed is not None:
        return deepspeed_preset_of_option(c.engine.deepspeed) or "zero2"
    if c.engine.use_fsdp or c.engine.fsdp or c.engine.fsdp_config:
        return "fsdp2"
    return AUTO if first_given_torch_only_option(c) else c.engine.engine


def is_engine_open(c: Sections) -> bool:
    """Whether no option names or implies an engine, so that the default may give way to one that serves the run."""
    return not uses_model_parallelism(c) and not {*READS} & c.given


def first_given_torch_only_option(c: Sections) -> str:
    """The first given option that only torch engines serve, where the engine is open; else the empty string."""
    if not is_engine_open(c) or not c.given & _IMPLY_TORCH:
        return ""
    values = {
        **{name: c.value(name) not in OPTIONS[name].neutral for name in TORCH_ONLY if name in c.given},
        "train_type": c.model.train_type in METHODS,
        "quantization_bit": c.model.train_type == "lora" and c.quantization.quantization_bit is not None,
        "optimizer": c.optim.optimizer not in EVERYWHERE and not is_elementwise_plugin(c.optim.optimizer),
        "attn_impl": c.model.attn_impl in ("flex", "flash_3"),
    }
    return next((name for name, wanted in values.items() if wanted and name in c.given), "")


def deepspeed_preset_of_option(deepspeed: str) -> str:
    """What `--deepspeed` names: a preset, or a file that amounts to one; the empty string for a file that cannot be
    read, which `filled_deepspeed_config` reports."""
    if deepspeed in ZERO:
        return deepspeed
    try:
        return matching_deepspeed_preset(read_deepspeed_json(deepspeed)) or "zero2"
    except ConfigError:
        return ""


def drive_parts_of_option(deepspeed: str | None) -> list[str]:
    """Which of "optimizer" and "param" the file of `--deepspeed` keeps on a drive; none for a file that cannot be
    read."""
    if deepspeed is None or deepspeed in ZERO:
        return []
    try:
        return offload_parts_on_a_drive(read_deepspeed_json(deepspeed))
    except ConfigError:
        return []


def filled_deepspeed_config(c: Sections, world: int, dtype: str, hidden_size: int) -> FilledDeepspeedConfig:
    """DeepSpeed's configuration of a run in this precision, without "auto", and what is wrong with the user's file."""
    named = c.engine.deepspeed
    own = None if named is None or named in ZERO else named
    label = "--deepspeed" if own is None else deepspeed_label(own)
    return fill_deepspeed_auto(
        deepspeed_preset(requested_engine(c)) if own is None else read_deepspeed_json(own),
        deepspeed_auto_values(c, world, dtype, hidden_size),
        label,
    )


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do."""

    family_tables: bool = False
    """Builds the model from the tables of `families/`, not from transformers' classes."""
    model_parallel: bool = False
    """Splits the model over ranks along other axes than data parallelism."""
    transformer_engine: bool = False
    """May use Transformer Engine's layers."""
    sharded_checkpoints: bool = False
    """Writes Megatron-Core's sharded checkpoints."""
    expert_adapters: bool = False
    """Adapters go into experts too."""
    merges_quantized: bool = False
    """Merges adapters into weights in few bits for a sampler without rounding them again."""
    vision: bool = False
    """Trains vision-language models."""


_MEGATRON = EngineCapabilities(
    family_tables=True,
    model_parallel=True,
    transformer_engine=True,
    sharded_checkpoints=True,
    expert_adapters=True,
    merges_quantized=True,
)
_TORCH_ENGINE = EngineCapabilities(vision=True)
CAPABILITIES: dict[str, EngineCapabilities] = {NATIVE: _MEGATRON}
"""By engine, where they are not those of the engines on transformers' models."""


def capabilities_of(c: Sections) -> EngineCapabilities:
    """What the engine of a run can do."""
    return CAPABILITIES.get(requested_engine(c), _TORCH_ENGINE)


def uses_model_parallelism(c: Sections) -> bool:
    """Whether any parallelism other than data parallelism is requested."""
    return any(c.value(name) > 1 for name in AXES)


def _names_torch_engine(c: Sections) -> bool:
    return requested_engine(c) not in (NATIVE, AUTO)


def _fsdp_beside_deepspeed(c: Sections) -> bool:
    """Whether options of FSDP stand beside DeepSpeed, and no engine is named."""
    return c.engine.deepspeed is not None and "engine" not in c.given and bool({*FSDP_ONLY, "use_fsdp"} & c.given)


def _as_save_safetensors(c: Sections) -> bool:
    """Whether the export was switched off by `save_safetensors false`: Megatron checkpoints, no Hugging Face files."""
    typed = c.typed.get("export_hf")
    return typed is not None and "save_safetensors" in typed.spelling.replace("-", "_")


def _is_no_shard(c: Sections) -> bool:
    """Whether a sharding strategy of FSDP, and not an engine's name, selected ddp."""
    typed = c.typed.get("engine")
    name = typed.spelling.split(" ")[-1] if typed is not None else ""
    return c.engine.engine == "ddp" and ("fsdp" in name or "shard" in name)


def engine_notices(c: Sections) -> Iterator[str]:
    """What a sharding strategy that shards nothing runs as, and what of a DeepSpeed file is not as written."""
    if _is_no_shard(c):
        yield (
            f"{c.typed['engine'].label}: runs as --engine ddp: each process keeps all weights, gradients and optimizer "
            "states; --fsdp full_shard divides them among the processes"
        )
    named = c.engine.deepspeed
    if named is None or "param" not in drive_parts_of_option(named):
        return
    zero = read_deepspeed_json(named)["zero_optimization"]
    if keys := [f'"{key}"' for key in READ_AHEAD_ON_A_DRIVE if zero.get(key)]:
        yield (
            f"{deepspeed_label(named)}: {' and '.join(keys)}: 0 is used, because weights are on a drive "
            "(offload_param): they are read when a module needs them"
        )


def engine_of_options(c: Sections) -> str:
    """Returns the engine whose options a configuration may use. FSDP's options outweigh DeepSpeed's."""
    return "fsdp2" if _fsdp_beside_deepspeed(c) else requested_engine(c)


def engine_texts(c: Sections) -> dict[str, str]:
    """Returns the texts that fill `{engine}`, `{to_megatron}` and `{to_fsdp2}` in a rule's reason or fix."""
    to_megatron = "--engine megatron"
    if "deepspeed" in c.given:
        to_megatron = "use --engine megatron without --deepspeed"
    elif {*READS[1:]} & c.given:
        to_megatron = "use --engine megatron without the options of FSDP"
    to_fsdp2 = "--engine fsdp2" if c.engine.deepspeed is None else "use --engine fsdp2 instead of --deepspeed"
    return {"engine": requested_engine(c), "to_megatron": to_megatron, "to_fsdp2": to_fsdp2}


ENGINE_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "fsdp_transformer_layer_cls_to_wrap",
        ("engine", "use_fsdp", "fsdp", "fsdp_config"),
        _is_no_shard,
        NOTHING_WRAPPED,
        "--fsdp full_shard",
        notice=True,
    ),
    IgnoredOption(
        "deepspeed",
        ("engine", "use_fsdp", *FSDP_ONLY),
        _fsdp_beside_deepspeed,
        "the FSDP options select engine fsdp2, which shards weights, gradients and optimizer",
        "keep either DeepSpeed or FSDP",
        notice=True,
    ),
)

ENGINE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("deepspeed", "engine"),
        lambda c: (
            c.engine.deepspeed is not None
            and deepspeed_preset_of_option(c.engine.deepspeed) not in ("", requested_engine(c))
        ),
        "conflicts with engine {engine}",
        ONE_OF,
    ),
    ConflictingOptions(
        ("use_fsdp", "engine"),
        lambda c: c.engine.use_fsdp and requested_engine(c) != "fsdp2" and not _fsdp_beside_deepspeed(c),
        "conflicts with engine {engine}",
        ONE_OF,
    ),
    ConflictingOptions(
        ("fsdp",),
        lambda c: len({*FSDP_STRATEGIES} & set(c.engine.fsdp)) > 1,
        "has more than one sharding strategy",
        "--fsdp full_shard",
    ),
    ConflictingOptions(
        ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
        lambda c: c.engine.fsdp_min_num_params is not None and c.engine.fsdp_transformer_layer_cls_to_wrap,
        "conflicts with fsdp_transformer_layer_cls_to_wrap: the units of fsdp2 are chosen by size or by class",
        ONE_OF,
    ),
    ConflictingOptions(
        ("recompute_granularity", *READS),
        lambda c: _names_torch_engine(c) and c.model.recompute_granularity == "selective",
        "needs the native engine; torch engines recompute whole layers",
        "--recompute_granularity full",
    ),
    ConflictingOptions(
        ("export_hf", *READS),
        lambda c: _as_save_safetensors(c) and requested_engine(c) != NATIVE,
        "would leave the run without weights: torch engines write safetensors only, no pickled files",
        "leave it out; on the native engine it keeps Megatron checkpoints only",
    ),
    ConflictingOptions(
        ("export_hf", "train_type", "save_only_model"),
        lambda c: _as_save_safetensors(c) and (c.model.train_type != "full" or c.checkpoint.save_only_model),
        "adapters and checkpoints of weights alone are written as safetensors",
        "leave it out",
    ),
    ConflictingOptions(
        ("freeze_llm", "freeze_vit", "freeze_aligner"),
        lambda c: c.model.freeze_llm and c.model.freeze_vit is not False and c.model.freeze_aligner is not False,
        "leaves nothing to train: freeze_vit and freeze_aligner are true by default",
        "--freeze_aligner false",
    ),
)
