"""Bytes that a rank sends over each link: NVLink within a node, the network between nodes.

Gathers, reductions and broadcasts go round a ring of the group's ranks in order, as NCCL's do where it takes rings; an
all-to-all and messages go straight to their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from megaswift.planner.machine import LINK, NETWORK
from megaswift.simulator.calls import Call, Form


def sent_to(call: Call, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (global rank, bytes) for each rank to which this one sends in a call."""
    ranks = call.group.ranks
    count = len(ranks)
    place = ranks.index(rank)
    following = ranks[(place + 1) % count]
    if call.name == "all_reduce":
        yield following, 2 * (count - 1) * call.sent_bytes // count
    elif call.name == "all_gather":
        yield following, (count - 1) * call.sent_bytes
    elif call.name == "reduce_scatter":
        yield following, (count - 1) * call.sent_bytes // count
    elif call.name == "broadcast":
        if following != call.peer:
            yield following, call.received_bytes
    elif call.name == "reduce":
        if rank != call.peer:
            yield following, call.sent_bytes
    elif call.name == "all_to_all":
        row = row_bytes(call.sent)
        yield from ((ranks[n], rows * row) for n, rows in enumerate(call.detail[1]) if n != place)
    elif call.name in ("send", "gather") and call.peer is not None and call.peer != rank:
        yield call.peer, call.sent_bytes
    elif call.name == "scatter" and call.peer == rank:
        yield from ((other, call.sent_bytes // count) for other in ranks if other != rank)


SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


def row_bytes(form: Form) -> int:
    """Return the bytes of a row of the first tensor; dtypes that are not in the table have one byte."""
    [(shape, dtype), *_] = form
    return prod(shape[1:]) * SIZES.get(dtype, 1)


def bytes_by_link(call: Call, rank: int, gpus_per_node: int) -> Counter[str]:
    """Return the bytes that a rank sends in a call, by the link."""
    found: Counter[str] = Counter()
    for other, size in sent_to(call, rank):
        found[LINK if other // gpus_per_node == rank // gpus_per_node else NETWORK] += size
    return found
