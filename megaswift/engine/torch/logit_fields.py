"""The fields that losses read (log-probabilities, ...) from the logits that a transformers model returns: the
counterpart of `engine/megatron/layers/head.py`, which makes the products itself.

Logits stay in the model's dtype, and their gradient takes their place: a model's last operations (a product, a factor,
a soft cap's factor) do not keep their output. Autograd refuses to go on where one does.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.divergence import TeacherOutputs, TeacherRows
from megaswift.engine.logit_fields import (
    VocabularyRows,
    gradient_coefficients,
    join_shards,
    row_statistics,
    write_gradient,
)
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.encoder_parts import label_scores
from megaswift.engine.torch.vision_parts import model_has_tower
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import SCORES, TOKENS, Batch, RequestedModelOutputs
from megaswift.models.encoders import is_encoder
from megaswift.parallel.head_memory import head_chunks


def compute_loss_fields(
    logits: Tensor,
    labels: Tensor,
    needs: RequestedModelOutputs,
    teacher: tuple[TeacherOutputs, TeacherHead | None] | None = None,
) -> Tensor:
    """float32 [f, ...] from logits [..., v] and labels [...], in the order of `needs.names`, and the divergence from
    the `teacher` [..., n] where that is asked for. The backward pass overwrites the logits."""
    width = logits.shape[-1]
    shard = VocabularyHeadShardSpec(0, width, None, needs.temperature, needs.names, needs.differentiable)
    rows = None
    if needs.divergence is not None:
        assert teacher is not None
        outputs, head = teacher
        flat = outputs.with_tensors(lambda t: t.reshape(-1, t.shape[-1]))
        rows = flat.rows(head, needs.divergence, shard, _product)
    fields: Tensor = LossFieldsFunction.apply(logits.reshape(-1, width), labels.reshape(-1), shard, rows)
    return fields.view(len(fields), *labels.shape)


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [r, h] times weight [v, h], in the dtype of both: autocast is off in backward passes too."""
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden @ weight.t()


class LossFieldsFunction(torch.autograd.Function):
    """(logits [t, v], labels [t]) to the fields [f, t] in float32, of which the divergence from a teacher is the
    last."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec, teacher: TeacherRows | None
    ) -> Tensor:
        """The fields; keeps the logits."""
        rows = join_shards(row_statistics(logits, labels, shard), labels, logits.shape[1], shard)
        ctx.shard = shard
        ctx.teacher = teacher
        ctx.done = False
        if teacher is None:
            ctx.save_for_backward(logits, labels, rows.fields, rows.kept)
            return rows.fields
        parts = [teacher.divergence(logits[some], some) for some in _row_chunks(logits)]
        fields = torch.cat([rows.fields, torch.cat([values for values, _ in parts])[None]])
        numbers = torch.cat([numbers for _, numbers in parts], dim=1)
        ctx.save_for_backward(logits, labels, rows.fields, rows.kept, numbers)
        return fields

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits, in their memory; so it runs once."""
        assert not ctx.done, "the backward pass of the fields has run already, and the logits are gone"
        ctx.done = True
        logits, labels, fields, kept, *numbers = ctx.saved_tensors
        coefficients = gradient_coefficients(
            grads[: len(fields)], VocabularyRows(fields, kept), logits.shape[1], ctx.shard
        )
        gradient = logits.detach()
        if ctx.teacher is None:
            write_gradient(gradient, labels, coefficients, ctx.shard, gradient)
            return gradient, None, None, None
        for some in _row_chunks(logits):
            own = gradient[some]
            further = torch.empty_like(own) if ctx.shard.differentiable else own
            ctx.teacher.write_gradient(own, some, numbers[0][:, some], grads[-1, some], further)
            if ctx.shard.differentiable:
                write_gradient(own, labels[some], coefficients[:, some], ctx.shard, own)
                own += further
        return gradient, None, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    """Rows of which a teacher's products exist at a time."""
    chunks = head_chunks(len(logits), logits.shape[1] * logits.element_size(), logits.device.type, False)
    return [slice(c.start, c.stop) for c in chunks]


def labeled_columns(labeled: Tensor) -> Tensor:
    """int64 [n], n at least 1: the columns of bool [b, s] that hold a label. Call it on a batch in host
    memory: for a tensor on a GPU the host would wait for the device."""
    columns = labeled.any(0).nonzero().squeeze(1)
    return columns if columns.numel() else columns.new_zeros(1)  # every rank goes through every layer


def image_grid_positions(model: Any, batch: Batch) -> Tensor | None:
    """(time, height, width) of each token of a batch in host memory, int64 [3, b, s], or [4, 1, s] of a packed row;
    None where the model does not place the tokens of images on a grid.

    They are asked from the model here, as its forward pass would read the size of every image from the device. It
    places a whole packed row as one document; each document's positions are these less the first of its own. Before
    them stand those that begin anew with each document and tell transformers the documents apart.
    """
    of_grid = getattr(model.base_model, "get_rope_index", None)
    if of_grid is None or not {"image_grid_thw", "video_grid_thw"} & batch.extra.keys():
        return None
    names = inspect.signature(of_grid).parameters
    whole: Tensor = of_grid(batch.input_ids, **{k: v for k, v in batch.extra.items() if k in names})[0]
    if batch.cu_seqlens is None:
        return whole
    positions = batch.positions
    first = torch.where(positions[0] == 0, torch.arange(positions.shape[1]), 0)
    grid = whole.to(positions) - whole[0, 0, first.cummax(0).values].to(positions)
    return torch.cat([positions[None], grid])


def position_ids(model: nn.Module, batch: Batch, on_host: Batch) -> Tensor | None:
    """What a transformers model needs to know of the positions in a batch on a device, which `on_host` is in host
    memory; None where it counts for itself."""
    grid = image_grid_positions(unwrap_peft_model(model), on_host)
    if grid is not None:
        return copy_to_device_async(grid, batch.positions.device)
    return None if batch.cu_seqlens is None else batch.positions


class LossFieldsModel(nn.Module):
    """A causal language model whose forward pass ends in fields, so that a wrapper's hooks see the head too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.needs = RequestedModelOutputs()
        self.teacher_head: TeacherHead | None = None
        bare: Any = unwrap_peft_model(model)
        self.has_tower = model_has_tower(bare)
        self.is_encoder = is_encoder(bare.config.to_dict())
        parameters = inspect.signature(bare.forward).parameters
        self.chooses = "logits_to_keep" in parameters
        self.takes_positions = self.has_tower or "position_ids" in parameters
        """Models without any (state spaces, ALiBi) do not; those with a tower hand them on to their language model."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        labels: Tensor,
        labeled: Tensor,
        columns: Tensor,
        extra: dict[str, Any],
        teacher: TeacherOutputs | None = None,
    ) -> Tensor:
        """float32 [f, b, s], 0 where `labeled` is False. `positions`: from `position_ids`. Only `columns`, from
        `labeled_columns`, go through the head, where the model can choose. `teacher`: of shapes [b, s, n], for the
        divergence that `needs` asks for.

        No attention mask, but for encoders in `extra`: rows are padded on the right, where causal attention does not
        look, and transformers tells packed documents by their positions. Rows of one document get none: a model counts
        for itself, not all from 0.
        """
        placed = {"position_ids": positions} if self.takes_positions and positions is not None else {}
        inputs = {"input_ids": input_ids, **placed, **extra}
        if self.needs.head:
            return self._vectors(columns, labeled, inputs)
        taught = None if teacher is None else (teacher.with_tensors(lambda t: t[:, columns]), self.teacher_head)
        logits = self._logits(columns, inputs)
        values = compute_loss_fields(logits, labels[:, columns], self.needs, taught) * labeled[:, columns]
        return values.new_zeros(values.shape[0], *labels.shape).index_copy(2, columns, values)

    def _logits(self, columns: Tensor, inputs: dict[str, Any]) -> Tensor:
        chosen: dict[str, Any] = {"logits_to_keep": columns} if self.chooses else {}
        logits: Tensor = self.model(use_cache=False, **inputs, **chosen).logits
        return logits if self.chooses else logits[:, columns]

    def _vectors(self, columns: Tensor, labeled: Tensor, inputs: dict[str, Any]) -> Tensor:
        """float32 [n, b, s] of a classifier's head, of the hidden states themselves, or of the logits of some tokens;
        transformers' own forward pass of a classifier of texts gives the numbers of one position a row."""
        if self.is_encoder:
            vectors = self._encoder_outputs(columns, inputs)
        elif self.needs.head == TOKENS:
            vectors = self._logits(columns, inputs)[..., list(self.needs.tokens)]
        else:
            model: Any = unwrap_peft_model(self.model)
            vectors = model.base_model(use_cache=False, **inputs).last_hidden_state[:, columns]
        if self.needs.head == SCORES and not self.is_encoder:
            vectors = model.score(vectors)
        vectors = vectors.float().permute(2, 0, 1) * labeled[:, columns]
        return vectors.new_zeros(len(vectors), *labeled.shape).index_copy(2, columns, vectors)

    def _encoder_outputs(self, columns: Tensor, inputs: dict[str, Any]) -> Tensor:
        """[b, columns, n] of transformers' own forward pass: each class of encoders has its own pooling and head."""
        model: Any = unwrap_peft_model(self.model)
        if self.needs.head == SCORES:
            return label_scores(model(**inputs).logits, columns)
        hidden: Tensor = model.base_model(**inputs).last_hidden_state
        return hidden[:, columns]
