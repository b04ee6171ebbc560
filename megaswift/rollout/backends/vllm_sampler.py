"""Sampler backend for vLLM in the trainer's own processes, on the trainer's own GPUs (colocated, with sleep mode).

Tested on CPUs (vLLM 0.32); the GPU path follows the documentation of releases from 0.22 on and has not been run. Each
rank has an engine, or `tensor_parallel_size` consecutive ranks share one: these ranks then pass the same prompts, and
each receives all completions. Engines create process groups over all ranks, so every rank of a run has one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.errors import Problem
from megaswift.rollout.pieces import next_piece, with_piece
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import checked_completion
from megaswift.rollout.vllm_package import RANKS, max_lora_rank_for, vllm_version_problem

OLDEST = (0, 22)
OTHERS = "--rollout_backend vllm_server or transformers"


def lora_rank_problems(options: SamplerOptions) -> list[Problem]:
    """The problem of a LoRA rank that exceeds vLLM's maximum."""
    if options.lora_rank <= RANKS[-1]:
        return []
    return [
        Problem(
            f"adapters of rank {options.lora_rank}",
            f"exceed vLLM's maximum LoRA rank ({RANKS[-1]})",
            "--rollout_lora false",
        )
    ]


def missing(options: SamplerOptions) -> list[Problem]:
    """Problems with the installed vLLM or the adapters' rank."""
    return vllm_version_problem("--rollout_backend vllm", OLDEST, OTHERS) or lora_rank_problems(options)


def build(folder: Path, options: SamplerOptions) -> VllmSampler:
    """The sampler with its engine, asleep: memory for weights and KV cache is allocated and released once."""
    return VllmSampler(folder, options)


class VllmSampler:
    """A vLLM engine in this process."""

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        # engine in this process: tensors are passed without a copy
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for name in ("RANK", "LOCAL_RANK"):  # vLLM reads them; a run of one process may have no launcher
            os.environ.setdefault(name, "0")
        self.vllm: Any = importlib.import_module("vllm")
        self.sleeps = bool(importlib.import_module("vllm.platforms").current_platform.is_sleep_mode_available())
        self.adapts = options.lora_rank > 0
        self.seeds_requests = options.seed_requests
        self.max_length = options.max_length
        adapted = {
            "enable_lora": True,
            "max_lora_rank": max_lora_rank_for(options.lora_rank),
            "max_loras": 1,
            "load_format": "auto",
        }
        lora = adapted if self.adapts else {"load_format": "dummy"}  # adapters need the folder's own weights
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
            seed=options.seed,
            **options.engine_arguments,
            **lora,
        )
        self.adapter: Any = None
        self.asleep: frozenset[str] = frozenset()
        self.sleep()

    def wake(self) -> None:
        """Allocates memory for the weights; the KV cache is allocated at the first prompt."""
        self._wake("weights")

    def _wake(self, tag: str) -> None:
        if tag in self.asleep and self.sleeps:
            torch.cuda.empty_cache()  # vLLM's allocator takes memory from the driver, not from torch's cache
            self.llm.wake_up(tags=[tag])
        self.asleep -= {tag}

    def sleep(self) -> None:
        """Releases device memory where this build supports sleep mode (CPU builds do not).

        With adapters the base weights are kept in host memory (level 1); otherwise weights are discarded (level 2).
        """
        if not self.asleep and self.sleeps:
            self.llm.sleep(level=1 if self.adapts else 2)
        self.asleep = frozenset({"weights", "kv_cache"})

    def close(self) -> None:
        """Releases device memory. vLLM's own shutdown is detached: it would destroy the trainer's process groups, or
        fail where they are destroyed already."""
        self.sleep()
        finalizer = getattr(getattr(self.llm.llm_engine, "engine_core", None), "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Passes the stream to vLLM, which loads and shards each tensor as it arrives. Called on every rank of the
        engine."""
        self._wake("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def update_adapter(self, folder: Path) -> None:
        """Loads the adapter under a new id and removes the previous one."""
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
        """Passes all prompts at once; vLLM batches them. A completion ends where the context does, if a long prompt
        leaves it less room than `max_tokens`."""
        assert len(prompts) == len(seeds) and "weights" not in self.asleep, "update_weights comes before generate"
        self._wake("kv_cache")
        rooms = [sampling.max_tokens] * len(prompts)
        if self.max_length is not None:
            rooms = [min(sampling.max_tokens, self.max_length - len(prompt)) for prompt in prompts]
        params = [
            self.vllm.SamplingParams(
                max_tokens=room,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=seed if self.seeds_requests else None,
            )
            for room, seed in zip(rooms, seeds, strict=True)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with_adapter = {} if self.adapter is None else {"lora_request": self.adapter}
        outputs = self.llm.generate(requests, params, use_tqdm=False, **with_adapter)
        found = [request.outputs[0] for request in outputs]
        return [
            self._completion(output, replace(sampling, max_tokens=room))
            for output, room in zip(found, rooms, strict=True)
        ]

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Completion],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Callable[[], bool],
    ) -> list[Completion]:
        """All completions one piece further at a time, until they end or `stop` is true."""
        written = [*begun]
        while not stop():
            pieces = {
                i: piece
                for i, prompt in enumerate(prompts)
                if (piece := next_piece(prompt, written[i], sampling, seeds[i])) is not None
            }
            if not pieces:
                break
            for size in {piece.sampling.max_tokens for piece in pieces.values()}:
                rows = [i for i, piece in pieces.items() if piece.sampling.max_tokens == size]
                asked = [pieces[i] for i in rows]
                found = self.generate([p.prompt for p in asked], asked[0].sampling, [p.seed for p in asked])
                for i, more in zip(rows, found, strict=True):
                    written[i] = with_piece(written[i], more)
        return written

    def _completion(self, output: Any, sampling: SamplingParams) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True)]
        return checked_completion(tokens, logprobs, output.finish_reason == "stop", sampling)
