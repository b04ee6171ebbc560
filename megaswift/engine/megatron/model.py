"""The model of one rank: Megatron's GPTModel with our vocabulary head, one module per pipeline chunk.

Owns construction (chunks, precision wrapper, DDP) and the forward pass of one micro-batch. Weights are in
`weights.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaswift.engine.divergence import largest_of_teacher
from megaswift.engine.megatron.context_parallel import gather_sequence_for_loss
from megaswift.engine.megatron.cuda_graphs import tell_graphs_of_fused_gradients
from megaswift.engine.megatron.layers.delta_net import GatedDeltaNet
from megaswift.engine.megatron.layers.divergence import compute_divergence
from megaswift.engine.megatron.layers.head import compute_vocabulary_fields
from megaswift.engine.megatron.layers.implementation import (
    TORCH,
    TRANSFORMER_ENGINE,
    LayerImplementationChoice,
)
from megaswift.engine.megatron.layers.moe.dispatcher import dispatch_to_local_experts
from megaswift.engine.megatron.layers.moe.experts import GroupedExpertLinear
from megaswift.engine.megatron.layers.moe.router import (
    AuxLossTopKRouter,
    install_padding_mask_hooks,
    keep_padding_of_scheduled_layers,
    refuse_parts_that_schedules_leave_out,
)
from megaswift.engine.megatron.layers.mtp import MultiTokenPrediction
from megaswift.engine.megatron.layers.rope import PositionRotary, inverse_frequencies, windowed_layer_inv_freq
from megaswift.engine.megatron.layers.spec import block_spec
from megaswift.engine.megatron.microbatch import MicrobatchInputs
from megaswift.engine.megatron.optim.fp8_weights import gather_weights_now
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.tp_comm_overlap import create_user_buffers
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import HIDDEN, TOKENS, RequestedModelOutputs
from megaswift.models.spec import VOCABULARY, ArchitectureExtras, ModelSpec
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.options.layout import ParallelConfig


class ScoreHead(nn.Module):
    """The head of classifiers, reward models and critics: hidden [t, h] to float32 [labels, t]. Every tensor-parallel
    rank computes all of it, from whole hidden states."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(spec.labels, spec.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(spec.labels, dtype=dtype)) if spec.score_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """The product in the model's precision, as transformers has it."""
        return nn.functional.linear(hidden, self.weight, self.bias).float().t()


AHEAD = RequestedModelOutputs()
"""What is asked of a layer for multi-token prediction: log-probabilities."""


class SwiftGPT(GPTModel):
    """GPTModel whose last stage returns what the loss needs, float32 [fields, b, s], never logits."""

    needs: RequestedModelOutputs
    step: MicrobatchInputs
    teacher_head: TeacherHead | None = None
    """On the last chunk, for divergences from hidden states of a teacher."""
    real_vocabulary: int
    wait_for_weight: Callable[[Tensor], None]
    """Returns once all of a parameter of this chunk is there; `wrap_chunks` sets it. For what is read without a call of
    its module."""

    @property
    def rotates_by_position(self) -> bool:
        """Return whether rotary angles come token by token, not by the distance from a row's or a document's start."""
        return isinstance(self.rotary_pos_emb, PositionRotary)

    def run(self, module: torch.nn.Module, step: MicrobatchInputs) -> Tensor:
        """One micro-batch through `module`, this chunk with its wrappers: hidden states, or the fields on the last
        stage."""
        self.step = step
        if self.rotates_by_position:
            self.rotary_pos_emb.positions = step.positions
        mask = self._padding_mask(step)
        return module(step.input_ids, step.positions, None, packed_seq_params=step.rows, padding_mask=mask)

    def plan(self, step: MicrobatchInputs) -> Any:
        """Return Megatron-Core's schedule of one micro-batch through this chunk, whose parts it runs between those of
        another micro-batch's backward pass."""
        self.step = step
        if self.rotates_by_position:
            self.rotary_pos_emb.positions = step.positions
        mask = self._padding_mask(step)
        return self.build_schedule_plan(
            step.input_ids, step.positions, None, packed_seq_params=step.rows, padding_mask=mask
        )

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Megatron's, with rotary angles for latent attention too, and after shared prefixes by position."""
        prepared = super()._preprocess(*args, **kwargs)
        if self.config.overlap_moe_expert_parallel_comm:
            keep_padding_of_scheduled_layers(self.decoder, prepared[-1])
        angles = prepared[1]
        if self.config.multi_latent_attention:
            angles = self.rotary_pos_emb()
        elif getattr(self.step.rows, "prefixed", None) is not None and not self.rotates_by_position:
            angles = angles.index_select(0, self.step.positions[0])
        return (prepared[0], angles, *prepared[2:])

    def _padding_mask(self, step: MicrobatchInputs) -> Tensor | None:
        """[b, s / cp], or its sequence-parallel part on later stages: Megatron cuts it on the first stage only."""
        if self.config.num_moe_experts is None:
            return None
        if self.config.sequence_parallel and not self.pre_process:
            return step.padding.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()].contiguous()
        return step.padding

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's, which takes an output layer over the vocabulary for granted."""
        if not self.post_process or hasattr(self, "output_layer"):
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def _postprocess(self, hidden_states: Tensor, *_: Any, rotary_pos_emb: Tensor | None = None, **__: Any) -> Tensor:
        return self._fields(hidden_states, rotary_pos_emb) if self.post_process else hidden_states

    def _fields(self, hidden: Tensor, rotary_pos_emb: Tensor | None) -> Tensor:
        """hidden [s / cp (/ tp), b, h] to the needed fields [f, b, s]; 0 where there is no label."""
        step = self.step
        parts = [self._fields_of(hidden, step.labels, step.labeled_rows, self.needs)]
        if step.ahead:
            embedding = self.embedding if self.pre_process else self.mtp.embedding
            for read, out in zip(step.ahead, self.mtp(hidden, step, embedding, rotary_pos_emb), strict=True):
                parts.append(self._fields_of(out, read.labels, read.labeled_rows, AHEAD))
            if self.needs.divergence is not None:  # comes last
                parts.append(parts[0][-1:])
                parts[0] = parts[0][:-1]
        full = torch.cat(parts) if len(parts) > 1 else parts[0]
        if step.order is None or step.index is None:
            return full.contiguous()
        return gather_sequence_for_loss(full, step.order, step.index, self.pg_collection.cp)

    def _fields_of(self, hidden: Tensor, labels: Tensor, rows: Tensor, needs: RequestedModelOutputs) -> Tensor:
        """The fields [f, b, s / cp] of hidden states, at the flat positions `rows` [n] of [s / cp x b]; 0 elsewhere."""
        shared = needs.head in (None, TOKENS)
        hidden = self._whole(hidden, shared)
        b, s = labels.shape
        picked = hidden.reshape(s * b, -1).index_select(0, rows)
        chosen = labels.t().reshape(-1).index_select(0, rows)
        if needs.head == HIDDEN:
            values = picked.float().t()
        elif needs.head == TOKENS:
            values = self._logits_of_tokens(picked, needs.tokens)
        else:
            values = self._vocabulary(picked, chosen, needs) if shared else self.score(picked)
        full = values.new_zeros(len(values), s * b).index_copy(1, rows, values)
        return full.view(len(values), s, b).transpose(1, 2)

    @property
    def repeated_embedding(self) -> list[Tensor]:
        """The embedding, or its copy on the last stage, where both exist and are parameters of their own."""
        if hasattr(self, "mtp"):
            weight = self.mtp.embedding_copy
            return [] if weight is None else [weight]
        repeats = self.config.mtp_layers and self.pre_process and not self.share_embeddings_and_output_weights
        return [self.embedding.word_embeddings.weight] if repeats else []

    def _whole(self, hidden: Tensor, shared: bool) -> Tensor:
        """The hidden states of this rank's positions. `shared`: each tensor-parallel rank has a part of the head, so
        gradients add up."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=shared, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group) if shared else hidden

    def _head_weight(self) -> Tensor:
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        self.wait_for_weight(weight)
        return weight

    def _logits_of_tokens(self, picked: Tensor, tokens: Sequence[int]) -> Tensor:
        """hidden [t, h] to the logits of some tokens, float32 [n, t]."""
        group = self.pg_collection.tp
        weight = self._head_weight()
        first = group.rank() * weight.shape[0]
        own = [i for i, token in enumerate(tokens) if first <= token < first + weight.shape[0]]
        # A rank without one of the tokens takes its first row, times 0: each has a gradient for its part of the weight
        columns = [token - first if i in own else 0 for i, token in enumerate(tokens)]
        factors = torch.tensor([float(i in own) for i in range(len(tokens))], device=picked.device)
        logits = nn.functional.linear(picked, weight[columns]).float() * factors
        features: ArchitectureExtras = self.config.features
        logits = reduce_from_tensor_model_parallel_region(logits, group=group) * features.logit_scale
        cap = features.logit_softcap
        return (logits if cap is None else cap * torch.tanh(logits / cap)).t()

    def _vocabulary(self, picked: Tensor, labels: Tensor, needs: RequestedModelOutputs) -> Tensor:
        """hidden [t, h] and labels [t] to the needed fields [f, t]."""
        group = self.pg_collection.tp
        weight = self._head_weight()
        if needs is AHEAD and self.mtp.detach:
            weight = weight.detach()
        first = group.rank() * weight.shape[0]
        features: ArchitectureExtras = self.config.features
        shard = VocabularyHeadShardSpec(
            first,
            self.real_vocabulary - first,
            group,
            needs.temperature,
            needs.names,
            needs.differentiable,
            features.logit_scale,
            features.logit_softcap,
        )
        if needs.divergence is None:
            return compute_vocabulary_fields(picked, weight, labels, shard, self.config.head)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(needs.differentiable)):
            fields = compute_vocabulary_fields(picked, weight, labels, shard, self.config.head)
        assert self.step.teacher is not None
        teacher = self.step.teacher, self.teacher_head
        divergence = compute_divergence(picked, weight, teacher, needs.divergence, shard, self.config.head)
        return torch.cat([fields, divergence[None]])

    def largest_of_teacher(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """The teacher's `k` largest log-probabilities [n, k] and their tokens, from its hidden states [n, h]."""
        group = self.pg_collection.tp
        first = group.rank() * (self.vocab_size // group.size())
        shard = VocabularyHeadShardSpec(first, self.real_vocabulary - first, group, temperature, (), ())
        return largest_of_teacher(hidden, self.teacher_head, shard, k)

    def set_teacher_head(self, weight: Tensor, scale: float, softcap: float | None) -> None:
        """Keep this rank's rows of the head of a teacher, [vocabulary, hidden size]."""
        group = self.pg_collection.tp
        rows = self.vocab_size // group.size()
        first = group.rank() * rows
        columns = max(0, min(rows, min(self.real_vocabulary, len(weight)) - first))
        own = weight.detach()[first : first + columns].to(next(self.parameters()).device, copy=True)
        self.teacher_head = TeacherHead(own, columns, scale, softcap)


def embedding_scale_hook(features: ArchitectureExtras) -> Callable[..., Tensor]:
    """A hook that multiplies the embeddings; the factor itself is rounded to their dtype where the family does so."""

    def hook(_module: torch.nn.Module, _args: Any, out: Tensor) -> Tensor:
        factor = features.embedding_scale
        return out * (
            torch.full((), factor, dtype=out.dtype, device=out.device) if features.embedding_scale_rounded else factor
        )

    return hook


def zero_pad_token_embedding_grad_hook(token: int) -> Callable[..., None]:
    """A hook on Megatron's token embedding: a padding token's vector gets no gradient where it is looked up, as in
    torch's Embedding(padding_idx), of which transformers builds every model whose config.json has a `pad_token_id`.
    (Some models end their turns with that token. A tied head learns from it all the same.)"""

    def hook(module: VocabParallelEmbedding, args: tuple[Tensor], out: Tensor) -> None:
        if not out.requires_grad:
            return
        padding = args[0] == token  # [b, s], as the output
        if module.reduce_scatter_embeddings:  # the output is this rank's part of [s, b]
            padding = padding.t().chunk(module.tp_group.size())[module.tp_group.rank()]
        out.register_hook(lambda gradient: gradient.masked_fill(padding.unsqueeze(-1), 0.0))

    return hook


def fuse_gradient_accumulation(model: nn.Module) -> None:
    """Let the products of Transformer Engine's modules add the gradients of weights to `main_grad` themselves, in
    float32. Megatron-Core's option of the name is off until then: its output layer, whose call nobody makes here, would
    refuse it without apex."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def build_model_chunks(
    spec: ModelSpec, config: TransformerConfig, context: ParallelContext, choice: LayerImplementationChoice
) -> list[SwiftGPT]:
    """This rank's model chunks, without wrappers and with weights still to be loaded."""
    layout = context.layout
    coords = context.coordinates
    create_user_buffers(config)
    inv_freq, _ = inverse_frequencies(spec)
    chunks = []
    for i in range(layout.vpp):
        stage = i if layout.vpp > 1 else None
        model = SwiftGPT(
            config=config,
            transformer_layer_spec=block_spec(config, choice, stage, coords.pp),
            vocab_size=padded_vocabulary_size(spec, layout.tp),
            max_sequence_length=spec.max_positions,
            pre_process=coords.pp == 0 and i == 0,
            post_process=coords.pp == layout.pp - 1 and i == layout.vpp - 1,
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            rotary_percent=spec.rope.partial,
            rotary_base=spec.rope.base,
            pg_collection=context.groups,
            vp_stage=stage,
        )
        features = spec.features
        if choice.attention == TORCH or config.multi_latent_attention or features.changes_rotated_queries:
            local = windowed_layer_inv_freq(spec)
            local = None if local is None else local.to(context.device)
            pairs = config.rotary_interleaved or features.latent_pairs
            scale = (features.query_scale_beta, features.query_scale_length) if features.query_scale_beta else None
            model.rotary_pos_emb = PositionRotary(inv_freq.to(context.device), local, pairs, scale)
        else:
            model.rotary_pos_emb.inv_freq = inv_freq.to(context.device)
        if fused := choice.linear == TRANSFORMER_ENGINE and config.head.into_main_grad:
            fuse_gradient_accumulation(model)
        model.real_vocabulary = spec.vocab_size
        if spec.experts:
            if config.overlap_moe_expert_parallel_comm:
                refuse_parts_that_schedules_leave_out(model.decoder)
            install_padding_mask_hooks(model.decoder)
            dispatch_to_local_experts(model.decoder)
        copy_biases_of_recomputed_mlps(model)
        if spec.head != VOCABULARY and model.post_process:
            del model.output_layer
        if spec.scored and model.post_process:
            model.score = ScoreHead(spec, config.params_dtype)
        model.needs = RequestedModelOutputs()
        if model.pre_process:
            adapt_embedding(model.embedding, spec.features)
        if spec.mtp_layers:
            add_mtp(model, spec, choice)
        chunks.append(model.to(context.device))
    tell_graphs_of_fused_gradients(config, fused)
    if spec.features.qk_norm_width == "all":
        config.qk_layernorm = (
            False  # read after construction for one thing: gradients of all `q_layernorm` are summed over TP ranks
        )
    return chunks


def adapt_embedding(embedding: LanguageModelEmbedding, features: ArchitectureExtras) -> None:
    """Let Megatron-Core's embedding compute what transformers' models do."""
    embedding.word_embeddings.__class__ = UnsyncedVocabParallelEmbedding  # Megatron-Core names the class itself
    embedding.embedding_dropout.p = 0.0  # transformers drops what attention and MLP add, never embeddings
    if features.padding_token is not None:
        embedding.word_embeddings.register_forward_hook(zero_pad_token_embedding_grad_hook(features.padding_token))
    if features.embedding_scale != 1.0:
        embedding.register_forward_hook(embedding_scale_hook(features))


def add_mtp(model: SwiftGPT, spec: ModelSpec, choice: LayerImplementationChoice) -> None:
    """Add the layers for multi-token prediction to the last chunk, and to that of several stages a copy of the
    embedding; mark both embeddings for Megatron-Core, as it does itself with an output layer that is tied to one."""
    apart = model.config.pipeline_model_parallel_size > 1
    if apart and model.pre_process:
        model.embedding.word_embeddings.weight.shared_embedding = True  # a bucket of its own in DDP
    if not model.post_process:
        return
    embedding = None
    if apart:
        embedding = LanguageModelEmbedding(
            model.config, model.vocab_size, spec.max_positions, "rope", tp_group=model.pg_collection.tp
        )
        adapt_embedding(embedding, spec.features)
        if spec.tied:
            embedding.word_embeddings.weight = model.output_layer.weight
            # the lookup's gradient comes by autograd, the head's is in `main_grad` already: DDP must add the former
            model.output_layer.weight.zero_out_wgrad = True
        else:
            copy = embedding.word_embeddings.weight
            copy.is_embedding_or_output_parameter = True
            copy.shared = True  # the gradient norm counts the first stage's
            copy.shared_embedding = True
    model.mtp = MultiTokenPrediction(model.config, choice, spec, model.pg_collection, model.vp_stage, embedding)
    if spec.experts:
        dispatch_to_local_experts(model.mtp)


def ddp_overlap_flags(p: ParallelConfig, distributed: bool, cuda: bool) -> tuple[bool, bool]:
    """(gradients reduced behind the backward pass, weights gathered behind the forward pass): on a GPU unless the
    options say otherwise.

    Weights are in parts with the distributed optimizer only, and Megatron-Core gathers them so only where it reduces so
    too.

    Args:
        distributed: Whether the optimizer is the distributed one.
    """
    reduce = cuda if p.overlap_grad_reduce is None else p.overlap_grad_reduce
    gather = p.overlap_param_gather
    if gather is None:
        gather = cuda and distributed and reduce
    return reduce, gather


def wrap_chunks(
    chunks: list[SwiftGPT],
    config: TransformerConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    context: ParallelContext,
) -> list[DistributedDataParallel]:
    """Precision wrapper and Megatron's DDP, with float32 gradients or, by `main_grads_dtype`, those of the weights'
    bfloat16."""
    sharded = uses_distributed_optimizer(parallel.distributed_optimizer, optim.optimizer)
    overlap_reduce, overlap_gather = ddp_overlap_flags(parallel, sharded, context.device.type == "cuda")
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optim.main_grads_dtype == "fp32",
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=overlap_gather,
        # the interleaved schedule starts all gathers of a chunk, so that no bucket has to start the next one's
        align_param_gather=overlap_gather and len(chunks) > 1,
        use_distributed_optimizer=sharded,
        check_for_nan_in_grad=False,
        average_in_collective=False,
        fp8_param_gather=config.fp8_param,
    )
    half = config.bf16 or config.fp16
    inner = [Float16Module(config, c) if half else c for c in chunks]
    for experts in (m for c in chunks for m in c.modules() if isinstance(m, GroupedExpertLinear)):
        experts.separate_partly_trained()
    for router in (m for c in chunks for m in c.modules() if isinstance(m, AuxLossTopKRouter)):
        # before weights come: Megatron's own call, in the first pass, is after their rounding
        router._maintain_float32_expert_bias()
    for layer in (m for c in chunks for m in c.modules() if isinstance(m, GatedDeltaNet)):
        layer.keep_float32()
    wrapped = [
        DistributedDataParallel(
            config, ddp, m, disable_bucketing=i > 0 and not overlap_reduce, pg_collection=context.groups
        )
        for i, m in enumerate(inner)
    ]
    for chunk, module in zip(chunks, wrapped, strict=True):
        chunk.wait_for_weight = functools.partial(_wait_for_weight, module)
    several = len(wrapped) > 1
    config.no_sync_func = [m.no_sync for m in wrapped] if several else wrapped[0].no_sync
    if overlap_reduce:
        starts = [functools.partial(_start_reduction, m) for m in wrapped]
        config.grad_sync_func = starts if several else starts[0]
    if overlap_gather and several:
        config.param_sync_func = [m.start_param_sync for m in wrapped]
    return wrapped


def _wait_for_weight(module: DistributedDataParallel, weight: Tensor) -> None:
    """Do what Megatron-Core does before the call of the module that owns `weight`, for one that is read without it."""
    bucket = module.param_to_bucket_group.get(weight)
    if module.ddp_config.overlap_param_gather and bucket is not None:
        bucket.finish_param_sync(skip_next_bucket_dispatch=module.ddp_config.align_param_gather)


def _start_reduction(module: DistributedDataParallel, *_: Any) -> None:
    """Megatron-Core's `start_grad_sync`, which leaves out that whole gradients may be wanted."""
    for bucket in (*module.bucket_groups, *module.expert_parallel_bucket_groups):
        bucket.start_grad_sync(module.force_all_reduce)


def finish_weight_gathers(chunks: list[DistributedDataParallel]) -> None:
    """Complete this rank's weights before they are read outside a forward pass. Collective.

    With `overlap_param_gather` the parts that other ranks' optimizer shards updated arrive with the next forward pass
    only.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            gather_weights_now(chunk)


def copy_biases_of_recomputed_mlps(model: torch.nn.Module) -> None:
    """Let recomputed MLPs return a copy of their bias, which their layer adds.

    The parameter itself would become an output of Megatron-Core's checkpoint: with this as its history the backward
    pass of the recomputation would begin the same recomputation without end.
    """
    for layer in model.modules():
        if getattr(layer, "recompute_mlp", False):
            layer.get_submodule("mlp").register_forward_hook(_with_copied_bias)


def _with_copied_bias(_: torch.nn.Module, args: Any, out: tuple[Tensor, Tensor | None]) -> Any:
    output, bias = out
    return output, None if bias is None else bias.clone()


# Megatron-Core's vocabulary-parallel embedding without waits of the host for the device.
#
# Megatron-Core's masks tokens of other ranks by boolean indices, whose count the host reads from the device: three
# waits a micro-batch, the backward pass included.


class UnsyncedVocabParallelEmbedding(VocabParallelEmbedding):
    """The same numbers from `masked_fill`."""

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [b, s] to vectors [b, s, h], or this rank's part of [s, b, h] with sequence parallelism."""
        if self.tp_group.size() == 1:
            return super().forward(input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        rows = (input_ - self.vocab_start_index).masked_fill_(elsewhere, 0)
        vectors = self.weight[rows] if self.deterministic_mode else F.embedding(rows, self.weight)
        vectors = vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(vectors.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(vectors, group=self.tp_group)
