"""What all ranks have agreed on before data and model are read, and what follows from it by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from megaswift.bridge.adapters.options.checks import SHARDED
from megaswift.config import SwiftConfig
from megaswift.data import build as data
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.model_tokenizer import read_tokenizer, training_processor
from megaswift.folders.checkpoint import shown_model_folder
from megaswift.models.spec import ModelSpec
from megaswift.models.vision import reads_images
from megaswift.parallel.layout import Layout
from megaswift.parallel.row_padding import fp8_token_multiple, needs_rows_of_full_length, row_padding_multiple
from megaswift.run.checks.distillation import teacher_layout
from megaswift.run.engines import RankContext
from megaswift.run.output import OutputFolder
from megaswift.trainers.options.batch_sizes import batch_plan


@dataclass(frozen=True)
class RunPlan:
    """A run on one rank, from which `build_run` makes its parts."""

    cfg: SwiftConfig
    spec: ModelSpec
    folder: Path
    """The model's Hugging Face folder."""
    context: RankContext
    outputs: OutputFolder
    fit: str = ""
    """What `--fit` has chosen, for the run summary."""
    resumed: Path | None = None
    """The checkpoint that the run goes on from."""

    @property
    def layout(self) -> Layout:
        """The ranks' grid."""
        return self.context.layout

    @property
    def adapts(self) -> bool:
        """Whether adapters train, and the model's folder keeps its weights."""
        return self.cfg.model.train_type != "full"

    @property
    def base(self) -> str:
        """Name of the base model, for those who load the adapters: the hub id, or the folder."""
        local = Path(str(self.cfg.model.model)).exists() or self.folder.is_relative_to(self.outputs.root)
        return str(shown_model_folder(self.folder.resolve())) if local else str(self.cfg.model.model)

    def geometry(self) -> LoaderGeometry:
        """What the loader must know of this rank and its batches."""
        layout = self.layout
        plan = batch_plan(self.cfg.train, layout.dp)
        # A teacher in a layout of its own computes the same micro-batches.
        teacher = teacher_layout(self.cfg, layout.world_size)
        layouts = (layout,) if teacher is None else (layout, teacher)
        multiples = (
            row_padding_multiple(one, fp8_token_multiple(self.cfg.model, one.sequence_parallel)) for one in layouts
        )
        return LoaderGeometry(
            dp_rank=self.context.coordinates.dp,
            dp_size=layout.dp,
            per_device=plan.per_device,
            accumulation=plan.accumulation,
            doc_multiple=lcm(*(2 * one.cp if one.cp > 1 else 1 for one in layouts)),
            row_multiple=lcm(*multiples),
            uniform=any(one.pp > 1 for one in layouts),
            full_length=needs_rows_of_full_length(self.cfg.model, self.cfg.parallel.tp_comm_overlap, layout),
            seed=data.data_seed(self.cfg.data, self.cfg.train),
            # an image's token may lie beyond the vocabulary
            vocabulary=0 if reads_images(self.cfg, self.spec.hf_config) else self.spec.vocab_size,
            divided_weights=self.cfg.engine.engine in SHARDED,
        )

    def reader(self) -> Any:
        """What the model's texts are read with: its tokenizer, or a vision-language model's `Processor`."""
        if reads_images(self.cfg, self.spec.hf_config):
            return training_processor(self.cfg.data, self.folder, self.cfg.model.trust_remote_code)
        return read_tokenizer(self.folder, self.cfg.model.trust_remote_code, self.cfg.data.chat_template)

    def scheduled(self, total_steps: int) -> SwiftConfig:
        """Return the configuration with the steps over which AdaLoRA allocates ranks."""
        allocates = self.cfg.model.train_type == "adalora" and self.cfg.peft.total_step is None
        return self.cfg.replace(total_step=total_steps) if allocates else self.cfg
