"""The loss of embedding models: pooled hidden states of the documents of each group, compared by cosine similarity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megaswift.losses.contract import (
    HIDDEN,
    Batch,
    LossTerm,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
    gather_from_one_rank,
)
from megaswift.losses.retrieval.groups import by_group, group_count, pool, present
from megaswift.losses.retrieval.infonce import GatheredGroups, InfonceSettings, infonce, normalized
from megaswift.losses.retrieval.pairs import OVER_ALL_RANKS, PAIR_LOSSES, LabeledPairs, PairSettings

INFONCE = "infonce"


@dataclass(frozen=True)
class EmbeddingLoss:
    """A loss on embeddings, or the weighted sum of it over several widths to which they are cut (Matryoshka,
    arXiv:2205.13147, equation 1)."""

    loss_type: str = INFONCE
    infonce: InfonceSettings = InfonceSettings()
    pairs: PairSettings = PairSettings()
    matryoshka_dims: tuple[int, ...] = ()
    matryoshka_weights: tuple[float, ...] = ()
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head=HIDDEN)

    @property
    def reported(self) -> Reported:
        """One term for each width, and for InfoNCE metrics at the first."""
        means = ("mean_pos", "mean_neg", "margin", "accuracy") if self.loss_type == INFONCE else ()
        return Reported(("rows",), {name: "rows" for name, _, _ in self._widths}, means)

    @property
    def _widths(self) -> list[tuple[str, int | None, float]]:
        """The term's name, the width (None: all) and the weight."""
        if not self.matryoshka_dims:
            return [("loss", None, 1.0)]
        weights = self.matryoshka_weights or (1.0,) * len(self.matryoshka_dims)
        pairs = zip(self.matryoshka_dims, weights, strict=True)
        return [(f"loss/{dim}", dim, weight) for dim, weight in sorted(pairs, reverse=True)]

    @property
    def _gathers(self) -> bool:
        if self.loss_type == INFONCE:
            return self.infonce.infonce_use_batch
        return self.loss_type in OVER_ALL_RANKS

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of groups, which are `rows` of the data."""
        return {"rows": float(group_count(batch))}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The terms, and metrics of the first width."""
        assert outputs.vectors is not None
        own = by_group(batch, pool(outputs.vectors, batch))
        gather = outputs.gather if self._gathers else gather_from_one_rank
        vectors = gather(own)
        there = gather(present(batch).float()) > 0
        labels = gather(batch.fields["values"])
        rank = outputs.rank if self._gathers else 0
        terms = []
        metrics: Mapping[str, Metric] = {}
        for name, width, weight in self._widths:
            groups = GatheredGroups(normalized(vectors[..., :width]), there, rank)
            total, measured = self._sum(groups, labels)
            terms.append(LossTerm(name, total, "rows", weight))
            metrics = metrics or measured
        return terms, metrics

    def _sum(self, groups: GatheredGroups, labels: Tensor) -> tuple[Tensor, Mapping[str, Metric]]:
        if self.loss_type == INFONCE:
            return infonce(groups, self.infonce)
        similarity = (groups.vectors[:, :, 0] * groups.vectors[:, :, 1]).sum(-1)
        there = groups.present[:, :, 1]
        pairs = LabeledPairs(similarity, labels[:, :, 1].nan_to_num(), there, groups.rank)
        return PAIR_LOSSES[self.loss_type](pairs, self.pairs), {}
