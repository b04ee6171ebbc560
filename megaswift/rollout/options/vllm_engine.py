"""Section `vllm`: settings of vLLM's engine in the training process (`rollout_backend vllm`), and of weight sync with
its servers (`rollout_backend vllm_server`).

Owns the options and the list of arguments that weight sync and sampling rely on, which no option may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaswift.errors import Problem
from megaswift.options.option import option
from megaswift.options.option_json import json_object
from megaswift.options.tasks import SAMPLED

TRANSPORTS = ("auto", "folder", "shared_memory", "cuda_ipc", "gloo", "nccl")
_SYNC = "weight sync relies on it"
_TOKENS = "sampling relies on it"
_PLACE = "the run's processes share the GPUs"
FIXED_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(("model", "model_weights", "dtype", "load_format", "model_loader_extra_config"), _SYNC),
    **dict.fromkeys(("quantization", "quantization_config", "hf_overrides", "weight_transfer_config"), _SYNC),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"), _SYNC),
    **dict.fromkeys(("enable_sleep_mode", "worker_cls", "worker_extension_cls", "trust_remote_code"), _SYNC),
    **dict.fromkeys(("skip_tokenizer_init", "generation_config", "override_generation_config"), _TOKENS),
    **dict.fromkeys(("logprobs_mode", "logits_processors", "seed", "runner", "convert"), _TOKENS),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _TOKENS),
    **dict.fromkeys(("distributed_executor_backend", "pipeline_parallel_size"), _PLACE),
    **dict.fromkeys(("data_parallel_size", "enable_expert_parallel", "nnodes", "node_rank"), _PLACE),
}
"""Argument of vLLM's engine -> why it is fixed."""
OPTION_OF = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "max_length",
    "max_num_seqs": "rollout_batch_size",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
}
"""Argument of vLLM's engine -> the option that sets it."""


@dataclass(frozen=True)
class VllmSamplerConfig:
    """vLLM as a sampler: in the training process, or as servers"""

    vllm_tensor_parallel_size: int = option(
        1,
        "Ranks of a node, or GPUs of an engine on Ray, that share one model",
        minimum=1,
        unit="ranks",
        tasks=SAMPLED,
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )
    vllm_enforce_eager: bool = option(
        False, "Disable CUDA graphs", tasks=SAMPLED, only_with={"rollout_backend": "vllm"}
    )
    vllm_seed_requests: bool | None = option(
        None,
        "Seed each completion, so runs are repeatable; default: not with vllm on a GPU",
        tasks=SAMPLED,
        metavar="BOOL",
        only_with={"rollout_backend": ("vllm", "vllm_server")},
        neutral=(None,),
    )
    vllm_enable_prefix_caching: bool | None = option(
        None,
        "Reuse the KV cache of equal prompt beginnings; default: as in vLLM",
        tasks=SAMPLED,
        metavar="BOOL",
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )
    vllm_disable_cascade_attn: bool | None = option(
        None,
        "Disable cascade attention; default: as in vLLM",
        tasks=SAMPLED,
        metavar="BOOL",
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )
    vllm_limit_mm_per_prompt: str | None = option(
        None,
        'Maximum images and videos in a prompt, as JSON: {"image": 5}',
        tasks=SAMPLED,
        metavar="JSON",
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )
    vllm_mm_processor_cache_gb: float | None = option(
        None,
        "Size of the cache of processed images and videos; 0: none",
        minimum=0,
        unit="GiB",
        tasks=SAMPLED,
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )
    vllm_engine_kwargs: str | None = option(
        None,
        "Other arguments of vLLM's engine, as a JSON object",
        tasks=SAMPLED,
        metavar="JSON",
        only_with={"rollout_backend": "vllm"},
        neutral=(None,),
    )

    rollout_weight_transport: str = option(
        "auto",
        "Transport of merged weights to vLLM servers; auto: the fastest available",
        choices=TRANSPORTS,
        tasks=SAMPLED,
        only_with={"rollout_backend": "vllm_server"},
    )
    rollout_changed_weights_only: bool = option(
        False,
        "Send vLLM servers only modules that changed, verified by checksums",
        tasks=SAMPLED,
        only_with={"rollout_backend": "vllm_server"},
    )

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's own name -> value, of what is set."""
        settings: dict[str, Any] = {"enforce_eager": True} if self.vllm_enforce_eager else {}
        for name in ("enable_prefix_caching", "disable_cascade_attn", "mm_processor_cache_gb"):
            if (value := getattr(self, f"vllm_{name}")) is not None:
                settings[name] = value
        if self.vllm_limit_mm_per_prompt is not None:
            settings["limit_mm_per_prompt"] = json_object(self.vllm_limit_mm_per_prompt)
        return {**settings, **(json_object(self.vllm_engine_kwargs or "{}") or {})}


def vllm_sampler_problems(options: VllmSamplerConfig) -> Iterator[Problem]:
    """Texts that are no JSON objects, and arguments that are fixed or set by another option."""
    for name in ("vllm_limit_mm_per_prompt", "vllm_engine_kwargs"):
        text = getattr(options, name)
        if text is not None and json_object(text) is None:
            yield Problem(f"--{name} {text}", "must be a JSON object", f"--{name} '{{\"NAME\": VALUE}}'")
    own = {name.removeprefix("vllm_"): name for name in type(options).__dataclass_fields__ if name.startswith("vllm_")}
    for name in json_object(options.vllm_engine_kwargs or "{}") or {}:
        label = f"--vllm_engine_kwargs {name}"
        if name in FIXED_ARGUMENTS:
            yield Problem(label, f"cannot be set in the training process: {FIXED_ARGUMENTS[name]}", "leave it out")
        elif (owner := OPTION_OF.get(name) or own.get(name)) is not None:
            yield Problem(label, "has an option of its own", f"--{owner}")
