"""Against Megatron-Core's own permutation, values and gradients."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from megaswift.engine.megatron.layers.moe.permutation import unsynced_permute

moe_utils, token_dispatcher = (  # after the engine
    importlib.import_module(f"megatron.core.transformer.moe.{name}") for name in ("moe_utils", "token_dispatcher")
)

TOKENS, EXPERTS, HIDDEN = 13, 6, 5


def refuse(*args):
    raise AssertionError("Megatron-Core's own was called")


def routed(seed, per_token):
    """Tokens, a map with `per_token` experts of each, and their probabilities."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(TOKENS, EXPERTS, generator=random).topk(per_token).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    tokens = torch.randn(TOKENS, HIDDEN, generator=random, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, generator=random, requires_grad=True)
    return tokens, routing_map, probs


@pytest.mark.parametrize("per_token", [1, 3, EXPERTS])
@pytest.mark.parametrize("as_number", [int, torch.tensor])
def test_it_is_megatron_cores_permutation(per_token, as_number):
    results = []
    for permute in (moe_utils.permute, unsynced_permute(refuse)):
        tokens, routing_map, probs = routed(7, per_token)
        count = as_number(per_token * TOKENS)
        permuted, weights, places = permute(tokens, routing_map, probs=probs, num_out_tokens=count)[:3]
        scale = torch.arange(1.0, 1 + len(permuted))
        (permuted.sum(1) * weights * scale).sum().backward()
        results.append((permuted, weights, places, tokens.grad, probs.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_experts_without_tokens_and_tokens_without_experts():
    tokens, routing_map, _ = routed(3, 2)
    routing_map[:, 2], routing_map[4] = False, False
    count = int(routing_map.sum())
    permuted, weights, places = unsynced_permute(refuse)(tokens, routing_map, num_out_tokens=count)
    theirs = moe_utils.permute(tokens, routing_map, num_out_tokens=count)
    assert weights is None
    assert places.tolist() == theirs[2].tolist() and 4 not in places.tolist()
    torch.testing.assert_close(permuted, theirs[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [{"fused": True, "num_out_tokens": 2}, {"drop_and_pad": True, "num_out_tokens": 2}, {}],
    ids=["fused", "padded", "unknown"],
)
def test_other_cases_are_megatron_cores(case):
    seen = []
    tokens, routing_map, probs = routed(1, 2)
    unsynced_permute(lambda *args: seen.append(args))(tokens, routing_map, probs, **case)
    known = case.get("num_out_tokens"), case.get("fused", False), case.get("drop_and_pad", False)
    assert seen == [(tokens, routing_map, probs, *known)]


def test_the_dispatcher_has_it_where_its_own_waits():
    waits = ".masked_select(" in inspect.getsource(moe_utils.permute)
    replaced = token_dispatcher.permute.__module__ == unsynced_permute.__module__
    assert replaced is waits
