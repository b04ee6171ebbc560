"""What an unknown option or value is answered with: what another toolkit means by it, a likely typo, or nothing.

Covers: megaswift/inference/options/parser.py, megaswift/compat/names/answers.py,
megaswift/inference/options/checks.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from megaswift import deploy, export, infer
from megaswift.base.command_words import ELSEWHERE, unknown_command_error
from megaswift.base.redaction import is_secret
from megaswift.cli import COMMANDS
from megaswift.compat.names.answers import (
    NAMES_ELSEWHERE,
    PATTERNS,
    VALUES_ELSEWHERE,
    foreign_option_advice,
)
from megaswift.compat.names.inference import HINTS_OF, NEUTRAL_OF
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.errors import ConfigError, did_you_mean_hint, edit_distance, missing_path_hint
from megaswift.options.tasks import TASK_NAMES

SWIFT_NAMES = Path(__file__).with_name("swift_names.json")
"""Options that ms-swift documents (its docs/source_en, commit 3602360, 2026-08-22), names alone."""


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("prepare_datasets", "megaswift data cache"),
        ("prepare_datasets.py", "megaswift data cache"),
        ("estimate", "megaswift plan MODEL --gpus 8 --gpu h100"),
        ("merge_lora", "megaswift export --merge_lora true"),
        ("webui", "megaswift board OUT"),
        ("web_ui", "megaswift board OUT"),
        ("compare", "megaswift report OUT1 OUT2"),
    ],
)
def test_a_command_that_is_none_names_what_does_its_work(word: str, answer: str) -> None:
    assert answer in unknown_command_error("megaswift", word, COMMANDS).problems[0].fix


def fixes(*argv: str, task: str | None = "sft") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(task, list(argv), environ={})
    return [p.fix for p in caught.value.problems]


@pytest.mark.parametrize(
    "a, b, far",
    [
        ("", "", 0),
        ("kitten", "sitting", 3),
        ("lr", "rl", 1),
        ("ca", "abc", 3),  # 2 without "no letter twice": the optimal string alignment
        ("abc", "", 3),
        ("learnin_rate", "learning_rate", 1),
    ],
)
def test_distance_by_hand(a: str, b: str, far: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == far


@pytest.mark.parametrize(
    "typed, known, found",
    [
        ("LERNING-rate", ["learning_rate", "min_lr"], "learning_rate"),
        ("learnnig_raet", ["learning_rate"], "learning_rate"),  # two exchanges in a long name
        ("pakcing", ["packing"], "packing"),
        ("pcakign", ["packing"], ""),  # two in a short one
        ("lmbda", ["gae_lambda"], ""),
        ("ab", ["a", "b", "abc"], ""),
        ("learning", ["learning_rate", "logging_steps"], "learning_rate"),  # the beginning of one
        ("eval", ["eval_steps", "eval_iters"], ""),  # of two
        ("lorb_a", ["lora_a", "lorb_b"], ""),  # equally near
        ("mesages.jsonl", ["bom.jsonl", "messages.jsonl"], "messages.jsonl"),
        ("mesages.jsonl", ["bom.jsonl", "rows.jsonl"], ""),
    ],
)
def test_the_rule_of_typos(typed: str, known: list[str], found: str) -> None:
    assert did_you_mean_hint(typed, known) == (f"did you mean {found}?" if found else "")


def test_a_neighbour_of_a_file(tmp_path: Path) -> None:
    for name in ("bom.jsonl", "messages.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    assert missing_path_hint(tmp_path / "mesages.jsonl") == "did you mean messages.jsonl?"
    (tmp_path / "messages.jsonl").unlink()
    assert missing_path_hint(tmp_path / "mesages.jsonl") == f"look in {tmp_path}"


ANSWERS = [
    ("--task_type decision", "decision models are not supported"),
    ("--task_type prm", "--task_type token_cls"),
    ("--dataset identity --dataset_dir data", "--dataset DIR/FILE_NAME; megaswift migrate FILE"),
    ("--safe_serialization false", "leave it out"),
    ("--vllm_tensor_parallel_size 2", "leave it out"),
    ("-lr 1e-4", "--lr 1e-4"),
    ("--training_task grpo", "megaswift grpo ..."),
    ("--lora_dtype bf16", "leave it out: adapters have the precision of --torch_dtype"),
    ("--padded_vocab_size 4096", "leave it out: the model's config.json (--model DIR) sets it"),
    ("--wandb_notes x", "come from its own environment variables"),
    ("--swanlab_webhook_url x", "act on the exit code"),
    ("--no_cross_entropy_loss_fusion", "leave it out"),
    ("--no_shuffle", "--shuffle false"),
    ("--attn_impl flash_atn", "did you mean flash_attn?"),
    ("--attn_impl flash_attn4", "FlashAttention 4 is not supported"),
    ("--attn_impl flash_attn3 --engine megatron", "--attn_impl flash, or --engine ddp"),
    ("--optim lomo", "before the gradient's norm is known"),
    ("--optim apollo_adamw", "whose states have a low rank"),
    ("--optim schedule_free_adamw", "--lr_scheduler_type wsd"),
    ("--optimizer dist_muon", "--optimizer muon"),
    ("--train_type bone", "--train_type miss"),
    ("--train_type llamapro", "--trainable_parameters PATTERN"),
    ("--train_type lora --init_weights lora-ga", "--init_weights pissa, which needs no data"),
    ("--train_type lora --adapters a b", "--merge_lora true"),
    ("--ref_load x", "--ref_model DST"),
    ("--lora_bias all", "--modules_to_save NAME"),
    ("--muon_extra_scale_factor 1", "--learning_rate X"),
    ("--nothing_like_it 1", "megaswift sft --help all lists them"),
]


@pytest.mark.parametrize("words, answer", ANSWERS, ids=[words.split()[0] for words, _ in ANSWERS])
def test_what_other_toolkits_mean(words: str, answer: str) -> None:
    (fix,) = fixes(*words.split())
    assert answer in fix and "did you mean" not in fix or answer == fix, fix


def test_a_section_of_deepspeed_names_its_file(tmp_path: Path) -> None:
    for name, text in (
        ("r.yaml", "deepspeed:\n  config_path: zero2\n"),
        ("r.json", '{"deepspeed": {"config_path": "zero2"}}'),
    ):
        (tmp_path / name).write_text(text)
        assert load_config("sft", [str(tmp_path / name)], environ={}).engine.deepspeed == "zero2"


def test_minus_one_is_all() -> None:
    words = ["--val_dataset", "v", "--eval_iters", "-1", "--max_steps", "-1", "--save_total_limit", "-1"]
    cfg = load_config("sft", words, environ={})
    assert (cfg.train.eval_iters, cfg.train.max_steps, cfg.checkpoint.save_total_limit) == (None, None, None)
    assert fixes("--eval_iters", "-2", "--val_dataset", "v") == ["--eval_iters 1"]


def test_a_task_that_is_not_there_hides_nothing_else() -> None:
    words = "--rlhf_type ppo_v2 --beta 0.1 --temperature 1 --num_generations 8 --max_completion_length 9 --to_hf 1"
    with pytest.raises(ConfigError) as caught:
        load_config(None, words.split(), environ={})
    first, second = caught.value.problems
    assert first.what == "--rlhf_type ppo_v2" and first.fix == "megaswift ppo"
    assert second.what == "--to_hf 1"
    assert fixes("--rlhf_type", "dp0", task=None) == ["did you mean dpo?"]
    (fix,) = fixes("--rlhf_type", "whatever", task=None)
    assert fix.startswith("use one of dpo, ") and "sft" not in fix


@pytest.mark.parametrize("task", ["pt", "dpo", "grpo"])
def test_the_hint_names_the_command(task: str) -> None:
    assert fixes("--nothing_like_it", "1", task=task) == [f"megaswift {task} --help all lists them"]
    assert fixes("--nothing_like_it", "1", "--rlhf_type", "rm", task=None) == ["megaswift rm --help all lists them"]


def test_without_a_task_the_hint_names_all() -> None:
    """`megaswift rlhf` without --rlhf_type, and `megaswift config`."""
    (fix,) = fixes("--nothing_like_it", "1", task=None)
    assert fix.startswith("megaswift TASK --help all lists them (TASK: sft, pt, dpo, ")


@pytest.mark.parametrize("module", [infer, deploy, export])
def test_other_commands_advise_their_own_options(module: object) -> None:
    command = module.COMMAND  # type: ignore[attr-defined]
    hints = HINTS_OF[command.name]
    for name in {**NAMES_ELSEWHERE, **hints}:
        if name in {*command.table.names, *NEUTRAL_OF[command.name]} or is_secret(name):
            continue
        with pytest.raises(ConfigError) as caught:
            command.parse(["--model", "m", f"--{name}", "1"])
        (fix,) = [p.fix for p in caught.value.problems if p.what == f"--{name} 1"]
        named = re.findall(r"--(\w+)", fix)
        assert name in hints or set(named) <= {*command.table.names, "help"}, (name, fix)


def unknown_options(texts: Iterable[str], known: Collection[str]) -> list[str]:
    """Options that these texts advise and that do not exist."""
    return [name for text in texts for name in re.findall(r"--(\w+)", text) if name not in known]


def test_the_tables_name_what_exists() -> None:
    assert not {name for name in NAMES_ELSEWHERE if name in NAMES}
    texts = [*NAMES_ELSEWHERE.values(), *(text for _, text in PATTERNS), *VALUES_ELSEWHERE.values()]
    assert unknown_options(texts, {*NAMES, *TASK_NAMES, "merge_lora"}) == []
    assert {w for t in texts for w in re.findall(r"megaswift (\w+)", t)} <= {*COMMANDS, "does"}
    for (option, value), text in VALUES_ELSEWHERE.items():
        known = option in TASK_NAMES or value not in (
            *OPTIONS[option].choices,
            *OPTIONS[option].details.get("spellings", {}),
        )
        assert known and text, (option, value)


def test_no_guess_misleads_among_ms_swift_s_names() -> None:
    """Of 403 options that ms-swift documents and that are none here, none looks like a typo. (By letters in common, 220
    were guessed at, and about 15 of these guesses helped.) `test_documented_names.py` has their answers."""
    names = json.loads(SWIFT_NAMES.read_text())
    unknown = [name for name in dict.fromkeys(names) if name not in NAMES]
    assert len(unknown) > 305
    guessed = {name: did_you_mean_hint(name, NAMES) for name in unknown if not foreign_option_advice(name, "1", NAMES)}
    assert {name: text for name, text in guessed.items() if text} == {}


@pytest.mark.parametrize(
    "words, answer",
    [
        ("--loss_type gspo", "--importance_sampling_level sequence"),
        ("--loss_type ppo", "megaswift ppo"),
        ("--advantage_estimator reinforce++", "--advantage_estimator reinforce_plus_plus"),
        ("--kl_penalty kl", "--kl_estimator k1, k2 or k3"),
    ],
)
def test_what_algorithms_are_called_here(words: str, answer: str) -> None:
    assert fixes("--model", "m", "--dataset", "d", "--reward_funcs", "format", *words.split(), task="grpo") == [answer]


def test_a_missing_dash_leaves_no_stray_words() -> None:
    assert fixes("--max_steps", "2", "-lr", "1e-4", "-tp", "2", "--model", "m", "--dataset", "d") == [
        "--lr 1e-4",
        "--tp 2",
    ]


@pytest.mark.parametrize(
    "word, answer",
    [
        ("finetune", "megaswift sft"),
        ("merge-lora", "megaswift export"),
        ("sfft", "did you mean sft?"),
        ("swift/cli/sft.py", "megaswift sft ..."),
        ("swift/cli/_megatron/rlhf.py", "megaswift rlhf ..."),
        ("main.py", "megaswift train ..."),
    ],
)
def test_commands_of_other_toolkits(word: str, answer: str) -> None:
    assert unknown_command_error("megaswift", word, COMMANDS).problems[0].fix.startswith(answer)
    assert unknown_command_error("megaswift data", "train", ("show",)).problems[0].fix == "megaswift data --help"


@pytest.mark.parametrize("words", [answer for answer in ELSEWHERE.values()])
def test_what_takes_the_place_of_a_command_exists(words: str) -> None:
    for command in re.findall(r"megaswift ([a-z]+)", words):
        assert command in COMMANDS
    assert not unknown_options([words], [*NAMES, "help", "merge_lora", "result_path", "gpus", "gpu"])


@pytest.mark.parametrize("value", ["fp8", "float8"])
def test_fp8_is_no_dtype_and_not_a_mistyped_float(value: str) -> None:
    found = fixes("--model", "DIR", "--dataset", "d", "--torch_dtype", value)
    assert found == ["--torch_dtype bfloat16 --fp8_format hybrid"]
