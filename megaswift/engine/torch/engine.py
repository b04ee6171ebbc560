"""The engine for models that need no model parallelism: any transformers model under DDP, FSDP2 or ZeRO, behind the
engine protocol.

Owns the order in which the parts are built and used. The losses, their normalizers and what is reported are the native
engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaswift import distributed
from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.hf import finite
from megaswift.bridge.hf.model_folder import (
    folder_config_dtype,
    folder_tensor_dtypes,
    persistent_buffers,
    tensor_metas_with_source_dtypes,
)
from megaswift.device_copy import copy_to_device_async, pin_where_copied
from megaswift.engine.diagnostics.compute_time import OwnComputeClock
from megaswift.engine.diagnostics.replica_checksums import ReplicatedWeights
from megaswift.engine.divergence import TeacherOutputs, largest_of_teacher
from megaswift.engine.objective import (
    GlobalBatchLossCallback,
    StepReport,
    named_head_outputs,
    start_count_global_batch,
    states_at_labels,
)
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.process_group import set_timeout_of_all_groups
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
from megaswift.engine.storage_offload import StorageOffloader
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.torch import checkpoint, document_attention, model_check, quantized_weights, weights
from megaswift.engine.torch.adapters import peft_names
from megaswift.engine.torch.adapters.adalora import find_adalora_rank_allocator
from megaswift.engine.torch.adapters.merged_weights import collect_merged_adapter_weights
from megaswift.engine.torch.encoder_parts import padding_mask
from megaswift.engine.torch.host_memory import returning_freed_memory_to_system
from megaswift.engine.torch.logit_fields import labeled_columns, position_ids
from megaswift.engine.torch.model import ModelBuild
from megaswift.engine.torch.process_group import TorchContext
from megaswift.engine.torch.router_losses import RouterLosses
from megaswift.engine.torch.settings import EngineSettings
from megaswift.engine.torch.state import EngineState
from megaswift.engine.torch.strategies.ddp import DdpStrategy
from megaswift.engine.torch.strategies.strategy import GRADIENT, WEIGHT, whole_tensor
from megaswift.engine.torch.strategies.table import build_strategy
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import HIDDEN, Batch, Loss, ModelOutputs, RequestedModelOutputs
from megaswift.models.spec import VOCABULARY, ModelSpec


class TorchEngine(EngineState):
    """A transformers model over the ranks of a context. It exists once its weights are known: `load_hf`, `random_init`
    or `keep`."""

    def __init__(
        self,
        spec: ModelSpec,
        context: TorchContext,
        folder: Path,
        dtype: torch.dtype,
        build: ModelBuild,
        optim: OptimConfig,
        settings: EngineSettings,
    ) -> None:
        self.spec = spec
        self.context = context
        self.folder = folder
        self.dtype = dtype
        self.layout = context.layout
        self.rank = context.rank
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.build = build
        self.optim = optim
        self.settings = settings
        self.kind = settings.kind
        self.adapts = build.model.train_type != "full"
        self.remembered: ReferenceWeights | None = None
        self.parked = StorageOffloader()

    def load_hf(self, directory: Path) -> None:
        """The weights of a Hugging Face folder, or of a checkpoint of either engine."""
        with returning_freed_memory_to_system():
            self._build(weights.prepare_model_and_filler_from_files(directory, self))
        finite.check_weights_finite((name, _local(p)) for name, p in self.fields.model.named_parameters())
        model_check.check_causality_and_packing(self, self.score)

    def random_init(self, seed: int) -> None:
        """Weights from the configured seed."""
        with returning_freed_memory_to_system():
            self._build(weights.prepare_model_and_filler_with_random_weights(self.folder, self))
        model_check.check_causality_and_packing(self, self.score)

    def keep(self, directory: Path) -> None:
        """The model without its weights, which a checkpoint brings."""
        with returning_freed_memory_to_system():
            self._build(weights.prepare_model_and_filler_without_weights(directory, self))

    def _build(self, start: weights.ModelWithWeightFiller) -> None:
        self.fields = start.fields
        merges = self.adapts and self.settings.merges_adapters
        self.merging = collect_merged_adapter_weights(self.fields) if merges else None
        self.elements = sum(quantized_weights.unpacked_numel(p) for p in self.fields.parameters())
        bare = peft_names.unwrap_peft_model(self.fields.model)
        self.flop_parameters = flop_parameter_counts(bare, self.spec)
        self.shapes = {name: p.shape for name, p in self.fields.named_parameters()}
        model = self.build.model
        self.noise = self._noise()
        self.routers = RouterLosses(bare, self.spec, model.moe_aux_loss_coeff, model.moe_z_loss_coeff)
        if not self.settings.trains:
            self.fields.requires_grad_(False)
        self.trained = sum(p.numel() for p in self.fields.parameters() if p.requires_grad)
        self.strategy = build_strategy(self.fields, self.optim, self.settings, self.context, self.dtype)
        if self.layout.world_size > 1:
            set_timeout_of_all_groups(self.settings.ddp_timeout)
        self.clock = OwnComputeClock([self.strategy.module], backward=self.kind not in ZERO)
        start.fill(self)
        self.allocation = find_adalora_rank_allocator(self.fields.model)
        if self.allocation is not None:
            assert isinstance(self.strategy, DdpStrategy), "config.adapter_rules says so"
            self.strategy.stepped = self.allocation.stepped

    def _noise(self) -> NeftuneNoise | None:
        alpha = self.settings.neftune_noise_alpha
        bare = peft_names.unwrap_peft_model(self.fields.model)
        return NeftuneNoise(bare.get_input_embeddings(), alpha) if alpha else None

    def start_count(self, microbatches: Sequence[Batch], loss: Loss, further: Sequence[float] = ()) -> StartedCount:
        """Count the global batch, and add up the `further` numbers over all ranks in the same reduction. Collective."""
        return start_count_global_batch(microbatches, loss, self.context, further)

    def prepare_ahead(self, microbatches: list[Batch]) -> list[Batch]:
        """In memory that a GPU copies from while the host goes on."""
        device = self.context.device
        return [b.with_tensors(lambda tensor: pin_where_copied(tensor, device)) for b in microbatches]

    def train_batch(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        lr: float,
        weight_decay: float | None = None,
        counted: Counted = None,
        before_read: Callable[[], None] | None = None,
    ) -> StepResult:
        """Forward, backward, one optimizer step; skipped (and said so) where the gradient norm is not finite."""
        report = self._accumulate(microbatches, loss, counted)
        report.before_read = before_read or report.before_read
        scale = self.strategy.loss_scale
        used = None if scale is None else scale.value
        optim = self.optim if weight_decay is None else replace(self.optim, weight_decay=weight_decay)
        norm, stepped = self.strategy.step(lr, optim, report.read)
        falling = not stepped and scale is not None and scale.can_fall
        return replace(report.result, grad_norm=norm, skipped=not stepped, loss_scale=used, loss_scale_falling=falling)

    def accumulate(self, microbatches: Sequence[Batch], loss: Loss, counted: Counted = None) -> StepResult:
        """Forward and backward only; `hf_gradients` then has the gradients of the global objective."""
        return self._accumulate(microbatches, loss, counted).read_result()

    def _accumulate(self, microbatches: Sequence[Batch], loss: Loss, counted: Counted) -> StepReport:
        self.strategy.module.train()
        self.strategy.zero_grad()
        return self._run(microbatches, loss, True, counted)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], loss: Loss) -> StepResult:
        """The numbers of `train_batch` without dropout, gradient or change of state."""
        self.strategy.module.eval()
        result = self._run(microbatches, loss, False).read_result()
        self.strategy.module.train()
        return result

    def _run(self, microbatches: Sequence[Batch], loss: Loss, train: bool, counted: Counted = None) -> StepReport:
        counted = counted or self.start_count(microbatches, loss)()
        objective = GlobalBatchLossCallback(loss, counted, self.context)
        self.fields.needs = loss.needs
        for i, batch in enumerate(microbatches):
            on_device = batch.to(self.context.device)
            if self.noise is not None:
                self.noise.scale = self.noise.of(on_device) if train else None
            self.routers.begin(train)
            last = i == len(microbatches) - 1
            if train:
                self.strategy.begin_microbatch(last)
            with document_attention.rows_of(batch, self.fields.model):
                value = objective(on_device, self._fields(on_device, batch)) + self.routers.take(
                    on_device.valid, max(counted.microbatches, 1)
                )
                # once a global batch, of which every rank adds its share
                if train and last and self.allocation is not None:
                    orthogonal = self.allocation.penalty()
                    value = value + orthogonal / self.layout.world_size
                if train:
                    self.strategy.backward(value, last)
        if self.noise is not None:
            self.noise.scale = None
        report = StepReport(objective, counted, self.context, microbatches, self.clock)
        if train:
            report.metrics |= self.routers.report(self.context)
        if train and self.allocation is not None:
            report.metrics["orth_loss"] = orthogonal.detach()
        return report

    def _fields(self, batch: Batch, on_host: Batch) -> Tensor:
        """float32 [f, b, s] of a batch on the device; `on_host` is the same in host memory, for what the host asks."""
        half = self.kind in ZERO and self.dtype != torch.float32  # DeepSpeed casts weights and no inputs
        extra: dict[str, Any] = {
            k: v.to(self.dtype) if half and v.is_floating_point() else v for k, v in batch.extra.items()
        }
        if self.fields.is_encoder:
            extra["attention_mask"] = padding_mask(batch.valid)
        if batch.cu_seqlens is not None and self.build.model.attn_impl in ("flash", "flash_3"):
            bounds = batch.cu_seqlens.to(torch.int32)
            longest = int(on_host.cu_seqlens.diff().max()) if on_host.cu_seqlens is not None else 0
            extra |= {
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        with self._precision():
            positions = position_ids(self.fields.model, batch, on_host)
            columns = copy_to_device_async(labeled_columns(on_host.loss_weights != 0), self.context.device)
            labeled = batch.loss_weights != 0
            asked = self.fields.needs.divergence is not None
            teacher = TeacherOutputs.of_fields(batch.fields) if asked else None
            return self.strategy.module(batch.input_ids, positions, batch.labels, labeled, columns, extra, teacher)

    def _precision(self) -> AbstractContextManager[Any]:
        """Float32 weights compute in a lower precision by autocast; FSDP2 and ZeRO cast whole units themselves."""
        if self.dtype == torch.float32 or self.kind != "ddp":
            return nullcontext()
        return torch.autocast(self.context.device.type, dtype=self.dtype)

    @torch.no_grad()
    def score(self, microbatches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        """Return what `needs` asks for, per micro-batch in input order."""
        self.strategy.module.eval()
        self.fields.needs = needs
        outputs = []
        for batch in microbatches:
            with document_attention.rows_of(batch, self.fields.model):
                outputs.append(named_head_outputs(self._fields(batch.to(self.context.device), batch), needs))
        self.strategy.module.train()
        return outputs

    @torch.no_grad()
    def hidden_states(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """The last hidden states at the labels of each micro-batch, [labels, h] in the dtype of the products."""
        self.strategy.module.eval()
        self.fields.needs = RequestedModelOutputs(fields=frozenset(), head=HIDDEN)
        found = []
        for batch in microbatches:
            with document_attention.rows_of(batch, self.fields.model):
                fields = self._fields(batch.to(self.context.device), batch)
            found.append(states_at_labels(batch, fields).to(self.dtype))
        return found

    def head_weight(self) -> Tensor:
        """The weight of the output layer, [vocabulary, h]. Collective."""
        model: Any = peft_names.unwrap_peft_model(self.fields.model)
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            rule = "has a bias in its output layer, which a teacher must not have here"
            raise ConfigError(Problem(f"{type(model).__name__}", rule, "use a teacher of another family"))
        own = self.strategy.named() if isinstance(self.strategy, DdpStrategy) else self.fields.named_parameters()
        name = next(name for name, p in own if p is head.weight)
        return whole_tensor(self.strategy, name, WEIGHT).to(self.dtype)

    def keep_reference(self, on_host: bool = False) -> None:
        """From now on `reference` is the present model. New adapters need no copy: the base is the model without."""
        if self.adapts and self.build.lora.adapters is None:
            return
        names = list(self.strategy.trained()) if self.adapts else list(self.shapes)
        self.remembered = ReferenceWeights(lambda: self.strategy.live(names), on_host)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The reference model for the length of a block. Not around `train_batch`."""
        peft: Any = self.fields.model
        if self.remembered is None:
            with peft.disable_adapter():
                yield
            return
        with self.remembered.exchanged():
            self.strategy.exchanged = True
            try:
                yield
            finally:
                self.strategy.exchanged = False

    def move_reference(self, share: float) -> None:
        """reference = share x model + (1 - share) x reference."""
        assert self.remembered is not None, "keep_reference was not called"
        self.remembered.blend(share)

    def set_teacher_head(self, weight: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> None:
        """Keep a teacher's head, whole on each rank, but for tokens that the model does not have."""
        self.fields.teacher_head = None
        if weight is not None:
            columns = min(self.vocab_size, len(weight))
            own = weight.detach()[:columns].to(self.context.device, copy=True)
            self.fields.teacher_head = TeacherHead(own, columns, scale, softcap)

    def largest_of_teacher(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """The teacher's largest log-probabilities and their tokens, from its hidden states."""
        shard = VocabularyHeadShardSpec(0, self.vocab_size, None, temperature, (), ())
        return largest_of_teacher(hidden, self.fields.teacher_head, shard, k)

    def hf_weights(
        self, dtype: torch.dtype | None = None, to: Receivers = "rank0", on_device: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on the receivers; every rank iterates. With adapters for policies only:
        merged in."""
        assert not self.adapts or self.merging is not None, "exports are merged by bridge.merge_adapter_folder"
        stream = checkpoint.stream_weights(self, WEIGHT, to, on_device)
        return ((name, t if dtype is None else t.to(dtype)) for name, t in stream)

    def hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, gradient) after `accumulate`, of a run without adapters; rank 0 gets tensors."""
        return checkpoint.stream_weights(self, GRADIENT)

    def export(self, folder: Path, source: Path, dtype: torch.dtype | None = None) -> None:
        """A Hugging Face folder, tensors in the dtypes that they have in `source`, or in `dtype`. Collective; rank 0
        writes.

        config.json is the source's, but for a model with a scalar head.
        """
        metas = tensor_metas_with_source_dtypes(checkpoint.meta_tensors_by_disk_name(self), source)
        config = None if self.spec.head == VOCABULARY else self.spec.hf_config
        metas = metas if dtype is None else {name: meta._replace(dtype=dtype) for name, meta in metas.items()}
        distributed.raise_on_all_ranks(
            checkpoint.write_tensor_stream_to_folder(
                self, folder, metas, self.hf_weights(), lambda writer: writer.close(source, config)
            ),
        )

    def write_adapter(self, folder: Path, base: str) -> None:
        """A PEFT folder with what trains. Collective; rank 0 writes."""
        names = list(self.strategy.trained())
        tensors = checkpoint.gathered(self, [(name, WEIGHT) for name in names], "rank0")
        state = dict(zip(names, tensors, strict=self.rank == 0))
        state |= {
            peft_names.PREFIX + name: tensor for name, tensor in persistent_buffers(self.fields.model).items()
        }  # VeRA's projections
        if self.rank == 0:
            peft_names.write_adapter_folder(
                self.fields.model, {n: t.detach().cpu() for n, t in state.items()}, folder, base
            )

    def offload(self, what: frozenset[str]) -> None:
        """Move parts of the engine off the device, and drop the gradients. What DDP and DeepSpeed allocate for their
        reductions stays."""
        weights = self.strategy.live(self.shapes)
        if "optimizer" in what:
            self.strategy.zero_grad()
            places = {weight.untyped_storage().data_ptr() for weight in weights}
            states = self.strategy.optimizer_tensors()
            self.parked.park(t for t in states if t.untyped_storage().data_ptr() not in places)
            self.strategy.exchanged = True
        if "model" in what:
            self.parked.park(weights)

    def onload(self) -> None:
        """Bring everything back to the device."""
        self.parked.bring_back()
        self.strategy.exchanged = False

    def describe(self, target: Path, folder: Path) -> None:
        """config.json, the tokenizer and each tensor's dtype. On one rank."""
        write_checkpoint_hf_metadata(
            target, self.spec.hf_config, folder_tensor_dtypes(folder) or {"all": folder_config_dtype(folder)}, folder
        )

    @property
    def kernels(self) -> str:
        """For the first screen."""
        bare: Any = peft_names.unwrap_peft_model(self.fields.model)
        attention = document_attention.attention_name(bare)
        chosen = self.build.model
        parts = ["transformers", f"{attention} attention", str(self.dtype).removeprefix("torch.")]
        if chosen.torch_compile:
            parts.append(f"layers compiled by {chosen.torch_compile_backend}")
        if chosen.use_liger:
            parts.append("liger-kernel")
        return ", ".join(parts)

    def replicated_weights(self) -> list[ReplicatedWeights]:
        """All weights on DDP and up to ZeRO-2; none where they are sharded."""
        whole = {name: p.data for name, p in self.fields.named_parameters() if not is_sharded_parameter(p)}
        return [ReplicatedWeights(dist.group.WORLD, [*whole], [*whole.values()])] if self.layout.world_size > 1 else []

    def report(self) -> EngineSizeReport:
        """Exact sizes, for the first screen. Collective."""
        return measure_torch_engine_sizes(self)

    def start_save(self, directory: Path) -> StartedSave:
        """Not on this engine: `checks.engine` refuses `async_save`."""
        raise AssertionError("async_save is an option of the native engine")

    def save(self, directory: Path) -> FileEntries:
        """Weights, optimizer and this rank's random states. Collective."""
        return checkpoint.save_step(self, directory)  # other files are hashed afterwards

    def load(self, directory: Path) -> None:
        """The inverse of `save`, under this or another strategy and number of ranks. Collective."""
        checkpoint.load_step(self, directory)
        model_check.check_causality_and_packing(self, self.score)


def is_sharded_parameter(parameter: Any) -> bool:
    """Whether a rank holds a part of it only: of ZeRO-3 or FSDP2."""
    return hasattr(parameter, "ds_tensor") or hasattr(parameter, "to_local")


def _local(parameter: Any) -> Tensor:
    """The part of a parameter that lies on this rank, under any strategy."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.data


def compute_dtype(torch_dtype: str, folder: Path, device: torch.device) -> torch.dtype:
    """`--torch_dtype`; auto: the checkpoint's on a GPU, float32 on a CPU."""
    if torch_dtype != "auto":
        return getattr(torch, torch_dtype)
    return folder_config_dtype(folder) if device.type == "cuda" else torch.float32


def document_length_per_token(batch: Batch) -> Tensor:
    """int64 [b, s]: the number of tokens in each token's document; 0 on padding."""
    valid = batch.valid.long()
    if batch.cu_seqlens is None:
        return valid * valid.sum(1, keepdim=True)
    ends = batch.cu_seqlens[1:].long().to(valid.device)
    document = torch.bucketize(torch.arange(valid.shape[1], device=valid.device), ends, right=True)  # [s]
    sizes = valid.new_zeros(len(ends)).index_add_(0, document, valid[0])
    return valid * sizes[document]


class NeftuneNoise:
    """A hook on the embedding. `scale` [b, s] holds alpha / sqrt(L) of the batch that comes, None where there is to be
    no noise."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.scale: Tensor | None = None
        self.handle = embedding.register_forward_hook(self)

    def of(self, batch: Batch) -> Tensor:
        """Return the scale of a batch: 0 on padding."""
        tokens = document_length_per_token(batch)
        return self.alpha * (tokens > 0) * tokens.clamp(min=1).rsqrt()

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """Embeddings [b, s, d] with noise."""
        if self.scale is None or not module.training:
            return None
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-1.0, 1.0)
        return output + (noise * (self.scale / output.shape[-1] ** 0.5)[..., None]).to(output.dtype)


# Exact sizes of what a torch engine holds, for the first screen, and the parameters of the FLOP rule.


def flop_parameter_counts(model: Any, spec: ModelSpec) -> tuple[int, int]:
    """Parameters in the FLOP rule, of a training step and of a forward pass.

    Those active for a token (of E experts k), without the input embedding unless it is also the output; in a step,
    frozen ones count two thirds. `model` is a transformers model, its layers wrapped by PEFT or not, before weights are
    sharded.
    """
    active = spec.topk / spec.experts if spec.experts else 1.0
    left_out = set() if spec.tied else {id(p) for p in model.get_input_embeddings().parameters()}
    step = forward = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in left_out:
            continue
        count = quantized_weights.unpacked_numel(parameter) * (active if ".experts." in name else 1.0)
        forward += count
        step += count if parameter.requires_grad else count * 2 / 3
    return int(step), int(forward)


def measure_torch_engine_sizes(engine: EngineState) -> EngineSizeReport:
    """Sizes of the largest rank, parameters in all. Collective."""
    elements, weights, gradients, optimizer = map(int, distributed.all_max(engine.strategy.sizes()))
    sizes = engine.elements, elements, weights, gradients, optimizer
    step, forward = engine.flop_parameters
    if not engine.adapts:
        return EngineSizeReport(*sizes, forward)
    return EngineSizeReport(*sizes, step, engine.trained, forward)
