"""The model that a run starts from, where its options change the model's folder."""

from __future__ import annotations

from pathlib import Path

from megaswift import distributed, log
from megaswift.bridge.write_folder_with_new_config_or_vocab import write_changed_model_folder
from megaswift.bridge.write_pissa_olora_loftq_weights import write_initial_adapter
from megaswift.config import SwiftConfig
from megaswift.config.adapter_rules import starts_otherwise
from megaswift.config.engine_rules import NATIVE
from megaswift.models.family import read_config_json
from megaswift.trainers import rope_scaling_and_new_tokens


def base_model_folder(cfg: SwiftConfig, folder: Path, output: Path) -> Path:
    """The folder that the run starts from: `folder`, or OUT/base_model, which rank 0 makes. Collective."""
    if not rope_scaling_and_new_tokens.changes_model(cfg):
        return folder

    def make() -> Path:
        config, tokenizer = rope_scaling_and_new_tokens.changed_config_and_tokenizer(cfg, folder)
        more = config.get("vocab_size", 0) - read_config_json(folder).get("vocab_size", 0)
        if more:
            log.info(
                f"new_special_tokens: {log.count_text(more, 'new row')} in the embedding, each the mean of the old"
            )
        weights = not cfg.model.random_init
        return write_changed_model_folder(folder, output / rope_scaling_and_new_tokens.BASE, config, tokenizer, weights)

    return distributed.run_on_rank0(make, hours=24)


def with_initial_adapter(cfg: SwiftConfig, folder: Path, output: Path) -> tuple[SwiftConfig, Path]:
    """The configuration of a run that starts from OUT/initial_adapter, and the model that it belongs to, which rank 0
    makes (`--init_weights`). Collective."""
    if not starts_otherwise(cfg):
        return cfg, folder
    adapter, residual = output / rope_scaling_and_new_tokens.ADAPTER, output / rope_scaling_and_new_tokens.RESIDUAL
    seed, native = cfg.train.seed, cfg.engine.engine == NATIVE
    base = distributed.run_on_rank0(
        lambda: write_initial_adapter(cfg.lora, seed, native, folder, adapter, residual), hours=24
    )
    return cfg.with_adapter_folder(str(adapter)), base
