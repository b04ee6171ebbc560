"""Generations on disk: what was sampled and how it was rewarded, to train from it again without a sampler.

Owns the files: one a generation, `generation-000012.safetensors`, named by the draws that were trained on before.
Tokens are tensors; the rest is JSON in the header, with a checksum of both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megaswift.base.atomic_writes import atomic_file, safetensors_errors_as_oserror
from megaswift.data.prompts.source import Prompt
from megaswift.errors import CheckpointError, ConfigError, Problem
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, asked_prompt, model_token_mask
from megaswift.trainers.rl.scorer import ScoredCompletion

NAME = re.compile(r"generation-(\d{6,})\.safetensors")
FORMAT = "megaswift rollouts 3"
EARLIER = ("megaswift rollouts 1", "megaswift rollouts 2")
"""Both with rewards of tokens as JSON. The first without `further`, because an agent's session has the one segment that
was trained on, and without `drawn`."""
TURNS = ("messages", "rewards", "ends", "turns", "rewritten", "prompt_ids", "prompt_content", "segments")
"""Fields of a conversation beside its tokens."""


@dataclass(frozen=True)
class Generation:
    """The completions of a generation, in the order in which a run trains on them."""

    number: int
    """Draws that the run has trained on before."""
    draws: int
    """Draws of this generation: more than 1 where groups without spread were drawn again."""
    places: tuple[int, ...]
    """The place of each completion among all that were drawn, each prompt once for each of its completions."""
    seeds: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    """The tokens of the data set's prompt of each completion, before what an environment observes."""
    rollouts: tuple[ScoredCompletion, ...]
    drawn: tuple[int, ...] = ()
    """The place of each prompt of its draws in the endless order of prompts."""
    temperature: float | None = None
    """Of the sampler, at which log-probabilities are compared; None in records that do not have it."""


class RolloutWriter:
    """Writes generations into a folder. Used on one rank."""

    def __init__(self, folder: Path, resumed: bool, weights: str | None = None) -> None:
        """Create the folder; raise ConfigError where it has generations that this run does not continue.
        `weights`: a fingerprint of those that the run starts from."""
        if not resumed and recorded_files(folder):
            rule = "has the rollouts of another run"
            raise ConfigError(Problem(f"--save_rollouts {folder}", rule, "an empty folder, or remove its files"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"cannot be made a folder: {error.strerror or error}"
            raise ConfigError(Problem(f"--save_rollouts {folder}", rule, "a folder that can be written")) from None
        self.folder = folder
        self.weights = weights

    def write(self, generation: Generation) -> None:
        """Write a generation; replace one of the same number, which a run has before it is resumed."""
        tensors, values = _parts(generation)
        text = json.dumps(values | {"weights": self.weights}, ensure_ascii=False, separators=(",", ":"))
        header = {"format": FORMAT, "record": text, "sha256": _checksum(tensors, text)}
        file = self.folder / f"generation-{generation.number:06}.safetensors"
        with atomic_file(file) as path, safetensors_errors_as_oserror(file):
            save_file(tensors, path, header)


class RolloutReader:
    """Reads the generations of a folder that `--save_rollouts` wrote. Used on one rank."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        self.weights = weights
        self.what = f"--replay_rollouts {folder}"
        self.files = recorded_files(folder)

    def check(
        self,
        needed: int,
        size: int,
        temperature: float,
        prompts_at: Callable[[Sequence[int]], Sequence[Prompt]] | None = None,
    ) -> None:
        """Read every file.

        Args:
            needed: Generations that the run takes.
            size: Completions of each.
            temperature: Of the run.
            prompts_at: The prompts at places of the run's endless order, each once for each of its completions; without
                it prompts are not compared.

        Raises:
            ConfigError: They are of another model, size or temperature, answer other prompts, are fewer, or one of them
                is missing.
            CheckpointError: A file is damaged.
        """
        if not self.files:
            raise ConfigError(Problem(self.what, "is not a folder with rollouts", "the folder of --save_rollouts"))
        draws: dict[int, int] = {}
        for number in self.files:
            state = self.read(number)
            draws[number] = state["draws"]
            if self.weights is not None and state.get("weights") not in (None, self.weights):
                rule = "is of a run that started from another model"
                raise ConfigError(Problem(self.what, rule, "--model of the recorded run"))
            found = len(state["total"])
            if found != size:
                rule = f"has {found} completions a generation, and the run takes {size}"
                fix = "the batch sizes, --num_generations and --num_iterations of the recorded run"
                raise ConfigError(Problem(self.what, rule, fix))
            if state.get("temperature") not in (None, temperature):
                rule = f"was sampled at temperature {state['temperature']}, and the run has {temperature}"
                raise ConfigError(Problem(self.what, rule, f"--temperature {state['temperature']}"))
            if prompts_at is not None and "drawn" in state:
                check_prompts(state, prompts_at(state["drawn"]))
        if len(self.files) < needed:
            rule = f"has {len(self.files)} generations, and the run takes {needed}"
            raise ConfigError(Problem(self.what, rule, "a smaller --max_steps, or the folder of --save_rollouts"))
        number = 0
        for _ in range(needed):
            if number not in draws:
                rule = f"lacks generation {number}, which follows those before it"
                raise ConfigError(Problem(self.what, rule, "all files of --save_rollouts, under their own names"))
            number += draws[number]

    def read(self, number: int) -> dict[str, Any]:
        """Return the content of a generation as plain values, for `generation_of`."""
        if number not in self.files:
            fix = "start from the model of the recorded run, and resume at a step where a generation begins"
            raise ConfigError(Problem(self.what, f"has no generation {number}", fix))
        path = self.files[number]
        state = _read(path)
        if state["number"] != number:
            raise CheckpointError(_damaged(path, f"has another name: it is generation {state['number']}"))
        return state


def recorded_files(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by their generations' numbers."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {int(match[1]): path for path in found if (match := NAME.fullmatch(path.name))}


def check_prompts(state: Mapping[str, Any], taken: Sequence[Prompt]) -> None:
    """Compare the recorded prompts with those that the run draws; raise ConfigError where they are others.

    Args:
        state: The content of a file.
        taken: The prompts of its draws, each once for each of its completions.
    """
    prompts = _cut(state["prompt_tokens"], state["prompt_lengths"])
    for i, (place, row, prompt) in enumerate(zip(state["places"], state["rows"], state["prompt"], strict=True)):
        given = taken[place] if place < len(taken) else None
        if given is not None and (given.number, [*given.token_ids]) == (row, prompts[prompt]):
            continue
        drawn = "none"
        if given is not None:
            drawn = f"row {given.number}" + (", which has other tokens" if given.number == row else "")
        rule = f"completion {i} of generation {state['number']} answers row {row}; the run draws {drawn}"
        fix = "the model, data sets, --num_generations, --seed and --shuffle of the recorded run"
        raise ConfigError(Problem("--replay_rollouts", rule, fix))


def generation_of(
    state: Mapping[str, Any], taken: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
) -> Generation:
    """Build a generation from what `RolloutReader.read` returned.

    Args:
        state: The content of a file.
        taken: The prompts of its draws, each once for each of its completions.
        decode: Tokens to text, without special tokens.

    Raises:
        ConfigError: They are other prompts than the recorded ones.
    """
    prompts = _cut(state["prompt_tokens"], state["prompt_lengths"])
    check_prompts(state, taken)
    of_tokens = _token_rewards(state)
    rollouts = []
    for i, completion in enumerate(_completions(state)):
        given = taken[state["places"][i]]
        rewards = {name: _number(values[i]) for name, values in state["rewards"].items()}
        tokens = of_tokens[i]
        rollouts.append(
            ScoredCompletion(
                asked_prompt(given, completion),
                completion,
                decode(completion.token_ids),
                rewards,
                _number(state["total"][i]),
                None if tokens is None else tuple(tokens),
                _number(state["baseline"][i]),
            )
        )
    head = (state["number"], state["draws"], tuple(state["places"]), tuple(state["seeds"]))
    asked = tuple(tuple(prompts[k]) for k in state["prompt"])
    return Generation(*head, asked, tuple(rollouts), tuple(state.get("drawn", ())), state.get("temperature"))


def _completions(state: Mapping[str, Any]) -> Iterator[Completion]:
    tokens = _cut(state["tokens"], state["lengths"])
    own = _cut(
        np.unpackbits(np.asarray(state["own"], dtype=np.uint8))[: len(state["tokens"])].tolist(), state["lengths"]
    )
    logprobs = _cut(state["logprobs"], [sum(mask) for mask in own])
    versions = _cut(state["versions"], state["lengths"])
    further = _further(state)
    for i, (ids, mask, said) in enumerate(zip(tokens, own, logprobs, strict=True)):
        turns = state["conversations"][i]
        runs = tuple((version, len([*same])) for version, same in groupby(versions[i]))
        plain = (tuple(ids), tuple(said), bool(state["finished"][i]))
        if turns is None:
            yield Completion(*plain, versions=runs)
            continue
        more: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in turns.items() if name in TURNS
        }
        yield MultiTurnCompletion(*plain, own=tuple(map(bool, mask)), versions=runs, further=further[i], **more)


def _further(state: Mapping[str, Any]) -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
    """The further segments of each completion."""
    if "further" not in state:
        return [()] * len(state["lengths"])
    prompts = iter(_cut(state["further_tokens"], [n for segments in state["further"] for _, n in segments]))
    return [tuple((place, tuple(next(prompts))) for place, _ in segments) for segments in state["further"]]


def _token_rewards(state: Mapping[str, Any]) -> Sequence[Sequence[float] | None]:
    """The rewards of each completion's tokens, or None."""
    if "rewarded" not in state:
        return state["token_rewards"]
    rewards = _cut(state["token_rewards"], [n or 0 for n in state["rewarded"]])
    return [None if n is None else found for n, found in zip(state["rewarded"], rewards, strict=True)]


def _parts(generation: Generation) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and plain values of a generation."""
    rollouts = generation.rollouts
    completions = [rollout.completion for rollout in rollouts]
    own = [model_token_mask(completion) for completion in completions]
    asked: dict[tuple[int, ...], int] = {}
    prompt = [asked.setdefault(ids, len(asked)) for ids in generation.prompts]
    further = [c.further if isinstance(c, MultiTurnCompletion) else () for c in completions]
    tokens = np.asarray([t for c in completions for t in c.token_ids], dtype=np.int32)
    tensors: dict[str, np.ndarray] = {
        "tokens": tokens,
        "own": np.packbits(np.asarray([bool(o) for mask in own for o in mask], dtype=np.uint8)),
        "logprobs": np.asarray([p for c in completions for p in c.logprobs], dtype=np.float32),
        "versions": np.asarray([v for c in completions for v, n in c.versions for _ in range(n)], dtype=np.int32),
        "prompt_tokens": np.asarray([t for ids in asked for t in ids], dtype=np.int32),
        "further_tokens": np.asarray([t for segments in further for _, ids in segments for t in ids], dtype=np.int32),
        "token_rewards": np.asarray([t for r in rollouts for t in r.tokens or ()], dtype=np.float64),
        "seeds": np.asarray(generation.seeds, dtype=np.int64),
        "total": np.asarray([r.total for r in rollouts], dtype=np.float64),
    }
    values: dict[str, Any] = {
        "number": generation.number,
        "draws": generation.draws,
        "places": [*generation.places],
        "drawn": [*generation.drawn],
        "temperature": generation.temperature,
        "rows": [r.prompt.number for r in rollouts],
        "prompt": prompt,
        "prompt_lengths": [len(ids) for ids in asked],
        "lengths": [len(c.token_ids) for c in completions],
        "finished": [int(c.finished) for c in completions],
        "rewards": {name: [_plain(r.rewards[name]) for r in rollouts] for name in rollouts[0].rewards},
        "baseline": [_plain(r.baseline) for r in rollouts],
        "rewarded": [None if r.tokens is None else len(r.tokens) for r in rollouts],
        "conversations": [_turns(c) for c in completions],
        "further": [[(place, len(ids)) for place, ids in segments] for segments in further],
    }
    return tensors, values


def _turns(completion: Completion) -> dict[str, Any] | None:
    if not isinstance(completion, MultiTurnCompletion):
        return None
    return {name: getattr(completion, name) for name in TURNS}


def _plain(value: float) -> float | None:
    """A number for JSON; NaN, of a reward that does not apply, as null."""
    return None if value != value else value


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _cut(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    return [[*values[start:end]] for start, end in pairwise(accumulate(lengths, initial=0))]


def _checksum(tensors: Mapping[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name].tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; CheckpointError where it is not what was written."""
    try:
        with safe_open(path, "np") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = header.get("format") in (FORMAT, *EARLIER)
        whole = known and header["sha256"] == _checksum(tensors, header["record"])
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(_damaged(path, f"cannot be read: {error}")) from None
    if not known:
        rule = f"has the format {header.get('format', 'of other files')!r}, and not {FORMAT!r}"
        raise CheckpointError(Problem(f"rollouts {path}", rule, "use the version of megaswift that wrote it"))
    if not whole:
        raise CheckpointError(_damaged(path, "is damaged: its content does not have its checksum"))
    return json.loads(header["record"]) | {name: values.tolist() for name, values in tensors.items()}


def _damaged(path: Path, rule: str) -> Problem:
    return Problem(f"rollouts {path}", rule, "copy the file again, or replay up to the generation before it")
