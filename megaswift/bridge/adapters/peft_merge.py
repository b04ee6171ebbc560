"""Merges adapters with PEFT itself: those that are not LoRA, and those of models of no supported family.

Unlike `merge`, which streams, this builds the model: in float32, in the memory of one process. Each
tensor is rounded once, to the dtype that it had.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaswift.bridge.adapters.fit import check_adapter_sizes, load_whole_adapter
from megaswift.bridge.adapters.peft_config import train_type_for_peft_type
from megaswift.bridge.hf.finite import all_values_finite, warn_non_finite_written
from megaswift.bridge.hf.loading_report import LOADING_INFO, check_all_weights_loaded
from megaswift.bridge.hf.model_folder import (
    persistent_buffers,
    tensors_by_disk_name,
    tied_tensors,
    write_transformers_folder,
)
from megaswift.bridge.scalar_head import NEW
from megaswift.bridge.untied_head import untie_adapted_modules, untied_config
from megaswift.data.tokenizer import load_tokenizer, score_padding_token
from megaswift.errors import Problem, UserError, WeightsError, first_line
from megaswift.folders.adapter import adapter_peft_type_or_lora, is_reward_model_adapter
from megaswift.models.family import FAMILIES, read_config_json
from megaswift.models.quantized_training import PLAIN, quant_method
from megaswift.models.scalar_head import config_with_scalar_head, with_pad_token_id
from megaswift.models.vision import has_vision_tower

REFUSALS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, NotImplementedError)
"""What transformers and PEFT raise for what they cannot load or merge."""


def streaming_merge_unsupported(home: Path, adapter: Path) -> bool:
    """Whether the streaming merge does not support these weights or these adapters."""
    return adapter_peft_type_or_lora(adapter) != "lora" or str(read_config_json(home).get("model_type")) not in FAMILIES


def merge_with_peft(base: Path, adapter: Path, target: Path, max_shard_bytes: int, overwrite: bool) -> Path:
    """`target`: the model in `base`, a Hugging Face folder, with the adapters merged in. It appears whole or not at
    all."""
    kind = adapter_peft_type_or_lora(adapter)
    quantized = quant_method(read_config_json(base))
    if not train_type_for_peft_type(kind):
        raise WeightsError(Problem(str(adapter), f"is a {kind.upper()} adapter, which is not supported"))
    if quantized is not None:
        raise WeightsError(
            Problem(str(base), f"has quantized weights ({quantized}); adapters cannot be merged into them", PLAIN)
        )
    try:
        merged, tied = _merged(base, adapter)
    except UserError:
        raise
    except REFUSALS as error:
        raise WeightsError(Problem(f"{adapter} on {base}", f"PEFT cannot merge it: {first_line(error)}")) from None
    tensors = {**dict(merged.named_parameters(remove_duplicate=False)), **persistent_buffers(merged)}
    config: dict[str, Any] | None = None
    if is_reward_model_adapter(adapter):
        config = config_with_tokenizer_pad_token_id(config_with_scalar_head(read_config_json(base)), base)
    if all(torch.equal(tensors[name], tensors[first]) for name, first in tied.items()):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    else:
        config = untied_config(config or read_config_json(base))
    stored = tensors_by_disk_name(merged, {n: t.detach() for n, t in tensors.items()})
    write_transformers_folder(target, stored, base, max_shard_bytes, overwrite, config)
    warn_non_finite_written(target, [name for name, tensor in stored.items() if not all_values_finite(tensor)])
    return target


def config_with_tokenizer_pad_token_id(config: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The config.json of a reward model whose tokenizer lies in `home`: transformers reads a row's score at its last
    token."""
    tokenizer = load_tokenizer(home, False, "put the tokenizer's files into the base model's folder")
    return with_pad_token_id(config, score_padding_token(tokenizer, config))


def _merged(base: Path, adapter: Path) -> tuple[Any, dict[str, str]]:
    """The model, and which of its tensors were one with another before: adapters on one of the two part them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto: Any = AutoModelForImageTextToText if has_vision_tower(read_config_json(base)) else AutoModelForCausalLM
    auto, how = (
        (AutoModelForSequenceClassification, {"num_labels": 1}) if is_reward_model_adapter(adapter) else (auto, {})
    )
    model, loading_info = auto.from_pretrained(base, dtype=torch.float32, use_safetensors=True, **how, **LOADING_INFO)
    check_all_weights_loaded(str(base), loading_info, new=(NEW,) if how else ())
    check_adapter_sizes(model, adapter, str(base))
    tied = tied_tensors(model)
    with warnings.catch_warnings():
        # PEFT would merge an adapter on one of two tied modules into both, and warns of it.
        warnings.filterwarnings("ignore", "Model with .tie_word_embeddings=True.")
        adapted = load_whole_adapter(model, adapter)
        untie_adapted_modules(adapted)
        return adapted.merge_and_unload(), tied
