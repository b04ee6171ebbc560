"""The model of one rank: Megatron's GPTModel with our vocabulary head, one module per pipeline chunk.

Owns construction (chunks, precision wrapper, DDP) and the forward pass of one micro-batch. Weights are in
`weights.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
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

from megaswift.engine.megatron.context_parallel import gather_sequence_for_loss
from megaswift.engine.megatron.cuda_graphs import tell_graphs_of_fused_gradients
from megaswift.engine.megatron.layers.grouped_experts import GroupedExpertLinear
from megaswift.engine.megatron.layers.head import compute_vocabulary_fields
from megaswift.engine.megatron.layers.implementation import (
    TORCH,
    TRANSFORMER_ENGINE,
    LayerImplementationChoice,
)
from megaswift.engine.megatron.layers.local_dispatcher import dispatch_to_local_experts
from megaswift.engine.megatron.layers.rope import PositionRotary, inverse_frequencies, windowed_layer_inv_freq
from megaswift.engine.megatron.layers.router import AuxLossTopKRouter, install_padding_mask_hooks
from megaswift.engine.megatron.layers.spec import block_spec
from megaswift.engine.megatron.microbatch import MicrobatchInputs
from megaswift.engine.megatron.optim.fp8_weights import gather_weights_now
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.tp_comm_overlap import create_user_buffers
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import RequestedModelOutputs
from megaswift.models.spec import ArchitectureExtras, ModelSpec
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.options.layout import ParallelConfig


class ScalarHead(nn.Module):
    """The head of reward models and critics: hidden [t, h] to float32 [1, t], one number per token. Every
    tensor-parallel rank computes all of it, from whole hidden states."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """The product in the model's precision, as transformers has it."""
        return nn.functional.linear(hidden, self.weight).float().t()


class SwiftGPT(GPTModel):
    """GPTModel whose last stage returns what the loss needs, float32 [fields, b, s], never logits."""

    needs: RequestedModelOutputs
    step: MicrobatchInputs
    real_vocabulary: int
    wait_for_weight: Callable[[Tensor], None]
    """Returns once all of a parameter of this chunk is there; `wrap_chunks` sets it. For what is read without a call of
    its module."""

    @property
    def rotates_by_position(self) -> bool:
        """Whether rotary angles come token by token, not by the distance from a row's or a document's start."""
        return isinstance(self.rotary_pos_emb, PositionRotary)

    def run(self, module: torch.nn.Module, step: MicrobatchInputs) -> Tensor:
        """One micro-batch through `module`, this chunk with its wrappers: hidden states, or the fields on the last
        stage."""
        self.step = step
        if self.rotates_by_position:
            self.rotary_pos_emb.positions = step.positions
        mask = self._padding_mask(step)
        return module(step.input_ids, step.positions, None, packed_seq_params=step.rows, padding_mask=mask)

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Megatron's, with rotary angles for latent attention too, and after shared prefixes by position."""
        prepared = super()._preprocess(*args, **kwargs)
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

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._fields(hidden_states) if self.post_process else hidden_states

    def _fields(self, hidden: Tensor) -> Tensor:
        """hidden [s / cp (/ tp), b, h] to the needed fields [f, b, s]; 0 where there is no label."""
        step = self.step
        shared = self.needs.head is None
        hidden = self._whole(hidden, shared)
        b, s = step.labels.shape
        rows = step.labeled_rows
        picked = hidden.reshape(s * b, -1).index_select(0, rows)
        labels = step.labels.t().reshape(-1).index_select(0, rows)
        values = self._vocabulary(picked, labels) if shared else self.score(picked)
        full = values.new_zeros(len(values), s * b).index_copy(1, rows, values)
        full = full.view(len(values), s, b).transpose(1, 2)
        if step.order is None or step.index is None:
            return full.contiguous()
        return gather_sequence_for_loss(full, step.order, step.index, self.pg_collection.cp)

    def _whole(self, hidden: Tensor, shared: bool) -> Tensor:
        """The hidden states of this rank's positions. `shared`: each tensor-parallel rank has a part of the head, so
        gradients add up."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=shared, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group) if shared else hidden

    def _vocabulary(self, picked: Tensor, labels: Tensor) -> Tensor:
        """hidden [t, h] and labels [t] to the needed fields [f, t]."""
        group = self.pg_collection.tp
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        self.wait_for_weight(weight)
        first = group.rank() * weight.shape[0]
        features: ArchitectureExtras = self.config.features
        shard = VocabularyHeadShardSpec(
            first,
            self.real_vocabulary - first,
            group,
            self.needs.temperature,
            self.needs.names,
            self.needs.differentiable,
            features.logit_scale,
            features.logit_softcap,
        )
        return compute_vocabulary_fields(picked, weight, labels, shard, self.config.head)


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
            install_padding_mask_hooks(model.decoder)
            dispatch_to_local_experts(model.decoder)
        if spec.scored and model.post_process:
            del model.output_layer
            model.score = ScalarHead(spec.hidden_size, config.params_dtype)
        model.needs = RequestedModelOutputs()
        if model.pre_process:
            model.embedding.word_embeddings.__class__ = (
                UnsyncedVocabParallelEmbedding  # GPTModel names the class itself
            )
            model.embedding.embedding_dropout.p = 0.0  # transformers drops what attention and MLP add, never embeddings
        if model.pre_process and spec.features.padding_token is not None:
            model.embedding.word_embeddings.register_forward_hook(
                zero_pad_token_embedding_grad_hook(spec.features.padding_token)
            )
        if model.pre_process and spec.features.embedding_scale != 1.0:
            model.embedding.register_forward_hook(embedding_scale_hook(spec.features))
        chunks.append(model.to(context.device))
    tell_graphs_of_fused_gradients(config, fused)
    if spec.features.qk_norm_width == "all":
        config.qk_layernorm = (
            False  # read after construction for one thing: gradients of all `q_layernorm` are summed over TP ranks
        )
    return chunks


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
    """What Megatron-Core does before the call of the module that owns `weight`, for one that is read without it."""
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
