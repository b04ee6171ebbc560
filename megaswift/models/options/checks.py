"""Rules about the model: where it comes from, and which of its weights train."""

from __future__ import annotations

from pathlib import Path

from megaswift.config.rule import ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections
from megaswift.data.options.hub_ids import names_hub_dataset

_HUB = "applies only to hub IDs, but the model is a local folder"
_HUB_DATA = "applies only to hub IDs, but model and data are local"


def _is_folder(c: Sections) -> bool:
    return c.model.model is not None and Path(c.model.model).is_dir()


def _uses_no_hub(c: Sections) -> bool:
    return (
        _is_folder(c)
        and not c.hub.push_to_hub
        and not any(names_hub_dataset(entry) for entry in (*c.data.dataset, *c.data.val_dataset))
    )


MODEL_SOURCE_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption("model_revision", ("model",), _is_folder, _HUB, "--model ORGANIZATION/NAME"),
    IgnoredOption(
        "use_hf", ("model", "push_to_hub", "dataset"), _uses_no_hub, _HUB_DATA, "--model ORGANIZATION/NAME", (True,)
    ),
    IgnoredOption(
        "trainable_parameters",
        ("train_type", "freeze_parameters", "freeze_vit", "freeze_aligner", "freeze_llm"),
        lambda c: (
            c.model.train_type == "full"
            and not c.model.freeze_parameters
            and not (c.model.freeze_vit or c.model.freeze_aligner or c.model.freeze_llm)
        ),
        "no weights are frozen",
        "--freeze_parameters . to train these weights only",
    ),
)

MTP_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("mtp_num_layers", "fp8_format"),
        lambda c: bool(c.model.mtp_num_layers and c.model.fp8_format),
        "layers for multi-token prediction were not compared in FP8",
        "leave out one of them",
    ),
    ConflictingOptions(
        ("enable_dft_loss", "mtp_num_layers"),
        lambda c: bool(c.model.mtp_num_layers) and c.train.enable_dft_loss,
        "is not defined for layers for multi-token prediction",
        "leave out one of them",
    ),
    ConflictingOptions(
        ("mtp_num_layers", "cuda_graph_impl"),
        lambda c: bool(c.model.mtp_num_layers) and c.model.uses_cuda_graphs,
        "layers for multi-token prediction were not captured in CUDA graphs yet",
        "--cuda_graph_impl none",
    ),
    ConflictingOptions(
        ("mtp_num_layers", "tp_comm_overlap"),
        lambda c: bool(c.model.mtp_num_layers) and c.parallel.tp_comm_overlap,
        "layers for multi-token prediction have no communication buffers",
        "--tp_comm_overlap false",
    ),
)

MODEL_SOURCE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("random_init", "train_type"),
        lambda c: c.model.random_init and c.model.train_type != "full",
        "adapters on random weights would be useless: the base model could not be loaded again",
        "--random_init false",
    ),
    ConflictingOptions(
        ("train_type", "transformer_impl"),
        lambda c: c.model.train_type == "qlora" and c.model.transformer_impl == "transformer_engine",
        "Transformer Engine's layers do not support NF4 weights",
        "--transformer_impl torch",
    ),
)
