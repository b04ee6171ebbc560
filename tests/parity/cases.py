"""One parity case (a model variant, a layout, switches) as a line of text, and the micro-batches it is measured on.

Owns the words of a case (`tp2 sp pp2 vpp2 packed recompute=full`) and the data: documents of uneven lengths and uneven
masks (a data-parallel rank, then a context-parallel shard, without a single label), as padded rows or packed. Padding
depends on the layout and must not move a number, so one oracle serves all layouts of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from tests.parity.models import KNOWN, VOCAB, is_moe

T = TypeVar("T")
ROW = 32
LENGTHS = ((32, 19, 6), (9, 27, 30), (25, 4, 16), (13, 32, 21))
"""Document lengths of the micro-batches, in turn."""
SIZES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "first", "last")
FLAGS = ("sp", "do", "packed", "tied", "allgather", "filler", "te", "overlap", "ub")
NAMED = {"recompute": "none", "comm": "", "attn": ""}
"""Words with a value, and the value that is not written."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")},
}


@dataclass(frozen=True)
class Case:
    """A layout of a model variant, and switches.

    `ub`: overlapped tensor-parallel communication (Transformer Engine's user buffers). `te`: Transformer Engine's
    modules, on the test device. `comm`: the exchange of context parallelism. `attn`: `fused` or `unfused`. `overlap`:
    data-parallel communication beside the passes. `do`: distributed optimizer. `first`, `last`: layers of the outer
    stages (0: even). `filler`: the last micro-batch is padding only.
    """

    model: str = "dense"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    do: bool = False
    recompute: str = "none"
    packed: bool = False
    tied: bool = False
    allgather: bool = False
    filler: bool = False
    first: int = 0
    last: int = 0
    te: bool = False
    overlap: bool = False
    ub: bool = False
    comm: str = ""
    attn: str = ""

    @property
    def world(self) -> int:
        """Processes it takes."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def variant(self) -> str:
        """The model folder it runs on."""
        return f"{self.model}-tied" if self.tied else self.model

    @property
    def moe(self) -> bool:
        """Whether the model has experts."""
        return is_moe(self.variant)

    @property
    def total(self) -> int:
        """Micro-batches of a global batch over all ranks: few, but several a rank unless many ranks share the data.

        A single pipeline is filled; the interleaved schedule needs multiples of pp a rank.
        """
        own = max(2, self.pp) if self.dp == 1 else 2 if self.dp < 4 else 1
        if self.vpp > 1:
            own = -(-own // self.pp) * self.pp
        return own * self.dp

    def __str__(self) -> str:
        words = [f"{k}{getattr(self, k)}" for k in SIZES if getattr(self, k) != Case.__dataclass_fields__[k].default]
        words += [k for k in FLAGS if getattr(self, k)]
        words += [f"{k}={getattr(self, k)}" for k, unset in NAMED.items() if getattr(self, k) != unset]
        return " ".join([self.model, *(words or ["single"])])

    def config(self, **more: Any) -> dict[str, Any]:
        """The flat options of SwiftConfig for this case."""
        options: dict[str, Any] = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
            "distributed_optimizer": self.do,
            "packing": self.packed,
            "torch_dtype": "float32",
        }
        if self.vpp > 1:
            options["virtual_pipeline_parallel_size"] = self.vpp
        if self.first:
            options["first_stage_layers"] = self.first
        if self.last:
            options["last_stage_layers"] = self.last
        if self.te:
            options |= {"transformer_impl": "transformer_engine", "attn_impl": self.attn or "auto"}
        if self.overlap:
            options |= {"overlap_grad_reduce": True, "overlap_param_gather": self.do}
        if self.ub:
            b, s = global_batch(self, 0)[0].input_ids.shape
            options |= {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "gloo"}
            options |= {"per_device_train_batch_size": b, "max_length": s}
        if self.comm:
            options["cp_comm_type"] = self.comm
        if self.comm == "a2a+p2p":
            options["hierarchical_context_parallel_sizes"] = (2, self.cp // 2)
        if self.moe:
            options["moe_token_dispatcher_type"] = "allgather" if self.allgather else "alltoall"
        return options | RECOMPUTE[self.recompute] | more

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def parse(text: str, **defaults: Any) -> Case:
    """The inverse of `str(case)`; words in any order."""
    values: dict[str, Any] = dict(defaults)
    for word in text.split():
        stem = word.rstrip("0123456789")
        if word in KNOWN:
            values["model"] = word
        elif word in FLAGS:
            values[word] = True
        elif word.partition("=")[0] in NAMED:
            values[word.partition("=")[0]] = word.partition("=")[2]
        elif stem in SIZES and stem != word:
            values[stem] = int(word[len(stem) :])
        elif word != "single":
            raise ValueError(
                f"unknown word {word!r} in case {text!r}; known: {SIZES}, {tuple(FLAGS)}, {tuple(NAMED)} with =, a "
                f"model"
            )
    return Case(**values)


@dataclass(frozen=True)
class Document:
    """One document without padding: ids, labels and weights [n]."""

    ids: Tensor
    labels: Tensor
    weights: Tensor


EMPTY = Document(*(torch.zeros(0, dtype=t) for t in (torch.long, torch.long, torch.float)))


def _weights(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """`none`; `first`: labels in the first quarter only, so that a zigzag over 2 CP chunks leaves ranks from CP/2 on
    without."""
    drawn = torch.tensor([0.0, 0.0, 0.5, 1.0])[torch.randint(0, 4, (n,), generator=generator)]
    drawn[-1] = 0.0
    if kind == "none":
        return torch.zeros(n)
    if kind == "first":
        return torch.where(torch.arange(n) < n // 4, torch.ones(n), torch.zeros(n))
    return drawn


def documents(total: int, step: int, seed: int = 0) -> list[list[Document]]:
    """The documents of each of `total` micro-batches of a global batch.

    Step 0: the first half of the micro-batches has no label. Step 1: only the first quarter of each document has. Then:
    any.
    """
    generator = torch.Generator().manual_seed(1000 * seed + 10 * total + step)
    result = []
    for m in range(total):
        kind = ("none" if m < total // 2 else ("first", "any")[m % 2]) if step == 0 else "first" if step == 1 else "any"
        batch = []
        for n in LENGTHS[m % len(LENGTHS)]:
            ids = torch.randint(3, VOCAB, (n,), generator=generator)
            labels = torch.cat([ids[1:], torch.zeros(1, dtype=torch.long)])
            batch.append(Document(ids, labels, _weights(kind, n, generator)))
        result.append(batch)
    return result


def rows(docs: Sequence[Document], length: int = ROW) -> Batch:
    """A document a row, padded on the right; [b, length]."""
    shape = (len(docs), length)
    ids, labels, weights = (
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape),
    )
    valid = torch.zeros(shape, dtype=torch.bool)
    for r, d in enumerate(docs):
        n = len(d.ids)
        ids[r, :n], labels[r, :n], weights[r, :n], valid[r, :n] = d.ids, d.labels, d.weights, True
    return Batch(ids, labels, weights, torch.arange(length).repeat(len(docs), 1), valid)


def packed(docs: Sequence[Document], multiple: int, length: int) -> Batch:
    """All documents in one row [1, length], each padded to `multiple`; what is left is a document of padding only."""
    bounds = [0]
    parts: list[Batch] = []
    for d in docs:
        n = -(-len(d.ids) // multiple) * multiple
        if n == 0:
            continue
        parts.append(rows([d], n))
        bounds.append(bounds[-1] + n)
    assert bounds[-1] <= length and (length - bounds[-1]) % multiple == 0, (bounds, length, multiple)
    if bounds[-1] < length:
        parts.append(rows([EMPTY], length - bounds[-1]))
        bounds.append(length)
    joined = [
        torch.cat([getattr(p, k) for p in parts], 1)
        for k in ("input_ids", "labels", "loss_weights", "positions", "valid")
    ]
    return Batch(*joined, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def global_batch(case: Case, step: int, row: int = ROW) -> list[Batch]:
    """All ranks' micro-batches of a step, in order of data-parallel rank; rows that are not packed have `row`
    tokens."""
    groups = documents(case.total, step)
    if case.filler:
        groups[-1] = [EMPTY] * len(groups[-1])
    if not case.packed:
        return [rows(g, row) for g in groups]
    multiple = 2 * case.cp if case.cp > 1 else 1
    unit = max(multiple, case.tp * case.cp)
    need = max(sum(-(-len(d.ids) // multiple) * multiple for d in g) for g in groups)
    length = -(-need // unit) * unit
    return [packed(g, multiple, length) for g in groups]


def own(batches: Sequence[T], dp: int, rank: int) -> list[T]:
    """The part of one data-parallel rank, of micro-batches or of what belongs to them."""
    n = len(batches) // dp
    return list(batches[rank * n : (rank + 1) * n])
