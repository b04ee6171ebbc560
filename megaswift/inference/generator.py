"""Generation: one call of transformers' `generate` per batch of prompts, each with its own length limit, stop strings
and listener. A prompt that is given back with log-probabilities takes a forward pass of its own before.

Owns the arguments of that call and the progress reported while it runs; transformers samples the tokens. Callers
(terminal, file, server) see requests and completions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megaswift import log
from megaswift.data.vision.batches import ImageInputs, join_image_inputs
from megaswift.errors import ConfigError, Problem, UserError, first_line
from megaswift.families import FAMILIES
from megaswift.inference.adapters import active_adapter
from megaswift.inference.detokenizer import IncrementalDetokenizer, decode_tokens
from megaswift.inference.logit_penalties import LogitPenalties, PenaltyProcessor
from megaswift.inference.options.commands import GenerationOptions
from megaswift.inference.token_texts import TokenTexts

SCORED_POSITIONS = 512
"""Positions of a prompt whose log-probabilities over the vocabulary are in memory at a time."""
CANDIDATES = ("top_p", "top_k", "min_p")
"""Options that choose among which tokens one is drawn; they have no effect where none is."""
NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class GenerationParams:
    """How tokens are chosen. Requests with equal sampling can be answered in one batch, unless they have a seed."""

    temperature: float = 0.0
    """0: the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    """Candidates have at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_beams: int = 1
    seed: int | None = None
    adapter: str = ""
    """Which of the adapters that requests select; none of them."""


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer: log-softmax of the model's logits in float32, before temperature and penalties."""

    token: int
    logprob: float | None
    """None: the first token of an echoed prompt, before which there is nothing."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this position."""
    start: int = 0
    """Characters of the text before it."""
    first: bool = False
    """Whether no text is before it: decoders drop a space there."""


Listener = Callable[[str, Sequence[TokenLogprob]], None]
"""Takes new text and the tokens that it is made of. Called while the answer grows, in the thread that generates."""


@dataclass(frozen=True)
class ProcessedImageInputs:
    """What a model reads of a prompt's images beside its tokens, as its processor gives it, and of what kind each of it
    is."""

    inputs: Mapping[str, Tensor]
    kinds: Mapping[str, str]


@dataclass
class AnswerRequest:
    """One answer that is wanted."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """How many of the most likely tokens to return with the chosen token's log-probability; None: return neither."""
    listener: Listener | None = None
    pictures: ProcessedImageInputs | None = None
    echo: str | None = None
    """The text of the prompt, where the answer begins with it and its log-probabilities; None: it does not."""
    cancelled: bool = False
    """Set from any thread: the answer ends with the next token."""
    begun: bool = False
    """Whether the listener has heard of it."""


@dataclass(frozen=True)
class Answer:
    """An answer."""

    text: str
    """With the prompt's text before it where the request asks for an echo."""
    tokens: int
    """Generated, the end-of-text token included."""
    reason: str
    """`stop`: the model or a stop text ended it; `length`; `cancelled`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The tokens generated, the end-of-text token included."""


def generation_params(options: GenerationOptions, own: Any, seed: int | None = None) -> GenerationParams:
    """Options over the model's own generation configuration; what neither sets is off."""
    temperature = options.temperature
    if temperature is None and own.do_sample:
        temperature = own.temperature if own.temperature is not None else 1.0
    elif temperature is None:
        temperature = 0.0
    if temperature == 0:
        given = [n for n in CANDIDATES if getattr(options, n) is not None]
        if given:
            raise ConfigError(
                [
                    Problem(
                        f"--{n} {getattr(options, n)}",
                        "would be ignored: the default of this model is greedy decoding",
                        "--temperature 0.7",
                    )
                    for n in given
                ]
            )

    def either(name: str, off: float) -> Any:
        value = getattr(options, name)
        value = getattr(own, name, None) if value is None else value
        return off if value is None else value

    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    drawn = {name: either(name, off[name]) for name in CANDIDATES} if temperature else {}
    return GenerationParams(
        float(temperature),
        repetition_penalty=either("repetition_penalty", 1.0),
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        num_beams=either("num_beams", 1),
        seed=options.seed if seed is None else seed,
        **drawn,
    )


@dataclass
class _Row:
    """An answer that grows."""

    request: AnswerRequest
    stream: IncrementalDetokenizer | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    told: int = 0
    """Tokens whose log-probabilities the listener has."""
    reason: str = ""

    @property
    def echoed(self) -> bool:
        """Whether the prompt is a part of the answer."""
        return self.request.echo is not None

    def begin(self, prompt: Sequence[TokenLogprob]) -> None:
        """The prompt with its log-probabilities, where it is echoed."""
        self.logprobs += prompt
        if self.request.echo:
            self._tell(self.request.echo)
        if not self.request.max_new_tokens:
            self.reason = "length"

    def take(self, token: int, ends: bool, logprob: TokenLogprob | None) -> None:
        """The next token; an end-of-text token is counted, and is no text.

        With an echo it has its log-probability, so that as many follow the prompt's as tokens were generated.
        """
        self.ids.append(token)
        text = ""
        if logprob is not None and (self.echoed or not ends):
            assert self.stream is not None, "log-probabilities go with a stream"
            start = len(self.request.echo or "") + self.stream.length
            self.logprobs.append(replace(logprob, start=start, first=self.stream.blank))
        if self.stream is not None:
            if not ends:
                text = self.stream.add(token)
            elif self.request.stop:
                text = self.stream.end(token)
        if ends or (self.stream is not None and self.stream.stopped):
            self.reason = "stop"
        elif self.request.cancelled:
            self.reason = "cancelled"
        elif len(self.ids) >= self.request.max_new_tokens:
            self.reason = "length"
        if self.reason and self.stream is not None:
            text += self.stream.finish()
            self.reason = "stop" if self.stream.stopped else self.reason
            self._cut(len(self.stream.text))
        if text or (self.reason and self.told < len(self.logprobs)):  # special tokens at the end have no text
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self.request.listener is not None:
            self.request.begun = True
            self.request.listener(text, self.logprobs[self.told :])
            self.told = len(self.logprobs)

    def _cut(self, length: int) -> None:
        """Forget tokens that belong to the stop text."""
        if self.stream is not None and self.stream.stopped and not self.echoed:
            keep = sum(entry.start < length for entry in self.logprobs)
            del self.logprobs[max(keep, self.told) :]

    def completion(self, tokenizer: Any, ends: frozenset[int]) -> Answer:
        """The whole answer."""
        ids = self.ids[:-1] if self.ids and self.ids[-1] in ends else self.ids
        text = self.stream.text if self.stream is not None else decode_tokens(tokenizer, ids)
        return Answer(
            (self.request.echo or "") + text,
            len(self.ids),
            self.reason or "length",
            tuple(self.logprobs),
            tuple(self.ids),
        )


class _Watch:
    """A stopping criterion of transformers: it sees every token as soon as it is chosen."""

    def __init__(self, rows: Sequence[_Row], ends: frozenset[int]) -> None:
        self.rows = rows
        self.ends = ends
        self.logits: Tensor | None = None
        """[b, vocabulary] of the last position, as the model gave them."""

    def hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Keeps the logits of a forward pass until the token is chosen."""
        self.logits = outputs.logits[:, -1].detach().float()

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[b]: which answers are done."""
        chosen = ids[:, -1]
        logprobs = self._logprobs(chosen)
        for i, (row, token) in enumerate(zip(self.rows, chosen.tolist(), strict=True)):
            if not row.reason:
                row.take(token, token in self.ends, logprobs[i])
        return torch.tensor([bool(row.reason) for row in self.rows], device=ids.device)

    def _logprobs(self, chosen: Tensor) -> list[TokenLogprob | None]:
        counts = [row.request.logprobs for row in self.rows]
        if all(count is None for count in counts):
            return [None] * len(counts)
        assert self.logits is not None, "the hook runs before the token is chosen"
        return token_logprobs(self.logits, chosen, counts)


def token_logprobs(logits: Tensor, chosen: Tensor, counts: Sequence[int | None]) -> list[TokenLogprob | None]:
    """Log-probabilities of the chosen tokens and of the likeliest.

    Args:
        logits: [b, vocabulary], of any float dtype; the log-softmax is float32.
        chosen: [b], tokens.
        counts: How many of the likeliest tokens each row needs; None: nothing.
    """
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, chosen.to(scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(max(1, *(count or 0 for count in counts)), dim=-1)
    values = top.values.tolist()
    tokens = top.indices.tolist()
    return [
        None
        if count is None
        else TokenLogprob(token, own[i], tuple(zip(tokens[i][:count], values[i][:count], strict=True)))
        for i, (count, token) in enumerate(zip(counts, chosen.tolist(), strict=True))
    ]


def _unlike(requests: Sequence[AnswerRequest]) -> tuple[AnswerRequest, AnswerRequest]:
    """One with images, and that with others which differs most in length."""
    seen = next(r for r in requests if r.pictures is not None)
    others = [r for r in requests if r.pictures is not seen.pictures]
    return seen, max(others, key=lambda r: abs(len(r.prompt) - len(seen.prompt)))


class Generator:
    """A loaded model that answers batches. One at a time: callers wait for one another elsewhere."""

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device
        self.adapters = adapters
        self.own = model.generation_config
        ends = self.own.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        if not isinstance(ends, list):
            ends = [] if ends is None else [ends]
        self.ends = frozenset(ends)
        pads = (tokenizer.pad_token_id, self.own.pad_token_id, *sorted(self.ends), 0)
        self.pad = next(p for p in pads if p is not None)
        self._tried: dict[bool, bool] = {False: True} if getattr(model.config, "model_type", "") in FAMILIES else {}
        """Whether prompts without images, and with some, can be answered together; found when the first such batch
        comes."""

    def _together(self, requests: Sequence[AnswerRequest]) -> bool:
        """Whether these prompts can go in one batch."""
        shown = any(r.pictures is not None for r in requests)
        if len({(len(r.prompt), id(r.pictures)) for r in requests}) == 1:
            return True
        if shown not in self._tried:
            pair = (
                _unlike(requests)
                if shown
                else tuple(AnswerRequest(p, 1) for p in random_prompts_of_two_lengths(self.tokenizer, self.pad))
            )
            first, second = (self._inputs([r]) for r in pair)
            self._tried[shown] = batch_padding_keeps_logits(self.model, self._inputs(pair), (first, second), self.pad)
            if not self._tried[shown]:
                prompts = "prompts with images" if shown else "prompts"
                log.info(
                    f"the answers of this model to {prompts} of different lengths depend on the batch, so prompts run "
                    "one at a time"
                )
        return self._tried[shown]

    def _inputs(self, requests: Sequence[AnswerRequest]) -> dict[str, Tensor]:
        """A batch [b, width], padded on the left, with its images."""
        width = max(len(r.prompt) for r in requests)
        rows = [(width - len(r.prompt), r.prompt) for r in requests]
        ids = [[self.pad] * left + list(prompt) for left, prompt in rows]
        mask = [[0] * left + [1] * len(prompt) for left, prompt in rows]
        seen = [(i, r.pictures) for i, r in enumerate(requests) if r.pictures is not None]
        pieces = [ImageInputs(i, rows[i][0], len(rows[i][1]), p.inputs) for i, p in seen]
        towers = join_image_inputs(pieces, seen[0][1].kinds, (len(requests), width)) if seen else {}
        return {
            "input_ids": torch.tensor(ids, device=self.device),
            "attention_mask": torch.tensor(mask, device=self.device),
        } | {
            name: t.to(self.device, self._inner.dtype if t.is_floating_point() else None) for name, t in towers.items()
        }

    @property
    def _inner(self) -> Any:
        """The model within its adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def generate(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        """The answers, in the order of the requests."""
        with active_adapter(self.model, self.adapters, sampling.adapter):
            return self._generate(requests, sampling)

    def _generate(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        if not self._together(requests):
            return [completion for request in requests for completion in self._generate([request], sampling)]
        live = any(r.listener is not None or r.stop for r in requests)
        rows = [
            _Row(r, IncrementalDetokenizer(self.tokenizer, r.stop) if live or r.logprobs is not None else None)
            for r in requests
        ]
        with _model_errors_as_ours(requests):
            for row in rows:
                row.begin(self._prompt_logprobs(row.request))
            growing = [row for row in rows if not row.reason]
            if growing:
                self._grow(growing, sampling)
        return [row.completion(self.tokenizer, self.ends) for row in rows]

    def _prompt_logprobs(self, request: AnswerRequest) -> list[TokenLogprob]:
        """Log-probabilities of an echoed prompt's own tokens, each after those before it.

        The prompt runs alone, because the logits of all its positions are in memory.
        """
        if request.echo is None or request.logprobs is None or request.cancelled:
            return []
        ids = torch.tensor([request.prompt], device=self.device)
        with torch.inference_mode():
            out = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        logits = out.logits[0, :-1]
        following = ids[0, 1:]
        entries: list[TokenLogprob | None] = [TokenLogprob(request.prompt[0], None)]
        for begin in range(0, len(following), SCORED_POSITIONS):
            chosen = following[begin : begin + SCORED_POSITIONS]
            entries += token_logprobs(
                logits[begin : begin + SCORED_POSITIONS], chosen, [request.logprobs] * len(chosen)
            )
        starts = TokenTexts(self.tokenizer).starts(request.prompt, request.echo)
        return [
            replace(entry, start=start, first=not start)
            for entry, start in zip(entries, starts, strict=True)
            if entry is not None
        ]

    def _grow(self, rows: Sequence[_Row], sampling: GenerationParams) -> None:
        """Generates the answers of a batch."""
        requests = [row.request for row in rows]
        watch = _Watch(rows, self.ends)
        inputs = self._inputs(requests)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        beams = sampling.num_beams > 1
        how: dict[str, Any] = {} if beams else {"stopping_criteria": [watch]}
        penalties = LogitPenalties(
            sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty, sampling.logit_bias
        )
        if penalties:  # transformers' own repetition penalty counts padding
            prompts = [request.prompt for request in requests]
            how["logits_processor"] = [PenaltyProcessor(penalties, prompts, sampling.num_beams)]
        hook = self._inner.register_forward_hook(watch.hook) if any(r.logprobs is not None for r in requests) else None
        try:
            with torch.inference_mode():
                out = self.model.generate(**inputs, generation_config=self._config(requests, sampling), **how)
        finally:
            if hook is not None:
                hook.remove()
        if beams:
            self._take_all(rows, out[:, inputs["input_ids"].shape[1] :].tolist())

    def _take_all(self, rows: Sequence[_Row], answers: Sequence[Sequence[int]]) -> None:
        """After a beam search, whose answers are known at its end only."""
        for row, ids in zip(rows, answers, strict=True):
            for token in ids:
                if not row.reason:
                    row.take(token, token in self.ends, None)

    def _config(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> Any:
        from transformers import GenerationConfig

        drawn = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
        }
        return GenerationConfig(
            max_new_tokens=max(r.max_new_tokens for r in requests),
            do_sample=sampling.temperature > 0,
            num_beams=sampling.num_beams,
            pad_token_id=self.pad,
            eos_token_id=sorted(self.ends) or None,
            **(drawn if sampling.temperature else {}),
        )


@contextmanager
def _model_errors_as_ours(requests: Sequence[AnswerRequest]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            Problem(
                "GPU memory",
                str(error).splitlines()[0],
                "use a smaller batch, fewer --max_new_tokens, or a lower --max_memory for this GPU",
            )
        ) from None
    except ValueError as error:
        if all(r.pictures is None for r in requests):
            raise
        raise UserError(
            Problem(
                "images",
                f"the model rejects the output of its processor ({first_line(error)})",
                "use a chat template with a placeholder for each image",
            )
        ) from None


LONG = 12
"""Tokens of the longer prompt that is tried."""
SHORT = 5
"""Tokens of the shorter prompt that is tried."""
NEW = 2
"""Tokens of each answer that are compared."""
EXACT = 1e-3
"""The share of the difference between two prompts that counts as rounding in float32."""
ROUNDED = 0.1
"""The share of the difference between two prompts that counts as rounding in half precision."""
Inputs = Mapping[str, Tensor]
"""A batch, as transformers' `generate` takes it."""


def random_prompts_of_two_lengths(tokenizer: Any, pad: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two prompts of ordinary tokens."""
    special = {pad, *tokenizer.all_special_ids}
    order = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [t for t in order if t not in special]
    return tuple(tokens[:LONG]), tuple(tokens[LONG : LONG + SHORT])


def batch_padding_keeps_logits(model: Any, both: Inputs, alone: tuple[Inputs, Inputs], pad: int) -> bool:
    """Whether two prompts get the answers that each gets alone."""
    try:
        together = _logits(model, both, pad)
        single = [_logits(model, inputs, pad)[:, 0] for inputs in alone]
    except (RuntimeError, ValueError, IndexError):
        # of a model that takes no such batch at all; what is wrong with a prompt is told alone
        return False
    steps = min(len(together), *map(len, single))
    apart = float((single[0][:steps] - single[1][:steps]).abs().max()) or float(
        single[0].abs().max()
    )  # 0: they are one prompt
    wrong = max(float((together[:steps, i] - s[:steps]).abs().max()) for i, s in enumerate(single))
    return wrong <= (EXACT if model.dtype == torch.float32 else ROUNDED) * apart


def _logits(model: Any, inputs: Inputs, pad: int) -> Tensor:
    """[steps, b, vocabulary]: at the prompts' ends and behind the first tokens of their answers."""
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=pad, output_logits=True, return_dict_in_generate=True
    )
    with torch.inference_mode():
        return torch.stack(model.generate(**inputs, generation_config=how).logits).float()
