"""Pieces beside whole texts: the same tokens and masks as tokenizers gives a whole text with offsets, for every
published pattern.

Covers: megaswift/data/encode/split_points.py.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN3_5

from megaswift.data.encode import pieces
from megaswift.data.encode.rows import EncodeSpec, RowEncoder, encode_spec
from megaswift.data.encode.split_points import _separator, token_safe_split_patterns
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError
from tests.data.makers import TEXT, config, tokenizer
from tests.sources import ROOT

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]"
    r"+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2 = ()
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt2": GPT2,
    "qwen2": (QWEN2,),
    "qwen3_5": (QWEN3_5,),
    "llama3": (LLAMA3,),
    "tekken": (TEKKEN,),
    "deepseek": DEEPSEEK,
    "both": (QWEN2, "gpt2"),
}
TOKENS = (
    "<|end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "<s>>",
    "[INST]",
    "[[INST]",
    "\t\t",
    " <sp>",
    "aa",
)
HARD = [
    *" \n\r\t/.,'aZ5é日かß",
    " ",
    "  ",
    "\n\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u0085",
    "\u2028",
    "\u180e",
    "\u200d",
    "\u0301",
    "\u3099",
    ">",
    "\u1100\u1161",
    "\u212a",
    "\u1fef",
    "🙂",
    "👩‍👩‍👧",
    "'s",
    "'LL",
    "123",
    "!?",
    "/\n",
    "->",
    "\ufeff",
    "\ufe0f",
    "<",
    "|>",
    "<|",
    "[",
    "hello",
    " world",
    "the",
    *TOKENS,
]


@cache
def made(name: str) -> Tokenizer:
    """A byte-level tokenizer that splits by a published pattern, with awkward added tokens."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="gpt2" in (name, *PATTERNS[name]))
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[name] if p != "gpt2"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if name != "gpt2":
        tok.normalizer = normalizers.NFC()
    # trained on the like of the tests' own texts, so that whatever pre-tokenization lets merge does merge
    rng = random.Random(0)
    text = [*TEXT, *(hard_text(rng).text for _ in range(4000))]
    tok.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=6000,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(TOKENS),
            show_progress=False,
        ),
    )
    tok.add_tokens(
        [
            AddedToken("<think>", normalized=False),
            AddedToken("K2", normalized=True),
            AddedToken("  \n", normalized=True),
        ]
    )
    return tok


def encoder(tok: Tokenizer) -> RowEncoder:
    found = RowEncoder(EncodeSpec("sft", tok.to_str(), None, None))
    found._end = None
    return found


def oracle(tok: Tokenizer, rendered: RenderedConversation) -> tuple[list[int], list[int]]:
    """Tokens of the whole text, and those that touch a span by their offsets."""
    encoding = tok.encode(rendered.text, add_special_tokens=False)
    spans = [(begin, end) for begin, end in rendered.spans if begin < end]
    mask = [int(any(a < end and b > begin for begin, end in spans)) for a, b in encoding.offsets]
    return encoding.ids, mask


def hard_text(rng: random.Random) -> RenderedConversation:
    text = "".join(rng.choices(HARD, k=rng.randint(0, 12)))
    edges = sorted(rng.choices(range(len(text) + 1), k=2 * rng.randint(0, 3)))
    return RenderedConversation(text, tuple(zip(edges[::2], edges[1::2], strict=True)))


@pytest.mark.wide
@pytest.mark.parametrize("name", PATTERNS)
def test_pieces_are_whole_texts_over_hard_strings(name: str) -> None:
    tok, rng = made(name), random.Random(name)
    ours = encoder(tok)
    assert ours._pieces is not None
    texts = [hard_text(rng) for _ in range(3000)]
    for _ in range(2):  # once unknown, once known
        for i in range(0, len(texts), 500):
            some = texts[i : i + 500]
            for text, (ids, mask), whole in zip(some, ours.tokenize(some), ours._tokenize_whole(some), strict=True):
                assert (ids.tolist(), mask.tolist()) == oracle(tok, text), repr(text)
                assert (ids.tolist(), mask.tolist()) == (whole[0].tolist(), whole[1].tolist())
                assert (ids.dtype, mask.dtype) == (whole[0].dtype, whole[1].dtype)


CONTENTS = [
    "",
    " ",
    "\n",
    "  \n ",
    "hi",
    " hi ",
    "hello world, how are you",
    "🙂🙂",
    "日本語の テキスト\n\n次",
    "a\n\n\n b\n",
    "<think>\nso\n</think>\n\nyes",
    "<|im_start|>assistant\nno<|im_end|>\n",
    "<|eot_id|>",
    "<|im_",
    "\u00e9e\u0301 \u0301",
    "\u3000x\u00a0y",
    "def f(a):\n    return a/\n\n# x",
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1, "b": "x  y\n\nz"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds  a\nb", "parameters": {"type": "object", "properties": {}}},
    }
]
CHATS = [("qwen", n) for n in ("qwen3", "qwen2_5", "qwen3_training", "qwen2_5_training")] + [
    ("llama", n) for n in ("llama3", "llama3_1", "llama3_training")
]


def hard_chat(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(CONTENTS)}] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 3)):
        messages += [
            {"role": "user", "content": rng.choice(CONTENTS)},
            {"role": "assistant", "content": rng.choice(CONTENTS)},
        ]
        if rng.random() < 0.3:
            messages[-1]["reasoning_content"] = rng.choice(CONTENTS)
        if rng.random() < 0.2:
            messages[-1]["tool_calls"] = [CALL]
            messages += [
                {"role": "tool", "content": rng.choice(CONTENTS)},
                {"role": "assistant", "content": rng.choice(CONTENTS)},
            ]
    return {"messages": messages, "tools": rng.choice([None, TOOLS])}


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "name"), CHATS)
@pytest.mark.parametrize("loss_scale", ["default", "last_round"])
def test_pieces_are_whole_texts_over_hard_conversations(kind: str, name: str, loss_scale: str) -> None:
    tok, rng = tokenizer(kind, name), random.Random(f"{kind} {name}")
    ours = RowEncoder(encode_spec(config(Path("/tmp"), "x", loss_scale=loss_scale).data, tok, "sft"))
    assert ours._pieces is not None
    rendered = []
    for _ in range(150):
        try:
            rendered.append(ours.render(hard_chat(rng)))
        except RowError:  # the template refuses tools, or hides the turns
            continue
    assert len(rendered) > 30
    some = 0
    for text, (ids, mask) in zip(rendered, ours.tokenize(rendered), strict=True):
        assert (ids.tolist(), mask.tolist()) == oracle(ours._tokenizer, text), repr(text)
        some += int(mask.any())
    assert some > 20


def test_plain_texts_end_with_the_end_token() -> None:
    tok = tokenizer("qwen")
    ours = RowEncoder(encode_spec(config(Path("/tmp"), "x", "pt").data, tok, "pt"))
    texts = [RenderedConversation(t, ((0, len(t)),)) for t in CONTENTS]
    for text, (ids, mask) in zip(texts, ours.tokenize(texts), strict=True):
        assert ids.tolist() == [*tok.encode(text.text, add_special_tokens=False), tok.eos_token_id]
        assert mask.tolist() == [1] * len(ids)


def test_the_table_begins_anew_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECES", 40)
    tok, rng = made("qwen2"), random.Random(1)
    ours = encoder(tok)
    seen = []
    for _ in range(50):
        some = [hard_text(rng) for _ in range(3)]
        assert [i.tolist() for i, _ in ours.tokenize(some)] == [oracle(tok, t)[0] for t in some]
        seen.append(len(ours._pieces._numbers))
    assert min(b - a for a, b in zip(seen, seen[1:], strict=False)) < 0 and max(seen) < 100


def test_a_refused_text_leaves_the_table_right() -> None:
    tok = made("qwen2")
    ours = encoder(tok)
    with pytest.raises((TypeError, UnicodeEncodeError)):
        list(ours.tokenize([RenderedConversation("new words \ud800", ())]))
    assert (
        next(ours.tokenize([RenderedConversation("other new words", ())]))[0].tolist()
        == tok.encode("other new words").ids
    )


REFUSED: list[dict[str, Any]] = [
    {"added": AddedToken("<x>", rstrip=True, normalized=False)},
    {"added": AddedToken("<x>", lstrip=True, normalized=False)},
    {"added": AddedToken("<x>", single_word=True, normalized=False)},
    {"added": AddedToken("two words", normalized=False)},
    {"added": AddedToken("Ends ", normalized=True)},
    {"added": AddedToken("\nx", normalized=True)},
    {"normalizer": normalizers.Lowercase()},
    {"normalizer": normalizers.Prepend("_")},
    {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    {"pre_tokenizer": pre_tokenizers.ByteLevel(use_regex=False)},
    {"pre_tokenizer": pre_tokenizers.Split(Regex(r"\w+ \w+|\s+"), "isolated")},
    {"pre_tokenizer": pre_tokenizers.Metaspace()},
    {"pre_tokenizer": pre_tokenizers.Split(Regex(QWEN2), "removed")},
    {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},
    {"pre_tokenizer": pre_tokenizers.Split(Regex(QWEN2), "isolated", invert=True)},
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_not_proven_is_encoded_whole(case: int) -> None:
    tok = Tokenizer.from_str(made("qwen2").to_str())
    assert token_safe_split_patterns(tok) is not None
    for what, value in REFUSED[case].items():
        if what == "added":
            tok.add_tokens([value])
        else:
            setattr(tok, what, value)
    assert token_safe_split_patterns(tok) is None and encoder(tok)._pieces is None
    text = RenderedConversation("One two  words\n<x> Ends x\nx", ((4, 9),))
    assert [(i.tolist(), m.tolist()) for i, m in encoder(tok).tokenize([text])] == [oracle(tok, text)]


def test_dropout_and_other_models_are_encoded_whole() -> None:
    facts = json.loads(made("qwen2").to_str())
    facts["model"]["dropout"] = 0.1
    assert token_safe_split_patterns(Tokenizer.from_str(json.dumps(facts))) is None
    assert token_safe_split_patterns(tokenizer("mistral").backend_tokenizer) is None
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert token_safe_split_patterns(bare) is None  # no added token


def test_a_separator_is_found_wherever_it_stands() -> None:
    assert _separator(["<|a|>", "<b>"]) == "<|a|>"
    # the first overlaps itself, the second lies in the third
    assert _separator(["aa", "[INST]", "[[INST]"]) == "[[INST]"
    assert _separator(["<b>", "x<"]) == "x<"  # whose end begins the first
    assert _separator(["日"]) is None


def test_no_pattern_is_possessive() -> None:
    """Up to Python 3.11.4 `re` can go back behind a possessive group's beginning (CPython issue 106052): Debian's
    3.11.2 found newlines without an end."""
    wrong = re.compile(r"[)\]}][*+?]\+|\(\?>")
    files = {p: p.read_text(encoding="utf-8") for p in (ROOT / "megaswift").rglob("*.py")}
    assert wrong.search(r"(?:a|b)*+") and wrong.search(r"(?>a)") and not wrong.search(r"(a)*\+?")
    lines = [(p.name, line) for p, text in files.items() for line in text.splitlines() if "re." in line]
    assert len(lines) > 100 and [(name, line) for name, line in lines if wrong.search(line)] == []
