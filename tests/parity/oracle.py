"""The reference numbers: the Hugging Face model in fp32 on one process, trained in plain torch on the very same
micro-batches.

Owns loss, gradients (by disk name), MoE auxiliary losses, gradient norm, clipping and AdamW steps, all written out here
in plain torch. It imports nothing of the engine and nothing of Megatron-Core, so that agreement means something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaswift.bisection.precision import Widened
from megaswift.losses.contract import Batch
from tests.parity.models import EAGER, by_disk_name
from tests.parity.mtp import heads, heads_by_disk_name

SIGMOID = (
    "deepseek_v3",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "kimi_k2",
    "minimax_m2",
    "solar_open",
)
"""Model types whose routers score by sigmoids."""
BIASED_SOFTMAX = ("ernie4_5_moe",)
"""Those that choose by a bias beside softmax: their balancing loss counts the experts that are best without it, as
transformers' own does."""


@dataclass(frozen=True)
class Recipe:
    """The optimizer of both sides, and the coefficients of the routers' losses."""

    lr: float = 4e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    """Well above the noise of gradients (their limit, 5e-6 of 0.1): below it Adam turns noise into steps, an element
    whose gradient is 5e-8 on one side and 1.3e-7 on the other moves by 7% of the learning rate more."""
    max_grad_norm: float = 5.0
    aux_coeff: float = 0.0
    z_coeff: float = 0.0
    mtp_layers: int = 0
    """Layers for multi-token prediction that train."""
    mtp_weight: float = 0.3
    mtp_detach: bool = False


@dataclass
class Reference:
    """What one side computed. `loss` leaves the auxiliary losses out; these are means over MoE layers, coefficient left
    out."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    mtp_losses: list[list[float]] = field(default_factory=list)
    """For each step the mean of each layer for multi-token prediction."""
    aux_steps: list[float] = field(default_factory=list)
    z_steps: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    """Of the oracle in float64: how far its own float32 is off in each gradient, over the tensor's largest value; empty
    where the fixed limit holds."""


def documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, int]]]:
    """Each row of a micro-batch, or each document of a packed one, without its padding.

    Yields ids [1, n], labels [1, n], weights [1, n], positions [1, n] and (row, start) of its first token.
    """
    bounds = batch.cu_seqlens.tolist() if batch.cu_seqlens is not None else [0, batch.input_ids.shape[1]]
    for row in range(batch.input_ids.shape[0]):
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            n = int(batch.valid[row, start:end].sum())
            if n == 0:
                continue
            part = slice(start, start + n)
            assert bool(batch.valid[row, part].all()) and not bool(batch.loss_weights[row, start + n : end].any())
            ids, labels, weights = (t[row : row + 1, part] for t in (batch.input_ids, batch.labels, batch.loss_weights))
            yield ids, labels, weights, torch.arange(n)[None], (row, start)


@contextmanager
def router_logits(model: torch.nn.Module, before: str = "layers.") -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Collects every router's logits [tokens, E] and chosen experts [tokens, k] by layer while the model runs.

    `before`: what stands before the layer's number in a module's name.
    """
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            layer = int(name.rpartition(before)[2].split(".")[0] if before else name.split(".")[0])
            handles.append(
                module.register_forward_hook(
                    lambda _m, _i, out, n=layer: seen.setdefault(n, []).append((out[0], out[-1]))
                )
            )
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def load_balancing(logits: Tensor, topk: int, chosen: Tensor | None = None, sigmoid: bool = False) -> Tensor:
    """Switch Transformer's loss (arXiv 2101.03961, eq. 4-6) of one layer and micro-batch: E x sum_i f_i P_i.

    f_i is the share of the (token, slot) pairs sent to expert i, P_i the mean probability of expert i; logits [tokens,
    E], `chosen` [tokens, k] where these are not simply the best. Of `sigmoid` scores (DeepSeek-V3, arXiv 2412.19437,
    eq. 17-20) P_i is the mean of each over the token's sum, and f_i counts those with the largest scores, without the
    bias.
    """
    tokens, experts = logits.shape
    probs = logits.float().softmax(-1)
    if sigmoid:
        scores = logits.float().sigmoid()
        probs = scores / scores.sum(-1, keepdim=True)
    if sigmoid or chosen is None:
        chosen = probs.topk(topk).indices
    counts = torch.zeros(experts).index_add(0, chosen.flatten(), torch.ones(tokens * topk))
    return experts * (counts / (tokens * topk) * probs.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """ST-MoE's loss (arXiv 2202.08906, eq. 5) of one layer and micro-batch: the mean of logsumexp(logits)^2."""
    return logits.float().logsumexp(-1).square().mean()


def fields(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Every output that a loss may ask for, from full logits [1, n, V], as the contract defines them: [1, n] each."""
    scaled = logits / temperature
    log_p = F.log_softmax(scaled, -1)
    return {
        "logprobs": log_p.gather(-1, labels[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "logsumexp": scaled.logsumexp(-1),
        "correct": (scaled.argmax(-1) == labels).float(),
        "mean_logit": scaled.mean(-1),
        "log_sum_sq": (2 * log_p).logsumexp(-1),
    }


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of each label, [1, n]."""
    return -F.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def adamw(parameters: Iterable[tuple[str, Tensor]], recipe: Recipe) -> torch.optim.AdamW:
    """The optimizer: vectors do not decay, nor do biases that hold those of all experts."""
    named = list(parameters)
    matrices = [p for n, p in named if p.dim() > 1 and not n.endswith("bias")]
    vectors = [p for n, p in named if p.dim() == 1 or n.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


PerToken = Callable[[Tensor, Tensor], Tensor]


class Oracle:
    """A Hugging Face model under plain torch; `wide`: in float64 throughout."""

    def __init__(self, folder: Path, recipe: Recipe, attention: str = "sdpa", wide: bool = False) -> None:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        if AutoConfig.from_pretrained(folder).model_type in EAGER:
            attention = "eager"
        self.recipe = recipe
        transformers.utils.logging.set_verbosity_error()  # it lists tensors of multi-token prediction as unexpected
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        self.model.train()
        self.wide = wide
        if wide:
            self.model.double()
            self.model.set_experts_implementation("eager")  # grouped products have no float64
        self.ahead = heads(self.model, folder, recipe.mtp_layers) if recipe.mtp_layers else None
        if self.ahead is not None and wide:
            self.ahead.double()
            self.ahead.set_experts_implementation("eager")
        self.largest = 0.0
        self.sigmoid = self.model.config.model_type in SIGMOID
        self.biased = self.model.config.model_type in BIASED_SOFTMAX
        self.optimizer = adamw(self.named_parameters(), recipe)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, and of the layers ahead."""
        yield from self.model.named_parameters()
        if self.ahead is not None:
            yield from self.ahead.layers.named_parameters()

    def logits(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[int, int]]]:
        """Per document: logits [1, n, V] in float32, labels, weights, place."""
        for ids, labels, weights, positions, place in documents(batch):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=False)
            yield out.logits.float(), labels, weights, place

    def outputs(self, batch: Batch, temperature: float = 1.0) -> dict[str, Tensor]:
        """Every field of `Outputs`, float32 [b, s], 0 where the weight is 0. Keeps the largest logit in `largest`."""
        result: dict[str, Tensor] = {}
        with torch.no_grad():
            for logits, labels, weights, (row, start) in self.logits(batch):
                n = labels.shape[1]
                self.largest = max(self.largest, float(logits.abs().max()))
                for name, values in fields(logits, labels, temperature).items():
                    out = result.setdefault(name, torch.zeros_like(batch.loss_weights))
                    out[row, start : start + n] = torch.where(weights[0] != 0, values[0], 0.0)
        return result

    def greedy(self, batch: Batch) -> Batch:
        """The batch with every third label the model's own first choice, so that accuracies are not 0."""
        chosen = batch.labels.clone()
        with torch.no_grad():
            for logits, labels, _, (row, start) in self.logits(batch):
                chosen[row, start : start + labels.shape[1]] = logits.argmax(-1)
        third = torch.arange(batch.labels.shape[1]) % 3 == 0
        return replace(batch, labels=torch.where(third, chosen, batch.labels))

    def logprobs(self, batch: Batch) -> Tensor:
        """float32 [b, s]: log p(label), 0 where the weight is 0."""
        return self.outputs(batch)["logprobs"]

    def accumulate(self, batches: Sequence[Batch], per_token: PerToken = cross_entropy) -> tuple[float, float, float]:
        """Forward and backward over the global batch (all ranks' micro-batches); loss, and the mean over layers of aux
        and z losses.

        These are averaged over the micro-batches that hold a token: how many empty ones fill up the ranks depends on
        the layout.
        """
        self.optimizer.zero_grad(set_to_none=True)
        count = sum(float(b.loss_weights.sum()) for b in batches)
        self.losses_ahead = [0.0 for _ in range(self.recipe.mtp_layers)]
        counts_ahead = [
            sum(float(weights[0, n:].sum()) for b in batches for _, _, weights, _, _ in documents(b))
            for n in range(1, self.recipe.mtp_layers + 1)
        ]
        total = aux = z = 0.0
        filled = sum(bool(b.valid.any()) for b in batches)
        for batch in batches:
            objective = torch.zeros(())
            with router_logits(self.model) as seen:
                for logits, labels, weights, _ in self.logits(batch):
                    objective = objective + (per_token(logits, labels) * weights).sum() / count
            total += float(objective.detach())
            if self.ahead is not None:
                objective = objective + self._objective_ahead(batch, counts_ahead, filled)
            for parts in seen.values():
                rows, chosen = (torch.cat(part) for part in zip(*parts, strict=True))
                counted = None if self.biased else chosen
                balance = load_balancing(rows, chosen.shape[1], counted, self.sigmoid) / filled
                square = z_loss(rows) / filled
                aux, z = aux + float(balance.detach()) / len(seen), z + float(square.detach()) / len(seen)
                objective = objective + self.recipe.aux_coeff * balance + self.recipe.z_coeff * square
            if objective.requires_grad:
                objective.backward()
        return total, aux, z

    def _objective_ahead(self, batch: Batch, counts: Sequence[float], filled: int) -> Tensor:
        """What a micro-batch adds for multi-token prediction: the weighted mean over layers of cross-entropy, each over
        its own number of labels, and of the routers' losses."""
        objective = torch.zeros(())
        share = self.recipe.mtp_weight / len(counts)
        with router_logits(self.ahead.layers, "") as seen:
            for ids, labels, weights, positions, _ in documents(batch):
                hidden = self.model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)[0]
                hidden = hidden.detach() if self.recipe.mtp_detach else hidden
                for layer, layer_count in enumerate(counts):
                    hidden = hidden[:, :-1]
                    if not hidden.shape[1]:
                        break
                    after = layer + 1
                    vectors = self.model.get_input_embeddings()(ids[:, after:])
                    vectors = vectors.detach() if self.recipe.mtp_detach else vectors
                    hidden = self.ahead.forward_layer(
                        layer, hidden, positions[:, : hidden.shape[1]], None, inputs_embeds=vectors
                    )
                    head = self.model.lm_head.weight
                    logits = F.linear(hidden, head.detach() if self.recipe.mtp_detach else head).float()
                    loss = (cross_entropy(logits, labels[:, after:]) * weights[:, after:]).sum() / layer_count
                    self.losses_ahead[layer] += float(loss.detach())
                    objective = objective + share * loss
        for parts in seen.values():
            rows, chosen = (torch.cat(part) for part in zip(*parts, strict=True))
            balance = load_balancing(rows, chosen.shape[1], chosen, self.sigmoid) / filled
            square = z_loss(rows) / filled
            objective = objective + share * (self.recipe.aux_coeff * balance + self.recipe.z_coeff * square)
        return objective

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by disk name; zeros where a parameter took no part."""
        zero = torch.zeros_like
        return {n: t.clone() for n, t in self._by_disk_name(lambda p: zero(p) if p.grad is None else p.grad)}

    def _by_disk_name(self, value: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from by_disk_name(self.model, value)
        if self.ahead is not None:
            yield from heads_by_disk_name(self.ahead, self.model.config, value)

    def weights(self) -> dict[str, Tensor]:
        """Weights by disk name."""
        return {n: t.detach().clone() for n, t in self._by_disk_name(lambda p: p)}

    def step(self) -> float:
        """Clip by the global norm (coefficient max_norm / (norm + 1e-6), only downwards), one AdamW step; the norm."""
        parameters = [p for _, p in self.named_parameters()]
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.sqrt(sum(g.double().square().sum() for g in grads)))
        scale = self.recipe.max_grad_norm / (norm + 1e-6)
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif scale < 1.0:
                p.grad.mul_(scale)
        self.optimizer.step()
        return norm

    def trajectory(self, steps: Sequence[Sequence[Batch]]) -> Reference:
        """Loss and gradients of the first global batch at the first weights, then one optimizer step per global
        batch."""
        out = Reference()
        for k, batches in enumerate(steps):
            loss, aux, z = self.accumulate(batches)
            if k == 0:
                out.loss, out.gradients = loss, self.gradients()
            out.losses.append(loss)
            out.mtp_losses.append(self.losses_ahead)
            out.aux_steps.append(aux)
            out.z_steps.append(z)
            out.norms.append(self.step())
        out.weights = self.weights()
        return out


def reference(
    folder: Path, recipe: Recipe, steps: Sequence[Sequence[Batch]], attention: str = "sdpa", wide: bool = False
) -> Reference:
    """What the model itself computes."""
    with Widened() if wide else nullcontext():
        return Oracle(folder, recipe, attention, wide).trajectory(steps)
