"""A run that was killed goes on: the same files as without the interruption, no completion twice.

Covers: megaswift/rejection/journal.py, megaswift/rejection/run.py, megaswift/rejection/prompts.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.sources.files import resolve_dataset_files
from megaswift.errors import ConfigError, DataError
from megaswift.inference.chat_inputs import ChatInputRenderer, TokenizedChat
from megaswift.inference.model import load_config_tokenizer_and_processor
from megaswift.inference.options.commands import ChatTemplateOptions, ModelLoadingOptions
from megaswift.rejection.journal import PromptScores, SampledCompletion, SampleJournal
from megaswift.rejection.options.sampling import SampledCompletionOptions, SelectionOptions
from megaswift.rejection.prompts import PromptToSample, read_prompts
from megaswift.rejection.run import SampleRun, pass_sizes
from megaswift.rewards.user_function import describe_user_function
from tests.trainers.inputs import write_model

COMPLETIONS = SampledCompletionOptions(num_return_sequences=3, batch_size=4)


class Killed(Exception):
    """The process ends here."""


def lengths(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(one[0]["content"])) for one in completions]


class Drawn:
    """A sampler whose texts depend on the seed alone; it is killed at its `last` call."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.calls: list[int] = []

    def __call__(self, batch: Sequence[tuple[PromptToSample, int]], seed: int) -> list[SampledCompletion]:
        if len(self.calls) == self.last:
            raise Killed
        self.calls.append(seed)
        rng = random.Random(seed)
        texts = ["x" * rng.randrange(1, 30) for _ in batch]
        return [SampledCompletion(text, tuple(range(len(text))), True) for text in texts]


def prepared(folder: Path, reward: Any = lengths, **identity: Any) -> SampleRun:
    prompts = [
        PromptToSample(f"f:{i}", ({"role": "user", "content": str(i)},), {}, None, TokenizedChat((1,) * (i + 1)))
        for i in range(5)
    ]
    journal = SampleJournal(folder / "out.jsonl.partial", {"model": "m", **identity})
    function = describe_user_function("lengths", reward, "--reward_funcs lengths")
    return SampleRun(prompts, journal, COMPLETIONS, SelectionOptions(), [function], [1.0], folder / "out.jsonl")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    prepared(folder).run(Drawn)
    return files(folder)


def test_files(whole: dict[str, bytes]) -> None:
    assert whole.keys() == {"out.jsonl", "out.samples.jsonl", "out.summary.json"}
    samples = [json.loads(line) for line in whole["out.samples.jsonl"].splitlines()]
    rows = [json.loads(line) for line in whole["out.jsonl"].splitlines()]
    assert len(samples) == 15 and len(rows) == 5
    for i, row in enumerate(rows):
        assert row["reward"] == max(one["reward"] for one in samples if one["row"] == f"f:{i}")
    summary = json.loads(whole["out.summary.json"])
    assert summary["rows"] == 5 and summary["mean_reward"] == sum(one["reward"] for one in samples) / 15
    assert summary["pass@k"].keys() == {"1", "2", "3"} and pass_sizes(8) == [1, 2, 4, 8]


@pytest.mark.parametrize("last", range(4))
def test_killed_while_sampling(last: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Behind each batch: the next run draws only what is left."""
    first, second = Drawn(last), Drawn()
    with pytest.raises(Killed):
        prepared(tmp_path).run(lambda: first)
    assert not (tmp_path / "out.jsonl").exists()
    prepared(tmp_path).run(lambda: second)
    assert files(tmp_path) == whole
    assert len(first.calls) == last and not set(first.calls) & set(second.calls)
    assert len(first.calls) + len(second.calls) == 4


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_killed_while_writing_a_line(cut: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(Killed):
        prepared(tmp_path).run(lambda: Drawn(2))
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-cut])
    again = Drawn()
    prepared(tmp_path).run(lambda: again)
    assert files(tmp_path) == whole and len(again.calls) == 3


def test_killed_while_scoring(whole: dict[str, bytes], tmp_path: Path) -> None:
    """No completion is drawn again, and no model is loaded."""
    asked: list[int] = []

    def fails(completions: list[Any], **columns: Any) -> list[float]:
        asked.append(len(completions))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, fails).run(Drawn)
    assert asked == [15]

    def no_model() -> Drawn:
        raise AssertionError("all completions are there")

    prepared(tmp_path).run(no_model)
    assert files(tmp_path) == whole


def test_killed_before_the_journal_is_removed(whole: dict[str, bytes], tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run.journal.open()
    run._sample(Drawn)
    run._score()
    run._write()
    prepared(tmp_path).run(lambda: Drawn(0))
    assert files(tmp_path) == whole


def test_another_selection_goes_on_and_another_run_does_not(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        prepared(tmp_path).run(lambda: Drawn(1))
    with pytest.raises(ConfigError, match="belongs to a run with different model"):
        prepared(tmp_path, model="other").run(Drawn)
    run = replace(prepared(tmp_path), selection=SelectionOptions(num_best=3))
    assert run.run(Drawn)["rows"] > 5
    (tmp_path / "out.jsonl.partial").write_text("{}\n")
    with pytest.raises(ConfigError, match="is not the journal"):
        prepared(tmp_path).run(Drawn)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = SampleJournal(tmp_path / "j", {"a": 1})
    first.open()
    first.add_completions({(0, 1): SampledCompletion("ü\n\u2028", (1, 2), False)})
    first.add_scores(0, PromptScores({"r": [None, 0.1]}, [None, 0.1]))
    first.close()
    second = SampleJournal(tmp_path / "j", {"a": 1})
    second.open()
    assert second.completions == first.completions == {0: {1: SampledCompletion("ü\n\u2028", (1, 2), False)}}
    assert second.scores == first.scores and second.scores[0].total == [None, 0.1]


def test_prompts_are_those_of_reinforcement_learning(tmp_path: Path) -> None:
    """The conversation up to the answer; the answer and other columns are for rewards, and for rows where no format
    reads them."""
    model = write_model(tmp_path / "model")
    ready = load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(model)), None)
    file = tmp_path / "p.jsonl"
    rows = [
        {"query": "1+1", "response": "2", "answer": "2", "level": 1},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "plain"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [resolve_dataset_files(str(file), lambda *a: ())]
    first, second, third = read_prompts(
        sources, {"answer": "solution"}, ChatInputRenderer(ready, ChatTemplateOptions())
    )
    assert first.content == ({"role": "user", "content": "1+1"},) and first.columns["solution"] == "2"
    assert first.free_columns == {"solution": "2", "level": 1}
    assert second.columns == {"response": "b"} and second.free_columns == {}
    assert third.content == "plain" and first.place == f"{file}:1"
    system = ChatInputRenderer(ready, ChatTemplateOptions(system="be brief"))
    assert read_prompts([resolve_dataset_files(f"{file}#2", lambda *a: ())], {}, system)[0].content[0] == {
        "role": "system",
        "content": "be brief",
    }
    file.write_text('{"level": 1}\n{"query": "1"}\n')
    with pytest.raises(DataError, match=rf"{file}:1: "):
        read_prompts(sources, {}, ChatInputRenderer(ready, ChatTemplateOptions()))
