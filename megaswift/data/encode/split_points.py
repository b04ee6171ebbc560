"""Positions at which a text can be split without changing its tokens.

Owns the proof, which is about the tokenizer's own rules and never about sample texts. `token_safe_split_patterns`
returns None for a tokenizer that is not proven; `rows.py` then encodes whole texts.
`pieces.py` encodes the parts.

Two kinds of places are cut:

1. Around every added token with `normalized: false`: tokenizers takes these out before it normalizes or splits
   anything.
2. Between a SOLID character (never white space, in any version of Unicode) and a space; and between a line end and a
   NEXT character, where the white space that the line end closes is a single line end after a SOLID character, or any
   (see below).

The second is right when no added token lies across such a place, when the normalizer works on both sides apart (none,
or NFC: a space, or what follows a line end, never composes with what stands before), and when pre-tokenization has a
boundary there that does not depend on the other side. For pre-tokenization by a regular expression the latter is a
property of each of its alternatives, which SAFE lists after inspection:

- No match holds a place of the second kind inside, so what is consumed never reaches across.
- No alternative looks behind, and none looks ahead but `\\s+(?!\\S)`. Before a space that one behaves as at the end of
  the text. Before a NEXT character it does not: it would give back the last character of a run. A single line end is
  matched whole by `\\s+` instead, to the same effect; a longer run is matched whole by `\\s*[\\r\\n]+` where that
  stands earlier, and is cut only then.
- `\\s+` is there, so that white space always belongs to a match, which then begins or ends at the cut.

A pre-tokenizer in several stages has the first two properties if all its stages have; one that has the third is enough.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

SOLID = "!-~\u00a1-\u167f\u3001-\ufefe\uff00-\U0010ffff"
NEXT = "!-.0-~\u3001-\ufefe\uff00-\U0010ffff"
"""SOLID but `/`, which some patterns join to line ends, and what lies below the ideographs."""

_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}+{_LOWER}*")
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+"
_BEFORE_WORD = r"\s+(?!\S)"
_SPACE = r"\s+"
SAFE = frozenset(
    {
        "'s",
        "'t",
        "'re",
        "'ve",
        "'m",
        "'ll",
        "'d",
        _SHORT,
        r"'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *_CASED,
        *(c + _SHORT + "?" for c in _CASED),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"\p{N}",
        r"\p{N}+",
        r" ?\p{N}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _LINES,
        _BEFORE_WORD,
        _SPACE,
    }
)
"""Alternatives of GPT-2, cl100k (Llama 3), o200k, Qwen 2 to 3.5, Mistral's Tekken and DeepSeek."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by."""


@dataclass(frozen=True)
class TokenSafeSplitPatterns:
    """How to cut: first at `tokens` (one group: re.split keeps them), then each part between them into `parts`
    (re.findall)."""

    tokens: re.Pattern[str]
    parts: re.Pattern[str]
    added: tuple[str, ...]
    """What `tokens` matches."""
    separator: str | None
    """One of `added` that is found wherever it stands between parts, whatever they are."""


def token_safe_split_patterns(tokenizer: Tokenizer) -> TokenSafeSplitPatterns | None:
    """The places at which texts for `tokenizer` can be cut; None where that is not proven."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.dropout or not _normalizes_apart(tokenizer.normalizer):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    # of two that fit, tokenizers takes the longer
    plain = sorted((t.content for t in added if not t.normalized), key=len, reverse=True)
    if not plain or not all(map(_simple, added)):
        return None
    patterns = _patterns(tokenizer.pre_tokenizer)
    if patterns is None or not any(_SPACE in p for p in patterns):
        return None
    runs = all(_LINES in p[: p.index(_BEFORE_WORD)] for p in patterns if _BEFORE_WORD in p)
    line = f"[{NEXT}]" if runs else f"(?<=[{SOLID}]\n)[{NEXT}]"
    parts = re.compile(f" *[^ \n]*(?:(?:(?<![{SOLID}]) +|\n(?!{line}))[^ \n]*)*\n?")
    return TokenSafeSplitPatterns(
        re.compile("(" + "|".join(map(re.escape, plain)) + ")"), parts, tuple(plain), _separator(plain)
    )


def _separator(added: list[str]) -> str | None:
    """A token of visible ASCII that no other token, nor itself, can overlap from the left or hold."""
    for text in added:
        if re.fullmatch("[!-~]+", text) and not any(
            (text in other and text != other)
            or any(text.startswith(other[i:]) for i in range(text == other, len(other)))
            for other in added
        ):
            return text
    return None


def _simple(token: AddedToken) -> bool:
    """True for a token that takes in no neighbours and lies across no cut: white space, or a word with spaces before it
    at most."""
    text = token.content
    return (
        not (token.lstrip or token.rstrip or token.single_word)
        and text != ""
        and (text.isspace() or text.split() == [text.lstrip(" ")])
    )


def _facts(component: Any) -> dict[str, Any]:
    return json.loads(component.__getstate__())


def _normalizes_apart(component: Any) -> bool:
    return component is None or _facts(component) in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []})


def _patterns(component: Any) -> list[list[str]] | None:
    """The alternatives of each stage that splits by a regular expression; None where a stage is not known to be
    safe."""
    if component is None:
        return None
    facts = _facts(component)
    patterns: list[list[str]] = []
    for stage in facts["pretokenizers"] if facts["type"] == "Sequence" else [facts]:
        if stage["type"] == "ByteLevel" and not stage["add_prefix_space"]:
            patterns += [_alternatives(_GPT2)] if stage.get("use_regex", True) else []
        elif (
            stage["type"] == "Split"
            and stage["behavior"] == "Isolated"
            and not stage["invert"]
            and "Regex" in stage["pattern"]
        ):
            patterns.append(_alternatives(stage["pattern"]["Regex"]))
        elif stage["type"] != "Digits":  # runs of digits hold neither white space nor line ends
            return None
    return patterns if all(SAFE.issuperset(p) for p in patterns) else None


def _alternatives(pattern: str) -> list[str]:
    """The outermost alternatives of a regular expression."""
    out = [""]
    depth = 0
    bracket = False
    escaped = False
    for c in pattern:
        if not escaped and not bracket and c == "|" and depth == 0:
            out.append("")
            continue
        out[-1] += c
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif bracket:
            bracket = c != "]"
        else:
            bracket = c == "["
            depth += (c == "(") - (c == ")")
    return out
