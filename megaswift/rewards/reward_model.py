"""Rewards by `--reward_model DIR`: transformers' `...ForSequenceClassification` with one label, as exported by task rm.

A text scores what transformers says of it alone: batches and padding change nothing. In two steps, so that mistakes
cost nothing: made from configuration and tokenizer, weights read when they are first needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.hf import finite
from megaswift.bridge.hf.bits import disable_4bit_cpu_repacking
from megaswift.bridge.hf.loading_report import LOADING_INFO, check_all_weights_loaded
from megaswift.data.model_tokenizer import read_tokenizer
from megaswift.errors import Problem, RewardError, WeightsError, first_line
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.inference.load_errors import REFUSALS
from megaswift.inference.model import quiet_transformers
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.models.family import read_config_json
from megaswift.models.heads import scalar_head_problems
from megaswift.rewards.reward_input import RewardInput

TOKENS = 16384
"""Maximum tokens of a batch, padding included."""


@dataclass
class RewardModel:
    """Scores prompt and completion together."""

    name: str
    folder: Path
    options: ModelLoadingOptions
    tokenizer: Any
    columns: frozenset[str] = frozenset()
    whole_groups: bool = False
    _model: Any = field(default=None, repr=False)

    @property
    def flag(self) -> str:
        """The option as typed."""
        return f"--reward_model {self.options.model}"

    def load(self, device: torch.device | str | None = None) -> Any:
        """The model with its weights; on this process's GPU where there is one."""
        from transformers import AutoModelForSequenceClassification

        if self._model is None:
            dtype = (
                self.options.torch_dtype
                if self.options.torch_dtype == "auto"
                else getattr(torch, self.options.torch_dtype)
            )
            how: dict[str, Any] = (
                {} if self.options.attn_impl == "auto" else {"attn_implementation": self.options.attn_impl}
            )
            try:
                model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                    self.folder,
                    dtype=dtype,
                    trust_remote_code=self.options.trust_remote_code,
                    **LOADING_INFO,
                    **how,
                )
            except REFUSALS as error:
                raise WeightsError(
                    Problem(f"--reward_model {self.folder}", f"transformers cannot load it: {first_line(error)}")
                ) from None
            check_all_weights_loaded(f"--reward_model {self.folder}", loading_info)
            finite.check_weights_finite(model.named_parameters(), self.flag)
            self._model = (
                disable_4bit_cpu_repacking(model).eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            )
        return self._model

    def text(self, sample: RewardInput) -> str:
        """Prompt and completion as the model saw such texts in training: by its own chat template where they are
        messages."""
        if isinstance(sample.prompt, str):
            return f"{sample.prompt}{sample.completion}"
        if self.tokenizer.chat_template is None:
            raise RewardError(
                Problem(
                    f"--reward_model {self.folder}",
                    "its tokenizer has no chat template, which is needed for prompts of messages",
                    "use plain text prompts, or put chat_template.jinja into that folder",
                )
            )
        return self.tokenizer.apply_chat_template([*sample.prompt, *sample.completion], tokenize=False)

    @torch.inference_mode()
    def __call__(self, samples: Sequence[RewardInput]) -> list[float]:
        """One score a sample."""
        end = [self.tokenizer.eos_token_id or 0]  # of a text without tokens
        rows = [self.tokenizer(self.text(sample), add_special_tokens=False)["input_ids"] or end for sample in samples]
        scores = [0.0] * len(rows)
        for numbers in _batches([len(row) for row in rows]):
            for i, score in zip(numbers, self._scores([rows[i] for i in numbers]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[rows]: transformers reads a row's score at its last token that is not the padding, so padding must be no
        text's last token."""
        model = self.load()
        config = model.config.get_text_config()
        own = model.config.get_text_config().pad_token_id
        ends = {row[-1] for row in rows}
        padding = own if own is not None else next(token for token in range(len(ends) + 1) if token not in ends)
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
        mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
        config.pad_token_id = padding
        try:
            return (
                model(input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device), return_dict=True)
                .logits[:, 0]
                .float()
                .cpu()
            )
        finally:
            config.pad_token_id = own


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of rows of similar length, as many as have TOKENS together, padding included."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _made(options: ModelLoadingOptions, name: str) -> RewardModel:
    flag = f"--reward_model {options.model}"
    folder = locate_model(options)
    if find_checkpoint(folder) is not None:
        raise WeightsError(Problem(flag, "is a training checkpoint", "use the run's export: the folder hf"))
    if problems := missing_model_file_problems(folder, random_init=False) or scalar_head_problems(
        flag, read_config_json(folder)
    ):
        raise WeightsError(problems)
    return RewardModel(name, folder, options, read_tokenizer(folder, options.trust_remote_code, None))


def load_reward_models(
    folders: Sequence[str], options: ModelLoadingOptions, taken: Collection[str] = ()
) -> list[RewardModel]:
    """The models in their order, each under a name of its own; WeightsError with all that is wrong. `taken`: names of
    other rewards."""
    quiet_transformers()
    models: list[RewardModel] = []
    problems: list[Problem] = []
    names = set(taken)
    for folder in folders:
        parts = [part for part in Path(folder).absolute().parts if part != "hf"]
        name = next(
            n
            for i in range(1, len(folders) + len(names) + 2)
            if (n := parts[-1] if i == 1 else f"{parts[-1]}-{i}") not in names
        )
        names.add(name)
        try:
            models.append(_made(replace(options, model=folder, hf_config=None), name))
        except WeightsError as error:
            problems += error.problems
    if problems:
        raise WeightsError(problems)
    return models
