"""Reads `--chat_template` and `--system` (text, or a file that contains it) and `--enable_thinking`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from megaswift.data.templates.named import TOKENIZERS_OWN, named_templates, read_named_template
from megaswift.errors import ConfigError, DataError, Problem, did_you_mean_hint, first_line, missing_path_hint

TEXT_SUFFIXES = (".txt", ".md", ".text")
"""A system message of one word that ends so is a file's name."""
THINKING = "enable_thinking"
MARKS = ("{%", "{{")
"""A template has one of them; a path has none."""


def check_template(value: str) -> None:
    """DataError where `value` cannot be a template of any tokenizer."""
    if value not in TOKENIZERS_OWN:
        read_template(value)


def read_template(value: str, own: Any = None) -> Any:
    """The template that `value` is, that the file of this name holds, or that has this name (`named`);
    DataError for anything else, or when it is no valid Jinja.

    `own`: the tokenizer's (some have several by name), which names of other toolkits' templates stand for.
    """
    if _is_template(value):
        _parse(value, "--chat_template")
        return value
    flag = f"--chat_template {value}"
    fix = "give --chat_template FILE.jinja, or the template itself"
    try:
        path = Path(value).expanduser()
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission; ~name of nobody
        raise DataError(Problem(flag, f"cannot be read ({error})", fix)) from None
    except UnicodeDecodeError:
        raise DataError(Problem(flag, "is not UTF-8", "save it in UTF-8")) from None
    if text is None:
        text = _template_by_name(value, own)
        if text is None:
            rule = "is neither a file nor a template (it contains neither {{ nor {%) nor the name of one"
            close = did_you_mean_hint(value, [*named_templates(), *TOKENIZERS_OWN])
            names = f"{fix}, or one of {', '.join(named_templates())}"
            raise DataError(Problem(flag, rule, f"{close}; {names}" if close else names))
        return text
    if not _is_template(text):
        raise DataError(Problem(flag, "does not contain a template (neither {{ nor {%)", fix))
    _parse(text, flag)
    return text


def _template_by_name(name: str, own: Any) -> Any:
    """The template of a name; None where there is none."""
    text = read_named_template(name)
    if text is None and name in TOKENIZERS_OWN:
        if not own:
            raise DataError(
                Problem(
                    f"--chat_template {name}",
                    "stands for the template of the model's tokenizer, which has none",
                    f"give --chat_template FILE.jinja, or one of {', '.join(named_templates())}",
                )
            )
        return own
    return text


class _Generation(Extension):
    """transformers' own tag around what the assistant wrote."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _parse(text: str, flag: str) -> None:
    """DataError on a syntax error. The tags are those that transformers' templates may use."""
    try:
        Environment(extensions=[_Generation, loopcontrols]).parse(text)
    except TemplateSyntaxError as error:
        rule = f"is not valid Jinja: line {error.lineno}: {first_line(error)}"
        raise DataError(Problem(flag, rule, "correct it, or use another template (--chat_template FILE)")) from None
    except RecursionError:
        raise DataError(Problem(flag, "is nested too deeply", "use a simpler template")) from None


def thinking_variable(enable_thinking: bool | None, template: Any) -> dict[str, bool]:
    """The chat template's variable `enable_thinking`, where it is set; ConfigError where no template reads it.
    `template`: a tokenizer's `chat_template`, which may be several by name."""
    if enable_thinking is None:
        return {}
    if THINKING not in str(template or ""):
        rule = "has no effect: the chat template of this model does not read it"
        raise ConfigError(Problem(f"--{THINKING} {str(enable_thinking).lower()}", rule, "leave it out"))
    return {THINKING: enable_thinking}


def _is_template(text: str) -> bool:
    return any(mark in text for mark in MARKS)


def read_system_message(value: str | None) -> str | None:
    """The system message that `value` is, or that the file of this name holds (its last line end left out)."""
    if value is None or "\n" in value:
        return value
    fix = "give --system FILE, or the message text"
    try:
        path = Path(value).expanduser()
        if not path.is_file():
            if path.suffix.lower() in TEXT_SUFFIXES and " " not in value:
                raise DataError(
                    Problem(f"--system {value}", "no such file", f"{missing_path_hint(path)}, or give the message text")
                )
            return value
        text = path.read_text(encoding="utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(Problem(f"--system {value}", "is not UTF-8", "save it in UTF-8")) from None
    except (OSError, RuntimeError) as error:  # no permission; ~name of nobody; a text too long for a name is no file
        if isinstance(error, PermissionError):
            raise DataError(Problem(f"--system {value}", f"cannot be read ({error.strerror})", fix)) from None
        return value
    if not text.strip():
        raise DataError(Problem(f"--system {value}", "is an empty file", fix))
    return text
