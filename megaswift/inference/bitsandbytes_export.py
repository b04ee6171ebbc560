"""`megaswift export --quantization_bit`: quantizes the linear layers with bitsandbytes and saves the model with
transformers."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.bridge.checkpoint.hf_metadata import copy_tokenizer_and_template_files
from megaswift.errors import CheckpointError, ConfigError, Problem, first_line
from megaswift.inference.model import load_config_tokenizer_and_processor, load_model_and_prompt_device
from megaswift.inference.options.commands import BitsandbytesOptions, ModelLoadingOptions, PlacementOptions


def quantize_and_save_model(
    weights: ModelLoadingOptions, options: BitsandbytesOptions, target: Path, max_shard_size: str
) -> Path:
    """Loads the model with quantized layers and saves it; `target` appears whole or not at all."""
    placement = PlacementOptions(**{f.name: getattr(options, f.name) for f in fields(BitsandbytesOptions)})
    bits = placement.quantization_bit
    assert bits is not None, "the command line was checked"
    prepared = load_config_tokenizer_and_processor(weights, None)
    model, _ = load_model_and_prompt_device(prepared, placement)
    stage = target.with_name(f".{target.name}.exporting")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        _save(model, bits, stage, max_shard_size)
        copy_tokenizer_and_template_files(prepared.folder, stage)
        stage.rename(target)
    except OSError as error:
        raise CheckpointError(
            Problem(str(target), f"cannot be written: {first_line(error)}", "free space, or use another --output_dir")
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return target


def _save(model: Any, bits: int, stage: Path, max_shard_size: str) -> None:
    try:
        with safetensors_errors_as_oserror(stage):
            model.save_pretrained(stage, max_shard_size=max_shard_size)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            Problem(
                f"--quantization_bit {bits}",
                f"transformers cannot save it on this device: {first_line(error)}",
                "use a machine with a GPU, or quantize when loading: --quantization_bit of infer and deploy",
            )
        ) from None
