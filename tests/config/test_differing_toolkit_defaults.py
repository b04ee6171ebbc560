"""Defaults that differ from other toolkits': the page shows the code's table, the table is right, a run says it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megaswift.config import load_config
from megaswift.config.differing_toolkit_defaults import (
    CHANGED,
    MEGATRON_SWIFT,
    PAGE,
    SPELLINGS,
    SWIFT,
    TRL,
    defaults_differing_from_toolkit,
)
from megaswift.config.neutral_options import NEUTRAL
from megaswift.config.parse_option_values import option_value_text
from megaswift.config.rl_defaults import policy_loss_of
from megaswift.config.sections import NAMES, OPTIONS, TASKS
from tests.config.migration_page import written
from tests.sources import ROOT

UNSET = {
    "gradient_accumulation_steps",
    "global_batch_size",
    "recompute_granularity",
    "save_steps",
    "eval_steps",
    "beta",
    "sequence_parallel",
    "moe_aux_loss_coeff",
}
"""Options whose default is that they are not set; the table says in words what then happens."""


def test_the_page_shows_the_tables() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert text == written(text), "python -m tests.config.migration_page writes them"


def test_our_side_of_the_table() -> None:
    for row in CHANGED:
        task = row.tasks[0]
        words = ["--train_type", "lora"] * bool(row.adapters) + ["--per_device_train_batch_size", "4"] * (task == "kto")
        c = load_config(task, words, environ={})
        value, said = c.value(row.option), row.ours.replace(":", " ").replace(";", " ").replace(",", " ").split()[0]
        if row.option == "loss_type" and task == "grpo":
            assert policy_loss_of(c) == said
        elif value is None:  # decided elsewhere, or not at all
            assert row.option in UNSET and OPTIONS[row.option].optional
        else:
            assert said == option_value_text(value) or float(said) == value, (row, value)


def test_their_side_of_the_table_by_the_installed_packages() -> None:
    """TRL's and PEFT's own classes say so."""
    import peft
    import trl

    made = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "grpo": trl.GRPOConfig}
    names = {
        "recompute_granularity": "gradient_checkpointing",
        "importance_sampling_mode": "vllm_importance_sampling_mode",
    }
    for row in CHANGED:
        if row.toolkit != TRL or row.option in ("packing", "report_to"):
            continue
        for task, cls in made.items():
            if task in row.tasks:
                kinds = [peft.LoraConfig] if row.option == "lora_alpha" else [cls]
                fields = {f.name: f.default for kind in kinds for f in dataclasses.fields(kind)}
                theirs = fields[names.get(row.option, row.option)]
                said = row.theirs.split(";")[0]
                assert theirs is True if "true" in said else str(theirs) == said or float(theirs) == float(said), row


def test_every_row_has_an_option_and_differs() -> None:
    assert {row.option for row in CHANGED} <= set(OPTIONS) and all(set(row.tasks) <= set(TASKS) for row in CHANGED)
    assert all(row.theirs != row.ours for row in CHANGED)
    named = [name for names in SPELLINGS.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= {*NAMES, *NEUTRAL}
    assert not {n for n in named if n in OPTIONS}, "a canonical name shows nothing"


def told(*argv: str, task: str = "sft") -> list[str]:
    return [n for n in load_config(task, list(argv), environ={}).notices if "is an option name of" in n]


def test_the_notice() -> None:
    (line,) = told("--tuner_type", "lora", "--model", "m", "--num_train_epochs", "2")
    assert line.startswith("tuner_type is an option name of ms-swift.") and PAGE in line and "\n" not in line
    assert "lora_dropout 0 (0.05)" in line and "save_steps only at the end (500)" in line
    assert "num_train_epochs" not in line and "eval_steps" not in line  # given; without data to evaluate on
    (line,) = told("--micro_batch_size", "2", "--train_iters", "3")
    assert "Megatron-SWIFT" in line and "lora_dropout" not in line and "recompute_granularity none (selective)" in line
    (line,) = told("--tuner_type", "full", "--use_vllm", "true", task="grpo")
    assert all(
        part in line for part in ("beta 0: no reference model (0.04)", "loss_type dapo (grpo)", "temperature 1 (0.9)")
    )
    (line,) = told("--model_name_or_path", "m", "--use_vllm", "true", task="grpo")
    assert "TRL" in line and "importance_sampling_mode token_truncate (sequence_mask)" in line
    (line,) = told("--model_name_or_path", "m", task="grpo")
    assert "importance_sampling_mode" not in line, "the sampler is the trainer's own: nothing is weighed"
    (line,) = told("--model_name_or_path", "m", task="dpo")
    assert "TRL" in line and "learning_rate 1e-05 (1e-06)" in line
    assert told("--model", "m", "--lr", "1e-4", "--tp", "2", "--train_type", "lora") == []


def test_a_file_may_have_their_names_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tuner_type: lora\n")
    assert len(told(str(tmp_path / "run.yaml"))) == 1


def test_every_toolkit_has_rows_for_every_task() -> None:
    for toolkit in (SWIFT, MEGATRON_SWIFT, TRL):
        for task in TASKS:
            words = ["--micro_batch_size", "4"] if task == "kto" else []
            assert list(defaults_differing_from_toolkit(load_config(task, words, environ={}), toolkit)), (toolkit, task)
