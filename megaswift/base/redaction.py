"""Recognition and redaction of secrets (tokens, keys, passwords): by the names of options and variables, by their place
in a URL, a header or a line of shell, and by the shapes of well-known tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from megaswift.errors import Problem

NAME = re.compile(
    r"^api_|(api|access|private|auth|account|shared|encryption|master)_?key|passw|passphrase|secret|credential|bearer"
    r"|(hf|hub|api|access|auth|session|security|refresh|client|bot|sas|service|registry|github|gitlab)_?token"
    r"|(^|_)(keys?|token|pass)$|_pwd$"
)
NOT_SECRET = re.compile(
    r"(eos|bos|pad|unk|mask|stop|image|prng|positive|negative)_(token|key)$|(primary|foreign|sort|partition)_key$|_(file|path|dir|stdin|name|type|mode)$|(first|two|one|multi)_pass$"
)
"""Tokens of a vocabulary, keys of random generators, and places of secrets."""
PLAIN = re.compile(r"(key|keys|token|pass|credentials?)$")
"""Names that also stand for other things (`sort --key 2`, `key: question`) unless their value looks like a secret."""
MASK = "***"
LEAST = 4
"""Characters of a value that is looked for inside other texts; shorter ones would be found everywhere."""

_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'`;|&<>,})\]]+)"
_HARMLESS = re.compile(
    r"[\"']?(\$|`|[\[{(]|~?/|\.{1,2}/|\*|<|%[sd]?$|id=)|[\"']?(true|false|yes|no|none|null|auto|empty|dummy|\.\.\.)?[\"']?$",
    re.I,
)
"""Values that are an expansion, a path, a mask, a placeholder or a switch."""
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+=.~-]{12,}[\"']?$")

_URL_USER = r"\b[a-z][a-z0-9+.-]{0,30}://(?P<both>[^\s/@:'\"]*:[^\s/@'\"]+)@|\bhttps?://(?P<user>[^\s/@'\"]+)@"
URL_CREDENTIALS = re.compile(_URL_USER, re.I)
"""`SCHEME://USER:PASSWORD@`, and `https://TOKEN@`."""
_QUERY = re.compile(r"[?&](?P<name>[\w.-]+)=(?P<value>[^\s&#'\"<>`]+)")
_QUERY_NAMES = re.compile(r"^(sig|signature|x_(amz|goog|oss)_(signature|credential|security_token)|auth)$")
_SHAPES = re.compile(
    r"(?<![\w-])(?P<value>"
    r"hf_(?=[A-Za-z]*[0-9A-Z])[A-Za-z0-9]{16,}|sk-(?=[\w-]*[0-9])[\w-]{16,}|gh[opsru]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{20,}|gl(pat|rt|ptt)-[\w-]{16,}|(AKIA|ASIA)[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{20,}"
    r"|LTAI[A-Za-z0-9]{12,}|ms-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,})"
    r"|(?P<hook>\bhooks\.slack\.com/services/[\w/]{20,}|\b(discord|discordapp)\.com/api/webhooks/\d+/[\w-]{16,})"
    r"|(?P<pem>-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
"""Tokens by the prefixes that their services give them, and addresses that need no other token."""
_HEADER = re.compile(
    rf"\b(?:authorization|cookie)[\"']?[ \t]*[:=][ \t]*[\"']?(?:(?:bearer|basic|token|digest|apikey)[ \t]+)?{_VALUE}",
    re.I,
)
_BEARER = re.compile(rf"\bbearer[ \t]+{_VALUE}", re.I)
_FLAG = re.compile(rf"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*)(?:=|[ \t]+){_VALUE}")
_ASSIGNED = re.compile(
    rf"(?<![\w$.-])(?P<name>[A-Za-z_][\w.-]*)[\"']?\]?(?P<sign>[ \t]*=|[ \t]*:(?=[ \t\"']|$)[ \t]*)[ \t]*{_VALUE}"
)
_NETRC = re.compile(rf"\blogin\s+\S+\s+password\s+{_VALUE}")
_LOGIN = re.compile(r"(?<![\w-])login(?![\w-])(?P<rest>[^\n;|&]*)")
_LOGIN_FLAG = re.compile(rf"(?<![\w-])-[tpk][= \t]*{_VALUE}")
_LOGIN_WORD = re.compile(r"\A(?:[ \t]+--?[A-Za-z][\w-]*)*[ \t]+(?P<value>[A-Za-z0-9_-]{20,})(?!\S)")
_USER = re.compile(
    r"\bcurl\b[^\n;|]{0,400}?[ \t](?:-u|-U|--user|--proxy-user)[= \t]*[\"']?[^\s\"':$]+:(?P<value>[^\s\"'$]+)"
)
_SETTING = re.compile(
    rf"\b(?:setenv|setx|config(?:ure)?)[ \t]+(?:(?:set|--?\w+)[ \t]+)*(?P<name>[A-Za-z_][\w.-]*)[ \t]+{_VALUE}"
)
_SSHPASS = re.compile(rf"\bsshpass[ \t]+-p[ \t]*{_VALUE}")
_REDIS = re.compile(rf"\bredis-cli\b[^\n;|]{{0,400}}?[ \t]-a[ \t]+{_VALUE}")
_PIPED = re.compile(
    rf"\b(?:echo|printf)[ \t]+(?:-n[ \t]+|%s[ \t]+)?{_VALUE}[ \t]*\|[^\n;|]{{0,400}}-(?:stdin|with-token)\b"
)
"""`echo PASSWORD | docker login --password-stdin`."""


def is_secret(name: str) -> bool:
    """Whether an option or variable of this name holds a secret."""
    low = name.lower().replace("-", "_").replace(".", "_")
    return NAME.search(low) is not None and NOT_SECRET.search(low) is None


def has_url_credentials(text: str) -> bool:
    """Whether a URL in the text holds a password or a token, also in its query; `ssh://git@host` holds neither."""
    return next(_in_urls(text), None) is not None


def has_secret(text: str) -> bool:
    """Whether a text (a line of shell, of a configuration file, a URL, a header) holds a secret's value."""
    return next(_spans(text), None) is not None


def secret_lines(text: str) -> list[int]:
    """Numbers of the lines with a secret's value, from 1."""
    return sorted({text.count("\n", 0, start) + 1 for start, _ in _spans(text)})


def redacted(text: str) -> str:
    """The text with a mask in the place of every secret's value."""
    return _masked(text, _spans(text))


def redacted_urls(text: str) -> str:
    """The text with a mask in the place of secrets in URLs and of tokens of a known shape."""
    return _masked(text, [*_in_urls(text), *_matches(_SHAPES, text)])


def redact_problems(problems: Iterable[Problem], values: Iterable[str]) -> list[Problem]:
    """The problems without these secret values, and without secrets in URLs."""
    hidden = sorted((v for v in values if len(v) >= LEAST), key=len, reverse=True)
    return [Problem(*(redacted_urls(_without(part, hidden)) for part in (p.what, p.rule, p.fix))) for p in problems]


def redacted_command(text: str) -> str:
    """A line of flags and words without the words that follow a secret's flag, and without other secrets."""

    def hidden(found: re.Match[str]) -> str:
        return found[1] + found[2] + MASK if is_secret(found[1].lstrip("-")) else found[0]

    return redacted(re.sub(r"(--[\w-]+)([= ])([^\s-]\S*(?: [^\s-]\S*)*)", hidden, text))


_Span = tuple[int, int]
"""Start and end of a secret's value."""


def _spans(text: str) -> Iterator[_Span]:
    """Spans may overlap."""
    yield from _in_urls(text)
    for pattern in (_SHAPES, _HEADER, _NETRC, _USER, _SSHPASS, _REDIS, _PIPED):
        yield from _matches(pattern, text)
    yield from (found.span("value") for found in _BEARER.finditer(text) if _RANDOM.match(found["value"]))
    for pattern in (_FLAG, _SETTING):
        yield from (found.span("value") for found in pattern.finditer(text) if _is_named(found["name"], found["value"]))
    yield from (found.span("value") for found in _ASSIGNED.finditer(text) if _is_assigned(found))
    for login in _LOGIN.finditer(text):
        for pattern in (_LOGIN_FLAG, _LOGIN_WORD):
            for found in pattern.finditer(login["rest"]):
                value = found["value"]
                if not _HARMLESS.match(value) and (pattern is _LOGIN_FLAG or _RANDOM.match(value)):
                    begin = login.start("rest")
                    yield begin + found.start("value"), begin + found.end("value")


def _in_urls(text: str) -> Iterator[_Span]:
    for found in URL_CREDENTIALS.finditer(text):
        group = "both" if found["both"] else "user"
        if not found[group].rpartition(":")[2].startswith(("$", MASK)):
            yield found.span(group)
    for found in _QUERY.finditer(text):
        name = found["name"].lower().replace("-", "_")
        if (is_secret(name) or _QUERY_NAMES.match(name)) and not _HARMLESS.match(found["value"]):
            yield found.span("value")


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[_Span]:
    for found in pattern.finditer(text):
        group = next(name for name, text in found.groupdict().items() if text)
        if not _HARMLESS.match(found[group]):
            yield found.span(group)


def _is_named(name: str, value: str) -> bool:
    """Whether this value of a flag is a secret."""
    if not is_secret(name) or _HARMLESS.match(value):
        return False
    is_plain = PLAIN.fullmatch(name.lower()) is not None and name.lower() not in ("token", "pass")
    return not is_plain or _RANDOM.match(value.strip("\"'")) is not None


def _is_assigned(found: re.Match[str]) -> bool:
    """Whether `NAME=VALUE` or `NAME: VALUE` gives a secret. Written in capitals any such name is a variable's."""
    name = found["name"]
    value = found["value"]
    if not is_secret(name) or _HARMLESS.match(value):
        return False
    by_colon = ":" in found["sign"]
    if by_colon and value.strip("\"'").islower() and " " in found.string[found.end() : found.end() + 1]:
        return False  # a sentence: "the password: ask your admin"
    is_plain = PLAIN.fullmatch(name.lower()) is not None and (by_colon or not name.isupper())
    return not is_plain or _RANDOM.match(value.strip("\"'")) is not None


def _masked(text: str, spans: Iterable[_Span]) -> str:
    at = 0
    parts = []
    for start, end in sorted(spans):
        if start >= at:
            parts += [text[at:start], MASK]
        at = max(at, end)
    return "".join([*parts, text[at:]])


def _without(text: str, hidden: Iterable[str]) -> str:
    for value in hidden:
        text = text.replace(value, MASK)
    return text
