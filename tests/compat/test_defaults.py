"""Defaults that differ from other toolkits': the page shows the code's table, the table is right, a run says it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megaswift.compat.defaults import (
    CHANGED,
    MEGATRON_SWIFT,
    PAGE,
    SPELLINGS,
    SWIFT,
    TRANSFORMERS,
    TRL,
    defaults_differing_from_toolkit,
)
from megaswift.compat.names.neutral import NEUTRAL
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.options.tasks import TASKS
from megaswift.options.values import option_value_text, parse_option_value
from megaswift.trainers.rl.options.derived import policy_loss_of
from tests.compat.migrating_page import written
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
    "data_split",
    "eval_iters",
}
"""Options whose default is that they are not set; the table says in words what then happens."""


def test_the_page_shows_the_tables() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert text == written(text), "python -m tests.compat.migrating_page writes them"


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


THEIR_NAMES = {
    "recompute_granularity": "gradient_checkpointing",
    "importance_sampling_mode": "vllm_importance_sampling_mode",
    "truncation_strategy": "truncation_mode",
    "lora_rank": "lora_r",
}
THEIR_VALUES = {"full": True, "right": "keep_start", "0": 0.0, "false": False}


def test_their_side_of_the_table_by_the_installed_packages() -> None:
    """The classes that TRL's and transformers' scripts parse their options with."""
    import transformers
    import trl

    made = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "grpo": trl.GRPOConfig}
    made["rm"] = trl.RewardConfig
    compared = 0
    for row in CHANGED:
        if row.toolkit not in (TRL, TRANSFORMERS) or row.option == "packing":
            continue
        for task, cls in made.items():
            if task in row.tasks:
                kind = trl.ModelConfig if row.option.startswith("lora_") else cls
                kind = transformers.TrainingArguments if row.toolkit == TRANSFORMERS else kind
                fields = {f.name: f.default for f in dataclasses.fields(kind)}
                theirs = fields[THEIR_NAMES.get(row.option, row.option)]
                expected = THEIR_VALUES.get(row.value, row.value)
                assert theirs in (expected, row.value) or float(theirs) == float(expected), (row, theirs)
                compared += 1
    assert compared > 80


WITHOUT_MEANING = {
    "eval_strategy": "unset is what eval_steps says, which has a row",
    "save_strategy": "unset is what save_steps says, which has a row",
    "hub_strategy": "of uploads only",
    "hub_private_repo": "of uploads only",
    "output_dir": "each has its own",
    "padding_free": "the loss is the same",
    "max_steps": "-1 and unset are the same",
    "optimizer": "both are Adam",
    "galore_target_modules": "of GaLore only",
    "gradient_accumulation_steps": "unset is 1, or what a generation needs",
    "torch_compile_backend": "of torch.compile only",
    "per_device_eval_batch_size": "an evaluation is a mean over all label tokens",
    "dataset_num_proc": "how many processes tokenize",
    "fsdp": "none in both",
    "loss_type": "unset is the same formula",
    "loss_weights": "none in both",
    "beta": "unset is the same value",
    "num_generations": "unset is the same number",
    "rollout_backend": "two options there",
    "rollout_server_url": "none in both",
    "rollout_server_timeout": "how long a server is waited for",
    "reward_weights": "all 1 in both",
    "importance_sampling_correction": "unset is the same",
    "importance_sampling_clip_max": "vllm_importance_sampling_cap is the former name there",
    "use_bias_correction_kl": "unset is the same",
    "log_completions": "what is written beside the run",
}


def test_no_row_is_missing() -> None:
    """Every field of TRL's and transformers' classes that is an option here and has another default has its row."""
    import transformers
    import trl

    made = {"dpo": trl.DPOConfig, "kto": trl.KTOConfig, "grpo": trl.GRPOConfig, "rm": trl.RewardConfig}
    pairs = [(TRL, task, cls) for task, cls in {"sft": trl.SFTConfig, **made}.items()]
    for toolkit, task, cls in [*pairs, (TRANSFORMERS, "sft", transformers.TrainingArguments)]:
        c = load_config(task, ["--per_device_train_batch_size", "4"] if task == "kto" else [], environ={})
        rows = {row.option for row in CHANGED if row.toolkit == toolkit and task in row.tasks}
        for f in dataclasses.fields(cls):
            name = NAMES.get(f.name)
            if name is not None and name not in WITHOUT_MEANING and f.default != c.value(name):
                assert name in rows, (toolkit, task, f.name, f.default, c.value(name))


def test_every_row_has_an_option_and_differs() -> None:
    assert {row.option for row in CHANGED} <= set(OPTIONS) and all(set(row.tasks) <= set(TASKS) for row in CHANGED)
    assert all(row.theirs != row.ours for row in CHANGED)
    assert all(row.value == "" or parse_option_value(OPTIONS[row.option].of_task(row.tasks[0]), row.value) != () or
               row.option == "report_to" for row in CHANGED)  # fmt: skip
    named = [name for names in SPELLINGS.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= {*NAMES, *NEUTRAL}
    assert not {n for n in named if n in OPTIONS}, "a canonical name shows nothing"


def told(*argv: str, task: str = "sft") -> list[str]:
    return [n for n in load_config(task, list(argv), environ={}).notices if "is an option name of" in n]


def test_the_notice() -> None:
    (line,) = told("--tuner_type", "lora", "--model", "m", "--num_train_epochs", "2")
    assert line.startswith("tuner_type is an option name of ms-swift.") and PAGE in line and "\n" not in line
    assert "lora_dropout 0 (0.05)" in line and "save_steps at the end; every 30 minutes" in line
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
