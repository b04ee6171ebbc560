"""Options of ms-swift and vLLM in infer, deploy and export: taken, taken without effect, or refused with the way out.

Covers: megaswift/compat/names/inference.py, megaswift/inference/options/parser.py,
megaswift/inference/options/placement.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaswift import deploy, export, infer, sample
from megaswift import eval as evaluate
from megaswift.compat.inference import InferenceToolkits
from megaswift.compat.names.inference import HINTS_OF, NEUTRAL_OF
from megaswift.compat.names.neutral import ANY
from megaswift.errors import ConfigError, Problem
from megaswift.inference.options.placement import parse_device_map
from megaswift.options.sources import GivenOptionValue

COMMANDS = {
    "infer": infer.COMMAND,
    "deploy": deploy.COMMAND,
    "export": export.COMMAND,
    "eval": evaluate.COMMAND,
    "sample": sample.COMMAND,
}
WORDS = {
    "infer": [],
    "deploy": [],
    "export": ["--quant", "4", "--output_dir", "new"],
    "eval": ["--tasks", "t"],
    "sample": ["--dataset", "d"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_neutral_options_are_taken_and_said(command: str) -> None:
    parser = COMMANDS[command]
    for name, neutral in NEUTRAL_OF[command].items():
        assert name not in parser.table.names, name
        value = "x" if neutral.values == ANY else neutral.values[0]
        (told,) = parser.parse(["--model", "m", *WORDS[command], f"--{name}", value]).notices
        assert f"--{name} {value}" in told and neutral.reason in told
        if neutral.values != ANY and "false" not in neutral.values:
            assert refused(command, f"--{name} false")


@pytest.mark.parametrize("command", ["infer", "deploy"])
def test_precision_switches_and_mappings(command: str, tmp_path: Path) -> None:
    file = tmp_path / "i.yaml"
    file.write_text("model: m\nbf16: true\nfp16: false\nrope_scaling: {rope_type: yarn, factor: 4}\n")
    parsed = COMMANDS[command].parse([str(file)])
    weights = parsed.sections["weights"]
    assert weights.torch_dtype == "bfloat16" and json.loads(weights.rope_scaling) == {"rope_type": "yarn", "factor": 4}
    assert COMMANDS[command].parse(["--model", "m", "--fp16"]).sections["weights"].torch_dtype == "float16"
    assert "conflicts" in refused(command, "--bf16 true --torch_dtype float16")
    assert "only to --infer_backend transformers" in refused(command, "--rope_scaling yarn --infer_backend vllm")


def refused(command: str, words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        COMMANDS[command].parse(["--model", "m", *WORDS[command], *words.split()])
    return str(caught.value)


def test_every_hint_names_options_of_its_command() -> None:
    other = {"local"}  # of hf download
    for command, hints in HINTS_OF.items():
        for name, text in hints.items():
            assert name not in COMMANDS[command].table.names, (command, name)
            assert {*re.findall(r"--(\w+)", text)} <= {*COMMANDS[command].table.names} | other, (command, name, text)


@pytest.mark.parametrize(
    ("command", "words", "answer"),
    [
        ("infer", "--infer_backend sglang", "python -m sglang.launch_server"),
        ("deploy", "--infer_backend lmdeploy", "lmdeploy serve api_server"),
        ("infer", "--sglang_tp_size 2", "start that server itself"),
        ("deploy", "--vllm_use_async_engine false", "vLLM's server has an asynchronous engine"),
        ("deploy", "--vllm_swap_space 4", "--vllm_engine_kwargs"),
        ("infer", "--vllm_pipeline_parallel_size 2", "applies only to --infer_backend vllm"),
        ("infer", "--infer_backend vllm --vllm_reasoning_parser qwen3", "a result has the whole answer"),
        ("deploy", "--infer_backend vllm --vllm_limit_mm_per_prompt image=5", '{"NAME": VALUE}'),
        ("deploy", '--infer_backend vllm --vllm_engine_kwargs {"host":"0.0.0.0"}', "use --host alone"),
        (
            "deploy",
            '--infer_backend vllm --vllm_quantization fp8 --vllm_engine_kwargs {"quantization":"awq"}',
            "is set by --vllm_quantization",
        ),
        ("deploy", "--infer_backend vllm --vllm_quantization fp8 --quantization_bit 4", "give one of the two"),
        ("deploy", "--ssl_keyfile k", "reverse proxy"),
        ("infer", "--quant_method gptq", "megaswift export --quant_method gptq --quant_bits 4 --dataset FILE"),
        ("infer", "--quant_method fp8", "megaswift export --quant_method fp8"),
        ("export", "--quant_method fp8", "whose weights have 8 bits"),
        ("export", "--fp8_recipe blockwise", "--quant_method fp8 writes weights in FP8"),
        ("export", "--hub_always_push true", "--push_to_hub true with --hub_model_id"),
        ("export", "--to_cached_dataset true", "writes a cached data set"),
        ("export", "--to_ollama true", "ollama create"),
        ("infer", "--task_type seq_cls --infer_backend vllm", "--infer_backend transformers"),
        ("infer", "--val_dataset_shuffle true", "results have the order of the file"),
        ("infer", "--vllm_max_model_len 100", "applies only to --infer_backend vllm"),
        ("infer", "--infer_backend vllm", "answers prompt files only"),
        ("deploy", "--infer_backend vllm --vllm_engine_kwargs [1]", "must be a JSON object"),
        ("deploy", "--quant_method bnb", "applies only to runs with --quantization_bit"),
    ],
)
def test_refusals(command: str, words: str, answer: str) -> None:
    assert answer in refused(command, words)


def test_a_purpose_that_is_refused_is_the_only_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        export.COMMAND.parse(["--model", "m", "--quant_method", "gptq_v2", "--dataset", "d", "--output_dir", "new"])
    (problem,) = caught.value.problems
    assert "--quant_method gptq --quant_bits 4" in problem.fix


def test_advice_is_of_the_command() -> None:
    """vLLM's arguments have an answer where vLLM runs."""
    given = GivenOptionValue("vllm_x", "1", "--vllm_x 1")
    (infer,) = InferenceToolkits("infer").explain(given, {}, None)
    (export,) = InferenceToolkits("export").explain(given, {"rollout_backend": ""}, None)
    assert "vllm_engine_kwargs" in infer.fix and "rollout_backend" in export.fix


def test_a_configuration_file_and_what_overrides_it(tmp_path: Path) -> None:
    file = tmp_path / "infer.yaml"
    file.write_text("max_new_tokens: 7\ntemperature: 0\nstream: true\nload_from_cache_file: true\n")
    parsed = infer.COMMAND.parse([str(file), "--model", "m", "--temperature", "0.5"])
    generation = parsed.sections["generation"]
    assert (generation.max_new_tokens, generation.temperature) == (7, 0.5) and parsed.sections["terminal"].stream
    assert any("load_from_cache_file" in notice for notice in parsed.notices)
    file.write_text("ENV:\n  MAX_PIXELS: 9\nmodle: x\n")
    with pytest.raises(ConfigError) as caught:
        infer.COMMAND.parse(["--config", str(file), "--model", "m"])
    assert "export MAX_PIXELS=9" in str(caught.value) and "did you mean model?" in str(caught.value)


def test_a_device_map_as_json() -> None:
    assert parse_device_map('{"model.layers.0": "cuda:1", "": "cpu"}') == {"model.layers.0": 1, "": "cpu"}
    wrong = parse_device_map('{"model": "tpu"}')
    assert isinstance(wrong, Problem) and "'tpu' is not a device" in wrong.rule
    broken = parse_device_map('{"model"')
    assert isinstance(broken, Problem) and "cannot be read" in broken.rule


def test_names_of_a_server() -> None:
    words = ["--verbose", "false", "--max_logprobs", "5", "--owned_by", "us", "--log_interval", "20"]
    server = deploy.COMMAND.parse(["--model", "m", *words]).sections["server"]
    assert (server.log_requests, server.max_logprobs, server.owned_by) == (False, 5, "us")
