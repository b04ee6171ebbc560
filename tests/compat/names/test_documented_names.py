"""Every documented option of ms-swift, Megatron-SWIFT, Megatron-LM and transformers has an answer of its own.

Covers: megaswift/compat/names/absent.py, megaswift/compat/names/megatron_lm.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from megaswift.compat.names.answers import NAMES_ELSEWHERE
from megaswift.compat.names.architecture import ARCHITECTURE
from megaswift.compat.names.neutral import ABSENT, EITHER, NEUTRAL, NEWER
from megaswift.compat.names.translated import RENAMED, SWITCHES
from megaswift.config import load_config
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError, Problem

DOCUMENTED: dict[str, dict[str, list[str | None]]] = json.loads(
    Path(__file__).with_name("documented_names.json").read_text(encoding="utf-8")
)
"""By toolkit: name to its default and another value; null: unset. ms-swift of 2026-08-22, Megatron-LM d98e8a64."""
GENERIC = re.compile(r"did you mean|--help all lists them")


def transformers_names() -> dict[str, list[str | None]]:
    """The fields of the installed TrainingArguments, in the same form."""
    names: dict[str, list[str | None]] = {}
    for field in dataclasses.fields(TrainingArguments):
        default = None if field.default is dataclasses.MISSING else field.default
        text = None if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        names[field.name] = [text or None, "false" if default is True else "true" if default is False else "2"]
    return names


ALL = {**DOCUMENTED, "transformers": transformers_names()}


def problems(given: dict[str, Any], task: str = "sft") -> list[Problem]:
    """What is wrong with these options in one run."""
    words = ["--model", "m", "--dataset", "d.jsonl", *(w for n, v in given.items() for w in (f"--{n}", v))]
    try:
        load_config(task, words, environ={})
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("toolkit", ALL)
@pytest.mark.parametrize("task", ["sft", "grpo"])
@pytest.mark.parametrize("which", [0, 1])
def test_no_name_is_answered_with_a_guess(toolkit: str, task: str, which: int) -> None:
    given = {name: values[which] for name, values in ALL[toolkit].items() if values[which] is not None}
    unanswered = [p for p in problems(given, task) if p.rule == "is not an option" and GENERIC.search(p.fix)]
    assert len(given) > 40 and unanswered == []


DIFFERENT = {
    "ms-swift": "disable_ignore_empty_think num_mini_batches num_sample_generations template_backend use_chat_template",
    "Megatron-SWIFT": "accumulate_allreduce_grads_in_fp32 calculate_per_token_loss "
    "data_parallel_sharding_strategy fp8_amax_compute_algo fp8_amax_history_len "
    "main_params_dtype muon_extra_scale_factor use_chat_template",
    "transformers": "dataloader_drop_last do_train project",
}
"""Names whose default asks for something that does not happen here. (Megatron-LM's switches take no value, and its
other defaults describe a model.)"""


@pytest.mark.parametrize("toolkit", DIFFERENT)
def test_a_default_is_accepted_where_it_asks_for_what_happens(toolkit: str) -> None:
    given = {name: values[0] for name, values in ALL[toolkit].items() if values[0] is not None}
    found = [p for p in problems(given) if p.rule.startswith(("is not supported", "is not an option"))]
    assert {p.what.split()[0][2:] for p in found} == {*DIFFERENT[toolkit].split()}


def test_each_name_stands_in_one_table() -> None:
    """`dataset_dir` is translated or answered, by whether data sets are named beside it."""
    tables = (RENAMED, SWITCHES, NAMES_ELSEWHERE, NEUTRAL, ABSENT, NEWER, dict.fromkeys(ARCHITECTURE), NAMES)
    count = Counter(name for table in tables for name in table)
    assert [name for name, number in count.items() if number > 1] == ["dataset_dir"]


def test_a_name_means_the_same_in_a_deepspeed_file_and_on_the_command_line(tmp_path: Path) -> None:
    numbers = {"warmup_min_lr": 1e-6, "warmup_num_steps": 10, "warmup_type": "linear"}
    file = tmp_path / "zero2.json"
    scheduler = {"type": "WarmupLR", "params": numbers}
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler, "gradient_clipping": 0.5}))
    words = ["--warmup_min_lr", "1e-6", "--warmup_num_steps", "10", "--gradient_clipping", "0.5"]
    read = load_config("sft", ["--deepspeed", str(file)], environ={})
    typed = load_config("sft", [*words, "--lr_scheduler_type", "constant"], environ={})
    assert (read.optim, read.schedule) == (typed.optim, typed.schedule)
    assert (typed.schedule.lr_warmup_init, typed.schedule.warmup_steps) == (1e-6, 10)


def test_the_rows_of_absent_options_hide_nothing() -> None:
    """Each has a reason, and a fix unless any value is accepted."""
    for name, entry in {**ABSENT, **NEWER}.items():
        assert entry.reason and (entry.otherwise or entry.values in ((), EITHER)), name
    named = {n for e in {**ABSENT, **NEWER}.values() for n in re.findall(r"--(\w+)", f"{e.reason} {e.otherwise}")}
    assert named - {*NAMES, "merge_lora"} == set()


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--stop_words x", "is not supported: a completion ends with", "leave it out"),
        ("--no-rope-fusion", "", ""),
        ("--moe_input_jitter_eps 0.1", "Megatron-Core's default applies", "--megatron_extra_kwargs '{"),
        ("--label_smoothing_factor 0.0", "", ""),
        ("--rampup_batch_size 16", "the batch size does not change", "leave it out"),
        ("--train_samples 1000", "is not an option", "--max_steps N"),
        ("--vllm_pipeline_parallel_size 2", "has no effect in sft, which samples nothing", "leave it out"),
    ],
)
def test_what_some_names_are_answered_with(words: str, what: str, fix: str) -> None:
    name, *value = words.split()
    found = problems({name[2:]: value[0] if value else "true"})
    assert [(what in p.rule, p.fix.startswith(fix)) for p in found] == [(True, True)] * bool(what)


def test_an_empty_entry_of_a_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndataset: d.jsonl\nstop_words:\nuse_lora:\nbf16:\nnum_layers:\nsave_safetensors:\n")
    cfg = load_config("sft", [str(file)], environ={})
    assert cfg.given == {"model", "dataset"}


def test_lengths_in_samples() -> None:
    words = "--model m --dataset d --train_samples 1003 --lr_warmup_samples 100 --global_batch_size 10"
    cfg = load_config("sft", words.split(), environ={})
    assert (cfg.train.max_steps, cfg.schedule.warmup_steps) == (100, 10)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--recompute_activations", "recompute_granularity", "selective"),
        ("--checkpoint-activations", "recompute_granularity", "full"),
        ("--distributed_timeout_minutes 10", "ddp_timeout", 600),
    ],
)
def test_what_other_names_mean(words: str, name: str, value: Any) -> None:
    assert load_config("sft", ["--model", "m", "--dataset", "d", *words.split()], environ={}).value(name) == value
