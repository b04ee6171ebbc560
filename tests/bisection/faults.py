"""Faults to plant in the ranks of a step: of kinds that were reported of Megatron-LM, and such at random places.

A fault is a line of text, `kind layer=2 module=self_attention.linear_proj axis=tp at=1`. Owns how each is planted, and
which answers name its place.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.engine.megatron.model import finish_weight_gathers


@dataclass(frozen=True)
class Fault:
    """A fault on a layout."""

    case: str
    kind: str
    layer: int = 0
    module: str = ""
    axis: str = ""
    at: int = 0
    """The fault is on ranks whose coordinate on `axis` is this; on all ranks without an axis."""
    answers: tuple[str, ...] = ()
    """Names, or beginnings of names, of which the answer has to be one; `@kind` for any tensor of a kind."""
    source: str = "random"
    factor: float = 1.01
    """What a fault of a size multiplies by."""
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    """Further options of the run."""

    def __str__(self) -> str:
        where = f" layer {self.layer}" if self.module else ""
        on = f" on {self.axis} {self.at}" if self.axis else ""
        return f"{self.source}: {self.kind}{where} {self.module}{on} ({self.case})"


def plant(fault: Fault, engine: Any, context: Any) -> None:
    """Plant the fault on this rank (on the ranks)."""
    if fault.kind in OF_STAGES or (fault.axis and getattr(context.coordinates, fault.axis) != fault.at):
        return
    PLANTED[fault.kind](fault, engine)


def plant_before(fault: Fault) -> None:
    """Plant a fault of how stages are built, before they are (on the ranks)."""
    if fault.kind in OF_STAGES:
        OF_STAGES[fault.kind]()


def modules_of(fault: Fault, engine: Any) -> list[nn.Module]:
    """The module that a fault names, where this rank holds its layer; every such module for other names."""
    found = []
    for chunk in engine.plain:
        for layer in chunk.decoder.layers:
            if layer.layer_number - 1 == fault.layer:
                found.append(layer.get_submodule(fault.module) if fault.module else layer)
    return found


PLANTED: dict[str, Callable[[Fault, Any], None]] = {}
OF_STAGES: dict[str, Callable[[], None]] = {}
"""Kinds that change what is built: the layers of a pipeline stage, what the optimizer gets."""


def planted(function: Callable[[Fault, Any], None]) -> Callable[[Fault, Any], None]:
    """Register a kind under the function's name."""
    PLANTED[function.__name__] = function
    return function


def _first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


class ScaledGradient(torch.autograd.Function):
    """Identity; the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@planted
def scaled_output(fault: Fault, engine: Any) -> None:
    for module in modules_of(fault, engine):
        module.register_forward_hook(lambda _m, _a, out: _first(out, lambda x: x * fault.factor))


@planted
def shifted_output(fault: Fault, engine: Any) -> None:
    """Tokens are one position off."""
    for module in modules_of(fault, engine):
        module.register_forward_hook(lambda _m, _a, out: _first(out, lambda x: x.roll(1, 0)))


@planted
def wrong_shard(fault: Fault, engine: Any) -> None:
    """A weight that is another's, or stale."""
    for module in modules_of(fault, engine):
        module.weight.data.mul_(fault.factor)


@planted
def swapped_rows(fault: Fault, engine: Any) -> None:
    """The two halves of a shard exchanged: gate and up, or heads."""
    for module in modules_of(fault, engine):
        module.weight.data.copy_(module.weight.data.roll(len(module.weight) // 2, 0))


@planted
def no_forward_reduction(fault: Fault, engine: Any) -> None:
    """A row-parallel product without the sum over its ranks."""
    from megatron.core.tensor_parallel import layers

    name = "reduce_scatter_to_sequence_parallel_region" if engine.config.sequence_parallel else ""
    name = name or "reduce_from_tensor_model_parallel_region"

    def local(x: Tensor, *_: Any, **__: Any) -> Tensor:
        if not engine.config.sequence_parallel:
            return x
        return x.chunk(engine.layout.tp)[engine.context.coordinates.tp].contiguous()

    _patched_within(modules_of(fault, engine), layers, name, local)


@planted
def no_backward_reduction(fault: Fault, engine: Any) -> None:
    """A column-parallel product whose input's gradient is not summed over tensor-parallel ranks."""
    for module in modules_of(fault, engine):
        module.allreduce_dgrad = False
        module.disable_grad_reduce = True


@planted
def scaled_input_gradient(fault: Fault, engine: Any) -> None:
    for module in modules_of(fault, engine):
        own = module.forward

        def forward(x: Tensor, *args: Any, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            return own(ScaledGradient.apply(x, fault.factor), *args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]


@planted
def scaled_input(fault: Fault, engine: Any) -> None:
    """What a product reads is not what was computed before it: of the second one of an MLP, its activation."""
    for module in modules_of(fault, engine):
        module.register_forward_pre_hook(lambda _m, args: (args[0] * fault.factor, *args[1:]))


@planted
def wrong_epsilon(fault: Fault, engine: Any) -> None:
    """A norm's epsilon of another model."""
    for module in modules_of(fault, engine):
        module.eps = 1e-3


@planted
def wrong_attention_scale(fault: Fault, engine: Any) -> None:
    for module in modules_of(fault, engine):
        module.softmax_scale *= fault.factor


@planted
def delta_net(fault: Fault, engine: Any) -> None:
    """A fault of gated delta nets, of those by which the tests of these layers are tested."""
    from tests.engine.megatron.layers.delta_net_faults import FAULTS

    FAULTS[fault.module]()


@planted
def scaled_weight_gradient(fault: Fault, engine: Any) -> None:
    for module in modules_of(fault, engine):
        module.weight.register_hook(lambda gradient: gradient * fault.factor)


@planted
def last_microbatch_only(fault: Fault, engine: Any) -> None:
    """Gradients of the first micro-batch are lost."""
    for module in modules_of(fault, engine):
        seen: list[int] = []

        def lose(gradient: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(1)
            return gradient * (len(seen) > 1)

        module.weight.register_hook(lose)


@planted
def unsynced_norm(fault: Fault, engine: Any) -> None:
    """A norm's or router's gradient that is not summed over tensor-parallel ranks."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    path, _, name = fault.module.rpartition(".")
    weights = [getattr(module, name) for module in modules_of(replace(fault, module=path), engine)]
    summed = finalize._allreduce_non_tensor_model_parallel_grads

    def all_but_these(*args: Any, **kwargs: Any) -> None:
        kept = [weight.main_grad.clone() for weight in weights]
        summed(*args, **kwargs)
        for weight, own in zip(weights, kept, strict=True):
            weight.main_grad.copy_(own)

    finalize._allreduce_non_tensor_model_parallel_grads = all_but_these


@planted
def stale_gradient(fault: Fault, engine: Any) -> None:
    """A buffer that is not zeroed before the step."""
    targets = [module.weight for module in modules_of(fault, engine)]
    for chunk in engine.chunks:
        zero = chunk.zero_grad_buffer

        def leave(zero: Callable[[], None] = zero) -> None:
            zero()
            for weight in targets:
                weight.main_grad.add_(1e-3)

        chunk.zero_grad_buffer = leave


@planted
def rounded_gradient(fault: Fault, engine: Any) -> None:
    """Main gradients in bfloat16."""
    for module in modules_of(fault, engine):
        module.weight.register_hook(lambda gradient: gradient.bfloat16().float())


@planted
def no_gradient_reduction(fault: Fault, engine: Any) -> None:
    """Data-parallel ranks keep their own gradients. (`experts`: of experts.)"""
    for chunk in engine.chunks:
        groups = chunk.expert_parallel_bucket_groups if fault.module == "experts" else chunk.bucket_groups
        for group in groups:
            group.start_grad_sync = lambda *_, **__: None
            group.finish_grad_sync = lambda *_, **__: None


@planted
def averaged_gradient(fault: Fault, engine: Any) -> None:
    """Gradients divided by the number of data-parallel ranks though the loss is divided already."""
    for chunk in engine.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0 / (engine.layout.dp * engine.layout.cp)


@planted
def no_tied_sum(fault: Fault, engine: Any) -> None:
    """First and last stage keep their own gradients of the tied embedding."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    for name in ("_allreduce_word_embedding_grads", "_allreduce_embedding_grads"):
        if hasattr(finalize, name):
            setattr(finalize, name, lambda *_, **__: None)


@planted
def wrong_positions(fault: Fault, engine: Any) -> None:
    for chunk in engine.plain:
        run = chunk.run

        def shifted(module: nn.Module, step: Any, run: Callable[..., Any] = run) -> Any:
            return run(module, replace(step, positions=step.positions + 1))

        chunk.run = shifted


@planted
def wrong_vocabulary_range(fault: Fault, engine: Any) -> None:
    """The mask of the vocabulary-parallel embedding is one off."""
    for chunk in engine.plain:
        if chunk.pre_process:
            chunk.embedding.word_embeddings.vocab_start_index += 1


@planted
def wrong_head_range(fault: Fault, engine: Any) -> None:
    """The head takes its part of the vocabulary for another one."""
    for chunk in engine.plain:
        if chunk.post_process:
            chunk.real_vocabulary -= 3


@planted
def wrong_normalizer(fault: Fault, engine: Any) -> None:
    """The loss is divided by the labels of this rank."""
    start = engine.start_count

    def local(microbatches: Sequence[Any], loss: Any, further: Sequence[float] = ()) -> Any:
        wait = start(microbatches, loss, further)
        own = {"label_weight": sum(float(b.loss_weights.sum()) for b in microbatches)}

        return lambda: replace(wait(), counts=own)

    engine.start_count = local


@planted
def dropped_label(fault: Fault, engine: Any) -> None:
    """The loss leaves one label out."""
    from megaswift.losses import sft

    call = sft.CrossEntropy.__call__

    def without(self: Any, outputs: Any, batch: Any) -> Any:
        weights = batch.loss_weights.clone()
        if weights.any():
            weights.view(-1)[weights.view(-1).nonzero()[0]] = 0.0
        return call(self, outputs, replace(batch, loss_weights=weights))

    sft.CrossEntropy.__call__ = without  # type: ignore[method-assign]


@planted
def mean_of_means(fault: Fault, engine: Any) -> None:
    """The mean of the context-parallel ranks' own means."""
    from megaswift.losses import sft

    call = sft.CrossEntropy.__call__
    ranks = engine.layout.cp

    def by_rank(self: Any, outputs: Any, batch: Any) -> Any:
        parts = list(batch.loss_weights.clone().chunk(2 * ranks, dim=1))
        total = batch.loss_weights.sum()
        for first, last in zip(parts[:ranks], reversed(parts[ranks:]), strict=True):
            share = total / (ranks * (first.sum() + last.sum()).clamp(min=1.0))
            first *= share
            last *= share
        return call(self, outputs, replace(batch, loss_weights=torch.cat(parts, dim=1)))

    sft.CrossEntropy.__call__ = by_rank  # type: ignore[method-assign]


@planted
def local_ratio_ahead(fault: Fault, engine: Any) -> None:
    """The loss of a layer for multi-token prediction is divided by the labels of the main loss, and multiplied by the
    ratio of both counts on this rank."""
    from megaswift.losses import mtp

    call = mtp.MultiTokenPrediction.__call__

    def by_rank(self: Any, outputs: Any, batch: Any) -> Any:
        terms, metrics = call(self, outputs, batch)
        counts = self.counts(batch)
        labels = counts["label_weight"]
        ratios = {name: labels / max(count, 1.0) for name, count in counts.items()}
        return [replace(t, sum=t.sum * ratios[t.denominator], denominator="label_weight") for t in terms], metrics

    mtp.MultiTokenPrediction.__call__ = by_rank  # type: ignore[method-assign]


@planted
def scaled_loss_share(fault: Fault, engine: Any) -> None:
    """Context-parallel ranks divide their part of the loss once more."""
    from megaswift.engine.megatron import context_parallel

    backward = context_parallel._Join.backward

    def halved(ctx: Any, gradient: Tensor) -> Any:
        return backward(ctx, gradient / 2)

    context_parallel._Join.backward = staticmethod(halved)  # type: ignore[method-assign]


@planted
def unsummed_keys(fault: Fault, engine: Any) -> None:
    """Gradients of keys and values stay on the context-parallel rank that read them."""
    from megaswift.engine.megatron import context_parallel

    def own(ctx: Any, gradient: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None, None

    context_parallel._GatherKV.backward = staticmethod(own)  # type: ignore[method-assign]


@planted
def mask_off_by_one(fault: Fault, engine: Any) -> None:
    """Queries see the next token too."""
    for module in modules_of(fault, engine):
        module.register_forward_pre_hook(
            lambda _m, args: (args[0], args[1].roll(-1, 0), args[2].roll(-1, 0), *args[3:])
        )


@planted
def received_scaled(fault: Fault, engine: Any) -> None:
    """What arrives from the stage before is not what it sent."""
    for layer in modules_of(fault, engine):

        def change(_m: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (args[0] * fault.factor, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * fault.factor}

        layer.register_forward_pre_hook(change, with_kwargs=True)


@planted
def crossed_messages(fault: Fault, engine: Any) -> None:
    """What arrives from the stage before is of other rows."""
    for layer in modules_of(fault, engine):

        def change(_m: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (args[0].roll(1, 1), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"].roll(1, 1)}

        layer.register_forward_pre_hook(change, with_kwargs=True)


@planted
def dropped_expert(fault: Fault, engine: Any) -> None:
    """The first local expert gives zeros."""
    for mlp in modules_of(fault, engine):
        experts = mlp.experts
        expert = experts.local_experts[0] if hasattr(experts, "local_experts") else experts
        expert.register_forward_hook(lambda _m, _a, out: _first(out, lambda x: x * 0))


@planted
def wrong_aux_scale(fault: Fault, engine: Any) -> None:
    """Auxiliary losses count their tokens once for each tensor-parallel rank."""
    begin = engine.aux.begin
    engine.aux.begin = lambda microbatches: begin(microbatches * 2)


@planted
def local_norm(fault: Fault, engine: Any) -> None:
    """Clipping by the norm of this rank's gradients."""
    from megaswift.engine.megatron.optim import optimizer

    launch = optimizer._launch_squared_norms

    def alone(*args: Any) -> Any:
        squares, groups = launch(*args)
        import torch.distributed as dist

        return [square * dist.get_world_size(group) / 3 for square, group in zip(squares, groups, strict=True)], groups

    optimizer._launch_squared_norms = alone


@planted
def decayed_vectors(fault: Fault, engine: Any) -> None:
    """Weight decay on norms too."""
    for group in engine.optimizer.param_groups:
        group["wd_mult"] = 1.0


@planted
def other_rate(fault: Fault, engine: Any) -> None:
    """The learning rate of this rank is another one."""
    for group in engine.optimizer.param_groups:
        group["lr_mult"] = 1.5


@planted
def lost_update(fault: Fault, engine: Any) -> None:
    """The optimizer does not change a weight."""
    targets = [module.weight for module in modules_of(fault, engine)]
    train = engine.train_batch

    def step(*args: Any, **kwargs: Any) -> Any:
        from megaswift.engine.megatron.checkpoint.optimizer_states import main_weights

        kept = [(m, m.detach().clone()) for w, _, m in main_weights(engine.optimizer) if any(w is t for t in targets)]
        result = train(*args, **kwargs)
        for main, before in kept:
            main.data.copy_(before)
        return result

    engine.train_batch = step


@planted
def stale_weight(fault: Fault, engine: Any) -> None:
    """The second half of a weight of the model stays as it was, though the optimizer's has changed."""
    targets = [module.weight for module in modules_of(fault, engine)]
    train = engine.train_batch

    def step(*args: Any, **kwargs: Any) -> Any:
        before = [weight.detach().clone() for weight in targets]
        result = train(*args, **kwargs)
        finish_weight_gathers(engine.chunks)
        for weight, old in zip(targets, before, strict=True):
            half = len(weight) // 2
            weight.data[half:] = old[half:]
        return result

    engine.train_batch = step


@planted
def other_tokens(fault: Fault, engine: Any) -> None:
    """This rank reads other rows than its tensor-parallel neighbours."""
    from megaswift.bisection import recorder

    take = recorder.StepRecorder.record_step

    def other(self: Any, microbatches: Sequence[Any], loss: Any, lr: float) -> None:
        changed = [replace(b, input_ids=b.input_ids.roll(1, 1)) for b in microbatches]
        take(self, changed, loss, lr)

    recorder.StepRecorder.record_step = other  # type: ignore[method-assign]


@planted
def local_smoothing(fault: Fault, engine: Any) -> None:
    """Label smoothing spreads its share over this rank's part of the vocabulary."""
    from megaswift.engine import logit_fields as fields

    join = fields.join_shards

    def local(stats: Tensor, labels: Tensor, width: int, shard: Any) -> Any:
        rows = join(stats, labels, width, shard)
        own = stats[fields.SUM] / shard.columns(width) + stats[fields.MAXIMUM]
        rows.fields[list(shard.fields).index("mean_logit")] = own
        return rows

    _patch_readers(fields, "join_shards", local)


@planted
def gathered_logits(fault: Fault, engine: Any) -> None:
    """Logits of the whole vocabulary, which every rank adds up once more."""
    from megaswift.engine import logit_fields as fields

    join = fields.join_shards

    def repeated(stats: Tensor, labels: Tensor, width: int, shard: Any) -> Any:
        rows = join(stats, labels, width, shard)
        rows.fields[list(shard.fields).index("logprobs")] -= math.log(engine.layout.tp)
        rows.kept[1] *= engine.layout.tp
        return rows

    _patch_readers(fields, "join_shards", repeated)


def _patch_readers(module: Any, name: str, other: Callable[..., Any]) -> None:
    """`other` in the place of a function, also in modules that have imported it."""
    own = getattr(module, name)
    for reader in [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is own]:
        setattr(reader, name, other)


def _of_another_replica(x: Tensor) -> Tensor:
    """The tensor of the next data-parallel rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.detach().contiguous(), group=group)
    return parts[(group.rank() + 1) % group.size()]


@planted
def recomputed_of_another_replica(fault: Fault, engine: Any) -> None:
    """A recomputation gathers the second half of its input from another model's ranks."""
    for layer in modules_of(fault, engine):

        def change(_m: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            half = hidden.shape[-1] // 2
            mixed = torch.cat([hidden[..., :half], _of_another_replica(hidden)[..., half:]], dim=-1)
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": mixed}
            return (mixed, *args[1:]), kwargs

        layer.register_forward_pre_hook(change, with_kwargs=True)


@planted
def padding_of_another_rank(fault: Fault, engine: Any) -> None:
    """Routers of a tensor-parallel rank get the padding of another rank's tokens."""
    for chunk in engine.plain:
        mask = chunk._padding_mask

        def other(step: Any, mask: Callable[[Any], Tensor] = mask) -> Tensor:
            own = mask(step)
            return own.roll(own.shape[1] // engine.layout.tp, 1)

        chunk._padding_mask = other


@planted
def summed_over_another_group(fault: Fault, engine: Any) -> None:
    """A product's sum over tensor-parallel ranks is over data-parallel ranks: column-parallel of its input's gradient,
    row-parallel of its output."""
    from megatron.core import parallel_state

    for module in modules_of(fault, engine):
        module.tp_group = parallel_state.get_data_parallel_group()


@planted
def scattered_by_another_group(fault: Fault, engine: Any) -> None:
    """Each rank keeps the part of the embedded tokens that its place in another group names."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    def other(_m: nn.Module, _a: Any, out: Tensor) -> Tensor:
        whole = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=True)
        return whole.chunk(engine.layout.tp)[engine.context.coordinates.dp]

    for chunk in engine.plain:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(other)


@planted
def sinks_of_one_rank(fault: Fault, engine: Any) -> None:
    """The norm counts the attention sinks of the first tensor-parallel rank only."""
    for chunk in engine.plain:
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.softmax_offset.tensor_model_parallel = False


@planted
def layers_of_the_first_stage(fault: Fault, engine: Any) -> None:
    """Layers are counted from each stage's first one when a checkpoint is read."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    first = torch.distributed.get_global_rank(group, 0)
    for layer in engine.plain[0].decoder.layers:
        for weight in layer.parameters():
            read = weight.data.clone()
            torch.distributed.broadcast(read, first, group=group)
            weight.data.copy_(read)


@planted
def keys_of_another_replica(fault: Fault, engine: Any) -> None:
    """Keys and values are gathered over data-parallel ranks in the place of context-parallel ones."""
    from megatron.core import parallel_state

    for layer in modules_of(fault, engine):
        layer.self_attention.core_attention.cp_group = parallel_state.get_data_parallel_group()


@planted
def recomputed_otherwise(fault: Fault, engine: Any) -> None:
    """A recomputation reads another input than the forward pass."""
    for module in modules_of(fault, engine):

        def change(_m: nn.Module, _a: Any, out: Any) -> Any:
            return _first(out, lambda x: x * fault.factor) if torch.is_grad_enabled() else out

        module.register_forward_hook(change)


@planted
def recomputed_from_fp8(fault: Fault, engine: Any) -> None:
    """A recomputation reads its saved input after a cast to FP8."""
    from megatron.core.tensor_parallel import random as recomputation

    detached = recomputation.detach_variable

    def cast(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        found = detached(inputs)
        for x in found:
            if isinstance(x, Tensor) and x.requires_grad:
                x.data = x.data.to(torch.float8_e4m3fn).to(x.dtype)
        return found

    recomputation.detach_variable = cast


@planted
def gradient_before_its_sum(fault: Fault, engine: Any) -> None:
    """The gradient of a product's input is handed on before its sum over the ranks has arrived, which overlaps with the
    gradient of the weight."""
    from megatron.core.tensor_parallel import layers

    product = layers.LinearWithGradAccumulationAndAsyncCommunication
    own = product.backward
    addresses = {module.weight.data_ptr() for module in modules_of(fault, engine)}
    reduce = torch.distributed.all_reduce
    scatter = layers.dist_reduce_scatter_func

    def reduced_late(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return reduce(x.clone(), *args, **kwargs)

    def scattered_late(part: Tensor, whole: Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
        part.copy_(whole.chunk(group.size())[group.rank()])
        return scatter(torch.empty_like(part), whole, *args, group=group, **kwargs)

    def early(ctx: Any, gradient: Tensor) -> Any:
        if ctx.saved_tensors[1].data_ptr() not in addresses:
            return own(ctx, gradient)
        torch.distributed.all_reduce = reduced_late
        layers.dist_reduce_scatter_func = scattered_late
        try:
            return own(ctx, gradient)
        finally:
            torch.distributed.all_reduce = reduce
            layers.dist_reduce_scatter_func = scatter

    product.backward = staticmethod(early)


@planted
def norms_summed_over_context(fault: Fault, engine: Any) -> None:
    """Gradients of norms are summed over tensor- and context-parallel ranks, though those of context parallelism are
    summed already."""
    from megatron.core import parallel_state

    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    summed = finalize._allreduce_non_tensor_model_parallel_grads

    def over_both(model: Any, config: Any, tp_group: Any = None) -> None:
        summed(model, config, parallel_state.get_tensor_and_context_parallel_group())

    finalize._allreduce_non_tensor_model_parallel_grads = over_both


def offset_one_less() -> None:
    """Later stages count their layers from one too early: a layer is built twice, and the last one is missing."""
    from megatron.core.transformer import transformer_layer

    right = transformer_layer.get_transformer_layer_offset

    def offset(*args: Any, **kwargs: Any) -> int:
        return max(right(*args, **kwargs) - 1, 0)

    _patch_readers(transformer_layer, "get_transformer_layer_offset", offset)


def frozen_weight() -> None:
    """A product does not train: the optimizer does not have its weight."""
    from megaswift.engine.megatron.engine import MegatronEngine

    freeze = MegatronEngine.freeze

    def more(self: Any, patterns: Any, trained: Any) -> None:
        freeze(self, [*(patterns or ()), r"layers\.1\.mlp\.down_proj"], trained)

    MegatronEngine.freeze = more  # type: ignore[method-assign]


def one_layer_less() -> None:
    """The first stage builds one layer less than the second stage's offset says."""
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_block

    right = transformer_block.get_num_layers_to_build

    def number(*args: Any, **kwargs: Any) -> int:
        return right(*args, **kwargs) - int(parallel_state.get_pipeline_model_parallel_rank() == 0)

    _patch_readers(transformer_block, "get_num_layers_to_build", number)


OF_STAGES |= {
    "offset_one_less": offset_one_less,
    "one_layer_less": one_layer_less,
    "frozen_weight": frozen_weight,
}


def _patched_within(modules: Sequence[nn.Module], owner: Any, name: str, other: Callable[..., Any]) -> None:
    """`owner.name` is `other` while one of the modules runs."""
    for module in modules:
        own = module.forward

        def forward(*args: Any, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            before = getattr(owner, name)
            setattr(owner, name, other)
            try:
                return own(*args, **kwargs)
            finally:
                setattr(owner, name, before)

        module.forward = forward  # type: ignore[method-assign]


LAYERS = 4
QKV, PROJ, FC1, FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
CORE = "self_attention.core_attention"
SMOOTHED = (("label_smoothing_factor", 0.1),)


def _at(layer: int, module: str) -> str:
    return f"layers.{layer}.{module}"


REPORTED: tuple[Fault, ...] = (
    # NVIDIA/Megatron-LM#7452, by its numbers; 6 is of cross-attention there
    Fault("dense tp2", "local_smoothing", answers=("loss",), source="composed 1", options=SMOOTHED),
    Fault("dense tp2 pp2", "gathered_logits", answers=("head",), source="composed 2"),
    Fault("glm4_moe-mtp dp2", "local_ratio_ahead", answers=("loss",), source="composed 3"),
    Fault("deepseek_v3-mtp dp2 pp2", "local_ratio_ahead", answers=("loss",), source="composed 3"),
    Fault("dense dp2", "wrong_normalizer", answers=("loss",), source="composed"),
    Fault("dense dp2 pp2", "wrong_normalizer", answers=("loss",), source="composed"),
    Fault("dense tp2 dp2 recompute=full", "recomputed_of_another_replica", 2, answers=("layers.2",),
          source="composed 4"),
    Fault("moe tp2 sp", "padding_of_another_rank", answers=("layers.3.mlp",), source="composed 5"),
    Fault("dense tp2 dp2", "summed_over_another_group", 2, QKV, answers=(_at(2, QKV),), source="composed 6"),
    Fault("dense tp2 sp dp2", "scattered_by_another_group", answers=("embedding",), source="composed 7"),
    Fault("gpt_oss tp2 sp", "sinks_of_one_rank", answers=("@clipped_gradient",), source="composed 8"),
    Fault("dense cp2", "mean_of_means", answers=("loss",), source="composed 9"),
    Fault("dense cp2 tp2", "scaled_loss_share", axis="cp", at=1, answers=("head",), source="composed 9"),
    Fault("moe tp2 sp ep2", "wrong_aux_scale", answers=("layers.3.mlp",), source="composed 10"),
    Fault("moe dp2 ep2", "wrong_aux_scale", answers=("layers.3.mlp",), source="composed 10"),
    Fault("qwen3_5 tp2", "delta_net", module="norm_not_summed", answers=("layers.3.self_attention",),
          source="composed 11"),
    Fault("dense pp2", "layers_of_the_first_stage", answers=("layers.2",), source="composed 12"),
    Fault("dense cp2 dp2", "keys_of_another_replica", answers=(f"{_at(0, CORE)}",), source="composed 13"),
    # of other reports of composed parallelism
    Fault("dense tp2 pp2", "wrong_head_range", axis="tp", at=1, answers=("head",), source="composed"),
    Fault("dense cp2", "scaled_loss_share", answers=("head",), source="composed"),
    Fault("moe tp2 sp", "unsynced_norm", 1, "mlp.router.weight", answers=(_at(1, "mlp.router"),), source="composed"),
    Fault("dense tp2 pp2 tied", "no_tied_sum", answers=("embedding",), source="composed"),
    Fault("dense pp2 vpp2", "crossed_messages", 1, answers=("layers.0",), source="composed"),
    Fault("dense dp2 cp2", "averaged_gradient", answers=("@gradient",), source="composed"),
    Fault("moe dp2", "no_gradient_reduction", module="experts", answers=("@gradient",), source="composed"),
    Fault("moe dp4 ep2", "no_gradient_reduction", module="experts", answers=("@gradient",), source="composed"),
    # of the kinds of the fourteen entries of TTrace's table (arXiv:2506.09280), by their numbers: 1 wrong mask of the
    # embedding; 2 wrong input of a recomputation; 3, 4 loss wrongly scaled under context and data parallelism; 5 untied
    # embedding and head; 6, 12 gradients of routers and norms not summed; 7 wrong communication group; 8 wrong cast of
    # a recomputation with FP8; 9 weights not updated; 10 wrong division into stages; 11 wrong gradients with overlap;
    # 13 wrong gradients of attention under context parallelism; 14 of norms under tensor and context parallelism
    Fault("dense tp2 pp2", "wrong_vocabulary_range", axis="tp", at=1, answers=("embedding",), source="traced 1"),
    Fault("dense recompute=full", "recomputed_otherwise", 2, PROJ, answers=("layers.2",), source="traced 2"),
    Fault("dense tp2 recompute=full", "recomputed_otherwise", 1, FC1, answers=("layers.1",), source="traced 2"),
    Fault("dense cp2 dp2", "scaled_loss_share", answers=("head",), source="traced 3"),
    Fault("dense cp2 dp2", "wrong_normalizer", answers=("loss",), source="traced 4"),
    Fault("dense dp2 do pp2 tied", "no_tied_sum", answers=("embedding",), source="traced 5"),
    Fault("moe tp2 sp", "unsynced_norm", 2, "mlp.router.weight", answers=(_at(2, "mlp.router"),), source="traced 6"),
    Fault("dense tp2 dp2", "summed_over_another_group", 1, PROJ, answers=(_at(1, PROJ),), source="traced 7"),
    Fault("dense tp2 sp dp2", "summed_over_another_group", 2, FC2, answers=(_at(2, FC2),), source="traced 7"),
    Fault("dense tp2 recompute=full", "recomputed_from_fp8", answers=("layers.3",), source="traced 8"),
    Fault("dense tp2 recompute=full", "recomputed_from_fp8", answers=("layers.3",), source="traced 8",
          dtype="bfloat16"),
    Fault("dense dp2 do", "lost_update", 1, FC1, answers=(_at(1, FC1),), source="traced 9"),
    Fault("dense pp2", "offset_one_less", answers=("layers.1",), source="traced 10"),
    Fault("dense pp2 vpp2", "offset_one_less", answers=("layers.0",), source="traced 10"),
    Fault("dense pp2", "one_layer_less", answers=("layers.1",), source="traced 10"),
    Fault("dense tp2", "gradient_before_its_sum", 1, FC1, answers=(_at(1, FC1),), source="traced 11"),
    Fault("dense tp2 sp", "gradient_before_its_sum", 2, QKV, answers=(_at(2, QKV),), source="traced 11"),
    Fault("dense tp2 sp", "unsynced_norm", 1, f"{QKV}.layer_norm_weight", answers=(_at(1, QKV),), source="traced 12"),
    Fault("dense cp2", "unsummed_keys", answers=("layers.3.self_attention.core_attention",), source="traced 13"),
    Fault("dense tp2 cp2", "unsynced_norm", 2, "self_attention.k_layernorm.weight",
          answers=(_at(2, "self_attention.k_layernorm"),), source="traced 14"),
    Fault("dense tp2 sp cp2", "norms_summed_over_context", answers=("final_layernorm",), source="traced 14"),
    # next to these, of no entry
    Fault("dense dp2", "dropped_label", axis="dp", at=1, answers=("loss",), source="near traced"),
    Fault("dense tp2", "unsynced_norm", 2, "self_attention.q_layernorm.weight",
          answers=(_at(2, "self_attention.q_layernorm"),), source="near traced"),
    Fault("dense tp2", "frozen_weight", answers=(_at(1, FC2),), source="near traced"),
    Fault("dense dp2 do", "frozen_weight", answers=(_at(1, FC2),), source="near traced"),
    Fault("dense pp2", "received_scaled", 2, answers=("layers.1",), source="near traced"),
    Fault("dense tp2", "no_backward_reduction", 2, QKV, answers=(_at(2, QKV),), source="near traced"),
    Fault("dense tp2 cp2", "wrong_positions", axis="cp", at=1, answers=(f"{_at(0, CORE)}.query",),
          source="near traced"),
)  # fmt: skip


DELTA = "layers.0.self_attention"
"""A gated delta net: `qwen3_5` has attention in layer 2 only."""
DELTA_NETS: tuple[Fault, ...] = tuple(
    Fault(case, "delta_net", module=name, answers=answers, source="delta nets")
    for case, name, answers in (
        ("qwen3_5 cp2", "heads_off_by_one", (DELTA,)),
        ("qwen3_5 cp2 packed", "slices_not_sorted", (DELTA,)),
        ("qwen3_5 tp2", "cut_across_components", (DELTA,)),
        ("qwen3_5 packed", "state_goes_on", (DELTA,)),
        ("qwen3_5 packed", "convolution_goes_on", (DELTA,)),
        ("qwen3_5 tp2", "values_for_gates", (DELTA,)),
        ("qwen3_5 tp2", "rates_in_bfloat16", (DELTA,)),
    )
)


@dataclass(frozen=True)
class Kind:
    """What the generator may place: a kind, modules, layouts, the axes that it may be confined to."""

    kind: str
    modules: tuple[str, ...]
    cases: tuple[str, ...]
    axes: tuple[str, ...] = ("",)
    answers: Callable[[int, str], tuple[str, ...]] = lambda layer, module: (_at(layer, module),)


EVERY = ("dense tp2 pp2", "dense tp2 sp dp2", "dense cp2 dp2", "dense pp2 vpp2", "dense tp2 cp2", "dense dp2 do pp2")
SPLIT = ("dense tp2 pp2", "dense tp2", "dense tp2 cp2")
KINDS: tuple[Kind, ...] = (
    Kind("scaled_output", (QKV, PROJ, FC1, FC2, CORE, "self_attention.q_layernorm"), EVERY, ("",)),
    Kind("scaled_output", (QKV, FC1, PROJ), SPLIT, ("tp",)),
    Kind("shifted_output", (PROJ, FC1, CORE), ("dense cp2 dp2", "dense tp2 pp2"), ("",)),
    Kind("wrong_shard", (QKV, PROJ, FC1, FC2), EVERY, ("", "dp")),
    Kind("wrong_shard", (QKV, FC1), SPLIT, ("tp",)),
    Kind("swapped_rows", (QKV, FC1), EVERY),
    Kind("no_forward_reduction", (PROJ, FC2), (*SPLIT, "dense tp2 sp dp2")),
    Kind("no_backward_reduction", (FC1, QKV), SPLIT),
    Kind("scaled_input_gradient", (PROJ, FC2), EVERY),
    Kind("scaled_input", (FC2,), EVERY, ("",), lambda layer, module: (_at(layer, "mlp.activation"),)),
    Kind("wrong_epsilon", ("self_attention.q_layernorm", QKV, FC1), EVERY),
    Kind("wrong_attention_scale", (CORE,), EVERY),
    Kind("scaled_weight_gradient", (QKV, PROJ, FC1, FC2), EVERY),
    Kind("last_microbatch_only", (QKV, PROJ, FC2), EVERY),
    Kind("stale_gradient", (QKV, PROJ, FC1, FC2), EVERY),
    Kind("rounded_gradient", (QKV, PROJ, FC2), EVERY),
    Kind("mask_off_by_one", (CORE,), EVERY),
    Kind("stale_weight", (QKV, FC1), ("dense dp2 do pp2", "dense tp2 dp2 do"), ("dp",)),
    Kind("lost_update", (QKV, PROJ, FC2), EVERY),
    Kind("dropped_expert", ("mlp",), ("moe ep2 dp2", "moe tp2 sp ep2"), ("ep", "")),
    Kind("scaled_output", ("mlp.router",), ("moe ep2 dp2", "moe tp2 sp ep2", "moe pp2")),
    Kind("other_tokens", ("",), ("dense tp2 pp2", "dense tp2 cp2"), ("tp",), lambda layer, module: ("input_ids",)),
    Kind("local_norm", ("",), ("dense tp2 pp2", "moe ep2 dp2"), ("",), lambda layer, module: ("@clipped_gradient",)),
    Kind("other_rate", ("",), ("dense tp2 pp2", "dense dp2 do pp2"), ("pp",), lambda layer, module: ("@weight",)),
    Kind("decayed_vectors", ("",), ("dense tp2 pp2", "dense cp2 dp2"), ("",), lambda layer, module: ("@weight",)),
)  # fmt: skip


def placed_at_random(count: int, seed: int) -> list[Fault]:
    """Faults at places that a seed draws: kinds in turn, everything else by chance."""
    generator = random.Random(seed)
    found: list[Fault] = []
    kinds = list(KINDS)
    while len(found) < count:
        generator.shuffle(kinds)
        for kind in kinds[: count - len(found)]:
            case = generator.choice(kind.cases)
            axis = generator.choice([a for a in kind.axes if not a or f"{a}2" in case.split()] or [""])
            module = generator.choice(kind.modules)
            layer = generator.randrange(LAYERS) if module else 0
            at = generator.randrange(2) if axis else 0
            fault = Fault(case, kind.kind, layer, module, axis, at, kind.answers(layer, module))
            if fault not in found:
                found.append(fault)
    return found


SIZES = {"float32": (1e-6, 1e-5, 1e-4, 1e-3), "bfloat16": (1e-3, 1e-2, 1e-1)}
"""Relative sizes of faults by which the rate of misses is counted."""


def of_sizes(count: int, seed: int, dtype: str) -> dict[float, list[Fault]]:
    """`count` outputs or weights at random places that are too large by each of the sizes."""
    generator = random.Random(seed)
    places = [
        (generator.choice(EVERY), generator.choice(("scaled_output", "wrong_shard", "scaled_weight_gradient")),
         generator.randrange(LAYERS), generator.choice((QKV, PROJ, FC1, FC2)))
        for _ in range(count)
    ]  # fmt: skip
    return {
        size: [
            Fault(*place, answers=(_at(*place[2:]),), source=f"{size:g}", factor=1 + size, dtype=dtype)
            for place in places
        ]
        for size in SIZES[dtype]
    }
