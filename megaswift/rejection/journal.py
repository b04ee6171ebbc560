"""The journal of a run: completions batch by batch, then rewards prompt by prompt. A killed run goes on from it.

A line is one batch or one prompt, on the disk when the run goes on. A line that was cut off is removed, and its batch
is sampled again, with the same seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megaswift.errors import ConfigError, Problem


@dataclass(frozen=True)
class SampledCompletion:
    """One completion."""

    text: str
    token_ids: tuple[int, ...]
    finished: bool
    """False: cut off at the maximum length."""


@dataclass(frozen=True)
class PromptScores:
    """The rewards of the completions of a prompt."""

    per_function: Mapping[str, Sequence[float | None]]
    """None where a function does not apply."""
    total: Sequence[float | None]


@dataclass
class SampleJournal:
    """What a run has done so far."""

    path: Path
    run: Mapping[str, Any]
    """Settings that must be equal to go on."""
    completions: dict[int, dict[int, SampledCompletion]] = field(default_factory=dict)
    """Prompt -> number of the completion -> completion."""
    scores: dict[int, PromptScores] = field(default_factory=dict)
    """By prompt."""
    _file: TextIO | None = None

    def open(self) -> None:
        """Read what an earlier run has left, and open the file for what follows.

        Raises:
            ConfigError: The file is not the journal of an equal run.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        raw = self.path.read_bytes() if self.path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            owner = lines[0]["run"] if lines else dict(self.run)
            for line in lines[1:]:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            rule = "is not the journal of an interrupted run"
            raise ConfigError(Problem(str(self.path), rule, "remove it, or use another --result_path")) from None
        if other := sorted(k for k in {*owner, *self.run} if owner.get(k) != self.run.get(k)):
            fix = "use the same options to go on, or remove the file to start over"
            raise ConfigError(Problem(str(self.path), f"belongs to a run with different {', '.join(other)}", fix))
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        self._file = self.path.open("a", encoding="utf-8")
        if not whole:
            self._write({"run": dict(self.run)})

    def add_completions(self, sampled: Mapping[tuple[int, int], SampledCompletion]) -> None:
        """Keep the completions of a batch, by prompt and number."""
        entries = [{"prompt": p, "number": n, **asdict(one)} for (p, n), one in sampled.items()]
        self._keep({"completions": entries})

    def add_scores(self, prompt: int, scores: PromptScores) -> None:
        """Keep the rewards of a prompt's completions."""
        self._keep({"prompt": prompt, "scores": asdict(scores)})

    def close(self, remove: bool = False) -> None:
        """Close the file; `remove`: the result is complete."""
        if self._file is not None:
            self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)

    def _keep(self, line: Mapping[str, Any]) -> None:
        self._write(line)
        self._take(json.loads(json.dumps(line)))

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None, "opened"
        self._file.write(json.dumps(line, ensure_ascii=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _take(self, line: Mapping[str, Any]) -> None:
        for entry in line.get("completions", ()):
            one = SampledCompletion(entry["text"], tuple(entry["token_ids"]), entry["finished"])
            self.completions.setdefault(entry["prompt"], {})[entry["number"]] = one
        if "scores" in line:
            self.scores[line["prompt"]] = PromptScores(line["scores"]["per_function"], line["scores"]["total"])
