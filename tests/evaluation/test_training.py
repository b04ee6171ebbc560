"""Tasks within runs of training: scores are those of the export, and training does not notice.

Covers: megaswift/evaluation/training.py, megaswift/trainers/hooks/evaluation.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megaswift.cli import main
from megaswift.engine.protocol import Engine
from megaswift.evaluation.harness import HarnessRun, local_model, result_of, run_tasks
from megaswift.evaluation.results import read_result
from megaswift.evaluation.task_library import load_tasks
from megaswift.evaluation.training import TaskSettings, TrainingTasks
from megaswift.trainers.hooks.metrics import read_lines
from tests.evaluation.local_tasks import answers, task_files, write_rows
from tests.inference.models import folder, opened
from tests.parity.pool import RankError
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

STEPS = ("--max_steps", 3, "--eval_steps", 2, "--report_to", "none")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    return [*task_files(folder), str(answers(folder))]


def scores_of(folder: Path, tasks: list[str], out: Path) -> dict[str, float]:
    """By `megaswift eval`."""
    assert main(["eval", "--model", str(folder), "--tasks", *tasks, "--output_dir", str(out)]) == 0
    return {score.name: score.value for score in read_result(str(out)).scores}


class Weights:
    """An engine with the weights of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from load_file(self.folder / "model.safetensors").items()


@pytest.mark.process
def test_a_copy_of_the_weights_answers(tasks: list[str], tmp_path: Path) -> None:
    """Each time with the weights that the engine has then; nothing of the copy is left behind it."""
    first = folder(tmp_path / "first")
    second = folder(tmp_path / "second")
    tensors = load_file(second / "model.safetensors")
    save_file({name: t * 0.9 for name, t in tensors.items()}, second / "model.safetensors", {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(first)
    training = TrainingTasks(first, tokenizer, TaskSettings(tuple(tasks), 5, 0, 4, False, "cpu"))
    training.load()
    found = [training.scores(cast(Engine, Weights(path))) for path in (first, second, first)]
    assert found[0] == found[2] != found[1]
    loaded = load_tasks(tasks, (), chat=True)
    for path, scores in zip((first, second), found, strict=False):
        prepared, generator = opened(path)
        run = HarnessRun(num_fewshot=0, limit=5, batch_size=4, bootstrap_iters=0)
        plain = run_tasks(local_model(generator.model, prepared.tokenizer, 4), loaded, run)
        assert {score.name: score.value for score in result_of("", plain, run, {}).scores} == scores
    assert training._copy is not None and not training._copy.ready


@pytest.mark.slow
@pytest.mark.process
def test_scores_are_those_of_the_export(inputs: list[str], tasks: list[str], tmp_path: Path) -> None:
    """On two ranks that share each layer; the losses of training are those of a run without tasks, bit by bit."""
    words = [*inputs, "--tp", "2"]
    text = run(words, tmp_path / "with", *STEPS, "--eval_tasks", *tasks)
    lines = read_lines(tmp_path / "with" / "eval.jsonl")
    assert [line["step"] for line in lines] == [2, 3]
    expected = scores_of(tmp_path / "with", tasks, tmp_path / "scores")
    assert {name: lines[-1][name] for name in expected} == expected and len(expected) == 8
    assert lines[0]["local_texts/word_perplexity"] != lines[1]["local_texts/word_perplexity"]
    assert "step 3: local_choices/acc" in text and "evaluation loss" not in text
    run(words, tmp_path / "without", "--max_steps", 3, "--report_to", "none")
    losses = [[line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("with", "without")]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        ("--pp", "2"),
        ("--engine", "fsdp2"),
        ("--engine", "zero3"),
        ("--train_type", "lora", "--merge_lora", "true"),
        ("--engine", "fsdp2", "--train_type", "lora", "--merge_lora", "true"),
    ],
)
def test_every_layout(layout: tuple[str, ...], inputs: list[str], tasks: list[str], tmp_path: Path) -> None:
    """Adapters are merged for the copy and for the export apart from one another: equal up to rounding."""
    data = inputs[inputs.index("--dataset") + 1]
    run([*inputs, *layout, "--val_dataset", data], tmp_path / "out", *STEPS, "--eval_tasks", *tasks)
    line = read_lines(tmp_path / "out" / "eval.jsonl")[-1]
    expected = scores_of(tmp_path / "out" / "hf", tasks, tmp_path / "scores")
    assert line["loss"] > 0 and line["label_tokens"] > 0  # the validation rows are in the same line
    found = {name: line[name] for name in expected}
    assert found == (pytest.approx(expected, rel=1e-5) if "lora" in layout else expected)


@pytest.mark.slow
@pytest.mark.process
def test_the_best_model_by_a_task(inputs: list[str], tasks: list[str], tmp_path: Path) -> None:
    """Without validation rows: the export is that of the step whose score was the best."""
    best = ("--load_best_model_at_end", "true", "--metric_for_best_model", "local_texts/bits_per_byte")
    steps = ("--max_steps", 4, "--eval_steps", 1, "--save_steps", 1, "--lr_scheduler_type", "constant")
    run(inputs, tmp_path / "out", *steps, *best, "--eval_tasks", tasks[2], "--greater_is_better", "false", ranks=1)
    lines = read_lines(tmp_path / "out" / "eval.jsonl")
    expected = min(line["local_texts/bits_per_byte"] for line in lines)
    assert expected != lines[-1]["local_texts/bits_per_byte"]
    found = scores_of(tmp_path / "out" / "hf", tasks[2:3], tmp_path / "scores")
    assert found["local_texts/bits_per_byte"] == expected


@pytest.mark.slow
@pytest.mark.process
def test_reinforcement_learning(inputs: list[str], tasks: list[str], tmp_path: Path) -> None:
    """A line has rewards on held-out prompts and the scores of tasks."""
    (tmp_path / "mine.py").write_text("def short(completions, **columns): return [1.0] * len(completions)\n")
    rl = ("--reward_funcs", f"{tmp_path / 'mine.py'}:short", "--max_completion_length", 4, "--num_generations", 2)
    held = ("--val_dataset", inputs[inputs.index("--dataset") + 1])
    run(inputs, tmp_path / "out", *STEPS, *rl, *held, "--eval_tasks", tasks[0], ranks=1, task="grpo")
    line = read_lines(tmp_path / "out" / "eval.jsonl")[-1]
    assert (
        line["reward"] == 1
        and line["local_choices/acc"]
        == scores_of(tmp_path / "out" / "hf", tasks[:1], tmp_path / "scores")["local_choices/acc"]
    )


@pytest.mark.slow
@pytest.mark.process
def test_a_wrong_file_ends_the_run_before_a_model_is_loaded(inputs: list[str], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{"question": "q"}])
    with pytest.raises(RankError) as caught:
        run([*inputs, "--tp", "2"], tmp_path / "out", *STEPS, "--eval_tasks", file)
    assert f"{file}:1: column answer: nothing" in str(caught.value)


@pytest.mark.slow
@pytest.mark.process
def test_a_model_learns_its_sums(inputs: list[str], tmp_path: Path) -> None:
    """The share of right answers rises from nothing, as `megaswift eval` on the export finds it."""
    sums = [(f"{a}+{b}=?", str(a + b)) for a in range(5) for b in range(5)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
    data = write_rows(tmp_path / "sums.jsonl", [{"messages": messages} for messages in chats])
    questions = str(write_rows(tmp_path / "questions.jsonl", [{"question": q, "answer": a} for q, a in sums]))
    model = inputs[inputs.index("--model") + 1]
    words: list[Any] = ["--model", model, "--dataset", str(data), "--dataset_cache_dir", str(tmp_path / "cache")]
    more = ("--per_device_train_batch_size", 25, "--lr", "1e-2", "--max_steps", 250, "--eval_steps", 50)
    run(words, tmp_path / "out", *more, "--report_to", "none", "--eval_tasks", questions, ranks=1)
    before = scores_of(Path(model), [questions], tmp_path / "before")["questions/exact_match"]
    after = scores_of(tmp_path / "out", [questions], tmp_path / "after")["questions/exact_match"]
    steps = [line["questions/exact_match"] for line in read_lines(tmp_path / "out" / "eval.jsonl")]
    assert before <= 0.1 and after >= 0.9 and steps[-1] == after and len(steps) == 5
