"""The door to other toolkits: what is megaswift's own goes past the tables, and they would not have changed it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megaswift import compat
from megaswift.compat.translation import translated_sources
from megaswift.config.sections import OPTIONS, TRAINING
from megaswift.options.command_line import read_command_line
from megaswift.options.sources import ConfigSource, source_from_mapping
from tests.net.front import PARSED
from tests.net.options import listed_options
from tests.sources import ROOT

LISTED = [option for option in listed_options() if option.command not in PARSED]


def source(words: str) -> ConfigSource:
    return ConfigSource(tuple(read_command_line(words.split(), TRAINING).givens))


def is_passed(sources: list[ConfigSource]) -> bool:
    """Whether the tables are not asked: they put a source of the DeepSpeed file in front."""
    return len(compat.translate(sources)) == len(sources)


def test_the_tables_change_nothing_of_what_goes_past_them() -> None:
    passed = 0
    for option in LISTED:
        for value in option.values:
            sources = [source(f"--{option.name} {value}")]
            if is_passed(sources):
                passed += 1
                assert translated_sources(sources)[1:] == sources, option.name
    assert passed > 0.95 * sum(len(option.values) for option in LISTED)


def test_the_whole_of_a_configuration_goes_past() -> None:
    """With the defaults that can be written: names of files and words of FSDP are read further."""
    values = {name: o.default for name, o in OPTIONS.items() if o.default not in (None, (), {})}
    sources = [source_from_mapping(values, TRAINING)]
    assert is_passed(sources) and translated_sources(sources)[1:] == sources


@pytest.mark.parametrize(
    "words",
    [
        "--use_flash_attn true",
        "--train_type dora",
        "--train_type sft",
        "--warmup_steps 0.1",
        "--resume_from_checkpoint true",
        "--eval_strategy no --eval_steps 5",
        "--deepspeed default-zero2",
        "--deepspeed zero2.json",
        "--engine deepspeed",
        "--fsdp fsdp2",
        "--fsdp no_shard",
        "--fsdp_config fsdp.json",
        "--hostfile hosts",
        "--cached_dataset a",
        "--use_vllm true --vllm_mode server",
        "--rollout_importance_sampling_mode sequence_mask",
        "--num_layers 4",
        "--no_bias_swiglu_fusion",
    ],
)
def test_another_toolkit_s_words_do_not(words: str) -> None:
    assert not is_passed([source(words)])


@pytest.mark.process
def test_a_run_in_its_own_words_imports_no_table() -> None:
    code = (
        "import sys; from megaswift.config import load_config\n"
        "words = '--model m --dataset d --engine zero3 --train_type lora --lora_rank 4'\n"
        "load_config('sft', words.split(), environ={})\n"
        "print(sorted(m for m in sys.modules if m.startswith('megaswift.compat.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
