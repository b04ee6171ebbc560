"""The reference: the Hugging Face model on one process, one optimizer step on the rows of a trace, in plain torch.

Nothing of the engine and nothing of Megatron-Core takes part. Names of modules follow from the weight plan: a module of
Megatron is compared with the Hugging Face modules that own its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaswift.bisection.adapted import AdaptedModel
from megaswift.bisection.ahead import PARAMETER, LayersAhead, tokens_ahead
from megaswift.bisection.placement import Rows, plan_entry
from megaswift.bisection.precision import ReorderedSums, Widened
from megaswift.bisection.trace_folder import BACKWARD, CLIPPED, GRADIENT, LOSS, OUTPUT
from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.plan import WeightPlan

ATTENTION = "megaswift_bisect"
CORE = ".self_attention.core_attention"
INPUT_OF = {"core_attention": "linear_proj", "activation": "linear_fc2"}
"""Outputs that are no module's of transformers, and the module of Megatron that reads them."""
CLIP_EPSILON = 1e-6
LORA_B = ".lora_B.weight"
Microbatch = tuple[int, int]
"""(data-parallel rank, number)."""
Key = tuple[str, str, Microbatch | None]
"""(kind, name, micro-batch)."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a reference step."""

    optimizer: str = "adam"
    lr: float = 1e-5
    weight_decay: float = 0.0
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    aux_coeff: float = 0.0
    """Of the load-balancing loss of routers."""
    z_coeff: float = 0.0
    sigmoid: bool = False
    """Routers score by sigmoids."""
    biased: bool = False
    """Experts are chosen by a bias beside softmax, which the balancing loss leaves out."""
    ahead_weight: float = 0.0
    """Of the mean loss of the layers for multi-token prediction."""
    ahead_detached: bool = False
    """No gradient flows from these layers into the embedding, the decoder and the head."""
    lora_plus: float = 1.0
    """The learning rate of B and of vectors, over that of other matrices (LoRA+)."""

    def clipping(self, gradients: Iterable[Tensor]) -> float:
        """Return the factor that clips the global norm of the gradients."""
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        return min(1.0, self.max_grad_norm / (norm + CLIP_EPSILON)) if self.max_grad_norm > 0 else 1.0

    def updated(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        """Take the first step of the optimizer with a clipped gradient."""
        decay = self.weight_decay if weight.dim() > 1 and not name.endswith("bias") else 0.0
        lr = self.lr * (self.lora_plus if weight.dim() == 1 or name.endswith(LORA_B) else 1.0)
        if self.optimizer == "sgd":
            return weight - lr * (gradient + decay * weight)
        # AdamW from zero moments: both are corrected to the gradient and its square
        return weight * (1 - lr * decay) - lr * gradient / (gradient.abs() + self.eps)


@dataclass
class ReferenceStep:
    """The float32 tensors of a step: activations [s x b, columns] by key, parameters by kind and Hugging Face name."""

    activations: dict[Key, Tensor] = field(default_factory=dict)
    parameters: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    """The weights before the step, of the exact one."""

    def order(self) -> dict[tuple[str, str], int]:
        """(Kind, name) to its place in the order of computation."""
        found: dict[tuple[str, str], int] = {}
        for kind, name, _ in self.activations:
            found.setdefault((kind, name), len(found))
        return found


class HuggingFaceStep:
    """A model folder, and steps from its weights."""

    def __init__(
        self, folder: Path, plan: WeightPlan, dtype: torch.dtype, recipe: Recipe, adapter: Path | None = None
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.dtype = dtype
        self.recipe = recipe
        self.adapter = adapter
        self.adapters = None if adapter is None else PeftFolder(adapter).plan(plan, training=True)

    def run(
        self,
        rows: Mapping[Microbatch, Mapping[str, Tensor]],
        names: set[str],
        trained: set[str],
        seed: int | None = None,
    ) -> ReferenceStep:
        """Take one step.

        Args:
            rows: The inputs of every micro-batch of the global batch.
            names: Activations to record.
            trained: Hugging Face names of the parameters that train.
            seed: None computes the exact step, in a wider dtype. With a seed, in the run's own dtype: each weight is
                first moved by one unit in the last place, up or down as drawn, and products add up in another order.
        """
        model = _load(self.folder)
        ahead = LayersAhead(model, self.folder, self.plan) if self.plan.spec.mtp_layers else None
        parts = [model] if ahead is None else [model, ahead.made]
        adapted = None
        if self.adapter is not None and self.adapters is not None:
            for part in parts:
                part.requires_grad_(False)
            adapted = AdaptedModel(model, self.adapter, self.adapters)
        parameters = [*model.named_parameters(), *(() if ahead is None else ahead.named_parameters())]
        trained_here = [(name, p) for name, p in parameters if p.requires_grad]
        main = {name: p.detach().clone() for name, p in trained_here} if seed is None else {}
        mode: AbstractContextManager[Any] = nullcontext()
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        for part in parts:
            part.to(self.dtype)
        if seed is None:
            for part in parts:
                part.to(wide)
                if wide == torch.float64:
                    mode = Widened()
                    part.set_experts_implementation("eager")  # grouped products have no float64
        else:
            _perturb(parameters, seed)
            mode = ReorderedSums(seed)
        step = ReferenceStep()
        gradients = {name: torch.zeros_like(p, dtype=wide) for name, p in trained_here}
        counts = [_labels(rows.values(), further) or 1.0 for further in range(self.plan.spec.mtp_layers + 1)]
        filled = sum(bool(fields["valid"].any()) for fields in rows.values())
        for number, fields in rows.items():
            with mode:
                _Pass(self, model, ahead, step, number, fields, names).run(counts, max(filled, 1))
            for name, p in trained_here:
                if p.grad is not None:
                    gradients[name] += p.grad
                    p.grad = None
        on_disk = partial(_by_disk_name, model, ahead, adapted)
        self._update(step, on_disk(main), on_disk(gradients), trained)
        return step

    def _update(
        self, step: ReferenceStep, main: Mapping[str, Tensor], reduced: Mapping[str, Tensor], trained: set[str]
    ) -> None:
        """Clip by the global norm."""
        used = {name: g for name, g in reduced.items() if name in trained}
        clipping = self.recipe.clipping(used.values())
        step.parameters[GRADIENT] = {name: g.float() for name, g in used.items()}
        step.parameters[CLIPPED] = {name: (g * clipping).float() for name, g in used.items()}
        step.start = {name: p for name, p in main.items() if name in used}

    def modules(self, model: nn.Module, ahead: LayersAhead | None, name: str) -> list[nn.Module]:
        """The Hugging Face modules whose outputs, joined by columns, are the output of Megatron's module `name`; empty
        where there are none."""
        entry = plan_entry(self.plan, f"{name}.weight")
        paths = [] if entry is None else [hf.removesuffix(".weight") for hf in entry.hf]
        found = [_submodule(model, ahead, path) for path in paths]
        return [m for m in found if m is not None] if all(m is not None for m in found) else []


class _Pass:
    """Forward and backward of one micro-batch."""

    def __init__(
        self,
        owner: HuggingFaceStep,
        model: Any,
        ahead: LayersAhead | None,
        step: ReferenceStep,
        number: Microbatch,
        fields: Mapping[str, Tensor],
        names: set[str],
    ) -> None:
        self.owner = owner
        self.model = model
        self.ahead = ahead
        self.step = step
        self.number = number
        self.fields = fields
        self.names = names
        self.documents = list(documents_of(fields))
        self.longest = max((end - start for _, start, end in self.documents), default=0)
        while self.longest in _head_counts(model):
            self.longest += 1  # of padding, so that heads and tokens are told apart by their number
        self.routers: list[tuple[str, Tensor, Tensor]] = []
        """(Name, logits, chosen experts)."""
        self.hidden: Tensor | None = None
        """The decoder's last hidden states."""
        self.prefix = "layers.{}"
        """Names of the layers whose attention is computed at present."""
        self.gradients: list[RemovableHandle] = []

    def run(self, counts: Sequence[float], filled: int) -> None:
        """Record both passes; gradients are left in the parameters. `counts`: labels of the global batch, of the head
        and of each layer for multi-token prediction."""
        if not self.documents:
            return
        ids = torch.zeros(len(self.documents), self.longest, dtype=torch.long)
        for i, (row, start, end) in enumerate(self.documents):
            ids[i, : end - start] = self.fields["input_ids"][row, start:end]
        with ExitStack() as hooks:
            self._hook_all(hooks)
            logits = self.model(input_ids=ids, use_cache=False).logits
            ahead = self._loss_ahead(ids, counts[1:])
        smoothing = self.owner.recipe.label_smoothing
        loss = self._cross_entropy("head", logits, smoothing) / counts[0] + ahead
        self.step.activations[LOSS, "loss", self.number] = loss.detach().reshape(1)
        objective = loss + self._router_losses(filled)
        if objective.requires_grad:
            objective.backward()
        for hook in self.gradients:
            hook.remove()  # which holds the graph that holds it, where Python's collector sees no circle

    def _loss_ahead(self, ids: Tensor, counts: Sequence[float]) -> Tensor:
        """This micro-batch's share of what the layers for multi-token prediction add (arXiv:2412.19437, equations 24
        and 25)."""
        total = torch.zeros((), dtype=torch.float64)
        ahead = self.ahead
        if ahead is None:
            return total
        recipe = self.owner.recipe
        head = self.model.get_output_embeddings().weight
        hidden = self.hidden
        assert hidden is not None
        if recipe.ahead_detached:
            head = head.detach()
            hidden = hidden.detach()
        self.prefix = "mtp.layers.{}.transformer_layer"
        for layer, count in enumerate(counts):
            vectors = self.model.get_input_embeddings()(ids.roll(-layer - 1, 1))
            hidden = ahead.hidden_states(layer, hidden, vectors.detach() if recipe.ahead_detached else vectors)
            loss = self._cross_entropy(f"mtp.layers.{layer}.head", F.linear(hidden, head), 0.0) / count
            total = total + recipe.ahead_weight / len(counts) * loss
        return total

    def _cross_entropy(self, name: str, logits: Tensor, smoothing: float) -> Tensor:
        """The sum over labels, from logits [documents, n, V]; log-probabilities are recorded under a name."""
        further = tokens_ahead(name)
        labels, weights = (self._of_documents(self.fields[part], further) for part in ("labels", "loss_weights"))
        picked = weights != 0
        log_p = F.log_softmax(logits.float()[picked], -1)
        chosen = log_p.gather(-1, labels[picked][:, None])[:, 0]
        fields = chosen.new_zeros(weights.shape).masked_scatter(picked, chosen).unsqueeze(-1)
        self._record(name, fields)
        losses = -fields[..., 0][picked]
        if smoothing:
            losses = (1 - smoothing) * losses - smoothing * log_p.mean(-1)
        return (losses * weights[picked]).sum()

    def _router_losses(self, filled: int) -> Tensor:
        """Load-balancing loss (arXiv:2101.03961, equations 4 to 6) and z loss (arXiv:2202.08906, equation 5)."""
        recipe = self.owner.recipe
        total = torch.zeros((), dtype=torch.float64)
        for name, logits, chosen in self.routers:
            factor = recipe.ahead_weight / self.owner.plan.spec.mtp_layers if tokens_ahead(name) else 1.0
            experts = logits.shape[-1]
            probabilities = logits.float().softmax(-1)
            if recipe.sigmoid:
                scores = logits.float().sigmoid()
                probabilities = scores / scores.sum(-1, keepdim=True)
            if recipe.sigmoid or recipe.biased:
                chosen = probabilities.topk(chosen.shape[-1]).indices
            share = F.one_hot(chosen, experts).float().sum(1).mean(0) / chosen.shape[-1]
            balance = experts * (share * probabilities.mean(0)).sum()
            square = logits.float().logsumexp(-1).square().mean()
            total = total + factor / filled * (recipe.aux_coeff * balance + recipe.z_coeff * square)
        return total

    def _hook_all(self, hooks: ExitStack) -> None:
        """Hooks for all names that have a counterpart."""
        decoder = self.model.get_decoder()
        layers = decoder.layers
        first = partial(self._on_input, "embedding")
        hooks.callback(layers[0].register_forward_pre_hook(first, with_kwargs=True).remove)
        for number, layer in enumerate(layers):
            hooks.callback(layer.register_forward_hook(partial(self._on_output, f"layers.{number}")).remove)
        if self.ahead is not None:
            hooks.callback(decoder.register_forward_hook(self._on_decoder).remove)
            for number in range(len(self.ahead.layers)):
                record = partial(self._on_output, f"mtp.layers.{number}.transformer_layer")
                hooks.callback(self.ahead.block(number).register_forward_hook(record).remove)
        for name in sorted(self.names):
            stem, _, last = name.rpartition(".")
            if last in INPUT_OF:
                for module in self._modules(f"{stem}.{INPUT_OF[last]}"):
                    hook = partial(self._on_input, name)
                    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            elif name.endswith(".mlp"):
                path = self._mixture(name)
                if path is not None:
                    hooks.callback(path.register_forward_hook(partial(self._on_output, name)).remove)
            elif last == "router":
                for module in self._routers(name):
                    hooks.callback(module.register_forward_hook(partial(self._on_router, name)).remove)
            else:
                found = self._modules(name)
                parts: list[Tensor] = []
                for module in found:
                    hook = partial(self._on_part, name, parts, len(found))
                    hooks.callback(module.register_forward_hook(hook).remove)
        if self.model.config._attn_implementation == ATTENTION:
            hooks.enter_context(_attention_calls(self._on_attention))

    def _modules(self, name: str) -> list[nn.Module]:
        return self.owner.modules(self.model, self.ahead, name)

    def _mixture(self, name: str) -> nn.Module | None:
        """The Hugging Face block of experts of a layer."""
        further = tokens_ahead(name)
        if further and self.ahead is not None:
            layer = self.ahead.block(further - 1)
        else:
            layer = self.model.get_decoder().layers[int(name.split(".")[1])]
        return getattr(layer, "mlp", None)

    def _routers(self, name: str) -> list[nn.Module]:
        """Modules of which one may be the router, whose output is (logits, weights, experts): the one with its weight,
        or the one around it."""
        found = self._modules(name)
        entry = plan_entry(self.owner.plan, f"{name}.weight")
        around = None if entry is None else _submodule(self.model, self.ahead, entry.hf[0].rsplit(".", 2)[0])
        mixture = self._mixture(name.removesuffix(".router"))
        found += [
            m for m in (around, getattr(mixture, "gate", None), getattr(mixture, "router", None)) if m is not None
        ]
        return list(dict.fromkeys(found))

    def _on_decoder(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self.hidden = out.last_hidden_state

    def _on_output(self, name: str, _module: nn.Module, _args: Any, out: Any) -> None:
        self._record(name, out[0] if isinstance(out, tuple) else out)

    def _on_input(self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(name, args[0] if args else kwargs["hidden_states"])

    def _on_router(self, name: str, _module: nn.Module, _args: Any, out: Any) -> None:
        """The weights of all experts, 0 for those that are not chosen."""
        if not isinstance(out, tuple) or len(out) < 3:
            return
        logits = out[0]
        scores = out[1]
        chosen = out[-1]
        further = tokens_ahead(name)
        self.routers.append((name, self._valid(logits, further), self._valid(chosen, further)))
        if scores.shape != chosen.shape:
            self._record(name, scores)
            return

        def dense(of_chosen: Tensor) -> Tensor:
            whole = torch.zeros_like(logits, dtype=of_chosen.dtype).scatter(-1, chosen, of_chosen)
            return whole.reshape(len(self.documents), -1, logits.shape[-1])

        self._keep(OUTPUT, name, dense(scores.detach()))
        self._on_gradient(scores, lambda gradient: self._keep(BACKWARD, name, dense(gradient)))

    def _on_part(self, name: str, parts: list[Tensor], count: int, _module: nn.Module, _args: Any, out: Any) -> None:
        """One of the modules whose joined outputs are Megatron's."""
        if count == 1:
            self._record(name, out)
            return
        # its place in the order is the first part's: norms of queries run before keys are computed
        self.step.activations.setdefault((OUTPUT, name, self.number), out.detach())
        parts.append(out)
        if len(parts) == count:
            self._keep(OUTPUT, name, torch.cat([self._by_document(part.detach()) for part in parts], -1))
            self._on_gradients(name, parts)

    def _on_gradients(self, name: str, parts: Sequence[Tensor]) -> None:
        """Joins the gradients of parts as their values."""
        gradients: dict[int, Tensor] = {}

        def take(place: int, gradient: Tensor) -> None:
            gradients[place] = self._by_document(gradient)
            if len(gradients) == len(parts):
                self._keep(BACKWARD, name, torch.cat([gradients[i] for i in range(len(parts))], -1))

        for place, part in enumerate(parts):
            self._on_gradient(part, partial(take, place))

    def _on_attention(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Queries and keys [documents, heads, n, d]."""
        for part, value in (("query", query), ("key", key)):
            self._record(f"{self.prefix.format(layer)}{CORE}.{part}", value)

    def _record(self, name: str, value: Tensor) -> None:
        """A value [documents, n, ...] or [documents, heads, n, d], and its gradient."""
        if name not in self.names:
            return
        heads_first = value.dim() == 4 and value.shape[1] != self.longest == value.shape[2]

        def arranged(x: Tensor) -> Tensor:
            return self._by_document(x.transpose(1, 2) if heads_first else x)

        self._keep(OUTPUT, name, arranged(value.detach()))
        self._on_gradient(value, lambda gradient: self._keep(BACKWARD, name, arranged(gradient)))

    def _on_gradient(self, value: Tensor, take: Callable[[Tensor], None]) -> None:
        if value.requires_grad:
            self.gradients.append(value.register_hook(take))

    def _by_document(self, x: Tensor) -> Tensor:
        """[documents, n, columns]."""
        return x.reshape(len(self.documents), self.longest, -1)

    def _keep(self, kind: str, name: str, value: Tensor) -> None:
        """[documents, n, columns] to [s x b, columns], 0 on padding."""
        b, s = self.fields["input_ids"].shape
        whole = torch.zeros(s, b, value.shape[-1])
        for i, (row, start, end) in enumerate(self._further(tokens_ahead(name))):
            whole[start:end, row] = value[i, : end - start]
        self.step.activations[kind, name, self.number] = whole.flatten(0, 1)

    def _of_documents(self, field: Tensor, further: int = 0) -> Tensor:
        """A field [b, s] as [documents, n], by the positions of so many tokens before; 0 past the ends."""
        out = field.new_zeros(len(self.documents), self.longest)
        for i, (row, start, end) in enumerate(self._further(further)):
            out[i, : end - start] = field[row, start + further : end + further]
        return out

    def _further(self, further: int) -> Iterator[tuple[int, int, int]]:
        """(Row, start, end) of the tokens of each document that so many others follow."""
        for row, start, end in self.documents:
            yield row, start, max(start, end - further)

    def _valid(self, value: Tensor, further: int) -> Tensor:
        """[documents x n, ...] of the tokens that so many others follow."""
        whole = value.reshape(len(self.documents), -1, value.shape[-1])
        return torch.cat([whole[i, : end - start] for i, (_, start, end) in enumerate(self._further(further))])


def rows_of(fields: Mapping[str, Tensor], further: int = 0) -> Rows:
    """Return the layout of a micro-batch's tokens; `further`: only those that so many others follow."""
    valid = fields["valid"]
    if further:
        valid = torch.zeros_like(valid)
        for row, start, end in documents_of(fields):
            valid[row, start : max(start, end - further)] = True
    return Rows(valid, fields.get("cu_seqlens"))


def _labels(rows: Iterable[Mapping[str, Tensor]], further: int) -> float:
    """The weights of all labels that lie so many tokens further in the same document."""
    return sum(
        float(fields["loss_weights"][row, start + further : end].sum())
        for fields in rows
        for row, start, end in documents_of(fields)
    )


def _head_counts(model: Any) -> list[int]:
    return [getattr(model.config, name, 0) for name in ("num_attention_heads", "num_key_value_heads")]


def documents_of(fields: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of each document without its padding."""
    valid = fields["valid"]
    bounds = fields["cu_seqlens"].tolist() if "cu_seqlens" in fields else [0, valid.shape[1]]
    for row in range(valid.shape[0]):
        for start, end in zip(bounds, bounds[1:], strict=False):
            length = int(valid[row, start:end].sum())
            if length:
                yield row, start, start + length


def _submodule(model: nn.Module, ahead: LayersAhead | None, path: str) -> nn.Module | None:
    found = None if ahead is None else ahead.module(path)
    if found is not None:
        return found
    for name in (path, path.replace(".block_sparse_moe.", ".mlp."), path.replace(".block_sparse_moe", ".mlp")):
        try:
            return model.get_submodule(name)
        except AttributeError:
            continue
    return None


def _load(folder: Path) -> Any:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, transformers.masking_utils.sdpa_mask)
    kind = AutoConfig.from_pretrained(folder).model_type
    attention = "eager" if kind in EAGER else ATTENTION
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


EAGER = ("gemma2", "gpt_oss")
"""Model types whose attention transformers computes in its eager way only: others leave soft caps or sinks out."""
_listening: list[Callable[[int, Tensor, Tensor], None]] = []


def _attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' own attention; queries and keys are recorded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for listener in _listening:
        listener(int(module.layer_idx), query, key)  # type: ignore[arg-type]
    return sdpa_attention_forward(module, query, key, *args, **kwargs)


@contextmanager
def _attention_calls(listener: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)


def _by_disk_name(
    model: Any, ahead: LayersAhead | None, adapted: AdaptedModel | None, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of parameters by the names of files: transformers holds the experts of a layer in one."""
    from transformers.core_model_loading import revert_weight_conversion

    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(PARAMETER)}
    further = {} if adapted is None else dict(adapted.by_disk_name(own))
    if ahead is not None:
        further |= ahead.by_disk_name({name: tensor for name, tensor in tensors.items() if name not in own})
    found: dict[str, Tensor] = revert_weight_conversion(model, own if adapted is None else adapted.whole(own))
    return found | further


@torch.no_grad()
def _perturb(parameters: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Move each weight to a neighbouring number of its dtype."""
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(parameters):
        p.data = neighbours(p.data, generator)


def neighbours(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor whose numbers are the next larger or smaller ones, as drawn; zeros stay."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    step = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return (bits + step.mul_(tensor != 0)).view(tensor.dtype)
