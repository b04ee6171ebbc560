"""Loads a model that gives vectors, scores or classes, and runs it on batches of tokens.

Owns pooling, activations and the batches; transformers has the models. A row has the same result alone and in a batch:
padding stands behind the tokens, for language models before them, and is masked.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.new_head import POOLER
from megaswift.data.model_tokenizer import read_tokenizer
from megaswift.errors import ConfigError, Problem
from megaswift.inference.load_errors import transformers_errors_as_ours
from megaswift.inference.model import (
    ModelConfigAndTokenizer,
    load_model_and_prompt_device,
    quiet_transformers,
)
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions, PoolingOptions
from megaswift.inference.pooling.folder import CLASSES, EMBEDDING, GENERATIVE, SEQUENCE, PoolingFolder
from megaswift.inference.pooling.texts import TextInput

HEADS = ("score.", "classifier.")
"""Weights of a classifier's head, which its adapters bring."""


def load_pooling_model(
    folder: Path,
    weights: ModelLoadingOptions,
    placement: PlacementOptions,
    options: PoolingOptions,
    found: PoolingFolder,
) -> PoolingModel:
    """Return the model with its weights and adapters."""
    quiet_transformers()
    from transformers import AutoConfig

    with transformers_errors_as_ours(str(folder)):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=weights.trust_remote_code)
    tokenizer = read_tokenizer(folder, weights.trust_remote_code, None)
    if found.kind == GENERATIVE and found.score_tokens is None:
        tokens = (
            _one_token(tokenizer, "--positive_token", options.positive_token),
            _one_token(tokenizer, "--negative_token", options.negative_token),
        )
        found = replace(found, score_tokens=tokens)
    lacks: tuple[str, ...] = (f"{POOLER}.",) if found.kind == EMBEDDING else ()
    if found.head is not None:
        config.id2label = dict(enumerate(found.labels))
        config.label2id = {name: number for number, name in enumerate(found.labels)}
        config.problem_type = found.problem_type or None
        lacks = HEADS
    prepared = ModelConfigAndTokenizer(folder, weights, config, tokenizer, auto_class=CLASSES[found.kind], lacks=lacks)
    model, device = load_model_and_prompt_device(prepared, placement)
    return PoolingModel(model, tokenizer, device, found)


def _one_token(tokenizer: Any, option: str, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        rule = f"is {len(ids)} tokens of this model, {tokenizer.convert_ids_to_tokens(ids)}"
        raise ConfigError(Problem(f"{option} {text}", rule, "give a text that is one token"))
    return int(ids[0])


class PoolingModel:
    """A loaded model that turns rows of tokens into vectors or logits."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device, found: PoolingFolder) -> None:
        self.model = model
        self.device = device
        self.found = found
        config = model.config.get_text_config()
        pads = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id)
        self._pad = next((pad for pad in pads if pad is not None), 0)
        self._alone = found.kind == SEQUENCE and pads[0] is None
        """transformers finds the last token of a padded row by the pad_token_id of config.json."""
        self._arguments = inspect.signature(self._inner.forward).parameters

    @property
    def _inner(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def run(self, inputs: Sequence[TextInput]) -> list[Tensor]:
        """Return a float32 tensor of each input, on the host.

        An embedding [d], the logits of a classifier [labels], or of each token [n, labels]; the log-odds of the two
        tokens of a generative reranker [1].
        """
        if len(inputs) > 1 and self._alone:
            return [result for one in inputs for result in self.run([one])]
        with torch.inference_mode():
            return self._run(inputs)

    def _run(self, inputs: Sequence[TextInput]) -> list[Tensor]:
        kind = self.found.kind
        batch = self._batch(inputs, left=kind == GENERATIVE)
        mask = batch["attention_mask"]
        if kind == GENERATIVE:
            batch |= {"use_cache": False, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
            taken = {name: value for name, value in batch.items() if name in self._arguments}
            return [*self._log_odds(self.model(**taken).logits[:, -1].float()).cpu()]
        out = self.model(**batch)
        if kind == EMBEDDING:
            prompts = [0 if self.found.includes_prompt else one.prompt for one in inputs]
            vectors = pooled(out.last_hidden_state.float(), mask, self.found.pooling, prompts)
            if self.found.normalizes:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            return [*vectors.cpu()]
        logits = out.logits.float().cpu()
        return [*logits] if kind == SEQUENCE else [row[: len(one.ids)] for row, one in zip(logits, inputs, strict=True)]

    def _batch(self, inputs: Sequence[TextInput], left: bool) -> dict[str, Any]:
        width = max(len(one.ids) for one in inputs)

        def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
            filled = [[value] * (width - len(row)) for row in rows]
            joined = [[*fill, *row] if left else [*row, *fill] for row, fill in zip(rows, filled, strict=True)]
            return torch.tensor(joined, device=self.device)

        batch = {
            "input_ids": padded([one.ids for one in inputs], self._pad),
            "attention_mask": padded([[1] * len(one.ids) for one in inputs], 0),
        }
        if any(one.types is not None for one in inputs):
            batch["token_type_ids"] = padded([one.types or [0] * len(one.ids) for one in inputs], 0)
        return batch

    def _log_odds(self, logits: Tensor) -> Tensor:
        """[b, 1] of logits [b, vocabulary]."""
        assert self.found.score_tokens is not None, "set when the model was loaded"
        yes, no = self.found.score_tokens
        return (logits[:, yes] - (0 if no is None else logits[:, no]))[:, None]


def pooled(hidden: Tensor, mask: Tensor, poolings: Sequence[str], prompts: Sequence[int]) -> Tensor:
    """Return one vector for each row, [b, d * len(poolings)].

    Args:
        hidden: [b, n, d], float32.
        mask: [b, n], 1 for tokens and 0 for the padding behind them.
        poolings: Names, as sentence-transformers has them.
        prompts: Tokens at the beginning of each row that are left out.
    """
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    own = mask.bool() & (positions >= torch.tensor(prompts, device=hidden.device)[:, None])
    weights = own[:, :, None].to(hidden.dtype)
    first = own.int().argmax(1)
    last = mask.sum(1) - 1
    rows = torch.arange(len(hidden), device=hidden.device)
    parts = []
    for name in poolings:
        if name == "cls":
            parts.append(hidden[rows, first])
        elif name == "lasttoken":
            parts.append(hidden[rows, last])
        elif name == "max":
            parts.append(hidden.masked_fill(~own[:, :, None], float("-inf")).amax(1))
        elif name == "weightedmean":
            shares = weights * (positions + 1)[:, :, None]
            parts.append((hidden * shares).sum(1) / shares.sum(1).clamp(min=1e-9))
        else:
            count = weights.sum(1).clamp(min=1e-9)
            parts.append((hidden * weights).sum(1) / (count.sqrt() if name == "mean_sqrt_len_tokens" else count))
    return torch.cat(parts, dim=-1)


def class_probabilities(logits: Tensor, found: PoolingFolder) -> Tensor:
    """Return what the logits [..., labels] of a classifier mean: numbers of a regression as they are, one probability
    for each label where several may hold or there is one, and otherwise probabilities that add up to 1."""
    if found.problem_type == "regression":
        return logits
    if found.problem_type == "multi_label_classification" or logits.shape[-1] == 1:
        return logits.sigmoid()
    return logits.softmax(-1)


def pair_score(logits: Tensor, found: PoolingFolder) -> float:
    """Return the score of a pair from its logits [1]: P(yes) of a generative reranker, and of other rerankers what the
    folder's activation gives."""
    is_plain = found.kind != GENERATIVE and found.pair_activation == "identity"
    return float(logits[0] if is_plain else logits[0].sigmoid())


def shortened(vector: Tensor, dimensions: int | None, found: PoolingFolder) -> Tensor:
    """Return the first numbers of an embedding, of length 1 where the model's embeddings are."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    return torch.nn.functional.normalize(cut, dim=-1) if found.normalizes else cut
