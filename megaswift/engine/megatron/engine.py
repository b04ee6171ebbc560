"""The native engine: a model on Megatron-Core under any layout, behind the engine protocol.

Owns the order in which the parts are built and used; each part is a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megaswift import distributed
from megaswift.bridge.adapters.folder import write_peft_folder
from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.hf.export import HfExportOptions, source_tensor_dtypes, write_hf_export
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.new_head import with_new_head
from megaswift.bridge.plan import EMBEDDING, OUTPUT_LAYER, WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.diagnostics.compute_time import OwnComputeClock
from megaswift.engine.diagnostics.replica_checksums import ReplicatedWeights, replicated_by_group
from megaswift.engine.megatron import forward_backward as passes
from megaswift.engine.megatron.checkpoint import save_load
from megaswift.engine.megatron.checkpoint.optimizer_states import MainWeightFiller
from megaswift.engine.megatron.freezing import freeze_weights, require_input_gradients
from megaswift.engine.megatron.gather import Route
from megaswift.engine.megatron.hf_export import export_hf_folder_from_ranks
from megaswift.engine.megatron.layers.attention.te import TEAttentionBackendEnv
from megaswift.engine.megatron.layers.implementation import (
    TORCH,
    LayerImplementationChoice,
    fp8_blockwise_sp_hidden_size_problems,
    fp8_width_problems,
)
from megaswift.engine.megatron.layers.moe.router import AuxLosses
from megaswift.engine.megatron.lora.adapters import RankAdapters, adapter_plan_from_lora_config
from megaswift.engine.megatron.microbatch import prepare_batch_ahead
from megaswift.engine.megatron.model import build_model_chunks, finish_weight_gathers, wrap_chunks
from megaswift.engine.megatron.offload import EngineOffload
from megaswift.engine.megatron.optim import fp8_weights
from megaswift.engine.megatron.optim import optimizer as optimizers
from megaswift.engine.megatron.optim.fp8_weights import ExactWeights, is_fp8_weight
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.settings import EngineSettings
from megaswift.engine.megatron.sizes import measure_engine_sizes
from megaswift.engine.megatron.state import EngineState
from megaswift.engine.megatron.transformer_config import (
    check_main_grads_dtype,
    overlap_capture_fusion_text,
    transformer_config,
)
from megaswift.engine.megatron.weights import (
    RandomWeightSource,
    RankWeights,
)
from megaswift.engine.objective import (
    GlobalBatchLossCallback,
    StepReport,
    named_head_outputs,
    start_count_global_batch,
    states_at_labels,
)
from megaswift.engine.options.fp8_recipes import fp8_compute_capability_problems
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.protocol import (
    Counted,
    EngineSizeReport,
    FileEntries,
    Receivers,
    StartedCount,
    StartedSave,
    StepResult,
)
from megaswift.engine.reference_weights import ReferenceWeights
from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.losses.contract import HIDDEN, Batch, Loss, ModelOutputs, RequestedModelOutputs
from megaswift.models import qlora
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.models.stored_form import StoredForm
from megaswift.parallel.options.layout import ParallelConfig


class MegatronEngine(EngineState):
    """A model, its gradients and its optimizer over the ranks of a context. Weights come by `load_hf` or
    `random_init`."""

    kind = "megatron"

    def __init__(
        self,
        spec: ModelSpec,
        context: ParallelContext,
        choice: LayerImplementationChoice,
        model: ModelConfig,
        parallel: ParallelConfig,
        optim: OptimConfig,
        lora: LoraConfig,
        settings: EngineSettings,
    ) -> None:
        # Settings, and what the layout and the device allow.
        self.spec = spec
        self.context = context
        self.choice = choice
        self.layout = context.layout
        self.rank = context.rank
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.train_type = model.train_type
        self.has_random_start = model.random_init
        self.optim = optim
        self.lora_options = lora
        self.settings = settings
        self.cp_exchange = "all_gather" if choice.attention == TORCH else parallel.cp_exchange
        if model.fp8_format:
            recipe = model.fp8_recipe
            problems = [
                *fp8_compute_capability_problems(recipe, torch.cuda.get_device_capability()),
                *fp8_blockwise_sp_hidden_size_problems(recipe, spec.hidden_size, self.layout),
                *fp8_width_problems(recipe, spec, self.layout),
            ]
            if problems:
                raise ConfigError(problems)
        self.config = transformer_config(spec, self.layout, choice, model, parallel, lora, settings)
        check_main_grads_dtype(optim.main_grads_dtype, self.dtype)

        # Which weights and adapters the model has.
        self.plan = WeightPlan(family_of(spec.hf_config), spec)
        adapters = adapter_plan_from_lora_config(lora, self.plan) if model.train_type != "full" else None
        if adapters and self.config.quantized:
            family = self.plan.family
            problems = qlora.four_bit_block_size_problems(family, spec, self.layout.tp, self.layout.etp)
            problems += qlora.four_bit_trainable_problems(family, adapters.saved)
            if problems:
                raise ConfigError(problems)
            if adapters.settings.dora:
                raise ConfigError(qlora.NO_DORA)

        # Build this rank's part of the model, freeze what does not train, and add adapters.
        self.backend = TEAttentionBackendEnv(self.config.attention_backend != AttnBackend.auto)
        with self.backend.building():
            self.plain = build_model_chunks(spec, self.config, context, self.choice)
        self.weights = RankWeights(self.plain, spec, self.plan, context)
        if settings.trains:
            self.freeze(model.freeze_parameters, model.trainable_parameters)
        else:
            for placed in self.weights.placed:
                placed.tensor.requires_grad_(False)
        self.lora = RankAdapters(self.plain, self.weights, adapters) if adapters else None
        share = model.mtp_loss_scaling_factor / max(spec.mtp_layers, 1)
        self.aux = AuxLosses(self.plain, spec, model.moe_aux_loss_coeff, model.moe_z_loss_coeff, context, share)

        # Wrap it for data parallelism, then build the optimizer over the wrapped parameters.
        self.chunks = wrap_chunks(self.plain, self.config, parallel, optim, context)
        self.clock = OwnComputeClock(self.chunks)
        self.optimizer = optimizers.build_optimizer(self.chunks, self.config, optim)
        if self.config.fp8_param:
            self.weights.exact = ExactWeights(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss if self.config.fp16 else None

        # State of the run: memory lent to a sampler, and reference weights.
        self.away = EngineOffload(self.chunks, self.optimizer)
        self.remembered: ReferenceWeights | None = None
        self.kept: WeightSource | None = None
        self.kept_names: list[str] = []

    def load_hf(self, directory: Path) -> None:
        """Load weights from a Hugging Face folder or a checkpoint; each rank reads its own slices only."""
        source = with_new_head(open_weights(directory), self.spec, self.settings.seed)
        self.plan.check(source, contents=self.rank == 0)
        self._fill(source)
        self.keep(directory)

    def keep(self, directory: Path) -> None:
        """Take the tensors that training does not change from `directory` when a checkpoint is saved."""
        self.kept = open_weights(directory)
        self.kept_names = self.plan.kept(self.kept.names())

    def random_init(self, seed: int, device: torch.device | None = None) -> None:
        """Draw weights from the seed and each tensor's name, so that they are the same under every layout. Without
        `device` they are drawn on the CPU; another device is faster and gives other numbers."""
        self._fill(RandomWeightSource(self.plan, self.spec, seed, device))

    def _fill(self, source: object) -> None:
        if self.lora is None:
            self.weights.load(source, MainWeightFiller(self.optimizer))
            if self.config.fp8_param:
                self._quantize_weights()
            return
        self.weights.load(source)
        self.lora.start(self.lora_options, self.settings.seed)
        self.optimizer.reload_model_params()

    def _quantize_weights(self) -> None:
        """Quantize FP8 weights from new main weights. Collective."""
        weights = [p for p in self.weights.placed if is_fp8_weight(p.held)]
        delayed = self.config.fp8_recipe == "delayed"
        if delayed:
            fp8_weights.forget_weight_amaxes(p.tensor for p in weights)
        fp8_weights.quantize_from_main_weights(self.optimizer, self.chunks)
        if delayed:
            for expert, group in ((False, self.context.groups.tp), (True, self.context.groups.expt_tp)):
                own = [p.tensor for p in weights if (p.entry.expert is not None) == expert]
                if own:
                    fp8_weights.start_delayed_weight_scales(own, group)
            fp8_weights.quantize_from_main_weights(self.optimizer, self.chunks)

    def freeze(self, patterns: Sequence[str], trained: Sequence[str] = ()) -> None:
        """Freeze the parameters whose Hugging Face names match any of `patterns` and none of `trained`. Call it before
        the model is wrapped. Collective."""
        freeze_weights(self.weights.placed, self.plan, patterns, trained)
        require_input_gradients(self.plain, self.config, self.plan, patterns, trained)

    def start_count(self, microbatches: Sequence[Batch], loss: Loss, further: Sequence[float] = ()) -> StartedCount:
        """Count the global batch, and add up the `further` numbers over all ranks in the same reduction. Collective."""
        return start_count_global_batch(microbatches, loss, self.context, further)

    def prepare_ahead(self, microbatches: list[Batch]) -> list[Batch]:
        """Pin the micro-batches, and compute the indices of this rank's slices."""
        cp = self.layout.cp
        rank = self.context.coordinates.cp
        device = self.context.device
        ahead = self.spec.mtp_layers
        return [prepare_batch_ahead(batch, cp, rank, device, ahead) for batch in microbatches]

    def train_batch(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        lr: float,
        weight_decay: float | None = None,
        counted: Counted = None,
        before_read: Callable[[], None] | None = None,
    ) -> StepResult:
        """Run forward, backward and one optimizer step, which is skipped if the gradient norm is not finite."""
        report = self._accumulate(microbatches, loss, False, counted)
        report.before_read = before_read or report.before_read
        decay = self.optim.weight_decay if weight_decay is None else weight_decay
        optimizers.set_lr_and_weight_decay(self.optimizer, lr, decay)
        scale = optimizers.get_loss_scale(self.optimizer)
        clip = self.optim.max_grad_norm
        device = self.context.device
        norm, stepped = optimizers.optimizer_step(self.optimizer, clip, device, report)
        falling = not stepped and optimizers.can_lower_loss_scale(self.optimizer)
        return replace(report.result, grad_norm=norm, skipped=not stepped, loss_scale=scale, loss_scale_falling=falling)

    def accumulate(
        self, microbatches: Sequence[Batch], loss: Loss, whole_gradients: bool = True, counted: Counted = None
    ) -> StepResult:
        """Run forward and backward only; `hf_gradients` then yields the gradients of the global objective."""
        return self._accumulate(microbatches, loss, whole_gradients, counted).read_result()

    def _accumulate(
        self, microbatches: Sequence[Batch], loss: Loss, whole_gradients: bool, counted: Counted
    ) -> StepReport:
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        mode = passes.ForwardBackwardMode(self.choice.attention, False, whole_gradients)
        return self._run(microbatches, loss, mode, counted)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], loss: Loss) -> StepResult:
        """Compute the numbers of `train_batch` without dropout, gradients or a change of state."""
        with passes.evaluation_mode(self.chunks):
            mode = passes.ForwardBackwardMode(self.choice.attention, True)
            return self._run(microbatches, loss, mode).read_result()

    def _run(
        self, microbatches: Sequence[Batch], loss: Loss, settings: passes.ForwardBackwardMode, counted: Counted = None
    ) -> StepReport:
        counted = counted or self.start_count(microbatches, loss)()
        objective = GlobalBatchLossCallback(loss, counted, self.context)
        self._need(loss.needs)
        self.aux.begin(counted.microbatches)
        with self.backend.computing():
            passes.run_forward_backward_schedule(self.chunks, microbatches, objective, self.context, settings)
        report = StepReport(objective, counted, self.context, microbatches, self.clock)
        if not settings.forward_only:
            report.metrics |= self.aux.report()
        return report

    def _need(self, needs: RequestedModelOutputs) -> None:
        for chunk in self.plain:
            chunk.needs = needs

    @torch.no_grad()
    def score(self, microbatches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        """Compute the outputs that `needs` names for each micro-batch, in order, on every model-parallel rank."""
        outputs: list[Tensor] = []

        def keep(_: Batch, fields: Tensor) -> Tensor:
            outputs.append(fields)
            return fields.new_zeros(())

        self._forward(microbatches, needs, keep)
        if self.layout.pp > 1:
            if not outputs:
                rows = needs.rows(self.spec)
                outputs = [torch.empty(rows, *b.input_ids.shape, device=self.context.device) for b in microbatches]
            for tensor in outputs:
                dist.broadcast(tensor, group=self.context.groups.pp, group_src=self.layout.pp - 1)
        return [named_head_outputs(fields, needs) for fields in outputs]

    def _forward(
        self, microbatches: Sequence[Batch], needs: RequestedModelOutputs, keep: Callable[[Batch, Tensor], Tensor]
    ) -> None:
        """Run the model in evaluation mode; `keep` gets each micro-batch and its fields, on the last stage."""
        self._need(needs)
        with passes.evaluation_mode(self.chunks), self.backend.computing():
            mode = passes.ForwardBackwardMode(self.choice.attention, True)
            passes.run_forward_backward_schedule(self.chunks, microbatches, keep, self.context, mode)

    @torch.no_grad()
    def hidden_states(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """Compute the last hidden states at the labels of each micro-batch, [labels, h] in the dtype of the products,
        on ranks of the last pipeline stage; empty on others."""
        found: list[Tensor] = []

        def keep(batch: Batch, fields: Tensor) -> Tensor:
            found.append(states_at_labels(batch, fields).to(self.dtype))
            return fields.new_zeros(())

        self._forward(microbatches, RequestedModelOutputs(fields=frozenset(), head=HIDDEN), keep)
        return found

    def head_weight(self) -> Tensor:
        """Read the weight of the output layer from the files that `load_hf` read, [vocabulary, h] in host memory."""
        assert self.kept is not None, "the weights were not loaded"
        name = self.plan.by_megatron[EMBEDDING if self.spec.tied else OUTPUT_LAYER].hf[0]
        return self.kept.slice(name).to(self.dtype)

    def set_teacher_head(self, weight: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> None:
        """Keep this rank's rows of a teacher's head on the last pipeline stage."""
        last = self.plain[-1]
        if weight is None:
            last.teacher_head = None
        elif last.post_process:
            last.set_teacher_head(weight, scale, softcap)

    def largest_of_teacher(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute the teacher's largest log-probabilities and their tokens from its hidden states."""
        return self.plain[-1].largest_of_teacher(hidden, k, temperature)

    def hf_weights(
        self, dtype: torch.dtype | None = None, to: Receivers = "rank0", on_device: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on the receivers; every rank must iterate. Adapters are merged in. In
        host memory, or on the device if there are several receivers, too."""
        finish_weight_gathers(self.chunks)
        route = Route(to, self.context.device if on_device or to != "rank0" else None)
        if self.lora is not None:
            return self.lora.merged(route, dtype)
        return self.weights.stream(self.weights.exact, route, dtype)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in a PEFT folder without its prefix, full tensor) of what trains with LoRA, like `hf_weights`."""
        finish_weight_gathers(self.chunks)
        return self._adapters().stream(lambda p: p.data)

    def _adapters(self) -> RankAdapters:
        assert self.lora is not None, "no adapters: train_type is full"
        return self.lora

    def hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) after `accumulate`, in float32, like `hf_weights`, or like `adapter_weights` with
        LoRA."""

        def gradient(parameter: Tensor) -> Tensor | None:
            return getattr(parameter, "main_grad", None)

        if self.lora is None:
            return self.weights.stream(gradient, dtype=torch.float32)
        return self.lora.stream(gradient, torch.float32)

    def keep_reference(self, on_host: bool = False) -> None:
        """Make the present model the reference. New adapters need no copy, because the base model is the reference."""
        finish_weight_gathers(self.chunks)
        if self.lora is None or self.lora_options.adapters is not None:
            self.remembered = ReferenceWeights(self._tensors_of_reference, on_host)

    def _tensors_of_reference(self) -> list[Tensor]:
        """The tensors of which a reference has its own values: all weights, or what trains on a frozen base."""
        if self.lora is not None:
            return [p.data for p in (*self.lora.parameters, *(saved.tensor for saved in self.lora.saved))]
        return [p.tensor.data for p in self.weights.placed]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Put the reference in the model's place for the length of a block, which must not call `train_batch`."""
        finish_weight_gathers(self.chunks)
        with self.remembered.exchanged() if self.remembered is not None else self._adapters().off():
            yield

    def move_reference(self, share: float) -> None:
        """Set the reference to share x model + (1 - share) x reference."""
        assert self.remembered is not None, "keep_reference was not called"
        finish_weight_gathers(self.chunks)
        self.remembered.blend(share)

    def export(self, folder: Path, source: Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face folder in the source's dtypes or in `dtype`. Every rank writes a share; with adapters
        rank 0 writes everything."""
        options = HfExportOptions(source=source, dtype=dtype, overwrite=True)
        if self.lora is None:
            finish_weight_gathers(self.chunks)
            export_hf_folder_from_ranks(self.weights, folder, options)
            return
        weights = self.hf_weights()

        def write() -> None:
            try:
                if self.rank == 0:
                    write_hf_export(folder, self.plan, weights, options)
            finally:
                for _ in weights:  # also if rank 0 cannot write: the others send to it
                    pass

        distributed.run_and_gather_on_all_ranks(write)

    def write_adapter(self, folder: Path, base: str) -> None:
        """Write adapters and fully trained modules in float32, as PEFT saves them, on rank 0. Collective."""
        weights = self.adapter_weights()
        if self.rank == 0:
            write_peft_folder(folder, self._adapters().plan, weights, base)
        else:
            for _ in weights:
                pass

    def describe(self, target: Path, folder: Path) -> None:
        """Write config.json, the tokenizer and each tensor's dtype. Call it on one rank."""
        source = None if self.has_random_start else folder
        dtypes = source_tensor_dtypes(self.plan, source)
        form = StoredForm.of(self.spec.features)
        write_checkpoint_hf_metadata(target, self.spec.hf_config, dtypes, folder, form)

    def offload(self, what: frozenset[str]) -> None:
        """Move parts of the engine off the device, and drop the gradients."""
        if "optimizer" in what:
            self.away.optimizer_and_gradients()
        if "model" in what:
            self.away.weights()

    def onload(self) -> None:
        """Bring everything back to the device."""
        self.away.bring_back()

    @property
    def kernels(self) -> str:
        """The kernels and the dtype, for the first screen."""
        joined = f", keys and values by {self.cp_exchange}" if self.layout.cp > 1 else ""
        more = f"{joined}{overlap_capture_fusion_text(self.config, self.choice)}"
        return f"{self.choice}, {str(self.dtype).removeprefix('torch.')}{more}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return self.config.params_dtype

    def replicated_weights(self) -> list[ReplicatedWeights]:
        """Return the weights of experts, and all others, each with the group of their replicas. Collective."""
        finish_weight_gathers(self.chunks)
        named = [(f"{i}.{name}", p) for i, chunk in enumerate(self.plain) for name, p in chunk.named_parameters()]
        return replicated_by_group(named, self.context.groups.dp_cp, self.context.groups.expt_dp)

    def report(self) -> EngineSizeReport:
        """Measure the engine's exact sizes, for the first screen. Collective."""
        return measure_engine_sizes(self)

    def save(self, directory: Path) -> FileEntries:
        """Save weights, optimizer and this rank's random states as a sharded checkpoint. Collective."""
        return save_load.save_engine(self, directory)

    def start_save(self, directory: Path) -> StartedSave:
        """Copy what `save` writes to host memory, to be written in the background. Collective."""
        return save_load.start_save(self, directory)

    def load(self, directory: Path) -> None:
        """Load what `save` wrote, on this or another layout. Collective."""
        save_load.load_engine(self, directory)
