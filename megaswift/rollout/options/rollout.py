"""Section `rollout`: the sampler, how it draws completions, and the memory that it shares with training."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import but_not, is_set, option
from megaswift.options.tasks import RL, SAMPLED

BACKENDS = ("transformers", "vllm", "vllm_server", "sglang")
SERVERS = ("vllm_server", "sglang")
"""Backends that are other programs."""
BACKEND_SPELLINGS = {
    "true": "vllm",
    "false": "transformers",
    "colocate": "vllm",
    "server": "vllm_server",
    "sglang_server": "sglang",
}
"""`use_vllm` is a switch, `vllm_mode` says where it runs."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling"""

    rollout_backend: str = option(
        "transformers",
        "Sampler, in the training process or a server; default: vllm if it has a GPU",
        aliases=("use_vllm", "vllm_mode"),
        choices=BACKENDS,
        spellings=BACKEND_SPELLINGS,
        tasks=SAMPLED,
        common=RL,
    )
    rollout_batch_size: int | None = option(
        None,
        "Concurrent completions of a sampler or over all servers; default: by backend",
        aliases=("vllm_max_num_seqs",),
        minimum=1,
        tasks=SAMPLED,
    )
    max_completion_length: int = option(
        512,
        "Maximum completion length; prompts get the rest of max_length",
        aliases=("response_length", "max_new_tokens"),
        minimum=1,
        unit="tokens",
        tasks=SAMPLED,
        common=RL,
    )
    temperature: float = option(
        1.0,
        "Sampling temperature, also of log-probabilities and divergences",
        above=0,
        tasks=SAMPLED,
        common=RL,
    )
    top_p: float = option(
        1.0, "Nucleus sampling: cumulative probability of candidate tokens", above=0, maximum=1, tasks=SAMPLED
    )
    top_k: int = option(0, "Number of highest-probability candidate tokens; 0: all", minimum=0, tasks=SAMPLED)
    min_p: float | None = option(
        None,
        "Minimum probability of a candidate token, relative to the most likely one",
        minimum=0,
        maximum=1,
        tasks=SAMPLED,
        metavar="P",
    )
    repetition_penalty: float = option(
        1.0, "Repetition penalty; above 1: repeated tokens become less likely", above=0, tasks=SAMPLED
    )
    allow_biased_sampling: bool = option(
        False,
        "Allow top_p, top_k, min_p and repetition_penalty, which bias the gradient",
        tasks=RL,
        only_with={"biased_sampling": is_set()},
    )
    environment: str | None = option(
        None,
        "Environment or agent for multi-turn rollouts",
        aliases=("multi_turn_scheduler",),
        tasks=RL,
        takes_objects=True,
        metavar="FILE:NAME",
    )
    max_turns: int | None = option(
        None,
        "Maximum number of model turns with an environment; default: no limit",
        aliases=("max_tool_calling_iterations",),
        minimum=1,
        unit="turns",
        tasks=RL,
        only_with={"environment": is_set()},
    )
    async_generation: bool = option(
        False,
        "Sample the next generation during training: max_staleness of one generation",
        aliases=("async_generate",),
        tasks=RL,
    )
    max_staleness: int = option(
        0,
        "Sample during training, with weights at most so many steps old; 0: none",
        minimum=0,
        unit="optimizer steps",
        tasks=RL,
        metavar="S",
    )
    staleness_strategy: str = option(
        "wait",
        "Use draws in order; drop: finished ones first, and drop what gets too old",
        choices=("wait", "drop"),
        tasks=RL,
    )
    partial_rollouts: bool | None = option(
        None,
        "New weights interrupt completions, which then go on; default: if possible",
        tasks=RL,
    )
    save_rollouts: str | None = option(
        None, "Folder for the tokens, rewards and seeds of every generation", tasks=RL, metavar="DIR"
    )
    replay_rollouts: str | None = option(
        None, "Train on the generations of a folder of save_rollouts, without a sampler", tasks=RL, metavar="DIR"
    )
    rollout_sleep: bool = option(
        False,
        "Free the sampler's memory during training",
        aliases=("vllm_enable_sleep_mode",),
        tasks=SAMPLED,
        only_with={"rollout_backend": ("transformers", "vllm")},
    )
    rollout_server_url: tuple[str, ...] = option(
        (),
        "Sampler server URLs; default: the usual port on this machine",
        aliases=("vllm_server_base_url", "sglang_server_base_url"),
        tasks=SAMPLED,
        metavar="URL...",
        only_with={"rollout_backend": SERVERS},
    )
    rollout_server_timeout: float = option(
        600.0,
        "Timeout of a request to a sampler server",
        aliases=("vllm_server_timeout",),
        above=0,
        unit="seconds",
        tasks=SAMPLED,
        only_with={"rollout_backend": SERVERS},
    )
    rollout_sync_folder: str | None = option(
        None,
        "Folder for weights sent to samplers; default: /dev/shm, or in output_dir",
        tasks=SAMPLED,
        metavar="DIR",
        only_with={"sync_files": True},
    )
    rollout_lora: bool | None = option(
        None,
        "Send LoRA adapters to samplers instead of merged weights; default: if supported",
        aliases=("vllm_enable_lora",),
        tasks=SAMPLED,
        only_with={"train_type": but_not("full")},
    )
    vllm_gpu_memory_utilization: float = option(
        0.3,
        "Fraction of each GPU's memory for vLLM in the training process",
        above=0,
        maximum=1,
        tasks=SAMPLED,
        only_with={"rollout_backend": "vllm"},
    )
    offload_model: bool = option(False, "Offload model weights to CPU during sampling", tasks=SAMPLED)
    offload_optimizer: bool = option(
        False, "Offload gradients and optimizer state to CPU during sampling", tasks=SAMPLED
    )
