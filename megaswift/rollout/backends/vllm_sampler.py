"""vLLM in the trainer's own processes, on the trainer's own GPUs: it sleeps while the trainer works.

It has run on CPUs (vLLM 0.32); for GPUs it is written from the documentation of releases from 0.22 on. Each rank has an
engine, or a group of `tensor_parallel_size` consecutive ranks has one together: then these ranks ask for the same
prompts, and each gets all completions. Engines make process groups of all ranks, so every rank of a run has one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import Problem
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import checked_completion
from megaswift.rollout.vllm_package import RANKS, room_for, unfit_message

OLDEST = (0, 22)
OTHERS = "--rollout_backend vllm_server or transformers"


def too_wide(options: SamplerOptions) -> list[Problem]:
    """Adapters that fit into none."""
    if options.lora_rank <= RANKS[-1]:
        return []
    return [
        Problem(
            f"adapters of rank {options.lora_rank}",
            f"are wider than vLLM's widest ({RANKS[-1]})",
            "--rollout_lora false",
        )
    ]


def missing(options: SamplerOptions) -> list[Problem]:
    """What this machine lacks."""
    return unfit_message("--rollout_backend vllm", OLDEST, OTHERS) or too_wide(options)


def build(folder: Path, options: SamplerOptions) -> VllmSampler:
    """The engine; memory for weights and caches is taken, and given back at once."""
    return VllmSampler(folder, options)


class VllmSampler:
    """An engine of vLLM in this process."""

    shared = False

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        # the engine in this process: tensors are handed over, not copied
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for name in ("RANK", "LOCAL_RANK"):  # vLLM reads them; a run of one process may have no launcher that sets them
            os.environ.setdefault(name, "0")
        self.vllm: Any = importlib.import_module("vllm")
        self.sleeps = bool(importlib.import_module("vllm.platforms").current_platform.is_sleep_mode_available())
        self.adapts = options.lora_rank > 0
        adapted = {
            "enable_lora": True,
            "max_lora_rank": room_for(options.lora_rank),
            "max_loras": 1,
            "load_format": "auto",
        }
        lora = adapted if self.adapts else {"load_format": "dummy"}  # adapters belong to the folder's own weights
        self.llm: Any = self.vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            tensor_parallel_size=options.tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=options.memory_share,
            max_model_len=options.max_length,
            max_num_seqs=options.batch_size,
            enable_sleep_mode=self.sleeps,
            logprobs_mode="processed_logprobs",
            seed=0,
            **lora,
        )
        self.adapter: Any = None
        self.asleep: frozenset[str] = frozenset()
        self.sleep()

    def wake(self) -> None:
        """Memory for the weights; that of the caches waits for the first prompt."""
        self._wake("weights")

    def _wake(self, tag: str) -> None:
        if tag in self.asleep and self.sleeps:
            self.llm.wake_up(tags=[tag])
        self.asleep -= {tag}

    def sleep(self) -> None:
        """Gives the memory back, where this build can (for CPUs it cannot).

        A base model that only its adapters change stays in host memory, other weights are dropped.
        """
        if not self.asleep and self.sleeps:
            self.llm.sleep(level=1 if self.adapts else 2)
        self.asleep = frozenset({"weights", "kv_cache"})

    def close(self) -> None:
        """Gives the memory back. vLLM's own end would take the trainer's process groups down, or fail once they are: it
        does not come."""
        self.sleep()
        finalizer = getattr(getattr(self.llm.llm_engine, "engine_core", None), "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hands the stream to vLLM, which loads and shards each tensor as it comes. On every rank of the engine."""
        self._wake("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def update_adapter(self, folder: Path) -> None:
        """New adapters under a new number; those before are forgotten."""
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._wake("weights")
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        if self.adapter is not None:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = request(f"policy-{number}", number, str(folder.absolute()))
        self.llm.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """All prompts at once; vLLM batches them."""
        assert len(prompts) == len(seeds) and "weights" not in self.asleep, "update_weights comes before generate"
        self._wake("kv_cache")
        how = [
            self.vllm.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=seed,
            )
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with_adapter = {} if self.adapter is None else {"lora_request": self.adapter}
        found = self.llm.generate(asked, how, use_tqdm=False, **with_adapter)
        return [self._completion(request.outputs[0], sampling) for request in found]

    def _completion(self, output: Any, sampling: SamplingParams) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True)]
        return checked_completion(tokens, logprobs, output.finish_reason == "stop", sampling)
