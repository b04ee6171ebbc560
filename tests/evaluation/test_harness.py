"""Scores in this process are those of lm-evaluation-harness's own backend `hf` to the last digit: of a folder, of
adapters, of a checkpoint of training. Files of questions are scored as plain transformers scores them.

Covers: megaswift/evaluation/harness.py, megaswift/evaluation/question_task.py,
megaswift/evaluation/task_library.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.evaluation.harness import HarnessRun, local_model, result_of, run_tasks
from megaswift.evaluation.results import EvaluationResult
from megaswift.evaluation.task_library import load_tasks
from tests.evaluation.local_tasks import answers, choices, task_files, texts
from tests.inference.models import adapters, folder, opened

pytestmark = pytest.mark.wide
RUN = HarnessRun(batch_size=4, num_fewshot=2, bootstrap_iters=200)
SEEDS = {f"{kind}_random_seed": RUN.seed for kind in ("random", "numpy", "torch", "fewshot")} | {
    "random_seed": RUN.seed
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("evaluation") / "tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return task_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    yield


def here(path: Path, tasks: list[str], run: HarnessRun = RUN, adapter: Path | None = None, chat: bool = False) -> Any:
    loaded = load_tasks(tasks, (), chat)
    prepared, generator = opened(path, adapter)
    return run_tasks(local_model(generator.model, prepared.tokenizer, run.batch_size), loaded, run)


def by_hf_backend(arguments: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        "hf",
        model_args=arguments,
        tasks=list(tasks),
        num_fewshot=RUN.num_fewshot,
        batch_size=RUN.batch_size,
        device="cpu",
        bootstrap_iters=RUN.bootstrap_iters,
        task_manager=TaskManager(include_defaults=False),
        random_seed=RUN.seed,
        numpy_random_seed=RUN.seed,
        torch_random_seed=RUN.seed,
        fewshot_random_seed=RUN.seed,
    )
    assert found is not None
    return dict(found["results"])


def test_scores_are_those_of_its_own_backend(model: Path, files: list[str]) -> None:
    expected = by_hf_backend({"pretrained": str(model)}, files)
    assert here(model, files)["results"] == expected
    assert len(expected) == 3 and 0 < expected["local_choices"]["acc,none"] < 1


def test_scores_with_adapters(model: Path, files: list[str]) -> None:
    adapter = adapters(model.parent / "adapter", model)
    expected = by_hf_backend({"pretrained": str(model), "peft": str(adapter)}, files)
    found = here(model, files, adapter=adapter)["results"]
    assert found == expected
    assert found["local_texts"] != here(model, files)["results"]["local_texts"]


def test_scores_of_a_checkpoint(model: Path, files: list[str], tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "step")
    assert here(tmp_path / "step", files)["results"] == by_hf_backend({"pretrained": str(model)}, files)


def test_choices_are_those_that_plain_transformers_finds_likeliest(model: Path, tmp_path: Path) -> None:
    """By the log-probability of each choice behind the question, alone and unpadded."""
    file = choices(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    loaded = load_tasks([str(file)], (), chat=True)
    found = here(model, [str(file)], HarnessRun(bootstrap_iters=200), chat=True)
    rows = loaded["tasks"]["choices"].rows
    right = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True)
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        likely = []
        for choice in row.choices:
            ids = start + tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
            likely.append(sum(float(logprobs[t - 1, ids[t]]) for t in range(len(start), len(ids))))
        right.append(likely.index(max(likely)) == row.label)
    assert found["results"]["choices"]["acc,none"] == sum(right) / len(rows)
    assert 0 < sum(right) < len(rows)


def test_answers_are_scored_as_squad_scores_them(model: Path, tmp_path: Path) -> None:
    from lm_eval.tasks.tydiqa.utils import f1_score  # its import takes a second

    file = answers(tmp_path)
    found = here(model, [str(file)], HarnessRun(bootstrap_iters=200, gen_kwargs={"max_gen_toks": 12}), chat=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    f1 = []
    for sample in found["samples"]["answers"]:
        ids = tokenizer(sample["arguments"][0][0], add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = plain.generate(ids, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["filtered_resps"] == [answer]
        f1.append(max(f1_score(answer, reference, "en") for reference in sample["target"]))
    assert found["results"]["answers"]["f1,none"] == pytest.approx(np.mean(f1), abs=1e-12)


def test_perplexity_of_texts(model: Path, tmp_path: Path) -> None:
    """That of a task of lm-evaluation-harness on the same file, and by hand for one text."""
    found = here(model, [str(texts(tmp_path))])["results"]["texts"]
    task = here(model, task_files(tmp_path)[2:])["results"]["local_texts"]
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found[f"{metric},none"] == task[f"{metric},none"]
    assert math.log2(found["byte_perplexity,none"]) == pytest.approx(found["bits_per_byte,none"])


def evaluated(found: Any) -> EvaluationResult:
    return result_of("tiny", found, RUN, {})


def test_intervals_hold_the_scores(model: Path, files: list[str], tmp_path: Path) -> None:
    result = evaluated(here(model, files))
    by_name = {score.name: score for score in result.scores}
    assert {"local_choices/acc", "local_answers/exact_match", "local_texts/word_perplexity"} <= by_name.keys()
    for score in result.scores:
        assert score.low is not None and score.high is not None and score.low <= score.value <= score.high
    assert by_name["local_choices/acc"].higher_is_better and not by_name["local_texts/bits_per_byte"].higher_is_better
    assert by_name["local_choices/acc"].questions == 20


def test_generators_of_random_numbers_are_left_as_they_were(model: Path, files: list[str]) -> None:
    """An evaluation in the middle of training changes nothing."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    here(model, files[:1])
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_a_question_that_is_cut_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"question": "' + "a b " * 60 + '", "answer": "c"}\n')
    here(model, [str(file)])
    assert "longer than the model's context" in capsys.readouterr().err
