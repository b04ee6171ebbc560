"""Builds the transformers model of a run: architecture, weights, adapters, frozen parameters."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from logging import LogRecord, getLogger
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from megaswift.bridge.adapters.fit import check_adapter_sizes, load_whole_adapter
from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.hf.bits import disable_4bit_cpu_repacking
from megaswift.bridge.hf.loading_report import LOADING_INFO, check_all_weights_loaded, warn_of_unused_weights
from megaswift.bridge.initial_weights import initial_lora_a
from megaswift.bridge.new_head import encoder_head_names, new_head_weight
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.torch import document_attention, encoder_parts, meta_init, quantized_weights, vision_parts
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.layer_classes import decoder_layer_class_names
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.trainable_patterns import nothing_trains_problem, unmatched_pattern_problem
from megaswift.errors import ConfigError, Problem, WeightsError, first_line
from megaswift.folders.adapter import TASK_TYPES
from megaswift.models.any_model import spec_from_family
from megaswift.models.encoders import is_encoder
from megaswift.models.heads import NEW, head_names
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE, ModelSpec
from megaswift.models.vision import has_vision_tower

RECOMPILES = 64
"""Shapes and layers of one class that may be compiled before torch falls back to eager; its own limit is 8."""
ATTENTION = {
    "auto": None,
    "sdpa": "sdpa",
    "flash": "flash_attention_2",
    "flash_3": "flash_attention_3",
    "unfused": "eager",
    "flex": "flex_attention",
}
"""`--attn_impl` to transformers' name."""


@dataclass(frozen=True)
class ModelBuild:
    """The options by which a model is built, and adapted."""

    model: ModelConfig
    lora: LoraConfig
    seed: int
    peft_config: Any = None
    """PEFT's configuration of new adapters; None: there are none, or those of `lora.adapters`."""


def build_model(
    folder: Path,
    options: ModelConfig,
    seed: int,
    weights: bool,
    spec: ModelSpec,
    further: Mapping[str, Any],
    empty: bool,
) -> nn.Module:
    """The model in float32 on the CPU, with the folder's weights (and `quantized.loading`), random ones (all ranks the
    same), or empty."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # one a rank
    getLogger("transformers.modeling_utils").addFilter(_of_use)
    trust = options.trust_remote_code
    attention = attention_to_load_with(options, spec.hf_config)
    arguments: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    auto = _auto_class(spec)
    try:
        if weights:
            arguments |= {"dtype": torch.float32, "trust_remote_code": trust, "use_safetensors": True, **further}
            model = disable_4bit_cpu_repacking(_loaded(auto, folder, arguments, seed, spec))
            return quantized_weights.dequantized_model_to_float32(_with_named_outputs(model), folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust, **_labels(spec))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            with meta_init.init_empty_weights() if empty else nullcontext():
                model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust, **arguments)
                _refuse_other_head(model, spec, folder)
                return _with_named_outputs(model)
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        # what transformers raises for a folder or an option that it cannot serve
        reason = first_line(error)
        raise WeightsError(Problem(f"--model {folder}", f"transformers cannot load it: {reason}")) from None


def _auto_class(spec: ModelSpec) -> Any:
    """The class of transformers that loads a model with this head."""
    import transformers

    classes: dict[str, Any] = {
        SCORE: transformers.AutoModelForSequenceClassification,
        TOKEN_SCORE: transformers.AutoModelForTokenClassification,
        NO_HEAD: transformers.AutoModel,
    }
    if spec.head in classes:
        return classes[spec.head]
    tower = has_vision_tower(spec.hf_config)
    return transformers.AutoModelForImageTextToText if tower else transformers.AutoModelForCausalLM


def _labels(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of transformers that give a classifier its labels."""
    return {"num_labels": spec.labels} if spec.scored else {}


def _with_named_outputs(model: nn.Module) -> nn.Module:
    """Let a model and its parts return outputs with names, also where `return_dict` of config.json is false."""
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "return_dict"):
            config.return_dict = True
    return model


def attention_to_load_with(cfg: ModelConfig, hf_config: Mapping[str, Any]) -> str | None:
    """transformers' name; None: the model's own choice. transformers loads no model with soft caps or sinks with sdpa,
    which `set_per_document_attention` gives it afterwards."""
    ours = hf_config.get("model_type") in document_attention.SOFTCAPS_AND_SINKS and "auto_map" not in hf_config
    return "eager" if ours and cfg.attn_impl == "sdpa" and not cfg.torch_compile else ATTENTION[cfg.attn_impl]


def _of_use(record: LogRecord) -> bool:
    """All but the report of what was loaded, which is checked here, and the note that rows with padding came without a
    mask: padding is behind a row's end, where nothing that is scored sees it."""
    return not any(words in record.getMessage() for words in ("passing in an `attention_mask`", "LOAD REPORT"))


def _loaded(auto: Any, folder: Path, arguments: dict[str, Any], seed: int, spec: ModelSpec) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # from which transformers draws what an encoder's folder lacks
        model, loading_info = auto.from_pretrained(folder, **_labels(spec), **arguments, **LOADING_INFO)
    _refuse_other_head(model, spec, folder)
    encoder = is_encoder(spec.hf_config)
    new = encoder_head_names(model, loading_info["missing_keys"]) if encoder else head_names(spec)
    check_all_weights_loaded(f"--model {folder}", loading_info, new=new)
    warn_of_unused_weights(f"--model {folder}", loading_info["unexpected_keys"], spec.scored)
    if spec.scored and not encoder and NEW not in open_weights(folder).names():
        model.score.weight.data.copy_(new_head_weight(spec, seed))
        if spec.score_bias:
            model.score.bias.data.zero_()
    return model


def _refuse_other_head(model: nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Raise WeightsError for a classifier of transformers whose head is not a linear layer `score`."""
    if spec.scored and not is_encoder(spec.hf_config) and not isinstance(getattr(model, "score", None), nn.Linear):
        rule = f"is a {type(model).__name__} in transformers, whose head is no linear layer `score`"
        raise WeightsError(
            Problem(f"--model {folder}", rule, "use a decoder, such as Qwen3, or an encoder, such as BERT")
        )


def add_peft(model: Any, build: ModelBuild) -> nn.Module:
    """PEFT's adapters on a model: those of `--adapters`, or new ones from the seed."""
    import peft

    lora = build.lora
    train_type = build.model.train_type
    if lora.adapters is not None:
        folder = Path(lora.adapters)
        check_adapter_sizes(model, folder, str(build.model.model))
        return load_whole_adapter(model, folder, is_trainable=True)
    options = copy.deepcopy(build.peft_config)  # PEFT writes into it
    if (excluded := vision_parts.frozen_modules_pattern(model, build.model)) is not None:
        if not hasattr(options, "exclude_modules"):
            raise ConfigError(
                Problem(
                    f"--train_type {train_type}",
                    "cannot exclude the frozen parts of a vision-language model: PEFT has no exclude_modules for it",
                    "--train_type lora",
                )
            )
        options.exclude_modules = excluded
    encoder = is_encoder(model.config.to_dict())
    if encoder or (options.task_type == TASK_TYPES[TOKEN_SCORE] and options.target_modules == "all-linear"):
        # PEFT leaves the head out of these for classifiers of texts alone, and then finds that it trains whole
        if not hasattr(options, "exclude_modules"):
            what = "an encoder" if encoder else "a classifier of tokens"
            rule = f"cannot leave out the head of {what}: PEFT has no exclude_modules for it"
            raise ConfigError(Problem(f"--train_type {train_type}", rule, "--train_type lora"))
        if encoder:
            encoder_parts.adapt_around_head(options, model)
        else:
            options.exclude_modules = ["score"]
    if options.target_modules == "all-linear":
        options.target_modules = quantized_weights.gptq_awq_layer_names(model) or options.target_modules
    with torch.random.fork_rng():
        torch.manual_seed(build.seed)
        try:
            adapted = peft.get_peft_model(model, options)
        except ValueError as error:  # targets that match nothing; dropout and DoRA on parameters
            name = "parameters" if lora.target_parameters else "modules"
            targets = " ".join(lora.target_parameters or lora.target_modules)
            label = f"--train_type {train_type}"
            if train_type in ("lora", "qlora"):
                label = f"--target_{name} {targets}"
            commas = [word for word in lora.target_modules if "," in word]
            fix = f"--target_modules {' '.join(commas).replace(',', ' ')}" if commas else "--target_modules all-linear"
            raise ConfigError(
                Problem(label, str(error).splitlines()[0], fix if label.startswith("--target_modules") else "")
            ) from None
    if lora.target_parameters and not adapted.base_model.targeted_parameter_names:
        raise ConfigError(
            Problem(f"--target_parameters {' '.join(lora.target_parameters)}", "matches no parameter of this model")
        )
    if train_type in ("lora", "qlora") and lora.init_weights == "true":
        _fill_lora_a(adapted.get_base_model(), build.seed)
    return adapted


@torch.no_grad()
def _fill_lora_a(base: nn.Module, seed: int) -> None:
    """Fill an adapter as the native engine does: PEFT's numbers depend on the order of layers. Convolutions keep
    PEFT's."""
    for name, module in base.named_modules():
        a: Any = getattr(module, "lora_A", {})
        for half in a.values():
            if half.weight.dim() == 2:
                half.weight.copy_(initial_lora_a(f"{name}.lora_A.weight", tuple(half.weight.shape), seed))


def set_trainable_parameters_by_patterns(model: nn.Module, option: str, patterns: Sequence[str], trains: bool) -> None:
    """Parameters whose names match any pattern of this option train, or do not."""
    for pattern in patterns:
        matching = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        if not matching:
            raise ConfigError(unmatched_pattern_problem(option, pattern, [n for n, _ in model.named_parameters()][:4]))
        for parameter in matching:
            parameter.requires_grad_(trains)


def freeze_parts(model: nn.Module, cfg: ModelConfig) -> None:
    """Freezes what the options name; --trainable_parameters has the last word."""
    set_trainable_parameters_by_patterns(model, "freeze_parameters", cfg.freeze_parameters, False)
    vision_parts.freeze_vision_model_parts(model, cfg)
    set_trainable_parameters_by_patterns(model, "trainable_parameters", cfg.trainable_parameters, True)
    if cfg.freeze_parameters and not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(nothing_trains_problem(cfg.freeze_parameters))


def is_tested_class(spec: ModelSpec, model: Any) -> bool:
    """Return whether tests compare this transformers model with what is trained here: a family's, by transformers'
    code, with no field that its rules do not cover."""
    return spec_from_family(spec.hf_config) is not None and not document_attention.is_code_of_folder(model)


def build_model_for_wrapping(
    folder: Path, build: ModelBuild, weights: bool, spec: ModelSpec, further: Mapping[str, Any], empty: bool = False
) -> LossFieldsModel:
    """Everything that is done to a model before it is wrapped. `empty`: its parameters have no memory (`meta_init`)."""
    options = build.model
    model = build_model(folder, options, build.seed, weights, spec, further, empty)
    meta_init.meta_parameters_to_expanded_zeros(model)
    if options.use_liger:
        apply_liger(model)
    if is_encoder(spec.hf_config):
        encoder_parts.freeze_pooler(model, spec.head)
    else:
        document_attention.set_per_document_attention(model, options, is_tested_class(spec, model))
    freeze_parts(model, options)
    vision_parts.recompute_layers(model, options)
    if options.train_type != "full":
        model = add_peft(model, build)
    if options.torch_compile:
        compile_layers(model, decoder_layer_class_names(unwrap_peft_model(model)), options)
    return LossFieldsModel(model)


def compile_layers(model: nn.Module, classes: Collection[str], cfg: ModelConfig) -> int:
    """Compiles the `forward` of each module of these classes in place; returns how many there are.

    One graph serves all layers, and hooks do not break it: FSDP2's gathers and transformers' recomputation run outside
    of it, around the compiled code. No name changes, so checkpoints, adapters and exports are not affected. Each layer
    is compiled when it first runs.
    """
    limits: Any = importlib.import_module("torch._dynamo.config")
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILES)
    layers = [m for m in model.modules() if type(m).__name__ in classes]
    for layer in layers:
        _compile(layer, cfg)
    return len(layers)


def _compile(layer: Any, cfg: ModelConfig) -> None:
    uncompiled = getattr(type(layer).forward, "__wrapped__", None) if hasattr(layer, "gradient_checkpointing") else None
    plain = layer.forward if uncompiled is None else MethodType(uncompiled, layer)
    compiled = torch.compile(plain, backend=cfg.torch_compile_backend, mode=cfg.torch_compile_mode)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(compiled, **kwargs), *args)
        return compiled(*args, **kwargs)

    layer.forward = compiled if uncompiled is None else forward


def apply_liger(model: Any) -> None:
    """Patches `model`, and functions of its module in transformers. ConfigError where liger-kernel does not know the
    architecture."""
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = model.config.model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            Problem("--use_liger true", f"liger-kernel has no kernels for model_type {kind}", "--use_liger false")
        )
    patches._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
