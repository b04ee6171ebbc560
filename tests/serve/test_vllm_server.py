"""The command line of vLLM's own server: sizes, arguments of its engine, adapters by name."""

from __future__ import annotations

from pathlib import Path

from megaswift.config.inference import DeployConfig
from megaswift.deploy import COMMAND
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
    assert "--gpu-memory-utilization 0.5 --max-model-len 99 --data-parallel-size 2 --enforce-eager" in text
    assert "--max-logprobs 5" in text and "--max-logprobs" not in words(tmp_path)


def test_adapters_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 40}')
    assert f"--lora-modules a={tmp_path} b={tmp_path} " in words(
        tmp_path, "--adapters", f"a={tmp_path}", f"b={tmp_path}"
    )
    assert f"--lora-modules x-adapter={tmp_path} " in words(tmp_path, "--adapters", str(tmp_path))
