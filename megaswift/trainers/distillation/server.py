"""A teacher behind a server of vLLM's kind: its largest log-probabilities at each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megaswift import distributed
from megaswift.errors import ConfigError, Problem
from megaswift.losses.contract import Batch
from megaswift.parallel.layout import Layout
from megaswift.rollout.server_client import SamplingServer
from megaswift.trainers.distillation.exchange import transfer
from megaswift.trainers.distillation.largest import Largest, document_spans, sources_from_first_ranks, with_largest

AT_ONCE = 32
"""Requests of a rank that wait for the server at a time."""
SAMPLE = "The 3 quick foxes — naïve, 東京 — jump over 12.5 dogs.\n\tdef f(x): return x"
"""A text that tokenizers cut in different ways."""


class ServerTeacher:
    """Asks a server for the teacher's `k` largest log-probabilities. The first rank of each replica asks."""

    def __init__(self, url: str, k: int, layout: Layout, rank: int, timeout: float = 600.0) -> None:
        start = f"vllm serve TEACHER --max-logprobs {k}, or megaswift deploy --model TEACHER"
        self.server = SamplingServer(url, timeout, "teacher", start)
        self.url = url
        self.k = k
        self.layout = layout
        self.rank = rank
        self.model = ""

    def reach(self) -> None:
        """Ask the server for its model; the first rank does. Collective."""
        self.model = distributed.run_on_rank0(self._served)

    def check(self, tokenizer: Any) -> None:
        """Refuse a server whose tokens are others than the run's; the first rank asks. Collective."""
        self.model = distributed.run_on_rank0(lambda: self._checked(tokenizer))

    def _served(self) -> str:
        listed = self.server.get("/v1/models")
        name = str(listed["data"][0]["id"]) if isinstance(listed, Mapping) and listed.get("data") else ""
        if not name:
            label = f"--teacher_model_server {self.url}"
            raise ConfigError(Problem(label, "names no model at /v1/models", self.server.start))
        return name

    def _checked(self, tokenizer: Any) -> str:
        name = self._served()
        label = f"--teacher_model_server {self.url}"
        if self.server.takes("/tokenize"):
            body = {"model": name, "prompt": SAMPLE, "add_special_tokens": False}
            found = self.server.post("/tokenize", body)
            theirs = found.get("tokens") if isinstance(found, Mapping) else None
            own = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
            if theirs != own:
                rule = f"serves {name}, whose tokenizer differs from the model's: a text has other tokens there"
                raise ConfigError(Problem(label, rule, "serve a teacher of the model's own family"))
        return name

    def add(self, batches: Sequence[Batch], training: bool) -> list[Batch]:
        """Return the micro-batches with the server's numbers, on ranks of the last stage. Collective."""
        layout = self.layout
        place = layout.coordinates(self.rank)
        first = place.dp * len(batches)
        asks = place.tp == place.cp == place.pp == 0
        found = distributed.run_and_gather_on_all_ranks(lambda: self._ask(batches) if asks else [])
        # the numbers themselves go only to the ranks that read them
        own = {first + i: largest.packed() for i, largest in enumerate(self._last)} if asks else {}
        counts = [count for rank in range(layout.dp) for count in found[layout.rank(dp=rank)]]
        sizes = {number: 8 * self.k * count for number, count in enumerate(counts)}
        got = transfer(own, sources_from_first_ranks(layout, len(batches)), sizes)
        if not got:
            return list(batches)
        return [with_largest(batch, Largest.unpacked(got[first + i].cpu(), self.k)) for i, batch in enumerate(batches)]

    def _ask(self, batches: Sequence[Batch]) -> list[int]:
        """Ask for all documents of the micro-batches, and return how many labels each micro-batch has."""
        texts = [(batch, *span) for batch in batches for span in document_spans(batch)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(lambda text: self._largest(*text), texts))
        self._last: list[Largest] = []
        for batch in batches:
            own = [largest for text, largest in zip(texts, answers, strict=True) if text[0] is batch]
            self._last.append(Largest.joined(own, self.k))
        return [len(largest.logprobs) for largest in self._last]

    def _largest(self, batch: Batch, row: int, start: int, end: int) -> Largest:
        """The numbers at the labels of one document."""
        ids = batch.input_ids[row, start:end].tolist()
        labeled = (batch.loss_weights[row, start:end] != 0).nonzero().squeeze(1).tolist()
        if not labeled:
            return Largest.joined([], self.k)
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self.k}
        answer = self.server.post("/v1/completions", body)
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        tokens = choices[0].get("prompt_logprobs") if choices else None
        if not isinstance(tokens, list) or len(tokens) != len(ids):
            rule = "did not answer with prompt_logprobs for each token, as vLLM does"
            raise ConfigError(Problem(f"--teacher_model_server {self.url}", rule, self.server.start))
        logprobs = torch.full((len(labeled), self.k), -torch.inf)
        found = torch.zeros(len(labeled), self.k, dtype=torch.int32)
        for i, position in enumerate(labeled):
            # the label at a position is the next token; a token outside the largest is listed too
            listed = sorted(tokens[position + 1].items(), key=lambda entry: -float(entry[1]["logprob"]))[: self.k]
            logprobs[i, : len(listed)] = torch.tensor([float(entry["logprob"]) for _, entry in listed])
            found[i, : len(listed)] = torch.tensor([int(token) for token, _ in listed], dtype=torch.int32)
        return Largest(logprobs, found)
