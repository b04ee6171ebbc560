"""`--dataset`: answers every row of a file in batches of similar length; results are in the file's order.

Answers are appended to RESULT.partial after each batch. At the end they are written to RESULT in order and the partial
file is removed. A run that finds the partial file of an equal run resumes it.

Each of n processes answers every n-th batch and has a partial file of its own, RESULT.partial-N. The batches are
those of one process, and so are the answers; any number of processes resumes what any other number has left.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from megaswift import distributed, log
from megaswift.base.atomic_writes import atomic_file
from megaswift.errors import ConfigError, DataError, Problem
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer
from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams, Generator
from megaswift.inference.options.commands import InferConfig
from megaswift.inference.token_texts import TokenTexts
from megaswift.serve.logprobs import logprob_json
from megaswift.serve.prompt_rows import PromptFileRow, prompt_dataset_files

SEED = 42
PARTIAL = ".partial"
LONGEST_HOURS = 7 * 24.0
"""A process waits at most so long for others, as long as these make progress."""
VLLM_ROWS = 256
"""Rows whose answers are written together: as many as vLLM's engine runs at a time by default."""


@dataclass(frozen=True)
class AnswerJournal:
    """The partial file: a first line with the run's settings, then one answer per line with its row number."""

    path: Path
    run: Mapping[str, Any]
    """Settings that must be equal to resume."""

    def read(self) -> dict[int, dict[str, Any]]:
        """Answers by row, those of other processes too; a last line that was cut off is dropped. ConfigError where
        another run left a file."""
        others = [path for path in self.files() if path != self.path]
        answers = {row: answer for path in others for row, answer in self._read(path, mend=False).items()}
        return answers | self._read(self.path, mend=True)

    def files(self) -> list[Path]:
        """The partial files of all processes, of any earlier run too."""
        name = self.path.name.partition(PARTIAL)[0] + PARTIAL
        pattern = re.compile(re.escape(name) + r"(-\d+)?")
        return sorted(p for p in self.path.absolute().parent.glob("*") if pattern.fullmatch(p.name))

    def _read(self, path: Path, mend: bool) -> dict[int, dict[str, Any]]:
        """The answers of one file. `mend`: a line that was cut off is removed from it, which only its owner may do."""
        if not path.exists():
            return {}
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            owner = lines[0]["run"] if lines else dict(self.run)
            answers = {int(line["row"]): line["answer"] for line in lines[1:]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                Problem(
                    str(path),
                    "is not the partial file of an interrupted run",
                    "remove it, or use another --result_path",
                )
            ) from None
        other = sorted(k for k in {*owner, *self.run} if owner.get(k) != self.run.get(k))
        if other:
            raise ConfigError(
                Problem(
                    str(path),
                    f"belongs to a run with different {', '.join(other)}",
                    "use the same options to resume, or remove the file to start over",
                )
            )
        if mend and len(whole) < len(raw):
            os.truncate(path, len(whole))
        return answers

    def open(self) -> TextIO:
        """For appending; a new file begins with whose it is."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8")
        if file.tell() == 0:
            file.write(json.dumps({"run": dict(self.run)}) + "\n")
            file.flush()
        return file


def answer_journal_with_run_fingerprint(cfg: InferConfig, folder: Path) -> AnswerJournal:
    """The journal of this run, next to its result file."""
    assert cfg.file.dataset and cfg.file.result_path is not None
    digest = hashlib.sha256()
    for source in prompt_dataset_files(cfg.file.dataset):
        digest.update(f"{source.rows} {cfg.file.load_data_args} ".encode())
        for path in source.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    data = digest.hexdigest()
    newest = max((p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file()), default=0)
    w = cfg.weights
    p = cfg.placement
    rank = distributed.global_rank()
    run = {
        "model": [str(folder.resolve()), newest],
        "adapters": list(w.adapters),
        "backend": cfg.backend.infer_backend,
        "torch_dtype": w.torch_dtype,
        "rope_scaling": w.rope_scaling,
        "dataset": data,
        "quantization_bit": p.quantization_bit,
        "generation": json.loads(json.dumps(asdict(cfg.generation))),
        "conversation": asdict(cfg.conversation),
        "file": {k: v for k, v in asdict(cfg.file).items() if k not in ("dataset", "result_path")},
    }
    path = Path(cfg.file.result_path)
    return AnswerJournal(path.with_name(path.name + PARTIAL + (f"-{rank}" if rank else "")), run)


def length_batches(rows: Sequence[PromptFileRow], size: int) -> list[list[int]]:
    """Numbers of the rows of each batch: neighbours in length, the longest first, so that too little memory shows at
    once."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].prompt.ids), i))
    return [order[i : i + size] for i in range(0, len(order), size)]


@dataclass(frozen=True)
class PromptFileRun:
    """One file to answer."""

    cfg: InferConfig
    rows: Sequence[PromptFileRow]
    journal: AnswerJournal
    sampling: GenerationParams
    prompts: ChatInputRenderer

    def run(self, make: Callable[[], Generator]) -> Path:
        """Answers all rows that have none yet, this process its share of the batches; the result file, which rank 0
        writes. `make` loads the model, if a row is left."""
        done = self.journal.read()
        transformers = self.cfg.backend.infer_backend == "transformers"
        batches = length_batches(self.rows, self.cfg.file.per_device_eval_batch_size if transformers else VLLM_ROWS)
        share = batches[distributed.global_rank() :: distributed.global_world_size()]
        left = [b for b in share if any(i not in done for i in b)]
        if done:
            log.info(f"{len(done)} of {len(self.rows)} rows are already answered in {self.journal.path}; resuming")
        if left:
            generator = make()
            began = time.monotonic()
            before = len(done)
            total = len(done) + sum(i not in done for b in left for i in b)
            with self.journal.open() as file:
                for batch in left:
                    self._append(file, batch, self._answers(generator, batch), done)
                    log.info(
                        f"{len(done)} of {total} rows, {(len(done) - before) / (time.monotonic() - began):.2f} rows/s"
                    )
        distributed.untimed_barrier(LONGEST_HOURS)
        return self._finish(distributed.all_gather_merged_dict(done))

    def _answers(self, generator: Generator, batch: Sequence[int]) -> list[dict[str, Any]]:
        """One batch. Its seed is its own, so that a run that goes on draws what the whole run would have drawn."""
        top_logprobs = (self.cfg.file.top_logprobs or 0) if self.cfg.file.logprobs else None
        requests = [self._request(self.rows[i], top_logprobs) for i in batch]
        seed = (SEED if self.sampling.seed is None else self.sampling.seed) + batch[0]
        completions = generator.generate(requests, replace(self.sampling, seed=seed))
        texts = TokenTexts(generator.tokenizer) if self.cfg.file.logprobs else None
        return [_columns(completion, texts) for completion in completions]

    def _request(self, row: PromptFileRow, top_logprobs: int | None) -> AnswerRequest:
        try:
            return self.prompts.request(
                row.prompt, self.cfg.generation.max_new_tokens, self.cfg.generation.stop, top_logprobs
            )
        except ChatInputError as error:  # an image that changed or went since it was looked at
            raise DataError(Problem(row.place, str(error))) from None

    def _append(
        self, file: TextIO, batch: Sequence[int], answers: Sequence[dict[str, Any]], done: dict[int, dict[str, Any]]
    ) -> None:
        for i, answer in zip(batch, answers, strict=True):
            if i not in done:
                done[i] = answer
                file.write(json.dumps({"row": i, "answer": answer}, ensure_ascii=False) + "\n")
        file.flush()

    def _finish(self, done: Mapping[int, Mapping[str, Any]]) -> Path:
        """The result in the file's order, whole or not there. Partial files of another node are removed there."""
        result = Path(str(self.cfg.file.result_path))
        if distributed.global_rank():
            distributed.untimed_barrier(LONGEST_HOURS)
            distributed.barrier()
            self.journal.path.unlink(missing_ok=True)
            return result
        result.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(result) as fresh, fresh.open("w", encoding="utf-8") as file:
            for i, row in enumerate(self.rows):
                file.write(json.dumps({**row.columns, **done[i]}, ensure_ascii=False, default=_plain) + "\n")
        for path in self.journal.files():
            path.unlink(missing_ok=True)
        distributed.untimed_barrier(LONGEST_HOURS)
        distributed.barrier()
        return result


def _plain(value: Any) -> str:
    """What JSON has no form for: dates as text, and bytes, an image's, in the form in which rows are read again."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def _columns(completion: Answer, texts: TokenTexts | None) -> dict[str, Any]:
    """What an answer adds to its row; None: no log-probabilities."""
    columns: dict[str, Any] = {"response": completion.text}
    if texts is not None:
        columns["logprobs"] = {"content": [logprob_json(t, texts) for t in completion.logprobs]}
    return columns
