"""`infer --infer_backend vllm`: vLLM's engine in this process in place of transformers' `generate`.

Owns the arguments of that engine, which batches the rows of a call itself. Written for releases from 0.10 on; it has
not been run: the tests replace the package by one that records its arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from megaswift.errors import Problem, UserError
from megaswift.inference.detokenizer import special_token_texts
from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams, TokenLogprob
from megaswift.inference.model import ModelConfigAndTokenizer
from megaswift.inference.options.backends import BackendOptions


class VllmGenerator:
    """The same calls as `Generator`, answered by vLLM."""

    def __init__(self, prepared: ModelConfigAndTokenizer, options: BackendOptions, lora_rank: int) -> None:
        """`lora_rank`: the maximum of the engine; 0: no adapters."""
        vllm: Any = importlib.import_module("vllm")
        weights = prepared.options
        lora = {"enable_lora": True, "max_lora_rank": lora_rank} if lora_rank else {}
        self.tokenizer = prepared.tokenizer
        self._params = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=str(prepared.folder),
            dtype=weights.torch_dtype,
            trust_remote_code=weights.trust_remote_code,
            **options.engine_arguments,
            **lora,
        )
        self._adapter: dict[str, Any] = {}
        if lora_rank:
            request = importlib.import_module("vllm.lora.request").LoRARequest
            self._adapter = {"lora_request": request("adapter", 1, weights.adapter_folders[0])}

    def generate(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        """The answers, in the order of the requests."""
        if any(request.pictures is not None for request in requests):
            rule = "are not supported with --infer_backend vllm"
            raise UserError(Problem("images", rule, "--infer_backend transformers"))
        params = [
            self._params(
                max_tokens=request.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                stop=list(request.stop),
                logprobs=request.logprobs,
                seed=None if sampling.seed is None else sampling.seed + number,
                **_special_stops(self.tokenizer, request.stop),
            )
            for number, request in enumerate(requests)
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, **self._adapter)
        return [_answer(output.outputs[0], request) for output, request in zip(outputs, requests, strict=True)]


def _special_stops(tokenizer: Any, stop: Sequence[str]) -> dict[str, Any]:
    """Stop texts that are special tokens, by number: vLLM looks for texts in what it decodes without them."""
    special = [text for text in stop if text in special_token_texts(tokenizer)]
    return {"stop_token_ids": tokenizer.convert_tokens_to_ids(special)} if special else {}


def _answer(output: Any, request: AnswerRequest) -> Answer:
    tokens = list(output.token_ids)
    logprobs: tuple[TokenLogprob, ...] = ()
    if request.logprobs is not None:
        logprobs = tuple(
            TokenLogprob(token, entry[token].logprob, _likeliest(entry, request.logprobs), first=not place)
            for place, (token, entry) in enumerate(zip(tokens, output.logprobs, strict=True))
        )
    return Answer(output.text, len(tokens), output.finish_reason or "length", logprobs, tuple(tokens))


def _likeliest(entry: Any, count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of a position, which vLLM gives with the chosen token beside them."""
    ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return tuple((token, value.logprob) for token, value in ranked[:count])
