"""Limits on computation and output of chat templates, which are untrusted input.

jinja2's sandbox limits `range` alone: `'x' * 10**9`, nested loops and texts that double have no end there. Owns the
environment that counts, which takes the place of the sandbox in transformers (`install_template_limits`), so that
every rendering of a process is limited: `apply_chat_template` too. A legitimate conversation is far below every limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import MethodType
from typing import Any, cast

import jinja2
from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

MOST_SOURCE = 1 << 20
"""Characters of a template; the longest published ones have some 20,000."""
MOST_TEXT = 1 << 26
"""Characters that one rendering may write, or keep in one value."""
MOST_NUMBER = 1 << 20
"""Characters or items that one operator, filter or method may make of a number."""
MOST_STEPS = 2_000_000
"""Iterations and calls of one rendering."""
MOST_SECONDS = 10.0
_CLOCK_EVERY = 1024
"""Steps between two looks at the clock."""
_TOGETHER = 64
"""Pieces of a text that are measured at a time."""
_WIDTH = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{7})|\{[^{}]*:[^{}]*(?:\{|\d{7})")
"""In a format string: a width of millions, or one from the arguments."""
FORMATS = ("format", "format_map")
NUMBERED = ("center", "indent", "wordwrap", "batch", "slice", "truncate", "tojson", "format", "replace", "join")
"""Filters whose output may be longer than their input by a factor."""
# Sandboxed calls of these methods of str are limited like the filters.
METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "format", "format_map")


class TemplateLimitExceeded(SecurityError):
    """A template that exceeds a limit: it is broken, or meant to do harm."""


class _Budget(threading.local):
    """What is left to the rendering of this thread."""

    steps = written = 0
    """Steps up to the last look at the clock, and characters."""
    since = 0
    """Steps since then."""
    end = float("inf")

    def begin(self) -> None:
        self.steps = self.written = self.since = 0
        self.end = time.monotonic() + MOST_SECONDS

    def step(self, count: int = 1) -> None:
        since = self.since + count
        if since > _CLOCK_EVERY:
            self._look(since)
            since = 0
        self.since = since

    def _look(self, since: int) -> None:
        self.steps += since
        if self.steps > MOST_STEPS:
            raise TemplateLimitExceeded(f"more than {MOST_STEPS:,} loop iterations and calls")
        if time.monotonic() > self.end:
            raise TemplateLimitExceeded(f"more than {MOST_SECONDS:.0f} seconds for one conversation")


BUDGET = _Budget()


def _size(size: int, most: int = MOST_NUMBER) -> None:
    if size > most:
        raise TemplateLimitExceeded(f"a text or list of more than {most:,} characters or items")


def _steps(items: Any) -> Iterable[Any]:
    """The items of a loop, each of which counts: of short lists all at once."""
    if isinstance(items, (list, tuple)) and len(items) < _CLOCK_EVERY:
        BUDGET.step(len(items))
        return items
    return _stepping(items)


def _stepping(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        BUDGET.step()
        yield item


def _kept(value: Any) -> Any:
    """A value that a template assigns to a name."""
    if isinstance(value, (str, list, tuple)):
        _size(len(value), MOST_TEXT)
    return value


def _written(value: Any) -> Any:
    """A value that goes into a block's text, which is whole in memory before it can be measured."""
    if isinstance(value, (str, list, tuple, dict)):
        BUDGET.written += len(value)
        _size(BUDGET.written, MOST_TEXT)
    return value


def _made(name: str, first: Any, rest: tuple[Any, ...]) -> None:
    """TemplateLimitExceeded where the filter or method `name` of `first` makes too much of its arguments."""
    for value in rest if name not in FORMATS else ():
        if isinstance(value, int):
            _size(abs(value))
    if not isinstance(first, str):
        if name == "join":
            items = first if isinstance(first, (list, tuple)) else ()
            _size(len(items) * max((len(v) for v in rest if isinstance(v, str)), default=0), MOST_TEXT)
        return
    if name in FORMATS and _WIDTH.search(first):
        raise TemplateLimitExceeded("a format with a width of millions")
    if name == "replace" and len(rest) > 1 and isinstance(rest[0], str) and isinstance(rest[1], str):
        _size(len(first) + first.count(rest[0]) * len(rest[1]), MOST_TEXT)
    if name == "join" and rest and isinstance(rest[0], (list, tuple)):
        _size(len(rest[0]) * len(first), MOST_TEXT)


def _limited(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments before it works; jinja's marks of what is passed to it stay."""
    skipped = 1 if hasattr(plain, "jinja_pass_arg") else 0

    def limited(*args: Any, **options: Any) -> Any:
        BUDGET.step()
        _made(name, args[skipped], (*args[skipped + 1 :], *options.values()))
        return plain(*args, **options)

    limited.__dict__.update(plain.__dict__)
    return limited


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name; those of `NUMBERED` are limited, whoever sets them."""

    def __setitem__(self, name: str, plain: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited(name, plain) if name in NUMBERED else plain)


class _Counted(NodeTransformer):
    """Puts a count around each loop's items, and a look at the size around what is assigned or written to a block."""

    blocks = loops = 0

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1
        node.iter = _through("_megaswift_steps", node.iter)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        self.generic_visit(node)
        node.node = _through("_megaswift_kept", node.node)
        return node

    def _block(self, node: nodes.Node) -> nodes.Node:
        around, self.loops = self.loops, 0
        self.blocks += 1
        self.generic_visit(node)
        self.blocks -= 1
        self.loops = around
        return node

    visit_Macro = visit_CallBlock = visit_AssignBlock = visit_FilterBlock = _block

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        if self.blocks and self.loops:
            node.nodes = [
                n if isinstance(n, nodes.TemplateData) else _through("_megaswift_written", n) for n in node.nodes
            ]
        return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class LimitedTemplate(Template):
    """Counts anew for each rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text; TemplateLimitExceeded for one without end."""
        BUDGET.begin()
        return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """The text in pieces; TemplateLimitExceeded for one without end."""
        BUDGET.begin()
        size = 0
        for piece in super().generate(*args, **kwargs):
            size += len(piece)
            if size > MOST_TEXT:  # no call for each of many short pieces
                _size(size, MOST_TEXT)
            yield piece


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits."""

    intercepted_binops = frozenset({"*", "**", "%"})
    template_class = LimitedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.globals.pop("lipsum", None)
        filters = _Filters(_megaswift_steps=_steps, _megaswift_kept=_kept, _megaswift_written=_written)
        for name, plain in self.filters.items():
            filters[name] = plain
        self.filters = filters

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """The template; TemplateLimitExceeded for one of more than a megabyte."""
        if isinstance(source, str) and len(source) > MOST_SOURCE:
            raise TemplateLimitExceeded(f"a template of {len(source):,} characters; at most {MOST_SOURCE:,}")
        return super().from_string(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        counted: nodes.Template = _Counted().visit(source)
        counted.set_environment(self)
        return super()._generate(counted, *args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        """The pieces as one text; TemplateLimitExceeded when it grows too long."""
        if isinstance(pieces, list):
            _size(sum(map(len, pieces)), MOST_TEXT)
            return "".join(pieces)
        size, out, left = 0, list[str](), iter(pieces)
        while some := list(islice(left, _TOGETHER)):
            size += sum(map(len, some))
            if size > MOST_TEXT:
                _size(size, MOST_TEXT)
            out += some
        return "".join(out)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A function, macro or method, which counts."""
        BUDGET.step()
        if isinstance(getattr(obj, "__self__", None), (str, list)) and getattr(obj, "__name__", "") in METHODS:
            _made(obj.__name__, obj.__self__, (*args, *kwargs.values()))
        elif not isinstance(obj, MethodType):
            for value in args:
                _kept(value)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of bounded width."""
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        text, plain = value.__self__, formatter

        def limited(*args: Any, **kwargs: Any) -> str:
            _made("format", text, ())
            return plain(*args, **kwargs)

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A product, power or format of bounded size."""
        if operator == "%":
            if isinstance(left, str) and _WIDTH.search(left):
                raise TemplateLimitExceeded("a format with a width of millions")
        elif operator == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
            _size(len(left) * right)
        elif operator == "*" and isinstance(right, (str, list, tuple)) and isinstance(left, int):
            _size(len(right) * left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            _size(bits, 4096)
        return super().call_binop(context, operator, left, right)


def install_template_limits() -> None:
    """Let transformers render with the limits. Twice is once."""
    if chat_template_utils.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()


REFUSED = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    SyntaxError,
    MemoryError,
)
"""What a template's expressions raise, and what compiling one does."""
