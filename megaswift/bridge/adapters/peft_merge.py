"""Merges adapters with PEFT itself: adapters other than LoRA, and adapters of models outside the supported families.

Unlike `merge`, which streams, this loads the whole model in float32 into the memory of one process. Each merged tensor
is rounded once, to the dtype that it has on disk.
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
from megaswift.bridge.new_head import encoder_head_names
from megaswift.bridge.untied_head import untie_adapted_modules, untied_config
from megaswift.data.tokenizer import load_tokenizer, score_padding_token
from megaswift.errors import Problem, UserError, WeightsError, first_line
from megaswift.folders.adapter import adapter_peft_type_or_lora, classifier_head_of_adapter
from megaswift.models.encoders import is_encoder
from megaswift.models.family import FAMILIES, read_config_json
from megaswift.models.heads import BIAS, NEW, config_with_head, with_pad_token_id
from megaswift.models.quantized_training import PLAIN, quant_method
from megaswift.models.spec import NO_HEAD, TOKEN_SCORE
from megaswift.models.vision import has_vision_tower

REFUSALS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, NotImplementedError)
"""Errors that transformers and PEFT raise when they cannot load or merge something."""


def streaming_merge_unsupported(home: Path, adapter: Path) -> bool:
    """Return whether the streaming merge does not support these weights or these adapters."""
    return adapter_peft_type_or_lora(adapter) != "lora" or str(read_config_json(home).get("model_type")) not in FAMILIES


def merge_with_peft(base: Path, adapter: Path, target: Path, max_shard_bytes: int, overwrite: bool) -> Path:
    """Write the model in `base`, a Hugging Face folder, with the adapters merged into it, to `target`. The folder
    appears complete or not at all.

    Returns:
        `target`.

    Raises:
        WeightsError: The adapter or the base model is not supported, or PEFT cannot merge them.
    """
    # Refusals.
    kind = adapter_peft_type_or_lora(adapter)
    quantized = quant_method(read_config_json(base))
    if not train_type_for_peft_type(kind):
        raise WeightsError(Problem(str(adapter), f"is a {kind.upper()} adapter, which is not supported"))
    if quantized is not None:
        raise WeightsError(
            Problem(str(base), f"has quantized weights ({quantized}); adapters cannot be merged into them", PLAIN)
        )

    # The merge.
    try:
        merged, tied = _merged(base, adapter)
    except UserError:
        raise
    except REFUSALS as error:
        raise WeightsError(Problem(f"{adapter} on {base}", f"PEFT cannot merge it: {first_line(error)}")) from None

    # The config.json, and the tied tensors: they are written once, unless the adapter made them differ.
    tensors = {**dict(merged.named_parameters(remove_duplicate=False)), **persistent_buffers(merged)}
    config: dict[str, Any] | None = None
    if (head := classifier_head_of_adapter(adapter)) is not None:
        scored = config_with_head(read_config_json(base), head.kind, head.names)
        config = dict(scored) if is_encoder(scored) else config_with_tokenizer_pad_token_id(scored, base)
        config |= {"problem_type": head.problem_type} if head.problem_type else {}
    elif is_encoder(read_config_json(base)):
        config = config_with_head(read_config_json(base), NO_HEAD)
    if all(torch.equal(tensors[name], tensors[first]) for name, first in tied.items()):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    else:
        config = untied_config(config or read_config_json(base))

    stored = tensors_by_disk_name(merged, {name: tensor.detach() for name, tensor in tensors.items()})
    write_transformers_folder(target, stored, base, max_shard_bytes, overwrite, config)
    warn_non_finite_written(target, [name for name, tensor in stored.items() if not all_values_finite(tensor)])
    return target


def config_with_tokenizer_pad_token_id(config: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return the config.json of a reward model with the padding token of the tokenizer in `home`, by which
    transformers finds the last token of a row, where it reads the score."""
    tokenizer = load_tokenizer(home, False, "put the tokenizer's files into the base model's folder")
    return with_pad_token_id(config, score_padding_token(tokenizer, config))


def _merged(base: Path, adapter: Path) -> tuple[Any, dict[str, str]]:
    """Return the merged model, and the tensors that were tied before the merge, each with the first name of its
    tensor. An adapter on only one of two tied modules unties them."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    head = classifier_head_of_adapter(adapter)
    auto: Any = transformers.AutoModelForCausalLM
    if head is not None:
        tokens = head.kind == TOKEN_SCORE
        auto = transformers.AutoModelForTokenClassification if tokens else None
        auto = auto or transformers.AutoModelForSequenceClassification
    elif is_encoder(read_config_json(base)):
        auto = transformers.AutoModel
    elif has_vision_tower(read_config_json(base)):
        auto = transformers.AutoModelForImageTextToText
    labels: dict[str, Any] = {"num_labels": len(head.names)} if head else {}
    model, info = auto.from_pretrained(base, dtype=torch.float32, use_safetensors=True, **labels, **LOADING_INFO)
    new = encoder_head_names(model, info["missing_keys"]) if is_encoder(model.config.to_dict()) else (NEW, BIAS)
    check_all_weights_loaded(str(base), info, new=new if head or is_encoder(model.config.to_dict()) else ())
    check_adapter_sizes(model, adapter, str(base))
    tied = tied_tensors(model)
    with warnings.catch_warnings():
        # PEFT warns that it would merge an adapter on one of two tied modules into both; they are untied below.
        warnings.filterwarnings("ignore", "Model with .tie_word_embeddings=True.")
        adapted = load_whole_adapter(model, adapter)
        untie_adapted_modules(adapted)
        return adapted.merge_and_unload(), tied
