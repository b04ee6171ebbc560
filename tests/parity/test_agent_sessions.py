"""Sessions of several segments against Hugging Face on each segment by itself: the loss of whole sessions and every
gradient, with GSPO's ratio, token means and sums of sessions.

Covers: megaswift/data/prompts/collate.py, megaswift/losses/document_segments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.prompts.collate import RolloutCollator, RolloutTokens
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings
from tests.parity.cases import Case, own, parse
from tests.parity.check import bisect_if_it_fails
from tests.parity.compare import GRADIENT, LOSS, Difference, number, table, tensors
from tests.parity.measure import Task, build, full, recipe_options
from tests.parity.models import VOCAB
from tests.parity.oracle import Oracle, Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = [pytest.mark.process, pytest.mark.slow]
MOST = 24
"""The `max_completion_length` by which dr_grpo divides."""
EPSILON = 0.4
SETTINGS = PolicySettings(EPSILON, EPSILON)
LOSSES = {
    "dapo": PolicyLoss("dapo", SETTINGS, knows_sampler=False),
    "gspo": PolicyLoss("grpo", SETTINGS, "sequence", knows_sampler=False),
    "grpo": PolicyLoss("grpo", SETTINGS, knows_sampler=False),
    "dr_grpo": PolicyLoss("dr_grpo", SETTINGS, max_completion_length=MOST, knows_sampler=False),
}
SESSIONS = (
    (((9, 5), (3, 7), (12, 1)), ((4, 6),)),
    (((2, 3),), ((2, 4), (17, 6))),
    (((21, 2), (21, 8)), ((5, 9), (5, 3), (1, 4), (6, 2))),
)
"""Of each micro-batch, in turn: (tokens of a prompt, tokens after it) of each segment of a session."""


def sessions(total: int) -> list[list[RolloutTokens]]:
    """The sessions of each of `total` micro-batches, with ids that are the same on every layout."""
    rng = np.random.default_rng([3, total])
    micros, count = [], 0
    for m in range(total):
        micro = []
        for lengths in SESSIONS[m % len(SESSIONS)]:
            prompts = [rng.integers(3, VOCAB, prompt).tolist() for prompt, _ in lengths]
            owned = [rng.random(length) < 0.8 for _, length in lengths]
            for one in owned:
                one[-1] = True
            mine = np.concatenate(owned)
            places = np.cumsum([length for _, length in lengths])[:-1].tolist()
            values = {
                "old": (rng.normal(-np.log(VOCAB), 0.1, mine.sum())).astype(np.float32),
                "advantages": np.full(mine.sum(), 1.5 + rng.normal(), dtype=np.float32),  # a loss that is not near 0
            }
            written = rng.integers(3, VOCAB, len(mine)).tolist()
            further = [*zip(places, prompts[1:], strict=True)]
            micro.append(RolloutTokens(count, prompts[0], written, mine.tolist(), values, further=further))
            count += 1
        micros.append(micro)
    return micros


def train(rank: int, world: int, task: Task) -> dict[str, tuple[float, dict[str, Tensor]]] | None:
    """Value and gradients of each loss (on the ranks). The fault: segments count as completions of their own."""
    case = task.case
    options = {**task.options}
    shared = options.pop("shared", False)
    engine, context = build(case, task.folder, world, **recipe_options(task.recipe, case.moe), **options)
    unit = 2 * case.cp if case.cp > 1 else 1
    collator = RolloutCollator(
        PaddingShape(unit, case.tp * unit), case.packed, case.pp > 1, shares_prefixes=bool(shared)
    )
    micros = own(sessions(case.total), case.dp, context.layout.coordinates(rank).dp)
    batches = collator.batches(micros)
    if task.fault:
        batches = [replace(b, fields={n: t for n, t in b.fields.items() if n != "owner"}) for b in batches]
    found = {}
    for name, loss in LOSSES.items():
        value = engine.accumulate(batches, loss).loss
        found[name] = (value, full(engine.hf_gradients()))
    torch.distributed.barrier()
    context.close()
    return found if rank == 0 else None


def expected(name: str, case: Case, oracle: Oracle) -> tuple[float, dict[str, Tensor]]:
    """The same in plain torch, each segment by itself."""
    every = [c for micro in sessions(case.total) for c in micro]
    tokens = sum(c.count for c in every)
    oracle.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for c in every:
        ends = [*(place for place, _ in c.further), len(c.written)]
        begin, logprobs = 0, []
        for prompt, end in zip((c.prompt, *(p for _, p in c.further)), ends, strict=True):
            ids = torch.tensor([[*prompt, *c.written[begin:end]]])
            logits = oracle.model(input_ids=ids, use_cache=False).logits.float()[0, len(prompt) - 1 : -1]
            of_labels = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            logprobs.append(of_labels[torch.tensor(c.own[begin:end])])
            begin = end
        gap = torch.cat(logprobs) - torch.from_numpy(c.values["old"])
        ratio = (gap.mean() if name == "gspo" else gap).exp()
        advantage = torch.from_numpy(c.values["advantages"])
        worse = torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
        divisor = {"dapo": tokens, "dr_grpo": len(every) * MOST}.get(name, len(every) * c.count)
        loss = -worse.sum() / divisor
        loss.backward()
        total += loss.item()
    gradients = oracle.gradients()
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3, "a loss that proves nothing"
    return total, gradients


def differences(
    case: Case, pool: Pool, references: References, options: Mapping[str, Any] = MappingProxyType({}), fault: str = ""
) -> dict[str, list[Difference]]:
    """Each loss beside the oracle's."""
    folder, recipe = references.model(case.variant), Recipe()
    oracle = Oracle(folder, recipe)
    task = Task(case, folder, recipe, fault=fault, options=dict(options))
    got = pool.run("tests.parity.test_agent_sessions:train", task, case.world)[0]
    found = {}
    for name, (value, gradients) in got.items():
        loss, want = expected(name, case, oracle)
        trained = {n: g for n, g in want.items() if n in gradients or bool(g.any())}
        found[name] = [number("loss", value, loss, LOSS), *tensors("gradient", gradients, trained, GRADIENT)]
    return found


def cases() -> Iterator[Any]:
    """Layouts, packed and not, with shared prompts, and on torch engines."""
    shared = {"shared": True}
    found: list[tuple[str, dict[str, Any]]] = [("dense tp2 sp cp2 packed", {}), ("dense pp2", {}), ("dense dp2 do", {})]
    found += [
        ("dense pp2 vpp2 packed", {}),
        ("dense cp2 packed", {}),
        ("dense cp2", {}),
        ("dense tp2 packed", shared),
        ("dense pp2 packed", shared),
    ]
    found += [("dense dp2 packed", {"engine": "fsdp2"}), ("dense dp2", {"engine": "zero3"}), ("moe dp2 ep2 packed", {})]
    for text, options in found:
        yield pytest.param(text, options, id=" ".join([text, *map(str, options.values())]))


@pytest.mark.parametrize(("text", "options"), list(cases()))
def test_a_session_trains_as_its_segments(
    text: str, options: dict[str, Any], pool: Pool, references: References
) -> None:
    case = parse(text)
    of_engine = {name: value for name, value in options.items() if name != "shared"}
    losses = differences(case, pool, references, options)
    with bisect_if_it_fails(case, pool, references.model(case.variant), of_engine, "the segments of sessions"):
        for name, found in losses.items():
            assert not any(d.bad for d in found), "\n" + table(f"{name}, {text}", found)


def test_sees_faults(pool: Pool, references: References) -> None:
    """Segments that count as completions change what counts sessions, and not the mean over tokens."""
    found = differences(parse("dense single packed"), pool, references, fault="apart")
    assert {name for name, values in found.items() if any(d.bad for d in values)} == {"gspo", "grpo"}
