"""Sampler backend for any device: a transformers model in this process, decoded by our own loop.

Owns the model: built on the meta device, filled by `update_weights` or from its folder, released by `sleep`. The loop
is in `decoding`. Adapters are PEFT layers loaded from the PEFT folder that the run writes, as a user would load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.torch import meta_init
from megaswift.errors import Problem, UserError, WeightsError, first_line
from megaswift.families import family_of, read_config_json
from megaswift.inference.load_errors import REFUSALS
from megaswift.inference.model import quiet_transformers
from megaswift.models.family import trains_language_model
from megaswift.rollout.decoding import decode_batch
from megaswift.rollout.kv_cache import check_kv_cache_layer_types
from megaswift.rollout.sampler import BatchImages, Completion, SamplerOptions, SamplingParams
from megaswift.rollout.weight_update import InPlaceAdapterLoader, InPlaceWeightLoader

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""The fields of a configuration in which models name their placeholder tokens."""


def missing(options: SamplerOptions) -> list[Problem]:
    """Problems with the options or this machine: PEFT not installed, an unknown dtype, no CUDA."""
    problems = []
    if options.lora_rank and util.find_spec("peft") is None:
        problems.append(
            Problem(
                "adapters in the sampler",
                "require the package peft",
                "run pip install peft, or use --rollout_lora false",
            )
        )
    if options.dtype != "auto" and not isinstance(getattr(torch, options.dtype, None), torch.dtype):
        problems.append(
            Problem(f"dtype {options.dtype} of the sampler", "is not a torch dtype", "use auto, float32 or bfloat16")
        )
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        problems.append(Problem(f"device {options.device} of the sampler", "CUDA is not available", "cpu"))
    return problems


def _model(folder: Path, options: SamplerOptions) -> Any:
    """The transformers model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    quiet_transformers()
    trust = options.trust_remote_code
    attention = {} if options.attn_impl == "auto" else {"attn_implementation": options.attn_impl}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        config.return_dict = True
        dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        if options.dtype != "auto":
            dtype = getattr(torch, options.dtype)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weight sync sends floating-point tensors
        with torch.random.fork_rng(), meta_init.init_empty_weights():
            sees = getattr(config, "vision_config", None) is not None
            auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            model: Any = auto.from_config(config, dtype=dtype or torch.float32, trust_remote_code=trust, **attention)
    except REFUSALS as error:
        raise WeightsError(
            Problem(f"--model {folder}", f"transformers cannot build it for sampling: {first_line(error)}")
        ) from None
    meta_init.meta_parameters_to_expanded_zeros(model)
    return model.eval().requires_grad_(False)


class TransformersSampler:
    """Generates completions in batches. Without weight storage until the first update."""

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.folder = folder
        self.options = options
        self.device = torch.device(options.device)
        self.model = _model(folder, options)
        check_kv_cache_layer_types(self.model.config)
        self.incoming = InPlaceWeightLoader(self.model, self._carried)
        self.adapters = InPlaceAdapterLoader(self.model)
        self.ready = False
        """Whether all weights are loaded."""

    def _carried(self) -> Iterator[tuple[str, Tensor]]:
        """The folder's tensors that the native engine carries along unchanged: a vision tower."""
        config = read_config_json(self.folder)
        if not trains_language_model(config):
            return
        family = family_of(config)
        plan = WeightPlan(family, family.spec(config))
        source = open_weights(self.folder)
        yield from ((name, source.slice(name)) for name in plan.kept(source.names()))

    def wake(self) -> None:
        """Allocates uninitialized storage for the weights and moves buffers to the device."""
        meta_init.allocate_storage(self.model.parameters(), self.device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)

    def sleep(self) -> None:
        """Releases the weights' storage."""
        meta_init.swap_parameters_for_expanded_zeros(self.model)
        self.ready = False

    def close(self) -> None:
        """Releases the weights' storage."""
        self.sleep()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies each tensor into its parameter as it arrives."""
        self.wake()
        self.ready = False
        self.incoming.fill(weights)
        self.ready = True

    def update_adapter(self, folder: Path) -> None:
        """Loads the adapter in `folder`; reads the base weights from the model's folder first where they are not
        loaded."""
        if not self.ready:
            source = open_weights(self.folder)
            self.update_weights((name, source.slice(name)) for name in source.names() if name in self.incoming.of_name)
        self.ready = False
        self.adapters.fill(folder)
        self.ready = True

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Decodes batches of prompts of similar length."""
        return self._generate(prompts, None, sampling, seeds)

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Completion],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Callable[[], bool],
    ) -> list[Completion]:
        """Decodes batches of similar length, until they end or `stop` is true."""
        written = [(*prompt, *one.token_ids) for prompt, one in zip(prompts, begun, strict=True)]
        more = self._generate(written, None, sampling, seeds, [len(one.token_ids) for one in begun], stop)
        return [
            Completion(old.token_ids + new.token_ids, old.logprobs + new.logprobs, new.finished, versions=old.versions)
            for old, new in zip(begun, more, strict=True)
        ]

    def generate_with_images(
        self, prompts: Sequence[Sequence[int]], images: BatchImages, sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """The same; a batch's images are opened when its turn comes."""
        return self._generate(prompts, images, sampling, seeds)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: BatchImages | None,
        sampling: SamplingParams,
        seeds: Sequence[int],
        begun: Sequence[int] | None = None,
        stop: Callable[[], bool] = bool,
    ) -> list[Completion]:
        assert self.ready, "update_weights or update_adapter comes before generate, and again after sleep"
        assert len(prompts) == len(seeds) and all(len(p) for p in prompts) and sampling.max_tokens > 0
        unpadded = [tuple(p) for p in prompts]
        shown = [repr(one) for one in images.of] if images is not None else [""] * len(unpadded)
        order = sorted(range(len(unpadded)), key=lambda i: (-len(unpadded[i]), unpadded[i], shown[i]))  # equal adjacent
        sampling = replace(sampling, forbidden_token_ids=placeholder_token_ids(self.model.config))
        completions: dict[int, Completion] = {}
        try:
            with torch.inference_mode():
                for start in range(0, len(order), self.options.batch_size):
                    batch = order[start : start + self.options.batch_size]
                    some = None if images is None else replace(images, of=[images.of[i] for i in batch])
                    rows = [unpadded[i] for i in batch]
                    drawn = [seeds[i] for i in batch]
                    if stop():
                        completions |= dict.fromkeys(batch, Completion((), (), False))
                        continue
                    before = None if begun is None else [begun[i] for i in batch]
                    done = decode_batch(self.model, rows, sampling, drawn, some, before, stop)
                    completions |= dict(zip(batch, done, strict=True))
        except torch.OutOfMemoryError as error:
            raise UserError(
                Problem("GPU memory during sampling", first_line(error), "use a smaller --rollout_batch_size")
            ) from None
        return [completions[i] for i in range(len(prompts))]


def placeholder_token_ids(config: Any) -> tuple[int, ...]:
    """The tokens that stand for images and videos in a prompt; none of a language model. Numbers beyond the vocabulary
    are defaults of the configuration's class, of a model that has been made smaller."""
    size = config.get_text_config().vocab_size
    named = [getattr(config, name, None) for name in PLACEHOLDERS]
    return tuple(sorted({token for token in named if isinstance(token, int) and 0 <= token < size}))


def build(folder: Path, options: SamplerOptions) -> TransformersSampler:
    """The sampler for the model in `folder`."""
    return TransformersSampler(folder, options)
