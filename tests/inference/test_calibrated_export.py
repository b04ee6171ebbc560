"""`megaswift export --quant_method gptq`, `awq`: the calibration rows are those of training, and the folder is what
llmcompressor writes by itself; transformers loads it.

The slow tests need llmcompressor, which asks for older releases of transformers than the other tests run with:
MEGASWIFT_QUANT_PYTHON names the Python of an environment that has it and this project's packages
(CONTRIBUTING.md, "The slow tier").
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megaswift.errors import ConfigError, DataError
from megaswift.export import COMMAND, main
from megaswift.inference import prechecks
from megaswift.inference.calibrated_export import calibration_sequences, perplexity
from megaswift.inference.options.commands import CalibrationOptions
from tests.sources import ROOT

HAS_COMPRESSOR = importlib.util.find_spec("llmcompressor") is not None
PYTHON = os.environ.get("MEGASWIFT_QUANT_PYTHON") or (sys.executable if HAS_COMPRESSOR else "")
needs_llmcompressor = pytest.mark.skipif(
    not PYTHON, reason="no llmcompressor, and MEGASWIFT_QUANT_PYTHON is not set (CONTRIBUTING.md)"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "calibration.jsonl"
    talks = [
        [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": "say " + "x" * i}]
        for i in range(1, 31)
    ]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return file


def conversations(model: Path, rows: Path) -> list[list[int]]:
    """Each row as transformers renders and tokenizes it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    talks = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    return [tokenizer.apply_chat_template(talk, return_dict=False) for talk in talks]


def sequences(model: Path, rows: Path, **options: Any) -> list[list[int]]:
    given = CalibrationOptions(dataset=(str(rows),), **options)
    return [ids.tolist() for ids in calibration_sequences(AutoTokenizer.from_pretrained(model), given)]


def test_sequences_are_the_rows_as_the_chat_template_has_them(model: Path, rows: Path) -> None:
    wanted = conversations(model, rows)
    joined = sequences(model, rows, max_length=sum(map(len, wanted)))
    assert len(joined) == 1
    order = []
    rest = joined[0]
    while rest:  # every row begins with the token of a user's turn and is found whole
        found = max((i for i, row in enumerate(wanted) if rest[: len(row)] == row), key=lambda i: len(wanted[i]))
        order.append(found)
        rest = rest[len(wanted[found]) :]
    assert sorted(order) == list(range(30)) and order != sorted(order)
    assert sequences(model, rows, max_length=16)[0] == joined[0][:16]
    assert sequences(model, rows, max_length=16, seed=1)[0] != joined[0][:16]


def test_sequences_are_whole_and_no_more_than_asked_for(model: Path, rows: Path) -> None:
    total = sum(map(len, conversations(model, rows)))
    assert [len(ids) for ids in sequences(model, rows, max_length=50)] == [50] * (total // 50)
    assert [len(ids) for ids in sequences(model, rows, max_length=50, quant_n_samples=3)] == [50] * 3
    assert [len(ids) for ids in sequences(model, rows, max_length=10 * total)] == [total]
    assert sum(map(len, sequences(model, rows.with_name(f"{rows.name}#2"), max_length=10 * total))) < total / 5


def test_a_malformed_row_is_an_error_or_is_left_out(model: Path, rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows.read_text() + '{"nothing": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:31"):
        sequences(model, file)
    assert sequences(model, file, strict=False, seed=3, max_length=20)


def test_perplexity_is_over_tokens_of_all_sequences(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    parts = [torch.arange(4, 40), torch.tensor([5, 9, 7])]
    with torch.no_grad():  # transformers' loss is a mean: 35 predictions, and 2
        losses = [float(loaded(input_ids=ids[None], labels=ids[None]).loss) for ids in parts]
    wanted = math.exp((losses[0] * 35 + losses[1] * 2) / 37)
    assert perplexity(loaded, parts) == pytest.approx(wanted, rel=1e-5)


PROBLEMS = {
    "--quant_method gptq --dataset d": "--quant_method gptq: needs the number of bits",
    "--quant_method gptq --quant_bits 4": "--quant_method gptq: needs calibration rows",
    "--quant_method gptq --quant_bits 5 --dataset d": "--quant_bits 5: gptq weights have 4 or 8 bits",
    "--quant_method awq --quant_bits 8 --dataset d": "--quant_bits 8: awq weights have 4 bits",
    "--quant_method awq --quant_bits 4 --dataset d --group_size 0": "--group_size 0: must be",
    "--quant_method gptq --quant_bits 4 --dataset d --bnb_4bit_quant_type fp4": "bnb_4bit_quant_type",
    "--quant_method gptq --quant_bits 4 --dataset d --to_mcore true": "cannot be combined with a conversion",
}


@pytest.mark.parametrize("words", PROBLEMS)
def test_mistakes(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(PROBLEMS[words])):
        COMMAND.parse(["--model", "m", "--output_dir", "o", *words.split()])


def test_an_ms_swift_command_and_the_folder_that_it_names() -> None:
    words = "--model org/name --dataset a#500 b#500 --quant_n_samples 256 --quant_batch_size 1 --max_length 2048"
    parsed = COMMAND.parse([*words.split(), *["--quant_method", "gptq", "--quant_bits", "4", "--group_size", "64"]])
    calibration = parsed.sections["calibration"]
    assert calibration.dataset == ("a#500", "b#500") and calibration.group_size == 64
    assert parsed.sections["export"].output_dir == "name-gptq-int4" and not parsed.notices


def test_calibration_options_without_calibration_are_named() -> None:
    parsed = COMMAND.parse(
        ["--model", "m", "--output_dir", "o", "--quant_method", "fp8", "--dataset", "d", "--quant_n_samples", "9"]
    )
    found = [line.split(" has no effect: ")[0] for line in parsed.notices]
    assert found == ["--dataset d", "--quant_n_samples 9"]


def test_a_group_that_does_not_divide_the_inputs(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", str(model), "--quant_method", "gptq", "--quant_bits", "4", "--dataset", str(rows)]
    words += ["--output_dir", str(tmp_path / "out")]
    if not HAS_COMPRESSOR:
        with pytest.raises(ConfigError, match="requires the package llmcompressor"):
            main(words)
    monkeypatch.setattr(prechecks, "require_package", lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        main(words)
    (problem,) = caught.value.problems
    assert problem.rule == "does not divide the 32 inputs of model.layers.0.self_attn.q_proj and 20 more"
    assert problem.fix == "--group_size 32"


def with_experts(model: Path, folder: Path) -> Path:
    """A model with four experts a layer and the same tokenizer."""
    shutil.copytree(model, folder)
    plain = AutoConfig.from_pretrained(model)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(plain, name) for name in names}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def run(*words: str) -> str:
    """A program under the Python that has llmcompressor."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@needs_llmcompressor
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("method", "experts"), [("gptq", False), ("awq", False), ("gptq", True)])
def test_the_folder_has_the_logits_of_llmcompressors_own_result(
    method: str, experts: bool, model: Path, rows: Path, tmp_path: Path
) -> None:
    if experts:
        model = with_experts(model, tmp_path / "experts")
    out = tmp_path / "small"
    words = ["--model", str(model), "--quant_method", method, "--quant_bits", "4", "--group_size", "32"]
    words += ["--dataset", str(rows), "--max_length", "64", "--output_dir", str(out)]
    said = run("-m", "megaswift", "export", *words)
    assert re.search(r"perplexity on 8 calibration sequences: \d\S* before, \d\S* after", said)
    ids = json.dumps(sequences(model, rows, max_length=64))
    run(
        str(Path(__file__).with_name("llmcompressor_reference.py")),
        str(model),
        method,
        ids,
        str(tmp_path / "logits.pt"),
    )
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out)(torch.arange(4, 40)[None]).logits
        plain = AutoModelForCausalLM.from_pretrained(model)(torch.arange(4, 40)[None]).logits
    wanted = torch.load(tmp_path / "logits.pt")
    assert torch.equal(found, wanted) and not torch.allclose(found, plain, atol=1e-3)
    packed = [t for name, t in load_file(out / "model.safetensors").items() if name.endswith("weight_packed")]
    assert len(packed) == (3 * (4 + 3 * 4) if experts else 21) and all(t.dtype == torch.int32 for t in packed)
    assert (out / "tokenizer.json").is_file() and not list(tmp_path.glob(".small*"))
