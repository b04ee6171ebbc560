"""`megaswift export --quant_method gptq`, `awq`: integer weights calibrated on rows, by llmcompressor, in the format
compressed-tensors that transformers and vLLM load.

Owns which rows calibrate and which layers are quantized. The head, routers and everything that is not a linear layer
keep their dtype.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from megaswift import log
from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.bridge.checkpoint.hf_metadata import copy_tokenizer_and_template_files
from megaswift.data.options.data import DataConfig
from megaswift.data.tokenization import tokenize_datasets
from megaswift.errors import CheckpointError, ConfigError, DataError, Problem, first_line
from megaswift.inference.model import (
    ModelConfigAndTokenizer,
    load_config_tokenizer_and_processor,
    load_model_and_prompt_device,
    model_without_weights,
)
from megaswift.inference.options.commands import (
    CalibrationOptions,
    ExportOptions,
    ModelLoadingOptions,
    PlacementOptions,
)
from megaswift.models.family import read_config_json
from megaswift.models.quantized_training import quant_method
from megaswift.models.vision import has_vision_tower

KEPT = ("gate", "router", "shared_expert_gate")
"""Last names of linear layers that choose experts."""
MEASURED = 8
"""Calibration sequences of which the perplexity is printed."""


def export_calibrated_folder(
    weights: ModelLoadingOptions, export: ExportOptions, calibration: CalibrationOptions, target: Path
) -> Path:
    """Write `target`: the model with its linear layers in integers; whole or not at all.

    The model is in host memory, with the activations of all calibration sequences between two layers. An accelerator
    holds one layer at a time, with a float32 matrix of inputs x inputs for each linear layer of it.
    """
    prepared = load_config_tokenizer_and_processor(weights, calibration.chat_template)
    _check_model(prepared, export, calibration)
    sequences = calibration_sequences(prepared.tokenizer, calibration)
    model, _ = load_model_and_prompt_device(prepared, PlacementOptions(device_map="cpu"))
    before = perplexity(model, sequences[:MEASURED])
    _quantize(model, prepared, export, calibration, sequences)
    after = perplexity(model, sequences[:MEASURED])
    count = log.count_text(min(MEASURED, len(sequences)), "calibration sequence")
    log.info(f"perplexity on {count}: {before:.4g} before, {after:.4g} after")
    stage = target.with_name(f".{target.name}.exporting")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        with safetensors_errors_as_oserror(stage):
            model.save_pretrained(stage, save_compressed=True, max_shard_size=export.max_shard_size)
        copy_tokenizer_and_template_files(prepared.folder, stage)
        stage.rename(target)
    except OSError as error:
        raise CheckpointError(
            Problem(str(target), f"cannot be written: {first_line(error)}", "free space, or use another --output_dir")
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return target


def _check_model(prepared: ModelConfigAndTokenizer, export: ExportOptions, calibration: CalibrationOptions) -> None:
    """Raise an error for a model that cannot be quantized, before its weights are read."""
    config = read_config_json(prepared.folder)
    label = f"--quant_method {export.quant_method}"
    if stored := quant_method(config):
        rule = f"--model {prepared.options.model}: the weights are already quantized ({stored})"
        raise ConfigError(Problem(label, rule, "use the model's unquantized checkpoint"))
    if has_vision_tower(config):
        rule = "quantizes language models; this is a vision-language model"
        raise ConfigError(Problem(label, rule, "--quant_method fp8, which leaves the vision encoder as it is"))
    size = calibration.group_size
    odd = [(name, n) for name, n in quantized_layers(model_without_weights(prepared)) if size > 0 and n % size]
    if odd:
        name, inputs = odd[0]
        rule = f"does not divide the {inputs} inputs of {name}" + (f" and {len(odd) - 1} more" if len(odd) > 1 else "")
        divisors = [s for s in (128, 64, 32, 16) if all(n % s == 0 for _, n in odd)]
        fix = f"--group_size {divisors[0] if divisors else -1}"
        raise ConfigError(Problem(f"--group_size {size}", rule, fix))


def quantized_layers(model: Any) -> Iterator[tuple[str, int]]:
    """Yield (name, inputs) of each linear layer that is quantized."""
    for name, module in model.named_modules():
        is_kept = name.rpartition(".")[2] in KEPT or module is model.get_output_embeddings()
        if isinstance(module, nn.Linear) and not is_kept:
            yield name, module.in_features


def calibration_sequences(tokenizer: Any, options: CalibrationOptions) -> list[Tensor]:
    """Return at most `quant_n_samples` sequences, int64 [max_length] each: the rows as training has them, in random
    order, joined and cut. Fewer tokens than one sequence are one shorter sequence; the rest at the end is left out."""
    data = DataConfig(
        dataset=options.dataset,
        columns=options.columns,
        strict=options.strict,
        chat_template=options.chat_template,
        agent_template=options.agent_template,
        system=options.system,
        enable_thinking=options.enable_thinking,
        use_dataset_cache=False,
    )
    stores = [store for _, store in tokenize_datasets(data, tokenizer, "sft", seed=options.seed)]
    places = [(number, row) for number, store in enumerate(stores) for row in range(len(store))]
    order = np.random.default_rng(options.seed).permutation(len(places))
    needed = options.quant_n_samples * options.max_length
    pieces: list[np.ndarray] = []
    count = 0
    for place in order:
        if count >= needed:
            break
        number, row = places[place]
        pieces.append(stores[number].row(row)[0])
        count += len(pieces[-1])
    if count < 2:
        raise DataError(Problem(f"--dataset {' '.join(options.dataset)}", "has no tokens", "give rows with text"))
    tokens = torch.from_numpy(np.concatenate(pieces)[:needed].astype(np.int64))
    sequences = [part for part in tokens.split(options.max_length) if len(part) == options.max_length]
    sequences = sequences or [tokens]
    used = sum(map(len, sequences))
    log.info(f"calibrates on {log.count_text(len(sequences), 'sequence')}, {used:,} tokens of {len(pieces):,} rows")
    return sequences


def perplexity(model: Any, sequences: Sequence[Tensor]) -> float:
    """Return exp of the mean loss over all predicted tokens of the sequences."""
    total = 0.0
    count = 0
    with torch.no_grad():
        for ids in sequences:
            logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, :-1].float()
            total += float(functional.cross_entropy(logits, ids[1:].to(logits.device), reduction="sum"))
            count += len(ids) - 1
    return math.exp(min(total / count, 700.0))


def _quantize(
    model: Any,
    prepared: ModelConfigAndTokenizer,
    export: ExportOptions,
    calibration: CalibrationOptions,
    sequences: Sequence[Tensor],
) -> None:
    """Replace the linear layers of `model` by quantized ones."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    size = calibration.group_size
    grouping = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    is_gptq = export.quant_method == "gptq"
    # symmetric for both methods: transformers 5.24 does not load the zero points of experts
    integers = {"num_bits": export.quantization_bit, "type": "int", "symmetric": True, **grouping}
    which = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": integers}},
        "ignore": ["lm_head", *(rf"re:.*\.{name}$" for name in KEPT)],
    }
    recipe = [GPTQModifier(**which)] if is_gptq else [AWQModifier(), QuantizationModifier(**which)]
    model.config._name_or_path = str(prepared.folder)  # llmcompressor reads and writes again the config.json there
    batches: DataLoader[Any] = DataLoader(
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in sequences],  # type: ignore[arg-type]
        batch_size=calibration.quant_batch_size if calibration.quant_batch_size > 0 else len(sequences),
    )
    from loguru import logger

    warnings = logger.add(_warn, level="WARNING", filter=_is_about_the_model, format="{message}")
    try:
        with _unpinned_where_nothing_pins():
            oneshot(model=model, processor=prepared.tokenizer, dataset=batches, recipe=recipe, pipeline="sequential")
    except (ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            Problem(
                f"--quant_method {export.quant_method}",
                f"llmcompressor cannot quantize this model ({model.config.model_type}): {first_line(error)}",
                "without calibration: --quant_method fp8 or bnb",
            )
        ) from error
    finally:
        logger.remove(warnings)


def _warn(message: str) -> None:
    log.warn(f"llmcompressor: {message.strip()}")


def _is_about_the_model(record: Any) -> bool:
    """Whether a message of llmcompressor is a warning: its METRIC level, a line for each layer, is above warnings."""
    return record["level"].name == "WARNING" and record["function"] != "get_main_device"


@contextmanager
def _unpinned_where_nothing_pins() -> Iterator[None]:
    """Leave out the pinning of memory on a machine without an accelerator, where llmcompressor's AWQ (0.14) pins all
    the same and torch refuses."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    pin = IntermediatesCache.pin_memory
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = pin
