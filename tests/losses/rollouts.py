"""Completions with everything that a policy's loss may know of them, for us as batches and for TRL as padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from tests.losses import bigram
from tests.losses.bigram import Bigram, Doc, documents, fields

DOCS = documents([(3, 5), (3, 2), (1, 1), (1, 7), (6, 4), (6, 4), (2, 9), (2, 3)])
TOKENS = sum(len(d.ids) for d in DOCS)
ADVANTAGES = [0.9, -1.1, 0.4, 0.0, -0.6, 1.3, -1.7, 0.8]


@dataclass(frozen=True)
class Rollouts:
    """Values of each completion's tokens: name -> a tensor [tokens] for each document."""

    docs: Sequence[Doc]
    known: dict[str, list[Tensor]]
    learnt: list[Tensor]
    """bool: the model's own tokens, of a completion that counts."""

    def part(self, which: slice) -> Rollouts:
        return Rollouts(self.docs[which], {n: v[which] for n, v in self.known.items()}, self.learnt[which])

    def without(self, *names: str) -> Rollouts:
        return replace(self, known={n: v for n, v in self.known.items() if n not in names})

    def batch(self, packed: bool, sessions: bool = False) -> Batch:
        """A micro-batch; a filler when there are no documents. `sessions`: a longer completion is two segments, the
        second with the token before it as its prompt, after which a `Bigram` goes on as it would have."""
        cuts = [(d.begin + len(d.ids)) // 2 for d in self.docs]
        parts = [
            [Doc(d.ids[:cut], d.begin), Doc(d.ids[cut - 1 :], 1)] if sessions and cut > d.begin else [d]
            for d, cut in zip(self.docs, cuts, strict=True)
        ]
        first = torch.tensor([0, *(len(some) for some in parts)]).cumsum(0)
        made = bigram.batch([d for some in parts for d in some], packed)
        labeled = made.loss_weights != 0
        learnt = self._spread(labeled, self.learnt, torch.zeros(labeled.shape, dtype=torch.bool))
        found = {
            name: self._spread(
                labeled,
                values,
                torch.zeros(labeled.shape, dtype=torch.bool if name in ("keep", "selected") else torch.float64),
            )
            for name, values in self.known.items()
        }
        found = {name: x * learnt for name, x in found.items()}
        found["completions"] = first[:-1]
        if sessions:
            found["owner"] = first[:-1].repeat_interleave(first.diff())
        return replace(made, loss_weights=made.loss_weights * learnt, fields=found)

    def _spread(self, labeled: Tensor, values: list[Tensor], into: Tensor) -> Tensor:
        if values:
            into[labeled] = torch.cat(values)
        return into

    def layouts(self) -> list[list[Batch]]:
        """Padded, packed, the same as sessions of several segments, and in micro-batches with fillers."""
        return [
            [self.batch(False)],
            [self.batch(True)],
            [self.batch(False, sessions=True)],
            [self.batch(True, sessions=True)],
            [
                self.part(slice(0, 3)).batch(True),
                self.part(slice(0, 0)).batch(True),
                self.part(slice(3, 7)).batch(False),
                self.part(slice(0, 0)).batch(False),
                self.part(slice(7, None)).batch(True),
            ],
        ]

    def rows(self, pad: int) -> dict[str, Tensor]:
        """TRL's inputs."""
        wide = max(d.begin for d in self.docs)
        prompts = [d.ids[: d.begin] for d in self.docs]
        answers = [torch.tensor(d.ids[d.begin :]) for d in self.docs]
        names = {
            "old": "old_per_token_logps",
            "sampled": "sampling_per_token_logps",
            "reference": "ref_per_token_logps",
        }
        learnt = right(self.learnt, 0)
        return {
            "prompt_ids": torch.tensor([[pad] * (wide - len(p)) + p for p in prompts]),
            "prompt_mask": torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts]),
            "completion_ids": right(answers, pad),
            "completion_mask": right([torch.ones_like(a) for a in answers], 0),
            "tool_mask": learnt.long(),
            "num_items_in_batch": learnt.sum(),
            "advantages": torch.stack([a[0] for a in self.known["advantages"]]),
            **{theirs: right(self.known[ours], 0.0) for ours, theirs in names.items() if ours in self.known},
        }


def right(values: Sequence[Tensor], fill: float) -> Tensor:
    """[n, t], padded at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=fill)


def label_fields(model: Bigram, docs: Sequence[Doc]) -> dict[str, list[Tensor]]:
    """What a head knows of each completion's tokens."""
    found = [fields(model.weight[torch.tensor(d.ids[d.begin - 1 : -1])], torch.tensor(d.ids[d.begin :])) for d in docs]
    return {name: [f[name].detach() for f in found] for name in found[0]}


def rollouts(policy: Bigram, reference: Bigram, masked: bool = True, distance: float = 0.3) -> Rollouts:
    """Completions of an old policy not far from this one; `masked`: with tokens of a tool, and one truncated
    completion."""
    g = torch.Generator().manual_seed(5)
    logprobs = label_fields(policy, DOCS)["log_probs"]

    def near(values: list[Tensor], by: float) -> list[Tensor]:
        return [v + by * torch.randn(v.shape, generator=g, dtype=torch.float64) for v in values]

    old = near(logprobs, distance)
    learnt = [torch.ones(len(v), dtype=torch.bool) for v in old]
    if masked:
        learnt[4][:] = False
        learnt[6][2:5] = False
    return Rollouts(
        DOCS,
        {
            "advantages": [torch.full_like(v, a) for v, a in zip(old, ADVANTAGES, strict=True)],
            "old": old,
            "sampled": near(old, 0.2),
            "reference": label_fields(reference, DOCS)["log_probs"],
        },
        learnt,
    )


def models(seed: int = 1) -> tuple[Bigram, Bigram]:
    """A policy not far from its reference."""
    policy, reference = Bigram(TOKENS, seed), Bigram(TOKENS, seed + 1)
    with torch.no_grad():
        policy.weight.mul_(0.2).add_(reference.weight)
    return policy, reference
