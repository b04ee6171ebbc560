"""Whether a model answers prompts together as it answers each alone: asked of the model itself, once for texts and once
for images.

A batch is padded on the left, and every model gets a mask; some do not look at it. A state takes in what lies to the
left (RWKV), positions are counted from the start of the row (TrOCR). Their answers in a batch would be others, in
silence. The families are held to Hugging Face by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LONG, SHORT, NEW = 12, 5, 2
"""Tokens of the two prompts that are tried, and of the answers that are looked at."""
EXACT, ROUNDED = 1e-3, 0.1
"""The share of what tells two prompts apart that counts as rounding, in float32 and in half precision."""
Inputs = Mapping[str, Tensor]
"""Of transformers' `generate`: a batch."""


def probe_prompts(tokenizer: Any, pad: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two prompts of ordinary tokens."""
    special = {pad, *tokenizer.all_special_ids}
    order = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [t for t in order if t not in special]
    return tuple(tokens[:LONG]), tuple(tokens[LONG : LONG + SHORT])


def padding_agrees(model: Any, both: Inputs, alone: tuple[Inputs, Inputs], pad: int) -> bool:
    """Whether two prompts get the answers that each gets alone."""
    try:
        together, single = _logits(model, both, pad), [_logits(model, inputs, pad)[:, 0] for inputs in alone]
    except (RuntimeError, ValueError, IndexError):
        # of a model that takes no such batch at all; what is wrong with a prompt is told alone
        return False
    steps = min(len(together), *map(len, single))
    apart = float((single[0][:steps] - single[1][:steps]).abs().max()) or float(
        single[0].abs().max()
    )  # 0: they are one prompt
    wrong = max(float((together[:steps, i] - s[:steps]).abs().max()) for i, s in enumerate(single))
    return wrong <= (EXACT if model.dtype == torch.float32 else ROUNDED) * apart


def _logits(model: Any, inputs: Inputs, pad: int) -> Tensor:
    """[steps, b, vocabulary]: at the prompts' ends and behind the first tokens of their answers."""
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=pad, output_logits=True, return_dict_in_generate=True
    )
    with torch.inference_mode():
        return torch.stack(model.generate(**inputs, generation_config=how).logits).float()
