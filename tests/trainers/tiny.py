"""A real engine in one process: a two-layer bigram-like torch model behind `engine.protocol`, and a data source with a
position.

It computes gradients, steps AdamW, saves and loads its state: the loop and the hooks meet no difference to the large
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.engine.protocol import Addends, Counted, EngineSizeReport, GlobalBatchCounts, StartedCount, StepResult
from megaswift.losses.contract import Batch, Loss, MeanMetric, ModelOutputs, RequestedModelOutputs
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.hook import Run

VOCAB = 23


class TinyEngine:
    """Embedding, MLP, head; fp64-free fp32 AdamW; steps with a gradient that is not finite are skipped."""

    kind = "tiny"
    vocab_size = VOCAB
    rank = 0

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.layout = SimpleNamespace(dp=1, tp=1, pp=1, cp=1, world_size=1)
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, 16), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, VOCAB)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.rates: list[float] = []

    def _outputs(self, batch: Batch) -> ModelOutputs:
        logprobs = self.model(batch.input_ids).log_softmax(-1)
        picked = logprobs.gather(-1, batch.labels[..., None])[..., 0] * (batch.loss_weights != 0)
        return ModelOutputs(logprobs=picked, correct=(logprobs.argmax(-1) == batch.labels).float().detach())

    def _total(self, batches: Sequence[Batch], loss: Loss) -> tuple[Tensor, StepResult]:
        counts: dict[str, float] = {}
        for batch in batches:
            for name, value in loss.counts(batch).items():
                counts[name] = counts.get(name, 0.0) + value
        objective, sums, added = torch.zeros(()), {}, {}
        for batch in batches:
            terms, metrics = loss(self._outputs(batch), batch)
            objective = objective + sum(t.weight * t.sum / counts[t.denominator] for t in terms)
            for t in terms:
                before = added.get(t.name, (0.0, 0.0))[0]
                added[t.name] = before + t.weight * float(t.sum.detach()), counts[t.denominator]
            for name, metric in metrics.items():
                assert isinstance(metric, MeanMetric)
                s, c = sums.get(name, (0.0, 0.0))
                sums[name] = (s + float(metric.sum), c + float(metric.count))
        result = StepResult(
            float(objective.detach()),
            {k: s / c for k, (s, c) in sums.items()},
            tokens=sum(b.tokens for b in batches),
            label_tokens=sum(b.label_tokens for b in batches),
            counts=counts,
            addends=Addends(added, sums),
        )
        return objective, result

    def start_count(self, microbatches: Sequence[Batch], loss: Loss, further: Sequence[float] = ()) -> StartedCount:
        return lambda: GlobalBatchCounts({}, 0, 0, 0, tuple(map(float, further)))

    def train_batch(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        lr: float,
        decay: float | None = None,
        counted: Counted = None,
        before_read: Callable[[], None] = lambda: None,
    ) -> StepResult:
        self.model.train()
        self.rates.append(lr)
        objective, result = self._total(microbatches, loss)
        self.optimizer.zero_grad()
        objective.backward()
        before_read()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        finite = norm == norm and norm != float("inf")
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return StepResult(
            result.loss, result.metrics, norm, not finite, result.tokens, result.label_tokens, result.counts
        )

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], loss: Loss) -> StepResult:
        self.model.eval()
        return self._total(microbatches, loss)[1]

    def score(self, microbatches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        self.model.eval()
        return [self._outputs(b) for b in microbatches]

    @contextmanager
    def reference(self, update: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        yield

    def hf_weights(self, adapter_only: bool = False, dtype: Any = None) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def load_hf(self, directory: Path) -> None:
        raise NotImplementedError

    def save(self, directory: Path) -> dict[str, Any]:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, directory / "state.pt")
        return {}

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

    def offload(self, parts: frozenset[str]) -> None: ...

    def onload(self, parts: frozenset[str]) -> None: ...

    def freeze(self, patterns: Sequence[str]) -> None: ...

    def report(self) -> EngineSizeReport:
        n = sum(p.numel() for p in self.model.parameters())
        return EngineSizeReport(n, n, 4 * n, 4 * n, 8 * n, n - VOCAB * 16)


def batch(length: int, labeled: int, seed: int = 0, width: int | None = None) -> Batch:
    """One row of `length` tokens, the first `labeled` of which carry a label, padded to `width`."""
    width = width or length
    ids = torch.randint(0, VOCAB, (1, width), generator=torch.Generator().manual_seed(seed))
    at = torch.arange(width)[None]
    return Batch(ids, (ids * 5 + 3) % VOCAB, (at < labeled).float(), at.clone(), at < length)


class TinySource:
    """Endless batches, each from its own number; eight steps an epoch."""

    def __init__(self, accumulation: int = 2) -> None:
        self.accumulation, self.position = accumulation, 0

    @property
    def epoch(self) -> float:
        return self.position / 8

    def next(self) -> list[Batch]:
        first, self.position = self.position * self.accumulation, self.position + 1
        return [batch(6 + n % 5, 3 + n % 4, seed=n, width=12) for n in range(first, first + self.accumulation)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])


def tiny_loop(steps: int, *hooks: Any, seed: int = 0) -> Run:
    """A loop over the tiny engine."""
    engine, data, loss = TinyEngine(seed), TinySource(), CrossEntropy()
    return Run(engine, data, loss, lambda step, total: 0.01 / (1 + step), steps, list(hooks))
