"""Loads `--model` for generation: locates, places and loads it, with its adapters. Checks come first, so that errors
cost no time.

`load_config_tokenizer_and_processor` reads configuration and tokenizer; `load_model_and_prompt_device` reads weights.
transformers loads and accelerate dispatches; what is ours is the way from a checkpoint of training to transformers'
model, and saying what is wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift import log
from megaswift.bridge.hf import finite
from megaswift.bridge.hf.bits import bitsandbytes_config, disable_4bit_cpu_repacking
from megaswift.bridge.hf.loading_report import LOADING_INFO, check_all_weights_loaded
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.new_head import encoder_head_names
from megaswift.bridge.weight_source import open_checkpoint_weight_source
from megaswift.data.model_tokenizer import named_special_tokens, read_processor, read_tokenizer
from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.processor import Processor, image_support_problems
from megaswift.errors import ConfigError, Problem, UserError, WeightsError, first_line
from megaswift.families import FAMILIES
from megaswift.folders.checkpoint import find_checkpoint, find_intact_checkpoint
from megaswift.inference import device_placement
from megaswift.inference.adapters import check_adapters_fit, model_with_adapters
from megaswift.inference.device_placement import DeviceMap, ModuleSizes
from megaswift.inference.load_errors import transformers_errors_as_ours
from megaswift.inference.options import placement as devices
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from megaswift.inference.options.placement import DISK
from megaswift.inference.prechecks import locate_generation_model, require_package
from megaswift.models.encoders import is_encoder
from megaswift.models.family import read_config_json
from megaswift.models.rope_scaling import config_with_rope_scaling
from megaswift.models.vision import has_vision_tower

TEXT_ONLY = "this model accepts only text"


@dataclass(frozen=True)
class ModelConfigAndTokenizer:
    """All of a model but its weights."""

    folder: Path
    """config.json and tokenizer lie here; of a checkpoint, not the weights."""
    options: ModelLoadingOptions
    config: Any
    tokenizer: Any
    reader: Processor | str = TEXT_ONLY
    """What reads images; or why none are read."""
    auto_class: str = ""
    """transformers' class of a model that gives no text; empty: a language model."""
    lacks: tuple[str, ...] = ()
    """Beginnings of the names of weights that the folder need not have."""

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and answer together, where the model has a limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def generation(self) -> Any:
        """The model's own generation configuration."""
        from transformers import GenerationConfig

        if (self.folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(self.folder)
        return GenerationConfig.from_model_config(self.config)


def quiet_transformers() -> None:
    """Hides transformers' progress bars and developer notes; megaswift reports what is wrong."""
    from transformers.utils import logging

    log.quiet_libraries()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    getLogger("accelerate.big_modeling").setLevel(ERROR)  # says what the device map has said


def load_config_tokenizer_and_processor(
    options: ModelLoadingOptions, chat_template: str | None, max_length: int | None = None
) -> ModelConfigAndTokenizer:
    """Configuration and tokenizer, and everything that can be wrong without reading a weight.

    `max_length`: a --rope_scaling without a factor reaches so many positions.
    """
    folder = locate_generation_model(options)
    quiet_transformers()
    from transformers import AutoConfig

    with transformers_errors_as_ours(str(folder)):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    _writes(config, f"--model {options.model}")
    config = with_rope_scaling(config, folder, options.rope_scaling, max_length)
    if find_checkpoint(folder) is not None and hasattr(config, "quantization_config"):
        del config.quantization_config  # checkpoints hold the weights dequantized
    tokenizer = read_tokenizer(folder, options.trust_remote_code, chat_template)
    check_tokens_exist(tokenizer, options)
    reader = _reader(folder, options, chat_template)
    if isinstance(reader, Processor) and not tokenizer.chat_template:  # older models have it beside their processor
        tokenizer.chat_template = reader.tokenizer.chat_template
    return ModelConfigAndTokenizer(folder, options, config, tokenizer, reader)


def _reader(folder: Path, options: ModelLoadingOptions, chat_template: str | None) -> Processor | str:
    """A vision-language model's processor, tried on blank images; a reason where there is none, and text alone is
    answered."""
    if not has_vision_tower(read_config_json(folder)):
        return TEXT_ONLY
    if problems := image_support_problems(folder, f"--model {options.model}"):
        return f"{problems[0].what} {problems[0].rule}"
    try:
        processor = read_processor(folder, options.trust_remote_code, chat_template)
        return (
            processor
            if processor.tokenizer.chat_template and processor.kinds
            else "the model has no chat template to put them in"
        )
    except (UserError, RowError) as error:
        return (
            first_line(error) if isinstance(error, RowError) else f"{error.problems[0].what} {error.problems[0].rule}"
        )


def _writes(config: Any, flag: str) -> None:
    """WeightsError for an encoder: transformers lets it write, and only tells developers that it sees what is behind a
    token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    if config.model_type in MASKED and not config.is_encoder_decoder and getattr(config, "is_decoder", None) is False:
        raise WeightsError(
            Problem(
                flag,
                f"is an encoder ({config.model_type}), whose attention is not causal; it does not generate text",
                "use a causal language model, or --task_type embedding for vectors; for an encoder that can generate, "
                'set "is_decoder": true in config.json',
            )
        )


def _dtype(prepared: ModelConfigAndTokenizer) -> torch.dtype:
    wanted = prepared.options.torch_dtype
    own = getattr(prepared.config, "dtype", None) or getattr(prepared.config.get_text_config(), "dtype", None)
    if wanted != "auto":
        return getattr(torch, wanted)
    return own if isinstance(own, torch.dtype) else torch.float32


def _auto(prepared: ModelConfigAndTokenizer) -> Any:
    """transformers' class of models that answer; a vision-language model is asked by text alone."""
    if prepared.auto_class:
        import transformers

        return getattr(transformers, prepared.auto_class)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return (
        AutoModelForCausalLM if getattr(prepared.config, "vision_config", None) is None else AutoModelForImageTextToText
    )


def _skeleton(prepared: ModelConfigAndTokenizer, how: Mapping[str, Any]) -> Any:
    """transformers' model without weights."""
    trust = prepared.options.trust_remote_code
    with transformers_errors_as_ours(str(prepared.folder)), torch.device("meta"):
        model = _auto(prepared).from_config(prepared.config, trust_remote_code=trust, **how)
    model.tie_weights()
    return model


def model_without_weights(prepared: ModelConfigAndTokenizer) -> Any:
    """transformers' model on the meta device, to look at its modules."""
    return _skeleton(prepared, {"dtype": _dtype(prepared)})


def choose_and_log_device_map(prepared: ModelConfigAndTokenizer, options: PlacementOptions, model: Any) -> DeviceMap:
    """Each module's device; the table of them goes to the user."""
    # Place the modules: by the rule that --device_map names, or as the user's own map says.
    sizes = ModuleSizes(model, options.quantization_bit or device_placement.quantized_checkpoint_bits(prepared.config))
    requested = devices.parse_device_map(options.device_map)
    limits = devices.parse_max_memory(options.max_memory) if options.max_memory is not None else None
    assert not isinstance(requested, Problem) and not isinstance(limits, Problem), "the command line was checked"
    flag = f"--device_map {options.device_map}"
    placed = (
        device_placement.decide_device_map(sizes, requested, limits)
        if isinstance(requested, str)
        else device_placement.expand_user_device_map(sizes, requested, flag)
    )
    log.info(f"device map\n{device_placement.placement_table(sizes, placed)}")
    # Weights on disk need a folder, at least one computing device, and layers that are neither quantized nor merged.
    on_disk = [name or "the model" for name, device in placed.items() if device == DISK]
    if on_disk and options.offload_folder is None:
        count = log.count_text(len(on_disk), "module")
        what = f"no device has room for {count}" if isinstance(requested, str) else f"puts {count} on disk"
        shown = on_disk if len(on_disk) <= 3 else [*on_disk[:3], "..."]
        names = ", ".join(shown)
        raise ConfigError(
            Problem(
                flag,
                f"{what}: {names}",
                "use --offload_folder DIR to load them from disk in every step, a larger --max_memory, or "
                "--quantization_bit 4",
            )
        )
    if len(on_disk) == len(placed):
        raise ConfigError(
            Problem(
                flag,
                "places all layers on disk; at least one device must compute",
                "use a larger --max_memory",
            )
        )
    if on_disk and options.quantization_bit is not None:
        raise ConfigError(
            Problem(
                f"--quantization_bit {options.quantization_bit}",
                "cannot be combined with weights on disk",
                "use a larger --max_memory, or leave out --quantization_bit",
            )
        )
    if on_disk and prepared.options.merge_adapters:
        raise ConfigError(
            Problem(
                "--merge_adapters",
                "cannot be combined with weights on disk",
                "leave it out, or run megaswift export --merge_lora true first",
            )
        )
    return placed


def _quantization(prepared: ModelConfigAndTokenizer, options: PlacementOptions, dtype: torch.dtype) -> dict[str, Any]:
    bits = options.quantization_bit
    if bits is None:
        return {}
    stored = getattr(prepared.config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", "")
        raise ConfigError(
            Problem(f"--quantization_bit {bits}", f"the weights are already quantized ({method})", "leave it out")
        )
    return {"quantization_config": generation_bitsandbytes_config(options, dtype)}


def generation_bitsandbytes_config(options: PlacementOptions, dtype: torch.dtype) -> Any:
    """transformers' settings: NF4 or FP4 that computes in `dtype`, or LLM.int8()."""
    bits = options.quantization_bit
    assert bits is not None, "asked for with bits only"
    require_package("bitsandbytes", f"--quantization_bit {bits}")
    return bitsandbytes_config(bits, dtype, options.bnb_4bit_quant_type, options.bnb_4bit_use_double_quant)


class _Lazy:
    """A tensor of a checkpoint, read when transformers takes it. One at a time: the files' position is shared."""

    def __init__(self, source: WeightSource, name: str, lock: threading.Lock) -> None:
        self.source = source
        self.name = name
        self.lock = lock

    def __getitem__(self, where: Any) -> Tensor:
        assert where is ..., "transformers takes whole tensors"
        with self.lock:
            tensor = self.source.slice(self.name)
        finite.check_weights_finite([(self.name, tensor)])
        return tensor

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self.source.shape(self.name))

    def get_dtype(self) -> str:
        """As safetensors' slices have it."""
        return self.source.dtype_name(self.name)


def load_model_and_prompt_device(
    prepared: ModelConfigAndTokenizer, options: PlacementOptions
) -> tuple[Any, torch.device]:
    """(the model with its weights and adapters, where its prompts go)."""
    dtype = _dtype(prepared)
    attention = prepared.options.attn_impl
    how: dict[str, Any] = {"dtype": dtype} | ({} if attention == "auto" else {"attn_implementation": attention})
    quantized = _quantization(prepared, options, dtype)
    skeleton = _skeleton(prepared, how)
    check_adapters_fit(skeleton, prepared.options)
    placed = choose_and_log_device_map(prepared, options, skeleton)
    how |= {
        **quantized,
        "device_map": placed,
        "trust_remote_code": prepared.options.trust_remote_code,
        **LOADING_INFO,
    }
    checkpoint = find_intact_checkpoint(prepared.folder)
    if quantized and checkpoint is None:  # NaN does not survive in quantized weights
        finite.check_folder_weights_finite(prepared.folder)
    if (prepared.options.rope_scaling is not None or prepared.auto_class) and checkpoint is None:
        how["config"] = prepared.config
    if DISK in placed.values():
        how["offload_folder"] = options.offload_folder
    with transformers_errors_as_ours(str(prepared.options.model)):
        if checkpoint is None:
            loaded: Any = _auto(prepared).from_pretrained(prepared.folder, **how)
        else:
            source = open_checkpoint_weight_source(checkpoint)
            lock = threading.Lock()
            weights = {name: _Lazy(source, name, lock) for name in source.names()}
            loaded = type(skeleton).from_pretrained(None, config=prepared.config, state_dict=weights, **how)
            # from_pretrained looks for it beside files of weights only
            loaded[0].generation_config = prepared.generation
    model = disable_4bit_cpu_repacking(loaded[0])
    loading_info = loaded[1]
    model.config.return_dict = True
    lacking = {name for name in loading_info["missing_keys"] if name.startswith(prepared.lacks)}
    if prepared.lacks and is_encoder(prepared.config.to_dict()):
        lacking |= encoder_head_names(model, loading_info["missing_keys"])
    check_all_weights_loaded(str(prepared.options.model), loading_info, new=lacking)
    finite.check_weights_finite(model.named_parameters())
    if any(p.is_meta for p in model.parameters()) and prepared.config.model_type not in FAMILIES:
        device_placement.check_offloaded_forward_pass(
            model, device_placement.execution_device(placed), f"--device_map {options.device_map}"
        )
    return model_with_adapters(model, prepared.options, placed).eval(), device_placement.execution_device(placed)


# `--rope_scaling` and `--new_special_tokens` of `infer` and `deploy`.
#
# Owns the scaled configuration of a loaded model, and the check that the tokenizer has the tokens: rows of an embedding
# that no run has trained are not made.


def with_rope_scaling(config: Any, folder: Path, option: str | None, max_length: int | None) -> Any:
    """transformers' configuration with the scaling, as training with the same option has it."""
    if option is None:
        return config
    raw = read_config_json(folder)
    if has_vision_tower(raw):
        rule = "needs a language model; this is a vision-language model"
        raise ConfigError(Problem(f"--rope_scaling {option}", rule, "leave it out"))
    return type(config).from_dict(config_with_rope_scaling(raw, option, max_length))


def check_tokens_exist(tokenizer: Any, options: ModelLoadingOptions) -> None:
    """ConfigError where the tokenizer lacks one of the new special tokens."""
    known = tokenizer.get_vocab()
    lacking = [token for token in named_special_tokens(options.new_special_tokens) if token not in known]
    if lacking:
        raise ConfigError(
            Problem(
                f"--new_special_tokens {' '.join(lacking)}",
                f"the tokenizer of --model {options.model} lacks them: the model has no trained weights for them",
                "give the model that was trained with them: OUT/hf, or OUT/base_model with --adapters OUT/adapter",
            )
        )
