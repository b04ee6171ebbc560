"""Options of `infer`, `deploy` and `export` that exist only with certain values of others.

Covers: megaswift/inference/options/variants.py, megaswift/config/derived_rules.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift import deploy, export, infer, sample
from megaswift import eval as evaluate
from megaswift.errors import ConfigError
from megaswift.inference.options.variants import FACTS

COMMANDS = {
    "infer": infer.COMMAND,
    "deploy": deploy.COMMAND,
    "export": export.COMMAND,
    "eval": evaluate.COMMAND,
    "sample": sample.COMMAND,
}
TABLES = {name: command.table.options for name, command in COMMANDS.items()}
PAIRS = [(name, o, selector) for name, table in TABLES.items() for o in table for selector in table[o].only_with]


@pytest.mark.parametrize("command, option, selector", PAIRS)
def test_a_selector_exists_and_can_have_the_values(command: str, option: str, selector: str) -> None:
    options = TABLES[command]
    wanted = options[option].only_with[selector]
    assert selector in FACTS or selector in options
    if selector in options and options[selector].choices:
        assert {*wanted.values, *wanted.excluded} <= {*options[selector].choices}


def test_facts_read_options_of_a_command() -> None:
    assert {name for fact in FACTS.values() for name in fact.reads} <= {o for table in TABLES.values() for o in table}


def test_every_option_of_vllm_needs_vllm() -> None:
    for command in ("infer", "deploy"):
        of_vllm = {name for name, o in TABLES[command].items() if "infer_backend" in o.only_with}
        names = {name for name in TABLES[command] if name.startswith("vllm_")}
        assert len(names) == 16 and names | {"tensor_parallel_size"} <= of_vllm


@pytest.mark.parametrize(
    ("command", "words", "refused"),
    [
        ("deploy", "", {}),
        ("deploy", "--vllm_enforce_eager false", {"vllm_enforce_eager": "--infer_backend vllm (infer_backend is tr"}),
        ("deploy", "--infer_backend vllm --vllm_enforce_eager true", {}),
        ("deploy", "--infer_backend vllm --device_map auto", {"device_map": "--infer_backend transformers"}),
        ("deploy", "--infer_backend vllm --system a", {"system": "vLLM's server does not have it"}),
        ("infer", "--dataset p.jsonl --infer_backend vllm --system a", {}),
        (
            "infer",
            "--dataset p.jsonl --infer_backend vllm --num_beams 2",
            {"num_beams": "--infer_backend transformers"},
        ),
        ("infer", "--temperature 0 --top_p 0.5", {"top_p": "does not apply to --temperature 0"}),
        ("infer", "--temperature 0.1 --top_p 0.5", {}),
        ("infer", "--logprobs true", {"logprobs": "a prompt file"}),
        ("infer", "--dataset p.jsonl --top_logprobs 2", {"top_logprobs": "needs --logprobs"}),
        ("infer", "--merge_lora true", {"merge_lora": "--adapters"}),
        ("infer", "--merge_lora false", {}),
        ("infer", "--device_map cpu --max_memory 0:20GiB", {"max_memory": "already places all modules"}),
        ("infer", "--device_map balanced --max_memory 0:20GiB --offload_folder d", {}),
        ("infer", "--device_map {MAP} --offload_folder d", {}),
        ("infer", "--device_map cpu --offload_folder d", {"offload_folder": "no module on disk"}),
        ("infer", "--quantization_bit 8 --bnb_4bit_quant_type fp4", {"bnb_4bit_quant_type": "--quantization_bit 4"}),
        ("infer", "--quant_method bnb", {"quant_method": "--quantization_bit"}),
        ("export", "--quant_method fp8", {}),
        ("export", "--quant_method fp8 --bnb_4bit_quant_type fp4", {"bnb_4bit_quant_type": "--quantization_bit 4"}),
        ("export", "--quantization_bit 4 --bnb_4bit_quant_type fp4", {}),
        ("export", "--quantization_bit 4 --pp 2", {"pp": "applies only to a conversion"}),
        ("export", "--to_mcore true --pp 2", {}),
    ],
)
def test_outcomes(
    command: str, words: str, refused: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("{}\n")
    placed = json.dumps({"a": "disk", "b": "cpu"}, separators=(",", ":"))
    output = ["--output_dir", "o"] if command == "export" else []
    problems = []
    try:
        COMMANDS[command].parse(["--model", "m", *words.replace("{MAP}", placed).split(), *output])
    except ConfigError as error:
        problems = error.problems
    found = {p.what.split()[0].removeprefix("--"): p for p in problems}
    assert found.keys() == refused.keys() and len(problems) == len(refused)
    for name, rule in refused.items():
        assert found[name].rule.startswith("would be ignored: ") and rule in found[name].rule
        assert found[name].fix.endswith(", or leave it out")
