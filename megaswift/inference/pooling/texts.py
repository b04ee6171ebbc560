"""Turns texts, pairs of texts and conversations into tokens, as sentence-transformers and transformers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.data.templates.sandbox import REFUSED
from megaswift.errors import first_line
from megaswift.inference.chat_inputs import ChatInputError
from megaswift.inference.pooling.folder import GENERATIVE, PoolingFolder
from megaswift.models.encoders import encoder_of
from megaswift.models.family import read_config_json

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompt before documents, as sentence-transformers looks for them."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PROBES = ("megaswiftquery", "megaswiftdocument")


@dataclass
class TextInput:
    """The tokens of a text, a pair or a conversation."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    """0 for tokens of the first text of a pair, 1 for those of the second, where the model has such types."""
    prompt: int = 0
    """Tokens of the prompt at the beginning, special tokens before it included."""
    cancelled: bool = False
    begun: bool = False


def context_of(folder: Path) -> int | None:
    """Return the most tokens that config.json says the model reads."""
    config = read_config_json(folder)
    if (encoder := encoder_of(config)) is not None:
        return encoder.longest
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(most := section.get("max_position_embeddings"), int):
            return most
    return None


class TextReader:
    """Tokenizes for one model. In one thread at a time."""

    def __init__(
        self, tokenizer: Any, found: PoolingFolder, context: int | None, longest: int | None = None, system: str = ""
    ) -> None:
        """`context`: tokens that the model reads; `longest`: --max_length; `system`: of conversations without one."""
        self.tokenizer = tokenizer
        self.system = system
        self.found = found
        limits = [found.max_length, longest, context]
        known = tokenizer.model_max_length
        limits.append(known if isinstance(known, int) and known < 1 << 30 else None)
        self.limit = min((limit for limit in limits if limit), default=None)
        """Maximum tokens of an input."""
        self._roles = _has_pair_roles(tokenizer)

    def prompt(self, name: str | None) -> str:
        """Return the text of a prompt; of the folder's own where `name` is None."""
        if name is None:
            return self.found.prompts.get(self.found.default_prompt, "")
        if name not in self.found.prompts:
            known = ", ".join(self.found.prompts) or "none"
            raise ChatInputError(f"the model has no prompt {name[:40]!r}; it has {known}")
        return self.found.prompts[name]

    def side_prompt(self, names: Sequence[str]) -> str:
        """Return the first of these prompts that the folder has, else its own."""
        return self.prompt(next((name for name in names if name in self.found.prompts), None))

    def of_text(self, text: str, prompt: str = "", most: int | None = None) -> TextInput:
        """Return the tokens of a text behind a prompt. `most`: its end is cut behind so many tokens."""
        if self.found.lowercases:
            text = text.lower()
        ids = self.tokenizer(prompt + text, **_cut(most))["input_ids"]
        return TextInput(self._checked(ids), prompt=self._prompt_length(prompt) if prompt else 0)

    def _prompt_length(self, prompt: str) -> int:
        """The tokens of a prompt without what the tokenizer puts behind a text."""
        ids = self.tokenizer(prompt)["input_ids"]
        return len(ids) - (bool(ids) and ids[-1] in (self.tokenizer.sep_token_id, self.tokenizer.eos_token_id))

    def of_pair(self, first: str, second: str, most: int | None = None) -> TextInput:
        """Return the tokens of a query and a document."""
        instruction = self.prompt(None)
        if self._roles:
            told = [{"role": "system", "content": instruction}] if instruction else []
            pair = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            return self.of_messages([*told, *pair], add_generation_prompt=False)
        if self.found.kind == GENERATIVE:
            text = _qwen3_reranker_text(instruction or INSTRUCTION, first, second)
            return self.of_tokens(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        encoded = self.tokenizer(first, second, **_cut(most))
        return TextInput(self._checked(encoded["input_ids"]), encoded.get("token_type_ids"))

    def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> TextInput:
        """Return the tokens of a conversation, as the chat template writes it. It is never cut: its end is read.

        `add_generation_prompt` None: as in training, up to where an answer would begin, unless the last message is one.
        """
        if not self.tokenizer.chat_template:
            raise ChatInputError("the model has no chat template")
        if self.system and messages[0]["role"] not in ("system", "developer", "query"):
            messages = [{"role": "system", "content": self.system}, *messages]
        begins = messages[-1]["role"] != "assistant" if add_generation_prompt is None else add_generation_prompt
        how = {"add_generation_prompt": begins, "tokenize": True, "return_dict": True}
        try:
            ids = self.tokenizer.apply_chat_template(list(messages), tools=list(tools) if tools else None, **how)[
                "input_ids"
            ]
        except REFUSED as error:
            raise ChatInputError(f"the chat template rejects this conversation ({first_line(error)})") from None
        return self.of_tokens(ids)

    def of_tokens(self, ids: Sequence[int], most: int | None = None) -> TextInput:
        """Return tokens as they are."""
        count = len(self.tokenizer)
        if (wrong := next((t for t in ids if not 0 <= t < count), None)) is not None:
            raise ChatInputError(f"{wrong} is not a token id of this model (0 to {count - 1})")
        return TextInput(self._checked(ids[:most]))

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        if not ids:
            raise ChatInputError("an input is empty")
        if self.limit is not None and len(ids) > self.limit:
            raise ChatInputError(f"an input has {len(ids)} tokens; the limit is {self.limit}")
        return ids


def _cut(most: int | None) -> dict[str, Any]:
    return {} if most is None else {"truncation": True, "max_length": most}


def _qwen3_reranker_text(instruction: str, query: str, document: str) -> str:
    """The text of a pair for a generative reranker whose chat template has no roles query and document."""
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    system = f"<|im_start|>system\n{judge}<|im_end|>\n"
    return f"{system}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _has_pair_roles(tokenizer: Any) -> bool:
    """Return whether the chat template writes messages of the roles query and document."""
    if not tokenizer.chat_template:
        return False
    pair = [{"role": role, "content": text} for role, text in zip(("query", "document"), _PROBES, strict=True)]
    try:
        text = tokenizer.apply_chat_template(pair, tokenize=False)
    except REFUSED:
        return False
    return all(probe in text for probe in _PROBES)
