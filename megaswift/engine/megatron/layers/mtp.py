"""Layers for multi-token prediction, on the last pipeline stage (DeepSeek-V3, arXiv:2412.19437, equations 21 to 23).

Owns the layers, with Megatron-Core's names, and the copy of the embedding that the last of several stages needs.
`losses.mtp` decides which tokens a layer reads. Megatron-Core's own block is not used: it shifts tokens document by
document, with messages between context-parallel ranks and a wait of the host at each border. Here the host computes
all positions beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import (
    checkpoint,
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megaswift.bridge.plan import EMBEDDING
from megaswift.engine.megatron.layers.classes import layer_module_classes
from megaswift.engine.megatron.layers.implementation import LayerImplementationChoice
from megaswift.engine.megatron.layers.spec import layer_spec
from megaswift.engine.megatron.microbatch import MicrobatchInputs
from megaswift.models.spec import LayerKind, ModelSpec


class MtpLayer(MegatronModule):
    """One layer: norms of an embedding and of a hidden state, a product of both joined, a decoder layer, a norm."""

    def __init__(
        self,
        config: Any,
        choice: LayerImplementationChoice,
        kind: LayerKind,
        number: int,
        pg_collection: Any,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        modules = layer_module_classes(choice.linear, config.moe_grouped_gemm, config.torch_experts)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = modules.norm(**norm)
        self.hnorm = modules.norm(**norm)
        self.eh_proj = build_module(
            modules.column,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        before = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pg_collection.pp.rank())
        self.transformer_layer = build_module(
            layer_spec(config, choice, kind),
            config=config,
            layer_number=config.num_layers + number + 1 - before,  # the class adds the offset of its stage
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.final_layernorm = modules.norm(**norm)

    @property
    def mtp_model_layer(self) -> nn.Module:
        """The decoder layer by the name that the schedules of newer Megatron-Core (0.19) look for."""
        return self.transformer_layer

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotary_pos_emb: Tensor | None, padding_mask: Tensor | None, rows: Any
    ) -> Tensor:
        """Embeddings and hidden states [s / cp (/ tp), b, h] to hidden states of the same shape.

        Args:
            rotary_pos_emb: The angles of the decoder's layers.
            padding_mask: bool [b, s / cp (/ tp)], True where routers do not count a token; None without experts.
            rows: The documents of the rows, as the decoder's layers get them.
        """
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        projected, _bias = self.eh_proj(joined)
        projected = gather_from_tensor_model_parallel_region(projected, group=self.tp_group)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, group=self.tp_group)
        out, _context = self.transformer_layer(
            hidden_states=projected,
            attention_mask=None,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=rows,
            padding_mask=padding_mask,
        )
        normed: Tensor = self.final_layernorm(out)
        return normed


class _WithoutGradient(torch.autograd.Function):
    """Pass values through and return a gradient of 0. A missing gradient would not do: Megatron-Core's DDP waits for
    that of every parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class MultiTokenPrediction(MegatronModule):
    """All layers, each of which reads the hidden states of the one before it, the first those of the decoder.

    With `config.detaches_mtp` no gradient flows from the layers into embedding and decoder.

    Args:
        embedding: The copy of the embedding on a stage without the model's own; None: `forward` is given the model's.
    """

    def __init__(
        self,
        config: Any,
        choice: LayerImplementationChoice,
        spec: ModelSpec,
        pg_collection: Any,
        vp_stage: int | None,
        embedding: LanguageModelEmbedding | None,
    ) -> None:
        super().__init__(config=config)
        self.pg_collection = pg_collection
        self.detach: bool = config.detaches_mtp
        self.layers = nn.ModuleList(
            MtpLayer(config, choice, spec.mtp_kind, number, pg_collection, vp_stage)
            for number in range(spec.mtp_layers)
        )
        if embedding is not None:
            self.embedding = embedding

    def forward(
        self, hidden: Tensor, step: MicrobatchInputs, embedding: nn.Module, rotary_pos_emb: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the hidden states [s / cp (/ tp), b, h] of each layer that the step asks for.

        Args:
            hidden: Those of the decoder, after its last norm.
            embedding: Token ids [b, s / cp] to vectors [s / cp (/ tp), b, h].
        """
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        if torch.is_grad_enabled() and (self.detach or not hidden.requires_grad):
            hidden = hidden.detach().requires_grad_()  # recomputed layers have gradients only if an input has
        for layer, read in zip(self.layers, step.ahead, strict=False):
            embedded = embedding(input_ids=read.input_ids, position_ids=step.positions)
            if self.detach:
                embedded = _WithoutGradient.apply(embedded)
            padding = None
            if self.config.num_moe_experts is not None:
                padding = read.padding.chunk(ranks, dim=1)[self.pg_collection.tp.rank() % ranks].contiguous()
            hidden = self._run(layer, embedded, hidden, rotary_pos_emb, padding, step.rows)
            yield hidden

    def _run(self, layer: Any, *arguments: Any) -> Tensor:
        *tensors, rows = arguments
        own_states = get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext()
        with own_states:  # of dropout, as in Megatron-Core's block
            if self.config.recompute_granularity == "full" and self.training:
                out: Tensor = checkpoint(lambda *inputs: layer(*inputs, rows), False, *tensors)
            else:
                out = layer(*tensors, rows)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The layers, and the embedding's copy as a replica of the first stage's."""
        sharded: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, MtpLayer)
            sharded |= layer.sharded_state_dict(f"{prefix}layers.{number}.", (), metadata)
        weight = self.embedding_copy
        if weight is not None:
            group = self.pg_collection.dp_cp
            sharded[EMBEDDING] = make_tp_sharded_tensor_for_checkpoint(
                tensor=weight,
                key=EMBEDDING,
                replica_id=(1, 0, group.rank()),
                allow_shape_mismatch=True,
                tp_group=self.pg_collection.tp,
                dp_cp_group=group,
            )
        return sharded

    @property
    def embedding_copy(self) -> Tensor | None:
        """The parameter that repeats the embedding of the first stage; None where this stage has the embedding itself,
        or an output layer tied to it."""
        weight = self.embedding.word_embeddings.weight if hasattr(self, "embedding") else None
        return None if weight is None or hasattr(weight, "zero_out_wgrad") else weight


def sum_embedding_gradients(weights: Sequence[Tensor], group: Any) -> None:
    """Sum the gradients of the embedding and of its copy on the last stage, once each is complete. Collective over the
    group of both stages. Megatron-Core does so for an output layer that is tied to the embedding."""
    for weight in weights:
        gradient = getattr(weight, "main_grad", None)
        if gradient is not None:
            dist.all_reduce(gradient, group=group)
