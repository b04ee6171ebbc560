"""Options of the backend of `infer` and `deploy`: transformers, or vLLM with the arguments of its engine.

Owns the options of vLLM and the names under which its engine (`EngineArgs`) has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.options.option import option
from megaswift.options.option_json import json_object

_SWITCH = "true|false"
_VLLM = {"infer_backend": "vllm"}


@dataclass(frozen=True)
class BackendOptions:
    """Inference backend"""

    infer_backend: str = option(
        "transformers",
        "Inference backend",
        choices=("transformers", "vllm"),
        spellings={"pt": "transformers"},
        common=("infer", "deploy"),
    )
    tensor_parallel_size: int | None = option(
        None,
        "vLLM: number of GPUs to split each layer over",
        aliases=("tp", "vllm_tensor_parallel_size"),
        minimum=1,
        unit="GPUs",
        only_with=_VLLM,
        common=("infer", "deploy"),
    )
    vllm_pipeline_parallel_size: int | None = option(
        None,
        "vLLM: number of groups of layers, each on its own GPUs",
        aliases=("pipeline_parallel_size",),
        minimum=1,
        unit="stages",
        only_with=_VLLM,
    )
    vllm_data_parallel_size: int | None = option(
        None,
        "vLLM's server: number of model replicas",
        aliases=("data_parallel_size",),
        minimum=1,
        unit="replicas",
        only_with=_VLLM,
    )
    vllm_enable_expert_parallel: bool | None = option(
        None,
        "vLLM: distribute the experts of a model over the GPUs",
        aliases=("enable_expert_parallel",),
        metavar=_SWITCH,
        only_with=_VLLM,
    )
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "vLLM: fraction of GPU memory to use",
        aliases=("gpu_memory_utilization",),
        above=0,
        maximum=1,
        metavar="FRACTION",
        only_with=_VLLM,
    )
    vllm_max_model_len: int | None = option(
        None, "vLLM: maximum context length", aliases=("max_model_len",), minimum=1, unit="tokens", only_with=_VLLM
    )
    vllm_max_num_seqs: int | None = option(
        None,
        "vLLM: maximum number of sequences per step",
        aliases=("max_num_seqs",),
        minimum=1,
        unit="sequences",
        only_with=_VLLM,
    )
    vllm_quantization: str | None = option(
        None,
        "vLLM: quantization method of the weights, under vLLM's name (fp8, awq, ...); default: the checkpoint's",
        aliases=("quantization",),
        metavar="METHOD",
        only_with=_VLLM,
    )
    vllm_enable_prefix_caching: bool | None = option(
        None,
        "vLLM: reuse the KV cache of equal prompt beginnings; default: as in vLLM",
        aliases=("enable_prefix_caching",),
        metavar=_SWITCH,
        only_with=_VLLM,
    )
    vllm_limit_mm_per_prompt: str | None = option(
        None,
        'vLLM: maximum number of images and videos in a prompt, as a JSON object: {"image": 5}',
        aliases=("limit_mm_per_prompt",),
        metavar="JSON",
        only_with=_VLLM,
    )
    vllm_mm_processor_cache_gb: float | None = option(
        None,
        "vLLM: size of the cache of processed images and videos; 0: none",
        aliases=("mm_processor_cache_gb",),
        minimum=0,
        unit="GiB",
        only_with=_VLLM,
    )
    vllm_speculative_config: str | None = option(
        None,
        "vLLM: speculative decoding, as a JSON object",
        aliases=("speculative_config",),
        metavar="JSON",
        only_with=_VLLM,
    )
    vllm_reasoning_parser: str | None = option(
        None,
        "vLLM's server: parser that separates the reasoning from the answer, under vLLM's name",
        aliases=("reasoning_parser",),
        metavar="NAME",
        only_with=_VLLM,
    )
    vllm_disable_custom_all_reduce: bool | None = option(
        None,
        "vLLM: reduce over GPUs with NCCL instead of vLLM's own kernel",
        aliases=("disable_custom_all_reduce",),
        metavar=_SWITCH,
        only_with=_VLLM,
    )
    vllm_disable_cascade_attn: bool | None = option(
        None,
        "vLLM: disable cascade attention; default: as in vLLM",
        aliases=("disable_cascade_attn",),
        metavar=_SWITCH,
        only_with=_VLLM,
    )
    vllm_enforce_eager: bool = option(False, "vLLM: disable CUDA graphs", aliases=("enforce_eager",), only_with=_VLLM)
    vllm_engine_kwargs: str | None = option(
        None, "vLLM: any other arguments of its engine, as a JSON object; not checked", metavar="JSON", only_with=_VLLM
    )

    @property
    def engine_kwargs(self) -> dict[str, Any] | None:
        """--vllm_engine_kwargs; None where it is not an object."""
        return json_object(self.vllm_engine_kwargs or "{}")

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's own name -> value of every argument of its engine that the options set."""
        given = {argument: getattr(self, name) for name, argument in ENGINE_ARGUMENTS.items()}
        settings = {name: value for name, value in given.items() if value is not None}
        for name in OBJECTS.intersection(settings):
            settings[name] = json_object(settings[name])
        eager = {"enforce_eager": True} if self.vllm_enforce_eager else {}
        return {**settings, **eager, **(self.engine_kwargs or {})}


ENGINE_ARGUMENTS: Mapping[str, str] = {
    "tensor_parallel_size": "tensor_parallel_size",
    **{
        f"vllm_{name}": name
        for name in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "enable_expert_parallel",
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "quantization",
            "enable_prefix_caching",
            "limit_mm_per_prompt",
            "mm_processor_cache_gb",
            "speculative_config",
            "reasoning_parser",
            "disable_custom_all_reduce",
            "disable_cascade_attn",
        )
    },
}
"""Option -> argument of vLLM's engine. `enforce_eager` is a switch that is passed when on."""
OBJECTS = frozenset({"limit_mm_per_prompt", "speculative_config"})
"""Arguments that are JSON objects."""
SET_BY_OPTIONS: Mapping[str, str] = {
    "model": "--model",
    "revision": "--model_revision",
    "dtype": "--torch_dtype",
    "trust_remote_code": "--trust_remote_code",
    "enable_lora": "--adapters",
    "max_lora_rank": "--adapters",
    "lora_modules": "--adapters",
    "host": "--host",
    "port": "--port",
    "api_key": "--api_key",
    "served_model_name": "--served_model_name",
    "chat_template": "--chat_template",
    "max_logprobs": "--max_logprobs",
    "override_generation_config": "--temperature and the other options of generation",
}
"""Arguments of vLLM that the command sets itself -> the options that they come from."""
